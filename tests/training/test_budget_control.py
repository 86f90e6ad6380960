"""The budget of a running job changes: the next step holds within the new one, or the run says why not."""

import json
import os
import re
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import lightning as L
import pytest

from baoc.config.dynamics import DynamicsConfig, ScheduleEntry
from baoc.config.schema import CheckpointConfig
from baoc.core.budgets import parse_budget
from baoc.errors import InfeasibleBudgetError
from baoc.training import lightning as strategy_module
from baoc.units import GIB
from tests.support.training_runs import EVERY_STEP, config, logged
from tests.support.watched_runs import Hook, Watch, events, run

pytestmark = pytest.mark.slow


def scheduled(*entries: ScheduleEntry) -> DynamicsConfig:
    return DynamicsConfig(schedule=entries)


def answer(run_dir: Path) -> dict[str, Any]:
    return json.loads((run_dir / "budget.json").read_text())


TO_10_AND_BACK = scheduled(ScheduleEntry(budget="state_10", step=4), ScheduleEntry(budget="state_50", step=9))


def test_a_schedule_holds_from_its_step_on(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    watch, run_dir = Watch(), tmp_path / "day" / "run"
    result = run(run_dir, monkeypatch, watch, budget=parse_budget("state_50"), dynamics=TO_10_AND_BACK)
    share = {step: held / result.state_bytes_adamw for step, held in watch.state_bytes.items()}
    assert all(share[step] <= 0.1 for step in range(4, 9)), share
    assert share[3] > 0.4 and share[9] > 0.4, "released, and taken back"
    assert [watch.budgets[step] for step in (3, 4, 8, 9)] == ["state_50", "state_10", "state_10", "state_50"]
    told = [(event["step"], event["trigger"]) for event in events(run_dir)]
    assert told == [(4, "budget"), (6, "once"), (9, "budget")]
    assert events(run_dir)[0]["why"] == "budget state_10: budget.schedule, step 4"
    assert answer(run_dir)["budget"]["name"] == "state_50" and answer(run_dir)["refused"] is None
    assert result.budget["name"] == "state_50" and result.budget_met


class Killed(Exception):
    pass


def kill(trainer: L.Trainer) -> None:
    raise Killed


def test_resumed_anywhere_it_is_the_same_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Between and after changes of the budget and a reallocation."""
    often = CheckpointConfig(every_n_steps=2, keep=20)
    changes = {"budget": parse_budget("state_50"), "dynamics": TO_10_AND_BACK, "checkpoint": often}
    whole = tmp_path / "day" / "whole"
    run(whole, monkeypatch, Watch(), **changes)
    for stop in (4, 10):
        cut = tmp_path / "day" / f"cut_{stop}"
        with pytest.raises(Killed):
            run(cut, monkeypatch, Watch(**{f"step_{stop + 1}": kill}), **changes)
        held: list[int] = []
        watch = Watch(**{f"step_{stop + 1}": lambda _: held.append(answer(cut)["state_bytes"])})  # noqa: B023
        run(cut, monkeypatch, watch, resume=str(cut), **changes)
        after = [event["state_bytes_after"] for event in events(cut) if event["step"] <= stop + 1]
        assert held == after[-1:], "and not what the first plan of this attempt would hold"
        assert logged(whole) == logged(cut), stop
        assert [(e["step"], e["trigger"], e["why"]) for e in events(whole)] == [
            (e["step"], e["trigger"], e["why"]) for e in events(cut)
        ], stop


def test_a_schedule_that_cannot_be_met_is_refused_before_training(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    dynamics = scheduled(ScheduleEntry(budget="10kb", step=4))
    with pytest.raises(InfeasibleBudgetError, match=r"budget\.schedule, step 4: budget 10kb cannot be met"):
        run(tmp_path / "day" / "run", monkeypatch, Watch(), dynamics=dynamics)


def test_a_file_lowers_the_budget_and_gives_it_back(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    run_dir = tmp_path / "day" / "run"
    ask = run_dir / "budget"
    seen: list[dict[str, Any]] = []
    watch = Watch(
        step_2=lambda _: ask.write_text("state_10\n"),
        step_3=lambda _: ask.write_text(""),  # what a reader sees between the two halves of `echo state_10 > budget`
        step_4=lambda _: (seen.append(answer(run_dir)), ask.write_text("plenty")),
        step_6=lambda _: (seen.append(answer(run_dir)), ask.write_text("10kb")),
        step_8=lambda _: (seen.append(answer(run_dir)), ask.unlink()),
    )
    result = run(run_dir, monkeypatch, watch, budget=parse_budget("state_50"))
    share = {step: held / result.state_bytes_adamw for step, held in watch.state_bytes.items()}
    assert share[1] > 0.4 and share[2] <= 0.1, "held at the very next step"
    assert watch.budgets[3] == "state_10", "a file that is being written changes nothing"
    assert watch.budgets[5] == "state_10", "what cannot be read changes nothing"
    assert watch.budgets[7] == "state_10", "what cannot be met neither"
    assert share[9] > 0.4 and watch.budgets[9] == "state_50"
    assert seen[0]["budget"]["name"] == "state_10" and seen[0]["pid"] == os.getpid()
    assert seen[0]["why"] == "the budget file asks for it" and seen[0]["refused"] is None
    assert "budget is not followed: cannot read budget=plenty" in seen[1]["refused"]
    assert seen[2]["budget"]["name"] == "state_10" and "10kb cannot be met" in seen[2]["refused"]
    assert (seen[2]["step"], seen[2]["why"]) == (seen[0]["step"], seen[0]["why"]), "since when state_10 is in force"
    assert answer(run_dir)["refused"] is None, "nothing is asked for any more"
    assert answer(run_dir)["why"] == "the budget of the run"
    told = " ".join(capsys.readouterr().out.split())
    assert "is not followed: cannot read budget=plenty" in told
    assert told.count("the budget stays state_10: budget 10kb cannot be met") == 1, "said once, not at each step"


def test_garbage_in_the_file_changes_nothing_and_is_said_in_short(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    run_dir = tmp_path / "day" / "run"
    ask = run_dir / "budget"
    seen: list[str] = []

    def replaced(make: Callable[[], Any]) -> Hook:
        def do(_: L.Trainer) -> None:
            if ask.exists():
                seen.append(answer(run_dir)["refused"])
                ask.rmdir() if ask.is_dir() else ask.unlink()
            make()

        return do

    watch = Watch(
        step_1=replaced(lambda: ask.write_bytes(b"\x00\x1b[2J" * 10**6)),
        step_3=replaced(ask.mkdir),
        step_5=replaced(lambda: os.mkfifo(ask)),  # whoever opens it for reading waits for a writer
        step_7=replaced(lambda: ask.write_text("state_10\nstate_25")),
        step_9=replaced(lambda: None),
    )
    run(run_dir, monkeypatch, watch, budget=parse_budget("state_50"))
    assert set(watch.budgets.values()) == {"state_50"}
    texts = [r"'\\x00\\x1b\[2J.{,80}\.\.\.", r"\(no file\)", r"\(no file\)", r"'state_10\\nstate_25'"]
    for refused, text in zip(seen, texts, strict=True):
        assert re.search(f"is not followed: cannot read budget={text}: it takes a preset", refused), refused
    assert "\x00" not in capsys.readouterr().out


def test_what_comes_after_the_last_step_is_said(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    dynamics = scheduled(ScheduleEntry(budget="state_25", step=4), ScheduleEntry(budget="state_10", step=500))
    result = run(tmp_path / "day" / "run", monkeypatch, Watch(), dynamics=dynamics)
    told = " ".join(capsys.readouterr().out.split())
    assert f"budget.schedule, step 500 never comes: step {result.num_steps} is the last (trainer.max_steps)" in told
    assert "step 4 never comes" not in told


def test_a_budget_that_is_found_anew_is_what_is_free_by_then(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    run_dir, found = tmp_path / "day" / "run", iter([9 * GIB, 8 * GIB])
    monkeypatch.setattr(strategy_module, "free_bytes", lambda device: next(found))
    dynamics = scheduled(ScheduleEntry(budget="1gb", step=33))
    changes = {"budget": parse_budget("auto"), "dynamics": dynamics, "checkpoint": EVERY_STEP}
    with pytest.raises(Killed):
        run(run_dir, monkeypatch, Watch(step_3=kill), **changes)
    again = Watch()
    run(run_dir, monkeypatch, again, resume=str(run_dir), trainer=replace(config().trainer, max_steps=4), **changes)
    assert set(again.budgets.values()) == {"auto"}
    assert answer(run_dir)["budget"]["memory_bytes"] == 8 * GIB, "what is free by now"


def test_memory_is_held_too(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Measured anew under the lower budget: the next steps and the next validation hold less than it."""
    free = run(tmp_path / "day" / "free", monkeypatch, Watch(), budget=parse_budget("unlimited"))
    low = free.peak_bytes_predicted - int(0.7 * free.state_bytes_adamw)
    measured: dict[int, int] = {}

    def look(trainer: L.Trainer) -> None:
        monitor: Any = next(c for c in trainer.callbacks if type(c).__name__ == "MemoryMonitor")
        measured[trainer.global_step] = monitor.peak_bytes

    watch = Watch(step_3=look, step_6=look, step_14=look)
    dynamics = scheduled(ScheduleEntry(budget=low, step=3))
    result = run(
        tmp_path / "day" / "run", monkeypatch, watch, budget=parse_budget(free.peak_bytes_predicted), dynamics=dynamics
    )
    assert measured[3] > low >= measured[6] > 0.9 * low
    assert measured[14] <= low and result.budget_met and result.budget_bytes == low
    assert result.peak_bytes == max(measured[3], result.peak_bytes), "the run's peak is that of all its budgets"


def test_a_schedule_goes_on_over_accumulated_batches(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    watch, low = Watch(), replace(config().trainer, max_steps=3)
    dynamics = scheduled(ScheduleEntry(budget="state_10", step=2))
    run(tmp_path / "day" / "run", monkeypatch, watch, dynamics=dynamics, micro_batch=16, trainer=low)
    assert watch.budgets[1] == "state_25" and watch.budgets[2] == "state_10", "optimizer steps count, not micro-batches"
