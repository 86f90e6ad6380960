"""Whole runs on two ranks in one pair of processes: one curve at any number of ranks, and what befalls rank 1 alone.

What takes a launcher, a command's exit code or a killed process is in tests/cli/test_several_devices.py.
"""

import csv
import os
import signal
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, redirect_stderr, redirect_stdout
from dataclasses import replace
from io import StringIO
from itertools import count
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor, nan

from baoc.callbacks import checkpoint
from baoc.config.schema import (
    AllocatorConfig,
    CatalogueConfig,
    CheckpointConfig,
    ModelConfig,
    OptimConfig,
    ReallocationConfig,
    RiskConfig,
    TaskConfig,
)
from baoc.core.budgets import parse_budget
from baoc.core.recipes import Recipe
from baoc.tasks.vision import VisionTask
from baoc.tracking import files
from baoc.tracking.metrics import read_metrics
from baoc.training import run as training
from baoc.training.measure import microbatch_search
from baoc.training.reallocator import Reallocator
from tests.support.ranks import as_launched, group, in_processes
from tests.support.training_runs import brief, config
from tests.support.waiting import wait_until

pytestmark = pytest.mark.slow

STEPS, AT = 6, 4
MORE_BYTES = 256 << 20
ONE_CURVE = {
    "model": ModelConfig(),
    "reallocation": ReallocationConfig(),
    "optim": OptimConfig(schedule="constant", warmup_fraction=0.0),
    "allocator": AllocatorConfig(name="recipe"),
    "recipe": Recipe(
        name="alike on any device", specs={"mlp": "lion", "attention": "adamw_shared_in", "head": "rmsprop"}
    ),
    "budget": parse_budget("state_75"),
}
OWN = {key: value for key, value in ONE_CURVE.items() if key not in ("allocator", "recipe", "budget")}
BY_COLUMN = {**OWN, "risk": RiskConfig(name="prior")}  # which takes rules by column, too
ONCE = {"reallocation": ReallocationConfig(mode="once", warmup_steps=3)}
FROM_HOST = {
    "catalogue": CatalogueConfig(specs=("adamw@streamed", "adamw_int8@streamed"), keep_fp32_roles=()),
    "allocator": AllocatorConfig(),
    "recipe": None,
    "budget": parse_budget("8gb"),
}
BEFALLS: dict[str, dict[str, Any]] = {
    "nan, late": ONCE,
    "clock": {"checkpoint": CheckpointConfig(every_n_steps=None, every_minutes=0.2, keep=9, export=False)},
    "in a decision": {"reallocation": ReallocationConfig(mode="once", warmup_steps=AT)},
    "breach": {"budget": parse_budget("60mb")},
    "budget file": {},
}
BEFALLS_CUT = {"nan, late": ONCE, "SIGUSR1": {}, "breach": BEFALLS["breach"]}
BEFALLS |= {f"{kind}, cut": {"strategy": "fsdp", **OWN, **changes} for kind, changes in BEFALLS_CUT.items()}
AVERAGED: dict[str, Any] = {"task": TaskConfig(options={"ema_decay": 0.5})}
RESUMED = ("in a decision", "SIGUSR1, cut")


def ran(
    folder: Path,
    *,
    ranks: int,
    steps: int = STEPS,
    resume: Path | None = None,
    strategy: Any = "auto",
    precision: Any = "auto",
    **changes: Any,
) -> dict[str, Any]:
    """What a run says, how it ends, and its result on rank 0."""
    given = config(**{"batch_size": 64, "checkpoint": CheckpointConfig(every_n_steps=2, export=False), **changes})
    lasting = {"devices": ranks, "strategy": strategy, "max_steps": steps, "precision": precision}
    trainer = replace(given.trainer, **lasting, val_check_interval=100, limit_val_batches=1)
    given = replace(given, trainer=trainer, resume=None if resume is None else str(resume))
    folder.mkdir(parents=True, exist_ok=True)
    told, ended, result = StringIO(), "", None
    with redirect_stdout(told), redirect_stderr(told):
        try:
            result = training.run(given, run_dir=folder, command="python run.py")
        except Exception as error:
            ended = f"{type(error).__name__}: {error}"
    return {"ended": ended, "told": told.getvalue(), "result": result}


@contextmanager
def befalling(kind: str, *, rank: int, folder: Path) -> Iterator[None]:
    """Inside, `kind` befalls a rank in its step AT."""
    plain = VisionTask.training_step
    decide: Callable[..., Any] = Reallocator.decide

    def step(self: VisionTask, batch: Any, index: int) -> Tensor:
        now, mine = self.trainer.global_step, rank == 1
        if mine and now == 1 and kind.startswith("breach"):
            torch.zeros(MORE_BYTES, dtype=torch.uint8)
        if rank == 0 and now == AT and kind == "budget file":
            (folder / "budget").write_text("state_10\n")
        loss = plain(self, batch, index)
        if kind.startswith("nan") and now == AT and not mine:
            (folder / "ahead").touch()
        if mine and now == AT and self.trainer.training:
            if kind.startswith("SIG"):
                os.kill(os.getpid(), getattr(signal, kind.removesuffix(", cut")))
            if kind.startswith("nan"):
                ahead = folder.parents[1] / "rank 0" / folder.name / "ahead"
                wait_until(ahead.is_file, what="the other rank's step")
                return loss * nan
        return loss

    def decided(self: Reallocator, *given: Any, **more: Any) -> Any:
        if rank == 1 and self.step == AT and kind == "in a decision":
            os.kill(os.getpid(), signal.SIGTERM)
        return decide(self, *given, **more)

    ticks = count()
    with ExitStack() as stack:
        stack.enter_context(mock.patch.object(VisionTask, "training_step", step))
        stack.enter_context(mock.patch.object(Reallocator, "decide", decided))
        if kind == "clock":  # rank 0's stands still, and by rank 1's a checkpoint is late after each step
            stack.enter_context(mock.patch.object(checkpoint, "monotonic", lambda: rank * next(ticks) * 60.0))
        yield


def work(rank: int, size: int, store: Path) -> dict[str, Any]:
    with brief():
        return runs(rank, size, store)


def runs(rank: int, size: int, store: Path) -> dict[str, Any]:
    base = store.parent / f"rank {rank}"
    shared = store.parent / "rank 0"  # whose folders are those of the run
    kept = {**ONE_CURVE, "checkpoint": CheckpointConfig(every_n_steps=2, keep=3, export=False)}
    export = CheckpointConfig(every_n_steps=2, keep=3, export=True)
    found: dict[str, Any] = {}
    if rank == 0:
        found["one"] = ran(base / "one", ranks=1, **kept)
        ran(base / "by column", ranks=1, steps=2, **BY_COLUMN)
    with as_launched(rank, size), group(rank, size, store=store):
        found["two"] = ran(base / "two", ranks=2, **kept)
        found["one_two"] = ran(base / "one_two", ranks=2, resume=after(4, shared / "one"), **ONE_CURVE)
        cut: dict[str, Any] = {**ONE_CURVE, "strategy": "fsdp", "checkpoint": export}
        found["two_cut"] = ran(base / "two_cut", ranks=2, resume=after(2, shared / "two"), **cut)
        partly = {"model": ModelConfig(freeze=("*pos*",)), "task": TaskConfig(options={"ema_decay": 0.5})}
        found["cut, hosted"] = ran(base / "hosted", ranks=2, steps=2, **{**cut, **OWN, **FROM_HOST, **partly})
        found["cut, narrow"] = ran(base / "narrow", ranks=2, steps=2, precision="bf16-true", **cut)
        with mock.patch.object(microbatch_search, "DECIDING_S", 1.0), brief(depth=2):
            searched = {"micro_batch": "auto", "objective": "throughput", "budget": parse_budget("60mb"), "steps": 2}
            found["cut, searched"] = ran(base / "searched", ranks=2, strategy="fsdp", **searched, **OWN)
        with brief(depth=1):
            few = {**OWN, "budget": parse_budget("60mb"), "micro_batch": 1, "steps": 2}
            found["cut, few"] = ran(base / "few", ranks=2, strategy="fsdp", **few)
            less = {key: ONE_CURVE[key] for key in ("allocator", "recipe")}
            found["cut, less state"] = ran(base / "less", ranks=2, strategy="fsdp", **few, **less)
            few["budget"] = parse_budget("2mb")
            found["cut, averaged"] = ran(base / "averaged", ranks=2, strategy="fsdp", **few, **AVERAGED)
        with befalling("budget file", rank=rank, folder=(folder := base / "by column")):
            resumed = {"resume": shared / "by column", "strategy": "fsdp", "steps": AT + 2}
            found["cut, budget"] = ran(folder, ranks=2, **resumed, **BY_COLUMN)
        for kind, changes in BEFALLS.items():
            with befalling(kind, rank=rank, folder=base / kind):
                found[kind] = ran(base / kind, ranks=2, **changes)
        for kind in RESUMED:
            found[f"{kind}, resumed"] = ran(base / kind, ranks=2, resume=shared / kind, **BEFALLS[kind])
    if rank == 0:
        found["two_one"] = ran(base / "two_one", ranks=1, resume=after(4, base / "two"), **ONE_CURVE)
        found["cut_one"] = ran(base / "cut_one", ranks=1, resume=after(4, base / "two_cut"), **ONE_CURVE)
        found["losses"] = {name: losses(base / name) for name in ("one", *CURVES, *BEFALLS)}
        files_of = {kind: base / kind / "checkpoints" for kind in BEFALLS}
        names_of = {kind: [path.name for path in folder.glob("*")] for kind, folder in files_of.items()}
        found["kept"] = {kind: sorted(name for name in names if "best" not in name) for kind, names in names_of.items()}
        found["exported"], found["saved"] = left_by(base / "two_cut")
        found["averaged"], found["frozen"] = left_by(base / "hosted")
    options = list(csv.DictReader((base / "searched" / "options.csv").open()))
    chosen = [{key: option[key] for key in ("micro_batch", "accumulation", "recomputed")} for option in options]
    found["options"] = [row for row, option in zip(chosen, options, strict=True) if option["chosen"] == "True"]
    found["options"] += chosen if rank == 0 else []
    for kind, folder in {"moves": "budget file", "cut moves": "nan, late, cut"}.items():
        lines = files.read_jsonl(base / folder / files.REALLOCATIONS_FILE)
        moves = [[(move["block"], move["source"], move["target"]) for move in line["moves"]] for line in lines]
        found[kind] = [(line["step"], line["trigger"], moved) for line, moved in zip(lines, moves, strict=True)]
    return found


def left_by(folder: Path) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
    """What a run has exported, and the weights of its last checkpoint."""
    saved = torch.load(folder / "checkpoints" / "last.ckpt", weights_only=True)["state_dict"]
    exported = load_file(folder / "model" / "model.safetensors")
    return exported, {name.removeprefix("model.net."): value for name, value in saved.items()}


def after(step: int, folder: Path) -> Path:
    return folder / "checkpoints" / f"step_{step:08d}.ckpt"


def losses(folder: Path) -> dict[int, float]:
    return {line["step"]: line["train/loss"] for line in read_metrics(folder) if "train/loss" in line}


@pytest.fixture(scope="module")
def found() -> list[dict[str, Any]]:
    return in_processes(work)


CURVES = {"two": 0, "one_two": 4, "two_one": 4, "two_cut": 2, "cut_one": 4}  # their first step; `cut` by fully_shard


@pytest.mark.parametrize("name", CURVES)
def test_one_curve_at_any_number_of_ranks_and_across_a_resume(name: str, found: list[dict[str, Any]]) -> None:
    assert found[0][name]["ended"] == ""
    one, other = found[0]["losses"]["one"], found[0]["losses"][name]
    assert list(one) == list(range(STEPS)) and list(other) == [*one][CURVES[name] :]
    assert max(abs(one[step] - other[step]) for step in other) <= 1e-5


def test_a_run_under_fully_shard_tells_what_a_device_holds_and_leaves_the_files_of_one(found: list[Any]) -> None:
    one, cut, saved = found[0]["one"]["result"], found[0]["two_cut"]["result"], found[0]["saved"]
    assert 0.45 * one.state_bytes <= cut.state_bytes <= 0.55 * one.state_bytes
    assert cut.state_bytes <= cut.state_bytes_predicted and cut.budget_met is not False
    assert cut.num_ranks == 2 and max(cut.peak_by_rank) <= cut.peak_bytes <= cut.peak_bytes_predicted < one.peak_bytes
    assert found[0]["exported"].keys() == saved.keys()
    assert all(torch.equal(found[0]["exported"][name], value) for name, value in saved.items())


def test_bf16_weights_under_fully_shard_are_validated_at_the_end(found: list[dict[str, Any]]) -> None:
    assert [each["cut, narrow"]["ended"] for each in found] == ["", ""] and found[0]["cut, narrow"]["result"].metrics


def test_states_on_the_host_under_fully_shard(found: list[dict[str, Any]]) -> None:
    assert [each["cut, hosted"]["ended"] for each in found] == ["", ""]


def test_averages_are_exported_beside_what_is_frozen_under_fully_shard(found: list[dict[str, Any]]) -> None:
    exported, saved = found[0]["averaged"], found[0]["frozen"]
    same = {name for name, value in saved.items() if torch.equal(exported[name], value)}
    assert exported.keys() == saved.keys() and same == {name for name in saved if "pos" in name}


def test_how_a_batch_is_run_under_fully_shard_is_decided_by_all_ranks(found: list[dict[str, Any]]) -> None:
    assert [each["cut, searched"]["ended"] for each in found] == ["", ""], found[0]["cut, searched"]["told"]
    result, (chosen, *others) = found[0]["cut, searched"]["result"], found[0]["options"]
    assert found[1]["options"] == [chosen] and result.budget_met and result.peak_bytes <= result.peak_bytes_predicted
    assert 2 * int(chosen["micro_batch"]) * int(chosen["accumulation"]) == 64 and others


@pytest.mark.parametrize("name", ["cut, few", "cut, less state", "cut, averaged"])
def test_a_checkpoint_that_holds_more_than_a_step_is_predicted_under_fully_shard(name: str, found: list[Any]) -> None:
    assert [each[name]["ended"] for each in found] == ["", ""]
    result = found[0][name]["result"]
    assert result.peak_by_stretch["checkpoint"] == max(result.peak_by_stretch.values()) == result.peak_bytes
    assert result.budget_met and result.peak_bytes <= result.peak_bytes_predicted <= 1.1 * result.peak_bytes


def test_a_new_budget_under_fully_shard(found: list[dict[str, Any]]) -> None:
    assert [each["cut, budget"]["ended"] for each in found] == ["", ""]
    assert found[0]["cut, budget"]["result"].budget["name"] == "state_10"


def test_blocks_move_under_fully_shard(found: list[dict[str, Any]]) -> None:
    first, second = (each["cut moves"] for each in found)
    assert first == second and any(moves for _, _, moves in first)


def test_the_result_is_of_all_ranks(found: list[dict[str, Any]]) -> None:
    one, two = found[0]["one"]["result"], found[0]["two"]["result"]
    assert found[1]["two"]["result"] is None, "rank 0 has it"
    assert one.state_bytes == two.state_bytes and (one.num_ranks, one.peak_by_rank) == (1, ())
    assert two.num_ranks == 2 and max(two.peak_by_rank) == two.peak_bytes <= two.peak_bytes_predicted


ENDS = {
    "nan, late": "",
    "clock": "",
    "SIGUSR1": f"PreemptedError: SIGUSR1 ended the run after step {AT + 1}",
    "in a decision": f"PreemptedError: SIGTERM ended the run after step {AT}",
    "breach": "BudgetBreachedError: budget 60mb allows",
    "budget file": "",
}
ENDS |= {f"{kind}, cut": ENDS[kind] for kind in BEFALLS_CUT}


@pytest.mark.parametrize("kind", BEFALLS)
def test_what_befalls_one_rank_ends_or_spares_all_in_the_same_step(kind: str, found: list[dict[str, Any]]) -> None:
    first, second = (each[kind]["ended"].partition(", whose checkpoint")[0] for each in found)
    assert first == second and first.startswith(ENDS[kind]) and bool(first) == bool(ENDS[kind])
    if not first:
        assert list(found[0]["losses"][kind]) == list(range(STEPS))


@pytest.mark.parametrize("kind", ["nan, late", "nan, late, cut"])
def test_a_loss_that_is_no_number_on_one_rank_is_one_of_all(kind: str, found: list[dict[str, Any]]) -> None:
    assert f"the loss of step {AT + 1} is nan: the step leaves out" in " ".join(found[0][kind]["told"].split())


def test_checkpoints_go_by_the_first_clock(found: list[dict[str, Any]]) -> None:
    assert found[0]["kept"]["clock"] == ["last.ckpt"]


@pytest.mark.parametrize("kind", ["breach", "breach, cut"])
def test_a_breach_names_the_rank(kind: str, found: list[dict[str, Any]]) -> None:
    assert all(" bytes) on rank 1 (" in each[kind]["ended"] for each in found)


@pytest.mark.parametrize("kind", RESUMED)
def test_a_run_that_a_signal_to_one_rank_has_ended_goes_on(kind: str, found: list[dict[str, Any]]) -> None:
    assert [each[f"{kind}, resumed"]["ended"] for each in found] == ["", ""]
    assert list(found[0]["losses"][kind]) == list(range(STEPS))


def test_a_budget_that_is_written_in_mid_run_is_that_of_all_ranks_from_one_step_on(found: list[dict[str, Any]]) -> None:
    first, second = (each["moves"] for each in found)
    assert first == second and (AT + 1, "budget") in [line[:2] for line in first]
    assert found[0]["budget file"]["result"].budget["name"] == "state_10"
