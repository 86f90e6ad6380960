"""Micro-batch, checkpointing and allocation chosen together, on a CPU: pins, refusals, and that the choice holds."""

import csv
import json
import shutil
import sys
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from itertools import count
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import CheckpointError

from baoc.config.schema import ModelConfig, OptimConfig, ReallocationConfig
from baoc.core.budgets import parse_budget
from baoc.errors import BadInputError, InfeasibleBudgetError
from baoc.models import switches
from baoc.models.switches import count_recomputed_layers
from baoc.planning.microbatch import Axes, MicroBatchMeasurement
from baoc.tasks.base import Task
from baoc.training import run as training
from baoc.training.measure.measurements import Measurements
from baoc.training.measure.microbatch_search import MicroBatchSearch, axes_of
from baoc.training.measure.microbatches import MicroBatchRunner, measure_sizes
from baoc.training.session import make_profiler
from baoc.types import RunResult
from tests.support.planners import footprint
from tests.support.training_runs import brief, config

pytestmark = pytest.mark.slow
TIGHT = "2.7mb"  # AdamW fits with 8 samples at once, and not with 16


@pytest.fixture(autouse=True, scope="module")
def trains_briefly() -> Iterator[None]:
    """With a layer more than other tests: of one, the activations leave no choice."""
    with brief(depth=2):
        yield


@pytest.fixture
def four_layers() -> Iterator[None]:
    """Of two, the activations take more than gradients that could be released."""
    with brief(depth=4):
        yield


def run(run_dir: Path, **changes: Any) -> RunResult:
    run_dir.mkdir(parents=True, exist_ok=True)
    given = {
        "micro_batch": "auto",
        "budget": parse_budget(TIGHT),
        "trainer": replace(config().trainer, max_steps=2),
        "reallocation": ReallocationConfig(mode="off"),  # samples of gradients would take more than activations here
    }
    settings = config(**(given | changes))
    result = training.run(settings, run_dir=run_dir, command="python run.py")
    assert result is not None
    return result


def rows(run_dir: Path) -> list[dict[str, str]]:
    with (run_dir / "options.csv").open() as file:
        return list(csv.DictReader(file))


def chosen(run_dir: Path) -> dict[str, str]:
    (row,) = [row for row in rows(run_dir) if row["chosen"] == "True"]
    return row


@pytest.fixture(scope="module")
def decided(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, RunResult]:
    run_dir = tmp_path_factory.mktemp("day") / "auto"
    return run_dir, run(run_dir)


def test_the_option_that_is_run_holds_what_was_predicted(decided: tuple[Path, RunResult]):
    run_dir, result = decided
    row = chosen(run_dir)
    ends = [row for row in rows(run_dir) if row["recomputed"] in ("0", row["num_layers"])]
    assert len(ends) == 14  # six micro-batches of 32 samples, the whole batch released too; all recomputed or none
    assert result.budget_met and result.peak_bytes <= int(row["peak_bytes"])
    assert result.peak_bytes >= 0.95 * result.peak_bytes_predicted
    assert json.loads((run_dir / "decision.json").read_text())["micro_batch"] == int(row["micro_batch"])
    assert float(row["risk"]) == min(float(r["risk"]) for r in rows(run_dir) if r["risk"])


def test_what_is_pinned_stays(tmp_path: Path):
    run_dir = tmp_path / "day" / "pinned"
    model = ModelConfig(options={"dropout": 0.1}, checkpointing=True)
    run(run_dir, model=model, objective="throughput", budget=parse_budget("8gb"))
    assert {(row["recomputed"], row["num_layers"]) for row in rows(run_dir)} == {("2", "2")}
    run_dir = tmp_path / "day" / "size"
    run(run_dir, micro_batch=8, objective="balanced", budget=parse_budget("8gb"))
    assert {row["micro_batch"] for row in rows(run_dir)} == {"8"} and chosen(run_dir)["accumulation"] == "4"


def test_a_resumed_run_goes_on_with_what_was_decided(decided: tuple[Path, RunResult], tmp_path: Path):
    run_dir = shutil.copytree(decided[0], tmp_path / "day" / "first")
    decision = (run_dir / "decision.json").read_text()
    (run_dir / "options.csv").unlink()
    again = run(run_dir, resume="auto", trainer=replace(config().trainer, max_steps=3), objective="throughput")
    assert again.num_steps == 3 and (run_dir / "decision.json").read_text() == decision
    assert not (run_dir / "options.csv").exists()  # nothing was decided anew
    later = tmp_path / "later" / "first"
    run(later, resume=str(run_dir), trainer=replace(config().trainer, max_steps=4), objective="throughput")
    assert (later / "decision.json").read_text() == decision, "for whoever resumes from this run"


def test_the_same_decision_is_taken_over_once_its_bytes_were_found_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
):
    first = run(tmp_path / "day" / "first")
    seen: list[bool] = []
    monkeypatch.setattr(
        MicroBatchRunner, "measure", lambda *given, **named: (seen.append(True), run_trial(*given, **named))[1]
    )
    monkeypatch.setattr(MicroBatchRunner, "time_training_step", None)  # none is measured again
    again = run(tmp_path / "day" / "again", name="again", seed=7)
    assert len(seen) == 1 and rows(tmp_path / "day" / "again") == rows(tmp_path / "day" / "first")
    assert again.peak_bytes_predicted == first.peak_bytes_predicted and again.budget_met
    account = json.loads((tmp_path / "day" / "again" / "deciding.json").read_text())
    assert account["kept"] is True and "taken over from " in capsys.readouterr().out
    monkeypatch.undo()
    looks = count()
    grown = lambda *given, **named: more(run_trial(*given, **named), times=1 if next(looks) else 100)  # noqa: E731
    monkeypatch.setattr(MicroBatchRunner, "measure", grown)
    run(tmp_path / "day" / "grown", seed=8)
    assert "kept" not in json.loads((tmp_path / "day" / "grown" / "deciding.json").read_text()), "decided anew"


run_trial = MicroBatchRunner.measure


def more(trial: MicroBatchMeasurement, *, times: float = 1.05) -> MicroBatchMeasurement:
    """Of a step that takes so many times the bytes that it took."""
    grown = int(times * trial.footprint.forward_backward_bytes)
    return replace(trial, footprint=replace(trial.footprint, forward_backward_bytes=grown, intervals=()))


def test_no_option_fits_says_the_least_and_which_pin_is_in_the_way(tmp_path: Path):
    with pytest.raises(
        InfeasibleBudgetError, match=r"cannot be met by any of 1[4-9] options.*\(32 x 1, recomputed"
    ) as caught:
        run(tmp_path / "day" / "none", budget=parse_budget("512kb"))
    assert caught.value.least_feasible_bytes > 2**19
    with pytest.raises(InfeasibleBudgetError, match="a smaller micro_batch than the 32 that was asked for"):
        run(tmp_path / "day" / "large", budget=parse_budget("3mb"), micro_batch=32, objective="throughput")


def test_a_refusal_names_a_budget_within_which_an_option_fits(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
):
    """A stand-in for torch's CUDA allocator, which reserves more where it may have more.

    What a refusal has confirmed is not kept: a run at the budget that it names decides anew.
    """
    caps: list[float] = []
    seen: list[Any] = []
    given = lambda *_, budget, **__: caps.append(budget.memory_bytes)  # noqa: E731
    monkeypatch.setattr("baoc.training.measure.microbatch_search.cap_device", given)
    monkeypatch.setattr("baoc.training.measure.microbatch_search.needs_confirmation", lambda *_, **__: True)

    def within(trials: MicroBatchRunner, *given: Any, **named: Any) -> MicroBatchMeasurement:
        seen.append(trials.module)
        found = run_trial(trials, *given, **named)
        return more(found) if caps[-1] > 2**19 else found

    monkeypatch.setattr(MicroBatchRunner, "measure", within)
    with pytest.raises(InfeasibleBudgetError, match=r"of 1[4-9] options.*allows 512 KiB.* was found to do") as caught:
        run(tmp_path / "day" / "none", budget=parse_budget("512kb"))
    assert count_recomputed_layers(seen[-1].model) == 0, "layers are as they were"
    assert "are tried for the least" in capsys.readouterr().out
    first, *tried = caps
    least = caught.value.least_feasible_bytes
    assert first == 2**19 < tried[0] < least, "what was named by one step was too little for the next one"
    assert least in tried, "the budget that is named was tried itself"
    assert {int(row["peak_bytes"]) for row in rows(tmp_path / "day" / "none")} >= {int(tried[0])}, "rows are its own"
    assert run(tmp_path / "day" / "least", budget=parse_budget(f"{least}b")).num_steps == 2
    with pytest.raises(InfeasibleBudgetError):
        run(tmp_path / "day" / "less", budget=parse_budget(f"{least - 1}b"))


def standing_in(monkeypatch: pytest.MonkeyPatch, *, has_room: Callable[[dict[str, Any]], bool], context: bool) -> None:
    """A stand-in for CUDA's cap, within which only what `has_room` runs; or that the context alone takes the budget."""
    inside = [True]

    @contextmanager
    def uncapped(*_: Any, **__: Any) -> Iterator[None]:
        inside[0] = False
        yield
        inside[0] = True

    def capped(trials: MicroBatchRunner, micro_batch: int, **arguments: Any) -> MicroBatchMeasurement:
        if inside[0] and not context and not has_room(arguments):
            raise torch.OutOfMemoryError("CUDA out of memory")
        return run_trial(trials, micro_batch, **arguments)

    def cap(*_: Any, **__: Any) -> None:
        if context:
            raise BadInputError("of which the CUDA context alone takes 822 MiB")

    run_trial = MicroBatchRunner.measure
    monkeypatch.setattr(MicroBatchRunner, "measure", capped)
    monkeypatch.setattr("baoc.training.measure.measurements.uncapped", uncapped)
    monkeypatch.setattr("baoc.training.measure.microbatch_search.uncapped", uncapped)
    monkeypatch.setattr("baoc.training.measure.microbatch_search.cap_device", cap)


@pytest.mark.parametrize("context", [False, True])
def test_where_not_even_a_trial_has_room_the_refusal_names_what_would_fit(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, context: bool
):
    standing_in(monkeypatch, has_room=lambda _: False, context=context)
    monkeypatch.setattr("baoc.training.session.time_specs", None)  # there is no room to time anything
    budget = parse_budget({"memory": "512kb", "step_time": 1.1} if context else "512kb")
    with pytest.raises(InfeasibleBudgetError, match=r"cannot be met by any of 1[4-9] options.*least that one takes is"):
        run(tmp_path / "day" / "none", budget=budget)
    assert all(row["tried"] == "False" for row in rows(tmp_path / "day" / "none"))


def test_where_all_gradients_at_once_have_no_room_they_are_released(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """Measurements keep all gradients, so none has room; one outside of the cap tells what release leaves."""
    standing_in(monkeypatch, has_room=lambda arguments: bool(arguments.get("released")), context=False)
    model = ModelConfig(checkpointing=False)
    result = run(tmp_path / "day" / "freed", budget=parse_budget("16mb"), model=model, objective="throughput")
    assert chosen(tmp_path / "day" / "freed")["release"] == "True" and result.budget_met
    assert result.step_s_predicted > 0


def test_where_the_profiler_has_no_room_the_plan_is_refused_by_number(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """A stand-in for CUDA's cap, outside of which it is built to tell its bytes."""
    tries = iter([True, False])

    def built(*given: Any, **settings: Any) -> Any:
        if next(tries):
            raise torch.OutOfMemoryError("CUDA out of memory")
        return make_profiler(*given, **settings)

    monkeypatch.setattr(sys.modules["baoc.training.session"], "make_profiler", built)
    with pytest.raises(InfeasibleBudgetError, match="and the least feasible is"):
        run(tmp_path / "day" / "none", budget=parse_budget("512kb"), micro_batch=None)
    assert not list(tries)


def test_a_network_without_parts_to_recompute_says_so():
    """Left open, it is planned without; asked for, it is refused."""
    task = cast(Task, SimpleNamespace(model=nn.Linear(2, 2)))
    assert axes_of(config(micro_batch="auto"), task=task).recomputed == (0,)
    asked = config(micro_batch="auto", model=ModelConfig(checkpointing=True))
    with pytest.raises(
        BadInputError, match="model vit names no parts whose activations could be recomputed: set model"
    ):
        axes_of(asked, task=task)


EVERY_EPOCH = {"check_val_every_n_epoch": 1}


@pytest.mark.parametrize(
    ("changes", "trainer", "text"),
    [
        ({"batch_size": 5000}, {}, "a step of 5000 samples does not fit the 1438 training samples"),
        ({"batch_size": 5000, "micro_batch": 8}, {}, "a step of 5000 samples does not fit the 1438 training samples"),
        ({}, {"precision": "bf16-true"}, r"micro_batch=auto tries micro-batches at trainer\.precision=32-true or"),
        ({}, {"strategy": "ddp"}, r"trainer\.strategy=ddp is of several devices: set trainer\.devices=N"),
        ({"micro_batch": 16}, {"limit_train_batches": 0.001}, "=0.001 of the 88 batches of an epoch"),
        ({"micro_batch": 16}, EVERY_EPOCH | {"val_check_interval": 89}, "=89 is more than the 88 batches of an epoch"),
        ({"micro_batch": 5}, {}, "micro_batch=5 does not divide batch_size=32"),
    ],
)
def test_what_settings_and_sizes_rule_out_is_refused_before_a_network_is_built(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, changes: dict[str, Any], trainer: dict[str, Any], text: str
):
    monkeypatch.setattr(training, "build_model", None)
    with pytest.raises(BadInputError, match=text):
        run(tmp_path / "day" / "refused", **changes, trainer=replace(config().trainer, **trainer))


class Card:
    """A runner whose seconds are flat up to 8 samples and whose bytes are 10 and 1 per sample, with room for `room`."""

    def __init__(self, *, room: int, slow: float = 1.0):
        self.room, self.slow = room, slow
        self.asked: list[int] = []

    def run(self, size: int) -> MicroBatchMeasurement:
        self.asked.append(size)
        if 10 + size > self.room:
            raise torch.OutOfMemoryError("full")
        return MicroBatchMeasurement(
            micro_batch=size,
            footprint=replace(footprint(size), forward_backward_bytes=10 + size, intervals=()),
            seconds=self.slow * max(size, 8),
        )


def grown(card: Card, *, limit: int, max_s: float = 1e9) -> list[int]:
    sizes = [1, 2, 4, 8, 16, 32, 64]
    fits = lambda found: found.forward_backward_bytes <= limit  # noqa: E731
    return [trial.micro_batch for trial in measure_sizes(card.run, sizes=sizes, max_s=max_s, fits=fits)]


def test_the_smallest_one_four_times_as_large_and_the_largest_that_fits_are_tried():
    assert grown(Card(room=1000), limit=50) == [1, 4, 32]
    assert grown(Card(room=1000), limit=11) == [1, 4]
    card = Card(room=30)  # the line says that 32 fits, the device that it does not
    assert grown(card, limit=50) == [1, 4, 16] and card.asked == [1, 4, 32, 16]
    assert grown(Card(room=12), limit=50) == [1]
    with pytest.raises(torch.OutOfMemoryError):
        grown(Card(room=10), limit=50)
    assert grown(Card(room=1000), limit=1000, max_s=50) == [1, 4, 64], "seconds seem flat by the two"
    assert [t.micro_batch for t in measure_sizes(Card(room=99).run, sizes=[8], max_s=1, fits=lambda _: True)] == [8]


def test_what_would_take_too_long_is_not_tried():
    class Slow(Card):
        def run(self, size: int) -> MicroBatchMeasurement:
            return replace(super().run(size), seconds=float(size))

    assert grown(Slow(room=1000), limit=1000, max_s=6 * 16) == [1, 4, 16]


def test_a_limit_on_time_takes_part_and_is_refused_with_what_would_hold(tmp_path: Path):
    """Ratios far from 1, as seconds of a busy machine are no measure."""
    run_dir = tmp_path / "day" / "loose"
    budget = {"memory": "8gb", "step_time": 1000.0}
    result = run(run_dir, budget=parse_budget(budget), trainer=replace(config().trainer, max_steps=9))
    row = chosen(run_dir)
    assert 0 < float(row["step_s"]) <= 1000 * float(row["reference_s"])
    assert result.step_s_predicted > 0 and float(row["step_s_measured"]) == pytest.approx(result.step_ms / 1e3)
    footprint = json.loads((run_dir / "footprint.json").read_text())
    assert footprint["predicted"]["step_s"] == result.step_s_predicted
    assert footprint["error"]["peak_bytes"] == pytest.approx(result.peak_bytes_predicted / result.peak_bytes - 1)
    latency = json.loads((run_dir / "latency.json").read_text())
    assert latency["reference_step_s"] == pytest.approx(float(row["reference_s"]))
    tight = parse_budget({"memory": "8gb", "step_time": 0.001})
    with pytest.raises(
        InfeasibleBudgetError, match=r"with step_time=0.001 cannot be met by any of 7 options: of tho"
    ) as caught:
        run(tmp_path / "day" / "tight", budget=tight)
    assert caught.value.least_step_s and "budget.step_time=" in caught.value.advice[0]
    assert all(row["why"].startswith("too slow: ") for row in rows(tmp_path / "day" / "tight"))


def test_gradients_are_released_where_nothing_else_fits(
    four_layers: None, tmp_path: Path, capsys: pytest.CaptureFixture[str]
):
    pins: dict[str, Any] = {"micro_batch": 32, "model": ModelConfig(checkpointing=False), "objective": "balanced"}
    with pytest.raises(InfeasibleBudgetError):
        run(tmp_path / "day" / "none", budget=parse_budget("1mb"), **pins)
    kept, freed = (int(row["peak_bytes"]) for row in rows(tmp_path / "day" / "none"))
    assert freed < kept
    between = parse_budget(f"{(freed + kept) // 2}b")
    result = run(tmp_path / "day" / "freed", budget=between, **pins)
    assert chosen(tmp_path / "day" / "freed")["release"] == "True" and result.budget_met
    assert "clips by the norm of the step before. optim.release_gradients=false rules" in " ".join(
        capsys.readouterr().out.split()
    )
    with pytest.raises(InfeasibleBudgetError):
        run(tmp_path / "day" / "pinned", budget=between, optim=OptimConfig(release_gradients=False), **pins)
    asked = run(
        tmp_path / "day" / "asked",
        **{**pins, "micro_batch": "auto"},
        optim=OptimConfig(release_gradients=True),
        budget=parse_budget("8gb"),
    )
    assert asked.budget_met and [row["release"] for row in rows(tmp_path / "day" / "asked")] == ["True"]


def test_a_plan_on_this_device_tells_what_was_decided(tmp_path: Path):
    run_dir = tmp_path / "day" / "plan"
    run_dir.mkdir(parents=True)
    asked = config(
        mode="plan", micro_batch="auto", budget=parse_budget(TIGHT), reallocation=ReallocationConfig(mode="off")
    )
    assert training.run(asked, run_dir=run_dir, command="") is None
    plan, row = json.loads((run_dir / "plan.json").read_text()), chosen(run_dir)
    number, layers = int(row["recomputed"]), int(row["num_layers"])
    asked_again = number if 0 < number < layers else number == layers
    assert (str(plan["micro_batch"]), plan["checkpointing"]) == (row["micro_batch"], asked_again)
    assert plan["release"] is False
    assert plan["samples_per_s"] > 0 and plan["footprint"] == "probe"


def test_weights_in_full_that_pass_the_cap_are_tried_in_16_bits(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """A stand-in for CUDA's cap: with weights in full a trial has no room, so none is run but with 16 bits."""
    seen: list[bool] = []

    def capped(trials: MicroBatchRunner, micro_batch: int, **arguments: Any) -> MicroBatchMeasurement:
        narrow = {param.dtype for param in trials.module.parameters()} != {torch.float32}
        seen.append(narrow)
        if not narrow:
            raise torch.OutOfMemoryError("CUDA out of memory")
        return run_trial(trials, micro_batch, **arguments)

    run_trial = MicroBatchRunner.measure
    monkeypatch.setattr(MicroBatchRunner, "measure", capped)
    given = replace(config().trainer, max_steps=2, precision="bf16-mixed")
    wide = replace(config().catalogue, specs=("*", "*+split8"))
    asked: dict[str, Any] = {"objective": "throughput", "budget": parse_budget("2mb")}
    result = run(tmp_path / "day" / "narrow", trainer=given, catalogue=wide, **asked)
    assert result.budget_met and seen.count(False) <= 4 and seen[-1]
    assert chosen(tmp_path / "day" / "narrow")["weights"] == "native split8"
    # What is kept of 16-bit weights' copies is the planner's and the trial's: else a plan is measured without end.
    (pinned := tmp_path / "day" / "pinned").mkdir()
    model = ModelConfig(options={"dropout": 0.1}, checkpointing=False)
    off = ReallocationConfig(mode="off")
    only = config(micro_batch=8, mode="plan", reallocation=off, trainer=given, catalogue=wide, model=model, **asked)
    training.run(only, run_dir=pinned, command="")
    assert chosen(pinned)["tried"] == "True"
    seen.clear()  # a cap that does not even hold the weights alone: those in full never come
    for module in ("measure.microbatch_search", "lightning"):
        monkeypatch.setattr(f"baoc.training.{module}.must_wait", lambda *_, **__: True)
    (run_dir := tmp_path / "day" / "waits").mkdir()
    planned = config(micro_batch=8, mode="plan", reallocation=off, trainer=given, catalogue=wide, **asked)
    training.run(planned, run_dir=run_dir, command="")
    assert seen and all(seen) and chosen(run_dir)["weights"] == "native split8"


def test_what_was_looked_at_outside_of_the_cap_is_no_room_until_it_was_tried(monkeypatch: pytest.MonkeyPatch):
    """Else a decision that had no room, and finds some after all, goes on without a latency table and its limit."""
    given: dict[str, Any] = {
        "task": None,
        "runner": None,
        "budget": parse_budget("8gb"),
        "bf16_params": {},
        "bf16_savings": {},
        "explored": {},
    }
    axes = Axes(micro_batches=(32,), recomputed=(0,), release=(False, True))
    measurements, freed = Measurements(config(), device=torch.device("cpu"), axes=axes, **given), (32, False, True)
    found = MicroBatchMeasurement(micro_batch=32, footprint=footprint(32))
    measurements.small, measurements.out_of_memory = {False: [found]}, {(32, False, False)}
    monkeypatch.setattr(measurements, "set_layers", lambda *_, **__: None)
    monkeypatch.setattr(measurements, "measure_bytes", lambda *_, **__: found)
    assert (
        measurements.measure_outside_cap(freed, blocks=[])
        and measurements.is_measured(freed)
        and not measurements.any_room
    )
    monkeypatch.setattr(measurements, "rehearse", lambda *_, **__: 1.0)
    measurements.try_out(freed, blocks=[])
    assert measurements.any_room


@pytest.mark.parametrize("faster", [False, True])
def test_compiled_layers_are_searched_where_a_run_may_repay_them(
    faster: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    """What torch would compile runs as it is here, and its seconds are said to be more or less."""
    monkeypatch.setattr(torch, "compile", lambda forward, **_: forward)
    monkeypatch.setattr(switches, "compiled_layers", {})
    monkeypatch.setattr(MicroBatchSearch, "may_compile", lambda self, _: not self.measurements.compiled)
    rehearse, compiled = MicroBatchRunner.time_training_step, []

    def rehearsed(self: MicroBatchRunner, *given: Any, **named: Any) -> float:
        compiled.append(switches.is_compiled(self.module))
        return rehearse(self, *given, **named) * ((1e-3 if faster else 1e3) if compiled[-1] else 1.0)

    monkeypatch.setattr(MicroBatchRunner, "time_training_step", rehearsed)
    run_dir = tmp_path / "day" / "auto"
    result = run(run_dir, objective="throughput")
    assert {row["compiled"] for row in rows(run_dir)} == {"True", "False"} == {str(value) for value in compiled}
    assert chosen(run_dir)["compiled"] == str(faster) and result.budget_met
    assert json.loads((run_dir / "decision.json").read_text())["compile"] is faster
    if faster:
        again = run(tmp_path / "day" / "again", objective="throughput", seed=3)
        assert chosen(tmp_path / "day" / "again")["compiled"] == "True" and again.budget_met
        return
    pinned = run(tmp_path / "day" / "pinned", model=ModelConfig(options={"dropout": 0.1}, compile=True))
    assert {row["compiled"] for row in rows(tmp_path / "day" / "pinned")} == {"True"} and pinned.budget_met
    account = json.loads((tmp_path / "day" / "pinned" / "deciding.json").read_text())
    assert 0 < account["training_s"] <= account["phases_s"]["compiling"] < account["total_s"]
    assert account["total_s"] == pytest.approx(sum(account["phases_s"].values()))


@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf")  # torch's own look
def test_layers_are_compiled_for_the_sizes_that_are_tried_alone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """Compiling one form takes seconds on a GPU. What torch traces runs as it is here, and its sizes are noted."""
    sizes: list[int] = []

    def traced(graph: torch.fx.GraphModule, inputs: list[torch.Tensor]) -> Callable[..., Any]:
        sizes.append(max(value.shape[0] for value in inputs if value.ndim == 3))
        return graph.forward

    monkeypatch.setattr(switches, "inductor_kernels", traced)
    monkeypatch.setattr("baoc.training.measure.microbatch_search.DECIDING_S", 600.0)  # enough on a busy machine
    model, counts = ModelConfig(options={"dropout": 0.1}, compile=True), []
    for name in ("first", "kept"):
        torch.compiler.reset()
        monkeypatch.setattr(switches, "compiled_layers", {})
        sizes.clear()
        assert run(tmp_path / "day" / name, model=model, objective="throughput").budget_met
        counts.append(Counter(sizes))
    torch.compiler.reset()
    row = chosen(tmp_path / "day" / "first")
    size, forms = int(row["micro_batch"]), 1 if row["recomputed"] in ("0", row["num_layers"]) else 2
    tried = {int(row["micro_batch"]) for row in rows(tmp_path / "day" / "first") if row["tried"] == "True"}
    # Which sizes are tried without compiling follows from their seconds.
    assert size in counts[0] and counts[0].keys() <= tried, "what trains, and of others those that are tried alone"
    assert max(counts[0].values()) <= 2, "layers that are kept, and recomputed ones"
    assert counts[1] == {size: forms}, "a decision that is kept compiles what is trained"


def test_compiled_layers_are_worth_trying_in_a_long_run_on_a_gpu_alone():
    self = SimpleNamespace(
        config=config(
            trainer=replace(config().trainer, max_steps=100), batch_size=32, model=ModelConfig(compile="auto")
        ),
        device=torch.device("cuda"),
        measurements=SimpleNamespace(capped=True),
        axes=SimpleNamespace(num_layers=4),
        sharded=False,
        max_s=12.0,
    )

    def may(rate: float, **changes: Any) -> bool:
        return MicroBatchSearch.may_compile(cast(Any, SimpleNamespace(**vars(self) | changes)), cast(Any, option(rate)))

    option = lambda rate: SimpleNamespace(samples_per_s=rate)  # noqa: E731
    assert may(7.5) and not may(7.7)  # 420 s or more
    assert not may(7.5, device=torch.device("cpu")) and not may(7.5, axes=SimpleNamespace(num_layers=0))
    assert not may(7.5, sharded=True) and not may(7.5, max_s=0.0)
    pins = [replace(self.config, model=ModelConfig(compile=compile)) for compile in (False, True, "auto")]
    assert [may(7.5, config=pinned) for pinned in pins] == [False, False, True]


@pytest.mark.parametrize("asked", [True, "auto"])
def test_a_decision_goes_on_where_compiled_layers_fail(
    asked: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
):
    def fails(*_: Any, **__: Any) -> Any:
        raise NotImplementedError("no rule for this operator")

    monkeypatch.setattr(MicroBatchRunner, "compile", fails)
    monkeypatch.setattr(MicroBatchSearch, "may_compile", lambda self, _: asked == "auto")
    run_dir = tmp_path / "day" / "auto"
    result = run(run_dir, model=ModelConfig(options={"dropout": 0.1}, compile=asked))
    (row,) = [row for row in rows(run_dir) if row["compiled"] == "True"]
    assert row["why"] == "compiled layers fail: NotImplementedError: no rule for this operator"
    assert row["peak_bytes"] == "" == row["state_bytes"], "it was not planned"
    assert (
        chosen(run_dir)["compiled"] == "False"
        and result.budget_met
        and "layers run as they are" in capsys.readouterr().out
    )


@pytest.mark.parametrize(("pin", "works"), [(False, True), (2, False), (None, False)])
def test_where_layers_cannot_be_recomputed_a_pin_keeps_them_compiled(
    pin: Any, works: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    """Those that all layers are recomputed with are looked at for bytes alone. Two of four that cannot be fail too."""
    monkeypatch.setattr(torch, "compile", lambda forward, **_: forward)
    monkeypatch.setattr(switches, "compiled_layers", {})
    explore = Measurements.explore

    def explored(self: Measurements, recomputed: int) -> None:
        if recomputed and self.compiled:
            raise CheckpointError("layers do not do the same again")
        explore(self, recomputed)

    monkeypatch.setattr(Measurements, "explore", explored)
    run_dir = tmp_path / "day" / "auto"
    model = ModelConfig(options={"dropout": 0.1}, checkpointing=pin, compile=True)
    run(run_dir, model=model, objective="throughput")
    assert (chosen(run_dir)["compiled"] == "True") is works
    assert any(row["why"].startswith("compiled layers fail: CheckpointError") for row in rows(run_dir)) is not works


def test_what_was_not_timed_is_planned_and_keeps_the_seconds_of_before(monkeypatch: pytest.MonkeyPatch):
    axes = Axes(micro_batches=(8,), recomputed=(0,))
    given: dict[str, Any] = {"task": None, "runner": None, "budget": parse_budget("8gb"), "explored": {}}
    given |= {"bf16_params": {}, "bf16_savings": {}, "device": torch.device("cpu"), "axes": axes}
    measurements, way = Measurements(config(), **given), (8, 0, False)
    measurements.small = {0: [MicroBatchMeasurement(micro_batch=8, footprint=footprint(8), seconds=2.0)]}
    untimed = MicroBatchMeasurement(micro_batch=8, footprint=footprint(8))
    monkeypatch.setattr(measurements, "set_layers", lambda *_, **__: None)
    monkeypatch.setattr(measurements, "measure_bytes", lambda *_, **__: untimed)
    assert measurements.measure_outside_cap(way, blocks=[]) and measurements.seconds(way) == 4 * 2.0
    measurements.small = {0: [untimed]}
    decision: Any = SimpleNamespace(measurements=measurements, budget=measurements.budget)
    decision.config = config(objective="throughput")
    fast: Any = SimpleNamespace(fits=True, step_s=1.0)
    assert MicroBatchSearch.option_if_too_slow(decision, way, than=[fast]) is None


def test_a_plan_of_before_is_taken_again_only_where_the_context_has_grown():
    plans: list[int] = []
    planner: Any = SimpleNamespace(budget=parse_budget("8gb"), propose=lambda: plans.append(1) or refused())
    refused = lambda: InfeasibleBudgetError("", budget_bytes=1, least_feasible_bytes=100)  # noqa: E731
    self: Any = SimpleNamespace(planner=planner, budget=planner.budget, _plans={})
    for context in (10, 10, 14, 14, 6):
        planner.footprint = replace(footprint(8), context_bytes=context)
        with pytest.raises(InfeasibleBudgetError):
            MicroBatchSearch.propose(self, (8, 0, False))
    assert len(plans) == 2, "with less context another one may be better"
