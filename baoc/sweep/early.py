"""Ends a trial that another one beats in everything at the same step: successive rungs, judged by the Pareto front.

Optuna's pruners know one objective only. Here a trial's values at a rung (its validation there, its bytes so far) are
kept with it, so that those of finished, ended and running trials are compared at equal steps, whoever ran them.
"""

from collections.abc import Iterable, Mapping, Sequence
from math import inf
from pathlib import Path
from typing import Any

import optuna
from optuna.trial import FrozenTrial, Trial, TrialState

from baoc.sweep.study_config import StudyConfig
from baoc.tracking.files import read_json
from baoc.tracking.metrics import METRICS_FILE, read_metrics
from baoc.units import GIB

_LOGGED = {"peak_bytes": ("memory/peak_gib", GIB), "samples_per_s": ("throughput/samples_per_s", 1.0)}
_NOISY = ("quality", "samples_per_s")  # measured with noise: worse only by more than the margin counts
Values = Mapping[str, float | None]


def key_of(rung: int, *, part: int) -> str:
    """The user attribute that holds a trial's values at a rung; `part` counts its runs (`repeats`)."""
    return f"rung:{part}:{rung}"


class Watch:
    """Follows one trial; `verdict` says why it should end, or nothing."""

    def __init__(self, study: optuna.Study, trial: FrozenTrial, *, config: StudyConfig, exempt: bool):
        self.study, self.trial, self.exempt = study, trial, exempt
        self.objectives, self.stop = config.objectives, config.early_stop
        self._passed: set[str] = set()
        self._size: dict[Path, int] = {}

    def verdict(self, folder: Path, *, part: int = 0) -> str:
        """Reads the run's metrics if they have grown, and keeps and compares its values at each rung it has passed."""
        file = folder / METRICS_FILE
        size = file.stat().st_size if self.stop.rungs and file.is_file() else 0
        if size == self._size.get(file, 0):
            return ""
        self._size[file] = size
        rows = read_metrics(file)
        for rung in self.stop.rungs:
            key = key_of(rung, part=part)
            if key in self._passed:
                continue
            values = values_at(rows, rung=rung, folder=folder, names=self.objectives, metric=self.stop.metric)
            if values is None:
                break
            self._passed.add(key)
            Trial(self.study, self.trial._trial_id).set_user_attr(key, dict(values))
            why = "" if self.exempt else self._beaten(values, key=key)
            if why:
                return f"{why} at step {rung}"
        return ""

    def _beaten(self, values: Values, *, key: str) -> str:
        states = (TrialState.COMPLETE, TrialState.PRUNED, TrialState.RUNNING)
        others = {
            trial.number: trial.user_attrs[key]
            for trial in self.study.get_trials(deepcopy=False, states=states)
            if trial.number != self.trial.number and key in trial.user_attrs and not violated(trial)
        }
        if len(others) < self.stop.least:
            return ""
        better = beaten_by(values, others.items(), objectives=self.objectives, margin=self.stop.margin)
        return "" if better is None else f"trial {better} is better in everything"


def violated(trial: FrozenTrial) -> bool:
    """Whether a trial's budget was breached or it diverged; its values do not count."""
    return any(value > 0 for value in trial.constraints.values())


def values_at(
    rows: Sequence[Mapping[str, Any]], *, rung: int, folder: Path, names: Iterable[str], metric: str
) -> dict[str, float | None] | None:
    """A run's objectives at its first validation at or after `rung` steps; None where it has not come to it.

    `rows` are those of `read_metrics`, `metric` is the key of the quality; one that was no number is None.
    """
    at = next((i for i, row in enumerate(rows) if row["step"] + 1 >= rung and metric in row), None)
    if at is None:
        return None
    values: dict[str, float | None] = {}
    for name in names:
        if name == "quality":
            values[name] = rows[at][metric]
        elif name in _LOGGED:
            logged, unit = _LOGGED[name]
            found = [row[logged] for row in rows[: at + 1] if row.get(logged) is not None]
            values[name] = found[-1] * unit if found else None
        else:
            plan = folder / "allocation.json"
            values[name] = read_json(plan)[name] if plan.is_file() else None
    return values


def beaten_by(
    values: Values, others: Iterable[tuple[int, Values]], *, objectives: Mapping[str, str], margin: float
) -> int | None:
    """The number of a trial that is better in quality by `margin` of it and no worse in the rest; None where none is.

    What is measured with noise must be better by the margin, or the trial is not beaten; bytes are exact. A quality
    that was no number is beaten by any other; a rest that is not known is not beaten.
    """
    for number, other in others:
        if all(_better(other.get(n), values.get(n), name=n, way=w, margin=margin) for n, w in objectives.items()):
            return number
    return None


def _better(other: float | None, own: float | None, *, name: str, way: str, margin: float) -> bool:
    if name != "quality" and (other is None or own is None):
        return False
    sign = -1.0 if way == "maximize" else 1.0
    a = inf if other is None else sign * other
    b = inf if own is None else sign * own
    if name not in _NOISY:
        return a <= b
    return a < inf and (b == inf or a <= b - margin * abs(b))
