"""Maps the outcomes of a trial's runs to the trial's outcome in Optuna: values, a violated constraint, or a failure."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from math import isfinite
from statistics import fmean
from typing import Any

from optuna.trial import TrialState

from baoc.frontier.runs import NUMBER
from baoc.sweep.trial_process import RunOutcome

WORST = 1e30  # objective value of a trial without one; a violated constraint keeps the trial off every front


@dataclass(frozen=True, slots=True, kw_only=True)
class TrialOutcome:
    """Arguments of `Study.tell`, constraints (0 if met, above 0 if violated) and a text for the terminal."""

    text: str
    values: list[float] | None = None
    state: TrialState | None = None  # None: complete, with values
    constraints: Mapping[str, float] = field(default_factory=dict)


def trial_outcome(outcomes: Sequence[RunOutcome], *, objectives: Mapping[str, str]) -> TrialOutcome:
    """The outcome of a trial from those of its runs, in order; the last run decides whether it failed.

    Quality and throughput are means over the runs, bytes their maximum, as on a frontier. Divergence violates a
    constraint, as a breached budget does: with a bad value alone a trial would be on the front if no other one has as
    few bytes.
    """
    last = outcomes[-1]
    if not last.is_conclusive:
        return TrialOutcome(state=TrialState.FAIL, text=f"failed: {last.message}")
    results = [outcome.result for outcome in outcomes if outcome.result is not None]
    lacking = [name for name in objectives for result in results if not isinstance(_value(result, name), NUMBER)]
    if lacking:
        return TrialOutcome(state=TrialState.FAIL, text=f"failed: its result.json lacks a valid {lacking[0]}")
    values = [_objective_value(outcomes, name, direction) for name, direction in objectives.items()]
    diverged = float(last.diverged or (any(abs(value) >= WORST for value in values) and not last.violation))
    text = ", ".join(f"{name} {value:.6g}" for name, value in zip(objectives, values, strict=True))
    return TrialOutcome(
        values=values,
        text=last.message if last.violation else f"diverged: {last.message}" if diverged else text,
        constraints={"budget": last.violation} | ({"diverged": diverged} if diverged else {}),
    )


def _value(result: Mapping[str, Any], name: str) -> Any:
    return result["quality"]["value"] if name == "quality" else result.get(name, ...)


def _objective_value(outcomes: Sequence[RunOutcome], name: str, direction: str) -> float:
    worst = WORST if direction == "minimize" else -WORST
    values: list[float] = []
    for outcome in outcomes:
        if outcome.result is None:
            return worst
        value = _value(outcome.result, name)
        if value is None or not isfinite(value):
            return worst
        values.append(float(value))
    return max(values) if name.endswith("_bytes") else fmean(values)
