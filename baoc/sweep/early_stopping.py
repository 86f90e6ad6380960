"""Pruning with several objectives: a trial ends at a rung where another trial is better in every objective.

Optuna's pruners support one objective only. Here a trial's objectives at each rung (its validation there, its bytes so
far) are attributes of the trial in the storage, so that trials of all workers, finished, pruned or running, are
compared at equal steps.
"""

from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from math import inf
from pathlib import Path
from typing import Any

import optuna
from optuna.trial import FrozenTrial, Trial, TrialState

from baoc.errors import BadInputError
from baoc.sweep.study_config import StudyConfig
from baoc.tracking.files import read_record
from baoc.tracking.metrics import METRICS_FILE, read_metrics
from baoc.units import GIB

_METRICS = {"peak_bytes": ("memory/peak_gib", GIB), "samples_per_s": ("throughput/samples_per_s", 1.0)}  # key, unit
_NOISY = ("quality", "samples_per_s")  # must be better by the margin
Values = Mapping[str, float | None]  # by objective


class EarlyStopping:
    """Decides from the metrics of a trial whether it should end. An `exempt` trial (a baseline) is never stopped."""

    def __init__(self, study: optuna.Study, trial: FrozenTrial, *, config: StudyConfig, exempt: bool):
        self.study, self.trial, self.exempt = study, trial, exempt
        self.objectives, self.stop = config.objectives, config.early_stop
        self._passed_rungs: set[str] = set()
        self._read_bytes: dict[Path, int] = {}  # size of a metrics file when it was read last

    def stop_reason(self, folder: Path, *, repeat: int = 0) -> str:
        """Why the trial should end; empty if it should go on. Reads the run's metrics if their file has grown, then
        stores and compares the objectives at each rung passed since."""
        file = folder / METRICS_FILE
        size = file.stat().st_size if self.stop.rungs and file.is_file() else 0
        if size == self._read_bytes.get(file, 0):
            return ""
        self._read_bytes[file] = size
        try:
            rows = read_metrics(file)
        except BadInputError:  # a damaged line: the run goes on to its end
            return ""
        for rung in self.stop.rungs:
            key = f"rung:{repeat}:{rung}"
            if key in self._passed_rungs:
                continue
            values = values_at_rung(rows, rung=rung, folder=folder, names=self.objectives, metric=self.stop.metric)
            if values is None:
                break
            self._passed_rungs.add(key)
            Trial(self.study, self.trial._trial_id).set_user_attr(key, dict(values))
            dominating = None if self.exempt else self._dominated_by(values, key=key)
            if dominating is not None:
                return f"trial {dominating} is better in everything at step {rung}"
        return ""

    def _dominated_by(self, values: Values, *, key: str) -> int | None:
        """The number of a trial that is better in every objective at this rung; None if there is none, or if too few
        trials have passed the rung."""
        states = (TrialState.COMPLETE, TrialState.PRUNED, TrialState.RUNNING)
        others = {
            trial.number: trial.user_attrs[key]
            for trial in self.study.get_trials(deepcopy=False, states=states)
            if trial.number != self.trial.number and key in trial.user_attrs and not violates_constraint(trial)
        }
        if len(others) < self.stop.least:
            return None
        return find_dominating_trial(values, others.items(), objectives=self.objectives, margin=self.stop.margin)


def violates_constraint(trial: FrozenTrial) -> bool:
    """Whether a trial breached its budget or diverged, so that its values do not count."""
    return any(value > 0 for value in trial.constraints.values())


def values_at_rung(
    rows: Sequence[Mapping[str, Any]], *, rung: int, folder: Path, names: Iterable[str], metric: str
) -> dict[str, float | None] | None:
    """A run's objectives at its first validation at or after `rung` optimizer steps; None if it has not come that far.

    Args:
        rows: of `read_metrics`, one per step.
        metric: key of the quality, which is None if it was not finite.
    """
    validation = next((i for i, row in enumerate(rows) if row["step"] + 1 >= rung and metric in row), None)
    if validation is None:
        return None
    values: dict[str, float | None] = {}
    for name in names:
        if name == "quality":
            values[name] = rows[validation][metric]
        elif name in _METRICS:
            key, unit = _METRICS[name]
            logged = [row[key] for row in rows[: validation + 1] if row.get(key) is not None]
            values[name] = logged[-1] * unit if logged else None
        else:
            values[name] = None
            with suppress(BadInputError):  # not there yet, or damaged
                values[name] = read_record(folder / "allocation.json", {name: int})[name]
    return values


def find_dominating_trial(
    values: Values, others: Iterable[tuple[int, Values]], *, objectives: Mapping[str, str], margin: float
) -> int | None:
    """The number of a trial of `others` that is better in every objective; None if there is none.

    Quality and throughput must be better by the share `margin` of the own value; bytes are exact and must not be
    larger. Any finite quality is better than one that is not finite. An unknown value of another objective is neither
    better nor worse.
    """
    for number, other in others:
        better = [
            _is_better(other.get(name), values.get(name), name=name, direction=direction, margin=margin)
            for name, direction in objectives.items()
        ]
        if all(better):
            return number
    return None


def _is_better(other: float | None, own: float | None, *, name: str, direction: str, margin: float) -> bool:
    if name != "quality" and (other is None or own is None):
        return False
    sign = -1.0 if direction == "maximize" else 1.0
    other_cost = inf if other is None else sign * other
    own_cost = inf if own is None else sign * own
    if name not in _NOISY:
        return other_cost <= own_cost
    return other_cost < inf and (own_cost == inf or other_cost <= own_cost - margin * abs(own_cost))
