"""Two processes on gloo that plan together: one plan, the same samples, moves and weights, whatever one meets."""

import copy
import logging
import time
import weakref
from collections.abc import Callable
from contextlib import redirect_stdout
from functools import partial
from io import StringIO
from pathlib import Path
from threading import Lock
from typing import Any
from unittest import mock

import lightning as L
import pytest
import torch
from lightning.fabric.plugins.environments.lightning import LightningEnvironment
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.nn.functional import mse_loss
from torch.nn.parallel import DistributedDataParallel

from baoc import BaocDDPStrategy, BaocOptimizer, BaocStrategy, parallel
from baoc.callbacks.checkpoint import SafeCheckpoint
from baoc.config.schema import ReallocationConfig
from baoc.core.budgets import parse_budget
from baoc.errors import BadInputError, InfeasibleBudgetError, TrainingFailedError
from baoc.optim import BlockwiseOptimizer
from baoc.parallel import SINGLE_PROCESS, check_equal_on_ranks, is_lost_peer, ranks
from baoc.planning.planner import PlannerSettings
from baoc.profiling import schedule
from baoc.training import plain_loop
from baoc.training.fully_sharded import BaocFSDPStrategy
from baoc.training.session import SessionSettings
from baoc.units import format_bytes
from tests.support.classifier import Classifier, fit, loader
from tests.support.ranks import as_launched, group, in_processes
from tests.support.waiting import wait_until

pytestmark = pytest.mark.slow  # two ranks are started
ONCE = ReallocationConfig(mode="once", warmup_steps=3)


def net() -> nn.Sequential:
    return nn.Sequential(nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 4))


def trained(optimizer: BaocOptimizer, module: nn.Module, *, rank: int, steps: int, wait_s: float = 0.0) -> list[Tensor]:
    generator = torch.Generator().manual_seed(rank)
    for _ in range(steps):
        time.sleep(wait_s)
        optimizer.zero_grad()
        mse_loss(module(torch.randn(8, 64, generator=generator)), torch.ones(8, 4)).backward()
        optimizer.step()
    return [param.detach().clone() for param in module.parameters()]


def other_probes(rank: int) -> dict[str, Any]:
    """Rank 1 probes a larger batch, and has other weights to begin with."""
    torch.manual_seed(rank)
    module = net()
    probe = lambda: module(torch.ones(512 + 200 * rank, 64)).sum()  # noqa: E731
    optimizer = BaocOptimizer(module, budget="1.5mb", probe=probe, settings=SessionSettings(reallocation=ONCE))
    footprint, told = optimizer.reallocator.planner.footprint, list[str]()
    logging.getLogger(plain_loop.__name__).addFilter(lambda record: told.append(record.getMessage()) or True)
    weights = trained(optimizer, DistributedDataParallel(module), rank=rank, steps=12)
    assert footprint is not None
    found = {"specs": optimizer.specs, "forward": footprint.forward_backward_bytes, "weights": weights}
    return {**found, "told": told}


def other_clocks(rank: int) -> dict[str, Any]:
    """Which samples are taken follows a clock from LARGE_PARAMS on: rank 1's is ten times as fast, its loader slow."""
    before, clock = schedule.LARGE_PARAMS, schedule.perf_counter
    schedule.LARGE_PARAMS = 1
    schedule.perf_counter = lambda: clock() * (10 if rank else 1)
    try:
        module = net()
        optimizer = BaocOptimizer(module, budget="state_25", settings=SessionSettings(reallocation=ONCE))
        weights = trained(optimizer, DistributedDataParallel(module), rank=rank, steps=14, wait_s=0.01 * rank)
    finally:
        schedule.LARGE_PARAMS, schedule.perf_counter = before, clock
    profile = optimizer.reallocator.profile
    assert profile is not None
    return {"weights": weights, "samples": profile.num_samples, "stats": profile.stats, "specs": optimizer.specs}


def errors(rank: int) -> dict[str, str]:
    """What rank 1 alone meets is an error of both."""

    def on_1(error: Exception) -> Callable[[], object]:
        def make() -> None:
            if rank:
                raise error

        return lambda: ranks().run_or_raise_on_all(make)

    def out_of_memory() -> Tensor:
        if rank:
            raise torch.OutOfMemoryError("on rank 1")
        return module(torch.ones(8, 64)).sum()

    module = net()
    loaded, saved = BaocOptimizer(module, budget="state_25", verbose=False), list[dict[str, Any]]()
    for _ in range(2):
        saved.append(loaded.state_dict())
        trained(loaded, DistributedDataParallel(module, gradient_as_bucket_view=True), rank=rank, steps=1)
    refused = InfeasibleBudgetError("too small", budget_bytes=1, least_feasible_bytes=2)
    doors: dict[str, Callable[[], object]] = {
        "input": on_1(BadInputError("only here")),
        "budget": on_1(refused),
        "probe": lambda: BaocOptimizer(module, budget="1.5mb", probe=out_of_memory),
        "too small": lambda: BaocOptimizer(
            module, budget="60kb", probe=lambda: module(torch.ones(8 << 9 * rank, 64)).sum()
        ),
        "weights": lambda: check_equal_on_ranks(rank, what="weights", among=ranks()),
        "other budget": lambda: BaocOptimizer(module, budget=f"state_{25 + 25 * rank}"),
        "other rate": lambda: BaocOptimizer([{"params": [module[0].weight], "lr": 0.1 + rank}], budget="state_25"),
        "other layers": lambda: BaocOptimizer(module[rank:], budget="state_25"),
        "other type": lambda: BaocOptimizer(net().to(torch.bfloat16 if rank else torch.float32), budget="state_25"),
        "other recipe": lambda: BaocOptimizer(module, budget="state_25", recipe="lion" if rank else "adamw"),
        "other numbers": lambda: BaocOptimizer(module, budget={"name": "mine", "state_fraction": 0.25 + 0.25 * rank}),
        "other order": lambda: BaocOptimizer([*module.named_parameters()][:: 1 - 2 * rank], budget="state_25"),
        "an error that holds a lock": on_1(Locked()),
        "other checkpoint": lambda: loaded.load_state_dict(saved[rank]),
        "damaged checkpoint": lambda: loaded.load_state_dict({"state": 3} if rank else saved[0]),
        "damaged plan": lambda: loaded.load_state_dict({**saved[0], "online": {} if rank else saved[0]["online"]}),
        "rebudget": lambda: loaded.reallocator.rebudget(parse_budget(f"state_{10 + rank}"), why="asked for"),
        "a copy": lambda: copy.deepcopy((module, loaded))[1].specs == loaded.specs,
        "other probe": lambda: BaocOptimizer(module, budget="8gb", probe=out_of_memory if rank else None),
    }
    given: dict[str, Any] = {"devices": 2, "plugins": [LightningEnvironment()]}
    for strategy in (BaocDDPStrategy, BaocFSDPStrategy):
        doors[f"{strategy.__name__}, budget"] = lambda strategy=strategy: fit(strategy(f"state_{25 + rank}"), **given)
        other = Classifier(make=lambda module: torch.optim.AdamW(module.parameters(), lr=0.1 + rank))
        doors[f"{strategy.__name__}, rate"] = lambda strategy=strategy, other=other: fit(
            strategy("state_25"), module=other, **given
        )
        doors[f"{strategy.__name__}, accumulation"] = lambda strategy=strategy: fit(
            strategy("state_25"), accumulate_grad_batches=1 + rank, **given
        )
        doors[f"{strategy.__name__}, data"] = lambda strategy=strategy: fit(
            strategy("state_25"), data=loader(num=64 + 32 * rank), **given
        )
    told = {}
    for name, enter in doors.items():
        try:
            told[name] = f"was taken: {enter()}"
        except Exception as error:
            told[name] = f"{type(error).__name__}: {error}"
    return told


class Locked(Exception):
    def __init__(self) -> None:
        super().__init__("only here")
        self.lock = Lock()


ALONE: dict[str, Callable[[Any], object]] = {
    "load_state_dict()": lambda optimizer: optimizer.load_state_dict(optimizer.state_dict()),
    "load_state_dict() of explicit specs": lambda optimizer: optimizer.load_state_dict({}),
    "rebudget()": lambda optimizer: optimizer.reallocator.rebudget(parse_budget("state_10"), why="asked for"),
    "migrate()": lambda optimizer: optimizer.migrate(dict.fromkeys(optimizer.specs, "lion")),
    "add_param_group()": lambda optimizer: optimizer.add_param_group({"params": [nn.Parameter(torch.zeros(4))]}),
}


def alone(rank: int, *, call: str, done: Path) -> str:
    """What rank 0 is told that makes a call without the other, and what the other is told that makes it too late."""
    if call.endswith("explicit specs"):  # nothing else has called `ranks` in this group
        optimizer = BlockwiseOptimizer(fully_shard(net(), mesh=init_device_mesh("cpu", (2,))), "adamw")
    else:
        optimizer = BaocOptimizer(net(), budget="state_25", verbose=False)
    if rank:
        wait_until(done.exists, what="the other rank")
    told = ""
    for _ in range(2 - rank):  # a caller may try again
        try:
            told += f"was taken: {ALONE[call](optimizer)}"
        except (BadInputError, RuntimeError) as error:
            told += f"{type(error).__name__}: {error}. "
    done.touch()
    return told


def in_a_step(rank: int) -> str:
    """What a rank is told whose probe fails in a step through DistributedDataParallel that the other is in."""
    module = DistributedDataParallel(net())

    def probe() -> Tensor:
        loss = module(torch.ones(8, 64)).sum()
        if rank:
            raise ValueError("only here")
        return loss

    try:
        with mock.patch.object(parallel, "PEER_TIMEOUT_S", 1.0):
            return f"was taken: {BaocOptimizer(module, budget='1.5mb', probe=probe)}"
    except Exception as error:
        return str(error)


class Lowered(L.Callback):
    """Takes the budget down to one that only weights of 16 bits hold, and up again: both change the type of weights."""

    def on_train_batch_start(self, trainer: L.Trainer, *_: Any) -> None:
        strategy = trainer.strategy
        assert isinstance(strategy, BaocDDPStrategy) and strategy.reallocator is not None
        for step, specs in ((4, "adamw_int8+split8"), (8, "adamw")):
            if trainer.global_step == step:
                reallocator = strategy.reallocator
                with reallocator.around_migration(True):
                    reallocator.optimizer.migrate(dict.fromkeys(reallocator.optimizer.specs, specs))
                assert isinstance(strategy.model, DistributedDataParallel)
                self.views = strategy.model.gradient_as_bucket_view


class Buckets(L.Callback):
    """Bytes of the storages that gradients are in before each update, and whether the first step's are alive then."""

    def __init__(self) -> None:
        self.held: list[int] = []
        self.first: list[Any] = []
        self.first_alive: list[bool] = []

    def on_before_optimizer_step(self, trainer: L.Trainer, pl_module: L.LightningModule, *_: Any) -> None:
        grads = [param.grad for param in pl_module.parameters() if param.grad is not None]
        storages = {grad.untyped_storage()._cdata: grad.untyped_storage() for grad in grads}
        self.held.append(sum(storage.nbytes() for storage in storages.values()))
        if not self.first:
            self.first = [weakref.ref(storage) for storage in storages.values()]
        self.first_alive.append(any(ref() is not None for ref in self.first))


class Manual(Classifier):
    def __init__(self) -> None:
        super().__init__()
        self.automatic_optimization = False


class OnlyInTraining(Classifier):
    """Its step needs what a callback makes, which nothing calls before training."""

    def training_step(self, batch: list[Tensor], batch_idx: int) -> Tensor:
        return super().training_step(batch, batch_idx) * self.scale  # pyright: ignore[reportOperatorIssue]


class Scales(L.Callback):
    def on_train_start(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        pl_module.scale = 2.0


MORE_BYTES = 1 << 20  # that rank 1 holds in its first step, and nobody measured before


class More(L.Callback):
    def on_before_backward(self, trainer: L.Trainer, *_: Any) -> None:
        if trainer.global_rank == 1 and trainer.global_step == 0:
            torch.zeros(MORE_BYTES, dtype=torch.uint8)


class Verdicts(L.Callback):
    """What a rank says of a budget that only rank 1 passes."""

    def __init__(self) -> None:
        self.met: list[bool | None] = []

    def on_train_batch_end(self, trainer: L.Trainer, *_: Any) -> None:
        assert isinstance(trainer.strategy, BaocDDPStrategy)
        if trainer.global_step in (2, 8):
            self.met.append(trainer.strategy.budget_met)


def by_others(size: int) -> dict[str, Any]:
    """Modules as others write them: what is said on the terminal, what is measured in training, what is refused."""
    given = {"devices": size, "plugins": [LightningEnvironment()]}
    told, refused = StringIO(), ""
    verdicts = Verdicts()
    with redirect_stdout(told):
        measured, late = BaocDDPStrategy("8gb"), BaocDDPStrategy("1mb")
        beyond = BaocDDPStrategy("500kb")
        fit(measured, **given)
        module = fit(late, module=OnlyInTraining(), callbacks=[Scales()], **given)
        fit(beyond, callbacks=[More(), verdicts], **given)
    try:
        fit(BaocDDPStrategy("state_25"), module=Manual(), **given)
    except BadInputError as error:
        refused = str(error)
    assert late.reallocator is not None
    footprint = late.reallocator.planner.footprint
    narrator = beyond.narrators[0]
    return {
        "peaks": narrator.by_rank,
        "peak": narrator.peak_bytes,
        "beyond": tuple(verdicts.met),
        "values": tuple(narrator.values()),
        "told": told.getvalue(),
        "refused": refused,
        "met": (measured.budget_met, late.budget_met),
        "late": [param.detach().clone() for param in module.parameters()],
        "late_specs": late.reallocator.optimizer.specs,
        "late_bytes": footprint.forward_backward_bytes if footprint is not None else None,
    }


def alone_with_its_clock(rank: int, size: int, *, folder: Path) -> list[str]:
    """Checkpoints by time, of a callback without the vote of others: rank 0's clock says that each step is late."""
    keep = SafeCheckpoint(folder, every_minutes=1e9 * rank, keep=9)
    given: dict[str, Any] = {"devices": size, "plugins": [LightningEnvironment()], "enable_checkpointing": True}
    fit(BaocDDPStrategy("state_25"), steps=3, callbacks=[keep], **given)
    return sorted(path.name for path in (folder / "checkpoints").iterdir())


def by_lightning(rank: int, size: int) -> dict[str, Any]:
    planner = PlannerSettings(keep_fp32_roles=())
    given = {"devices": size, "plugins": [LightningEnvironment()], "steps": 12}
    strategy = BaocDDPStrategy("state_25", settings=SessionSettings(planner=planner, reallocation=ONCE))
    plan_first: list[Any] = []
    strategy.plan_listeners.append(lambda _, plan: plan_first.append(dict(plan.allocation.choices)))
    buckets = Buckets()
    halves = fit(strategy, accumulate_grad_batches=2, callbacks=[buckets], **given)
    lowered = BaocDDPStrategy("unlimited", settings=SessionSettings(planner=PlannerSettings(specs=("*", "*+split8"))))
    lowering = Lowered()
    cast = fit(lowered, precision="bf16-mixed", callbacks=[lowering], **given)
    assert strategy.reallocator is not None and lowered.reallocator is not None
    footprint = strategy.reallocator.planner.footprint
    assert footprint is not None
    return {
        "plan": plan_first[0],
        "specs": strategy.reallocator.optimizer.specs,
        "halves": [param.detach().clone() for param in halves.parameters()],
        "cast": [param.detach().clone() for param in cast.parameters()],
        "last": lowered.reallocator.optimizer.specs,
        "views": lowering.views,
        "buckets": (buckets.held, buckets.first_alive, footprint.gradients_bytes),
    }


def work(rank: int, size: int, store: Path) -> dict[str, Any]:
    with as_launched(rank, size), group(rank, size, store=store):
        found = {"probes": other_probes(rank), "clocks": other_clocks(rank), "errors": errors(rank)}
        found["saved"] = alone_with_its_clock(rank, size, folder=store.parent / "saved")
        found |= {"lightning": by_lightning(rank, size), "others": by_others(size)}
    calls = {call: partial(alone, call=call, done=store.parent / f"{call} done") for call in ALONE}
    for name, meet in {**calls, "in a step": in_a_step}.items():
        short = mock.patch.object(parallel, "MEETING_TIMEOUT_S", 1.0)
        with short, group(rank, size, store=store.parent / name):
            found[name] = meet(rank)
    return found


@pytest.fixture(scope="module")
def found() -> list[dict[str, Any]]:
    return in_processes(work)


def test_a_checkpoint_is_due_by_the_first_clock_also_without_a_vote_of_all(found: list[dict[str, Any]]) -> None:
    assert found[0]["saved"] == ["last.ckpt", "step_00000001.ckpt", "step_00000002.ckpt"]


def same(tensors: list[list[Tensor]]) -> bool:
    return all(all(map(torch.equal, tensors[0], others)) for others in tensors[1:])


def test_one_plan_by_what_the_rank_that_needs_most_has_measured(found: list[dict[str, Any]]) -> None:
    first, second = (each["probes"] for each in found)
    assert first["specs"] == second["specs"] and first["forward"] == second["forward"] > 712 * 64 * 4
    assert (
        first["told"] == second["told"]
        and len(first["told"]) == 1
        and "keeps a second copy of the grad" in first["told"][0]
    )
    assert same([first["weights"], second["weights"]])


def test_one_clock_says_which_steps_are_sampled(found: list[dict[str, Any]]) -> None:
    first, second = (each["clocks"] for each in found)
    assert first["samples"] == second["samples"]
    assert repr(first["stats"]) == repr(second["stats"])  # NaN, which a block may have, is not equal to itself
    assert first["specs"] == second["specs"] and same([first["weights"], second["weights"]])


ERRORS: dict[str, str | tuple[str, str]] = {
    "input": "BadInputError: only here",
    "budget": "InfeasibleBudgetError: too small",
    "probe": "OutOfMemoryError: on rank 1",
    "too small": "InfeasibleBudgetError: budget 60kb cannot be met",
    "weights": "TrainingFailedError: weights differ between ranks",
    "other numbers": "BadInputError: budget.state_fraction is 0.25 on rank 0 and 0.5 on rank 1",
    "other order": "BadInputError: the order of parameters is ['0.weight', '0.bias', '2.weight', '2.bias'] on rank 0",
    "an error that holds a lock": ("TrainingFailedError: Locked: only here", "Locked: only here"),
    "other checkpoint": "BadInputError: checkpoint.num_steps is 0 on rank 0 and 1 on rank 1",
    "damaged checkpoint": "CheckpointError: this is no optimizer checkpoint",
    "damaged plan": "CheckpointError: 'online' of the optimizer checkpoint is damaged: it lacks ",
    "a copy": "was taken: True",
    "rebudget": "BadInputError: budget.name is state_10 on rank 0 and state_11 on rank 1",
    "other budget": "BadInputError: budget.name is state_25 on rank 0 and state_50 on rank 1, so that ranks",
    "other rate": "BadInputError: lr of parameter group 0 is 0.1 on rank 0 and 1.1 on rank 1",
    "other layers": "BadInputError: 0.weight is (64, 64) torch.float32 on rank 0 and missing on rank 1",
    "other type": "BadInputError: 0.weight is (64, 64) torch.float32 on rank 0 and (64, 64) torch.bfloat16 on rank 1",
    "other recipe": "BadInputError: specs is ['adamw'] on rank 0 and ",
    "other probe": "BadInputError: probe is missing on rank 0 and given on rank 1",
}
for _strategy in ("BaocDDPStrategy", "BaocFSDPStrategy"):
    ERRORS[f"{_strategy}, budget"] = "BadInputError: budget.name is state_25 on rank 0 and state_26 on rank 1"
    ERRORS[f"{_strategy}, rate"] = "BadInputError: lr of parameter group 0 is 0.1 on rank 0 and 1.1 on rank 1"
    ERRORS[f"{_strategy}, accumulation"] = "BadInputError: trainer.accumulate_grad_batches is 1 on rank 0 and 2 on rank"
    ERRORS[f"{_strategy}, data"] = "BadInputError: the number of training batches is 4 on rank 0 and 6 on rank 1"


def test_an_error_in_a_step_of_all_ranks_leaves_none_waiting(found: list[dict[str, Any]]) -> None:
    told = "rank 1 alone failed, in a step that the others are in the middle of (only here)"
    assert found[1]["in a step"] == told and "closed by peer" in found[0]["in a step"].lower()


@pytest.mark.parametrize("call", ALONE)
def test_what_all_ranks_do_together_is_refused_to_one(call: str, found: list[dict[str, Any]]) -> None:
    what = call.removesuffix(" of explicit specs")
    refused = (
        f"CalledAloneError: {what} was called on rank 0, and not on all others within 1 s: either they do not call it, "
        "or are that late, as after a checkpoint or a validation of their own. Call it on all ranks"
    )
    assert found[0][call].startswith(refused) and found[0][call].count(refused) == 2
    assert found[1][call].startswith(
        f"RuntimeError: {what} was called on rank 1 when another rank had left: it ended, or had waited for this one "
        "for 1 s, see its own error ("
    )
    assert is_lost_peer(RuntimeError(found[1][call]))


@pytest.mark.parametrize("case", ERRORS)
def test_an_error_of_one_rank_is_one_of_all(case: str, found: list[dict[str, Any]]) -> None:
    wanted = ERRORS[case]
    for each, text in zip(found, wanted if isinstance(wanted, tuple) else (wanted, wanted), strict=True):
        assert each["errors"][case].startswith(text)


def test_lightning_plans_first_and_wraps_then(found: list[dict[str, Any]]) -> None:
    first, second = (each["lightning"] for each in found)
    assert first["specs"] == second["specs"] and first["views"]
    assert same([first["halves"], second["halves"]]), "with accumulation"


def test_gradients_are_held_once_also_when_buckets_are_made_anew(found: list[dict[str, Any]]) -> None:
    for each in found:
        held, first_alive, planned = each["lightning"]["buckets"]
        assert held == [planned] * 12 and first_alive == [True] + [False] * 11


def test_buckets_are_made_on_the_stream_that_trains(monkeypatch: pytest.MonkeyPatch) -> None:
    """Memory that one stream has freed is of no use to another: the first bucket would stay reserved."""
    made: list[dict[str, Any]] = []
    strategy = BaocDDPStrategy("8gb", find_unused_parameters=True)
    monkeypatch.setattr(BaocDDPStrategy, "determine_ddp_device_ids", lambda _: [0])
    monkeypatch.setattr(torch.cuda, "Stream", lambda *_: pytest.fail("a stream of its own"))
    monkeypatch.setattr(
        "baoc.training.lightning.DistributedDataParallel", lambda module, **given: made.append(given) or module
    )
    strategy._setup_model(net())
    assert made == [{"device_ids": [0], "find_unused_parameters": True, "gradient_as_bucket_view": True}]


def test_weights_that_change_their_type_are_averaged_all_the_same(found: list[dict[str, Any]]) -> None:
    first, second = (each["lightning"] for each in found)
    assert set(first["last"].values()) == {"adamw"} and first["cast"][0].dtype is torch.float32
    assert same([first["cast"], second["cast"]])


def test_the_plan_of_a_share_of_state_is_that_of_one_process(found: list[dict[str, Any]]) -> None:
    strategy = BaocStrategy("state_25", settings=SessionSettings(planner=PlannerSettings(keep_fp32_roles=())))
    plans: list[Any] = []
    strategy.plan_listeners.append(lambda _, plan: plans.append(dict(plan.allocation.choices)))
    fit(strategy, module=Classifier(), steps=1)
    assert [each["lightning"]["plan"] for each in found] == 2 * plans


def test_rank_0_alone_says_plan_and_verdict(found: list[dict[str, Any]]) -> None:
    first, second = (each["others"] for each in found)
    for budget in ("8gb", "1mb"):
        assert first["told"].count(f"BaocDDPStrategy: plan for budget {budget}") == 1
    assert first["told"].count("BaocDDPStrategy: 8 steps, no reallocation") == 3
    assert second["told"] == "" and first["met"] == second["met"] == (True, True)


def test_the_verdict_is_that_of_the_rank_which_held_most(found: list[dict[str, Any]]) -> None:
    first, second = (each["others"] for each in found)
    assert first["peaks"] == second["peaks"] and first["peak"] == second["peak"] == max(first["peaks"])
    assert first["peaks"][1] > first["peaks"][0] + MORE_BYTES / 2 and first["beyond"] == second["beyond"] == (
        False,
        False,
    )
    assert f"rank 1 {format_bytes(first['peaks'][1])}), " in first["told"]
    assert set(first["values"]) >= {"memory/peak_gib", "memory/peak_gib_rank_0", "memory/peak_gib_rank_1"}


def test_a_step_that_is_measured_in_training_is_planned_for_by_all(found: list[dict[str, Any]]) -> None:
    first, second = (each["others"] for each in found)
    assert first["late_bytes"] == second["late_bytes"] and first["late_specs"] == second["late_specs"]
    assert first["late_bytes"] and same([first["late"], second["late"]])


def test_modules_that_step_themselves_are_refused_in_several_processes(found: list[dict[str, Any]]) -> None:
    for each in found:
        assert each["others"]["refused"].startswith(
            "the module sets automatic_optimization=False: BaocDDPStrategy trains one AdamW in automatic optimization."
        )


def test_a_process_alone_is_asked_nothing_by_others() -> None:
    alone = SINGLE_PROCESS
    assert ranks() is alone
    assert alone.broadcast_result(lambda: 3) == alone.broadcast(3) == alone.run_or_raise_on_all(lambda: 3) == 3
    assert SINGLE_PROCESS.all_reduce_max(1.0, 2.0) == (1.0, 2.0) and SINGLE_PROCESS.all_gather("a") == ["a"]
    with pytest.raises(TrainingFailedError, match="weights differ between ranks, which is a bug"):
        check_equal_on_ranks(float("nan"), what="weights", among=SINGLE_PROCESS)
