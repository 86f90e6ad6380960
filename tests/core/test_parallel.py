"""Whether this process is one of several, told by variables: every door refuses, and a process that is alone trains."""

from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from types import SimpleNamespace
from typing import Any, TypeVar, cast

import lightning as L
import pytest
import torch
from torch import nn

from baoc import BaocOptimizer, BaocStrategy
from baoc.callbacks.budget_control import BudgetControl
from baoc.cli.main import main
from baoc.config.from_hydra import from_plain
from baoc.core.budgets import parse_budget
from baoc.errors import BadInputError, CalledAloneError, TrainingFailedError
from baoc.optim import BlockwiseOptimizer
from baoc.parallel import (
    LAUNCHERS,
    ProcessGroupRanks,
    Ranks,
    check_same_on_ranks,
    current_rank,
    is_lost_peer,
    unwrapped,
)
from baoc.planning.reallocation.budget_schedule import BudgetChange
from baoc.sweep.race import run_race
from baoc.sweep.study import run_study
from baoc.sweep.study_config import StudyConfig
from baoc.training.run import run
from tests.support.commands import start

T = TypeVar("T")
STEP = {"SLURM_STEP_ID": "0", "SLURM_JOB_ID": "7", "SLURM_JOB_NAME": "train"}
TORCHRUN = ({"WORLD_SIZE": "2", "RANK": "1", "LOCAL_RANK": "1"}, r"rank 1 of 2 processes \(torchrun: WORLD_SIZE\)")
SRUN = ({**STEP, "SLURM_NTASKS": "2", "SLURM_PROCID": "0"}, r"rank 0 of 2 processes \(srun: SLURM_NTASKS\)")
SEVERAL = {
    "torchrun": TORCHRUN,
    "srun": SRUN,
    "rank 0 of torchrun": ({"WORLD_SIZE": "4", "RANK": "0"}, r"rank 0 of 4 processes \(torchrun: WORLD_SIZE\)"),
    "no rank": ({"WORLD_SIZE": "2"}, r"rank \? of 2 processes \(torchrun: WORLD_SIZE\)"),
    "no size": ({"RANK": "1"}, r"rank 1 of several processes \(torchrun: RANK\)"),
    "no size, local": ({"LOCAL_RANK": "3"}, r"rank 3 of several processes \(torchrun: LOCAL_RANK\)"),
    "a step of an allocation": (
        {**STEP, "SLURM_NTASKS": "8", "SLURM_STEP_NUM_TASKS": "2", "SLURM_PROCID": "1"},
        r"rank 1 of 2 processes \(srun: SLURM_STEP_NUM_TASKS\)",
    ),
    "a task above 0": ({"SLURM_NTASKS": "2", "SLURM_PROCID": "1"}, r"rank 1 of 2 processes \(srun: SLURM_NTASKS\)"),
    "mpirun": (
        {"OMPI_COMM_WORLD_SIZE": "2", "OMPI_COMM_WORLD_RANK": "0"},
        r"rank 0 of 2 processes \(mpirun: OMPI_COMM",
    ),
    "submitit": ({"SUBMITIT_LOCAL_NTASKS": "2", "SUBMITIT_LOCAL_GLOBALID": "1"}, r"rank 1 of 2 processes \(submitit"),
}
ALONE = {
    "nothing": {},
    "torchrun with one process": {"WORLD_SIZE": "1", "RANK": "0", "LOCAL_RANK": "0"},
    "a rank of 0": {"RANK": "0", "LOCAL_RANK": "0"},
    "no number": {"WORLD_SIZE": "", "RANK": "first"},
    "a task of its own, as submitit's": {**STEP, "SLURM_NTASKS": "1", "SLURM_PROCID": "0"},
    "submitit's local executor": {"SUBMITIT_LOCAL_NTASKS": "1", "SUBMITIT_LOCAL_GLOBALID": "0"},
    "a batch script": {"SLURM_NTASKS": "4", "SLURM_PROCID": "0", "SLURM_JOB_ID": "7"},
    "an allocation": {"SLURM_NTASKS": "4", "SLURM_JOB_ID": "7"},
    "a shell of srun": {**STEP, "SLURM_NTASKS": "4", "SLURM_PROCID": "0", "SLURM_JOB_NAME": "bash"},
    "one task of an allocation": {**STEP, "SLURM_NTASKS": "4", "SLURM_STEP_NUM_TASKS": "1", "SLURM_PROCID": "0"},
}


@pytest.fixture(autouse=True)
def no_launcher(monkeypatch: pytest.MonkeyPatch) -> None:
    for key in {key for _, *keys in LAUNCHERS for key in keys} | set(STEP) | {"SLURM_NTASKS", "SLURM_PROCID"}:
        monkeypatch.delenv(key, raising=False)


@pytest.mark.parametrize("case", SEVERAL)
def test_one_of_several_is_known(case: str) -> None:
    environment, text = SEVERAL[case]
    with pytest.raises(BadInputError, match=text):
        raise BadInputError(str(current_rank(environment)))


@pytest.mark.parametrize("case", ALONE)
def test_a_process_that_is_alone_is_known(case: str) -> None:
    assert current_rank(ALONE[case]) is None


def net() -> nn.Module:
    return nn.Sequential(nn.Linear(4, 8), nn.Linear(8, 2))


def strategy(devices: object) -> object:
    return L.Trainer(strategy=BaocStrategy("8gb"), accelerator="cpu", devices=devices)  # pyright: ignore


def last_backward() -> None:
    with BlockwiseOptimizer(net(), "adamw@streamed").last_backward():
        raise AssertionError("it was entered")


DOORS: dict[str, tuple[Callable[[], object], str]] = {
    "run": (lambda: run(from_plain({}), run_dir=Path("nowhere"), command=""), r"a run was started as .*: each would"),
    "study": (
        lambda: run_study(StudyConfig(name="few", objectives={"quality": "maximize"}, space=()), folder="nowhere"),
        r"a study was started as .* Start it once per worker",
    ),
    "race": (
        lambda: run_race(from_plain({}), overrides=[], folder=Path("nowhere"), command=""),
        r"a race was started as .*: each would hold it alone. Race in one process .*, then train with recipe=raced",
    ),
    "strategy, devices=auto": (lambda: strategy("auto"), "BaocStrategy was built in .* trains on one device, and"),
    "strategy, devices=1": (
        lambda: strategy(1),
        "BaocStrategy was built in .*Use BaocDDPStrategy or, for fully_shard, BaocFSDPStrategy, which take the same",
    ),
    **{
        f"optimizer, {budget}": (
            lambda budget=budget: BaocOptimizer(net(), budget=budget),
            "BaocOptimizer was built in .* before torch.distributed.init_process_group: each would plan by its own",
        )
        for budget in ("8gb", "auto", "state_25", "unlimited", {"name": "fast", "memory": "8gb", "step_time": 1.1})
    },
    "release": (
        lambda: BlockwiseOptimizer(net(), release=True),
        "gradient release was asked for in .*: it steps before gradients are averaged over them. Train in one process",
    ),
    "last_backward": (last_backward, r"last_backward\(\) was entered in .*: it steps host-placed blocks before"),
}


@pytest.mark.parametrize("door", DOORS)
@pytest.mark.parametrize(("environment", "who"), [TORCHRUN, SRUN], ids=["torchrun", "srun"])
def test_every_door_refuses(
    door: str, environment: dict[str, str], who: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.chdir(tmp_path)
    for key, value in environment.items():
        monkeypatch.setenv(key, value)
    enter, text = DOORS[door]
    with pytest.raises(BadInputError, match=text) as told:
        enter()
    told.match(who)
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("words", ["", "mode=plan", "mode=eval", "-m budget=state_25,state_50", "-m sweeps=digits"])
@pytest.mark.parametrize(("environment", "who"), [TORCHRUN, SRUN], ids=["torchrun", "srun"])
def test_the_command_refuses_before_there_is_a_folder(
    words: str,
    environment: dict[str, str],
    who: str,
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.chdir(tmp_path)
    for key, value in environment.items():
        monkeypatch.setenv(key, value)
    assert main(words.split()) == BadInputError.exit_code
    what = "a study" if "sweeps" in words else "-m" if "-m" in words else "a run"
    with pytest.raises(BadInputError, match=rf"^baoc: error: {what} was started as {who}"):
        raise BadInputError(capsys.readouterr().err)
    assert not list(tmp_path.iterdir())


def test_what_runs_nothing_is_answered_in_every_process(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("WORLD_SIZE", "2")
    assert main(["--list", "specs"]) == main(["--cfg", "job"]) == main(["--cfg=job"]) == 0
    assert "adamw_int8" in capsys.readouterr().out


@pytest.mark.slow
def test_an_allocation_without_a_launcher_trains(tmp_path: Path) -> None:
    """Lightning takes it for a job of several tasks."""
    alone = {**ALONE["a batch script"], **ALONE["torchrun with one process"]}
    words = ("model.size=tiny", "trainer.max_steps=2", "trainer.log_every_n_steps=1", f"hydra.run.dir={tmp_path}/run")
    code, told = start(*words, folder=tmp_path / "command", **alone).done()
    assert code == 0, told
    assert (tmp_path / "run" / "result.json").is_file() and (tmp_path / "run" / "metrics.jsonl").is_file()


class Two(Ranks):
    """Two ranks, of which the other has a value of its own."""

    def __init__(self, other: dict[str, str]):
        self.other = other

    def all_gather(self, value: T) -> list[T]:
        return [value, cast(T, self.other)]


@pytest.mark.parametrize(
    ("given", "other", "told"),
    [
        (
            {"budget": {"name": "mine", "bytes": 1}},
            {"budget.name": "mine", "budget.bytes": "2"},
            "budget.bytes is 1 on",
        ),
        ({"a": "0" * 200 + "x"}, {"a": "0" * 200 + "y"}, r"a is \.\.\.0{40}x on rank 0 and \.\.\.0{40}y on rank 1, so"),
        ({"a": "x" + "0" * 200}, {}, r"a is x0{79}\.\.\. on rank 0 and missing on rank 1, so"),
    ],
)
def test_what_differs_on_ranks_is_told_where_it_does(given: dict[str, Any], other: dict[str, str], told: str) -> None:
    with pytest.raises(BadInputError, match=told):
        check_same_on_ranks(given, among=Two(other))


@pytest.mark.parametrize("has_collectives", [False, True])
@pytest.mark.parametrize(
    ("words", "kind"), [("Connection closed by peer", ZeroDivisionError), ("Timed out", TrainingFailedError)]
)
def test_a_failed_vote_tells_the_error_and_leaves_the_group_its_timeout(
    words: str, kind: type[Exception], has_collectives: bool
) -> None:
    def reduce(*_: object, **__: object) -> None:
        raise RuntimeError(words)

    timeouts: list[timedelta] = []
    group = {"get_rank": lambda: 1, "get_world_size": lambda: 2, "new_group": lambda **_: None}
    constants = SimpleNamespace(default_pg_timeout=timedelta(minutes=30))
    c10d = SimpleNamespace(_set_pg_timeout=lambda limit, _: timeouts.append(limit))
    gone = SimpleNamespace(
        **group, all_reduce=reduce, ReduceOp=SimpleNamespace(MAX=None), constants=constants, distributed_c10d=c10d
    )
    with pytest.raises(kind):
        ProcessGroupRanks(gone).run_or_raise_on_all(lambda: 1 / 0, has_collectives=has_collectives)
    assert timeouts[1:] == ([constants.default_pg_timeout] if has_collectives else [])


@pytest.mark.parametrize(("words", "kind"), [("Timed out", CalledAloneError), ("broken pipe", RuntimeError)])
def test_a_budget_that_one_rank_alone_is_given_ends_its_training(words: str, kind: type[Exception]) -> None:
    """It would go on by itself while the budget stays with the others, or the other way round."""

    def reduce(*_: object, **__: object) -> None:
        raise RuntimeError(words)

    group = {"get_rank": lambda: 1, "get_world_size": lambda: 2, "new_group": lambda **_: None}
    meeting = ProcessGroupRanks(SimpleNamespace(**group, all_reduce=reduce))
    planner = SimpleNamespace(budget=parse_budget("state_50"))
    reallocator = SimpleNamespace(planner=planner, rebudget=lambda *_, **__: meeting.meet("rebudget()"))
    listeners: dict[str, Any] = {name: [] for name in ("plan_listeners", "resume_listeners", "reallocation_listeners")}
    trainer: Any = SimpleNamespace(strategy=SimpleNamespace(reallocator=reallocator, **listeners), global_step=3)
    control = BudgetControl(schedule=[BudgetChange(budget=parse_budget("state_25"), step=3)])
    control.setup(trainer, L.LightningModule(), "fit")
    with pytest.raises(kind, match=r"rebudget\(\) was called on rank 1"):
        control.on_train_batch_start(trainer, L.LightningModule(), None, 0)
    assert CalledAloneError.exit_code == 2


@pytest.mark.parametrize("text", ["the socket of my data server broke", "broken pipe", "CUDA error"])
def test_an_error_of_a_users_own_is_not_that_of_a_lost_rank(text: str) -> None:
    assert not is_lost_peer(RuntimeError(text)) and is_lost_peer(torch.distributed.DistBackendError(text))
    assert is_lost_peer(RuntimeError("[/pytorch/third_party/gloo/gloo/transport/tcp/pair.cc:553] Broken pipe"))


def compiled(module: nn.Module) -> nn.Module:
    return torch.compile(module, backend="eager")  # pyright: ignore[reportReturnType]


@pytest.mark.parametrize("wrap", [compiled, nn.DataParallel, lambda module: nn.DataParallel(compiled(module))])
def test_names_are_those_of_the_network(wrap: Callable[[nn.Module], nn.Module]) -> None:
    module = net()
    assert unwrapped(wrap(module)) is module
    names = [name for name, _ in module.named_parameters()]
    assert list(BlockwiseOptimizer(wrap(module)).specs) == names
    optimizer = BaocOptimizer(wrap(module), budget="state_25")
    assert sorted(p.name for block in optimizer.blocks for p in block.params) == sorted(names)
    BaocOptimizer(net(), budget="state_25").load_state_dict(optimizer.state_dict())


def test_an_attribute_called_module_is_no_wrapper() -> None:
    class Holder(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.module = net()

    assert next(iter(BlockwiseOptimizer(Holder()).specs)) == "module.0.weight"
