"""From how a trial's runs ended to what the study is told: values, a violated constraint, or a failure."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from math import isfinite
from statistics import fmean

from optuna.trial import TrialState

from baoc.sweep.trial import Outcome

WORST = 1e30  # told for a trial without a value; its constraint is violated, so that it is on no front


@dataclass(frozen=True, slots=True, kw_only=True)
class Answer:
    """What a study is told. A constraint is met at 0 and violated above."""

    text: str
    values: list[float] | None = None
    state: TrialState | None = None  # None: complete, with values
    constraints: Mapping[str, float] = field(default_factory=dict)


def infeasible(outcome: Outcome) -> bool:
    """Whether the settings of a run are to blame for its end: over its budget, out of memory, or diverged."""
    return outcome.violated > 0 or outcome.diverged


def answer_of(outcomes: Sequence[Outcome], *, objectives: Mapping[str, str]) -> Answer:
    """Means over runs of quality and throughput, the largest of bytes, as frontiers do. The last run decides.

    A run that diverged is a violated constraint like a breached budget: told as a bad value alone it would stay on a
    front of which nothing else has its bytes.
    """
    last = outcomes[-1]
    if not last.answered:
        return Answer(state=TrialState.FAIL, text=f"failed: {last.message}")
    values = [_value(outcomes, name, way) for name, way in objectives.items()]
    diverged = float(last.diverged or (any(abs(value) >= WORST for value in values) and not last.violated))
    text = ", ".join(f"{name} {value:.6g}" for name, value in zip(objectives, values, strict=True))
    return Answer(
        values=values,
        text=last.message if last.violated else f"diverged: {last.message}" if diverged else text,
        constraints={"budget": last.violated} | ({"diverged": diverged} if diverged else {}),
    )


def _value(outcomes: Sequence[Outcome], name: str, way: str) -> float:
    worst = WORST if way == "minimize" else -WORST
    found: list[float] = []
    for outcome in outcomes:
        if outcome.result is None:
            return worst
        value = outcome.result["quality"]["value"] if name == "quality" else outcome.result[name]
        if value is None or not isfinite(value):
            return worst
        found.append(float(value))
    return max(found) if name.endswith("_bytes") else fmean(found)
