"""What a study says of itself: counts, the best of each objective, the time left; a bar where there is a terminal."""

import io
from datetime import datetime, timedelta

import optuna
import pytest
from optuna.trial import FrozenTrial, TrialState
from rich.console import Console

from baoc.sweep.progress import Progress
from baoc.sweep.status import status_of
from baoc.sweep.study_config import read_study

OBJECTIVES = {"quality": "minimize", "samples_per_s": "maximize"}
BEGAN = datetime(2026, 1, 1)


def trial(number: int, state: TrialState, *, seconds: float = 10, values=None, budget: float = 0.0) -> FrozenTrial:
    ended = state in (TrialState.COMPLETE, TrialState.FAIL, TrialState.PRUNED)
    return FrozenTrial(
        number=number,
        trial_id=number,
        state=state,
        value=None,
        values=values,
        datetime_start=BEGAN,
        datetime_complete=BEGAN + timedelta(seconds=seconds) if ended else None,
        params={},
        distributions={},
        user_attrs={},
        system_attrs={"constraints:budget": budget},
        intermediate_values={},
    )


def test_counts_best_front_and_time_left():
    trials = [
        trial(0, TrialState.COMPLETE, values=[0.5, 10.0]),
        trial(1, TrialState.COMPLETE, values=[0.4, 5.0], seconds=30),
        trial(2, TrialState.COMPLETE, values=[0.6, 6.0], seconds=20),
        trial(3, TrialState.COMPLETE, values=[0.1, 99.0], budget=1.0),
        trial(4, TrialState.PRUNED, seconds=20),
        trial(5, TrialState.FAIL, seconds=20),
        trial(6, TrialState.RUNNING),
        trial(7, TrialState.RUNNING),
    ]
    status = status_of(trials, total=12, objectives=OBJECTIVES)
    assert (status.done, status.violated, status.pruned, status.failed) == (4, 1, 1, 1)
    assert (status.running, status.waiting) == (2, 4)
    assert status.remaining_s == 20 * 6 / 2  # six are not ended, two at a time, the median took 20 s
    assert status.best == ("quality 0.4 (trial 1)", "samples_per_s 10 (trial 0)")
    assert status.on_front == 2
    assert (
        status.text == "4/12 done (1 over budget or diverged), 1 ended early, 1 failed, 2 running, 4 waiting, 60 s left"
    )


@pytest.mark.parametrize(
    ("workers", "running", "left_s"), [(2, 1, 10), (2, 2, 10), (1, 2, 10), (None, 1, 20), (2, 0, 20)]
)
def test_time_left_is_that_of_all_workers(workers: int | None, running: int, left_s: float):
    """A trial that has just ended leaves its place empty for a moment; others may run on further machines."""
    trials = [trial(0, TrialState.COMPLETE, values=[0.1, 1.0]), trial(1, TrialState.COMPLETE, values=[0.1, 1.0])]
    trials += [trial(2 + number, TrialState.RUNNING) for number in range(running)]
    total = 4 if running or workers is None else 6
    status = status_of(trials, total=total, objectives=OBJECTIVES, workers=workers)
    assert status.remaining_s == left_s


def test_nothing_is_known_before_the_first_trial():
    status = status_of([], total=3, objectives=OBJECTIVES)
    assert status.remaining_s is None and status.best == () and status.waiting == 3


@pytest.mark.parametrize("terminal", [True, False])
def test_a_terminal_gets_a_bar_and_a_log_a_line_per_trial(terminal: bool, capsys):
    given = {"name": "s", "objectives": {"quality": "minimize"}, "space": {"x": {"choices": [1]}}, "n_trials": 2}
    study = optuna.create_study()
    console = Console(file=io.StringIO(), force_terminal=terminal, width=120, highlight=False)
    with Progress(study, config=read_study(given), console=console) as progress:
        study.add_trial(optuna.trial.create_trial(value=0.25))
        progress.trial_ended("trial 0 (x=1): quality 0.25")
    drawn = console.file.getvalue()  # type: ignore[attr-defined]
    for text in ("50 %", "1/2 done", "best: quality 0.25 (trial 0)", "trial 0 (x=1)"):
        assert (text in drawn) == terminal, text
    plain = capsys.readouterr().out
    assert ("trial 0 (x=1): quality 0.25  [1/2 done" in plain) == (not terminal)
