"""The text of the frontier page: the best point of each family at equal memory, and a sentence about it.

Readers have a budget, so families are compared within the same memory: shares of fp32 AdamW's state, or the runs' own
memory budgets. The best of many points is biased upwards, so each is shown with the number of points it is the best of.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from math import isfinite, sqrt

from baoc.core.statistics import student_quantile
from baoc.frontier.pareto import Objective
from baoc.types import FrontierPoint
from baoc.units import format_bytes

STATE_SHARES = (0.5, 0.25, 0.1, 0.03)  # of fp32 AdamW's state
PREFERRED_SHARES = (0.25, 0.1, 0.5, 0.03)  # order in which equally good levels are chosen for the sentence
SLACK = 1.001  # padding may take a few bytes more than a share
ADAMW = "uniform_adamw"


@dataclass(frozen=True, slots=True, kw_only=True)
class ComparedPoint:
    """A point of a frontier with its family, allocator and memory budget."""

    point: FrontierPoint
    family: str
    allocator: str
    memory_limit: int | None = None  # bytes of its memory budget, if it had one


@dataclass(frozen=True, slots=True, kw_only=True)
class MemoryLevel:
    """The best point of each family within `limit` bytes, with the number of points it is the best of."""

    name: str
    limit: float
    best: Mapping[str, tuple[ComparedPoint, int]]


def best_at_levels(
    entries: Sequence[ComparedPoint], *, quality: Objective, adamw_bytes: int
) -> tuple[MemoryLevel, ...]:
    """The best points at shares of fp32 AdamW's state (`adamw_bytes`), or at the runs' own memory budgets."""
    limits = sorted({entry.memory_limit for entry in entries if entry.memory_limit is not None}, reverse=True)
    if limits:
        axis = "peak_bytes"
        compared = [(f"{format_bytes(limit)} peak memory", float(limit)) for limit in limits]
    else:
        axis = "state_bytes"
        compared = [(f"{share:.0%} of fp32 AdamW's state", share * adamw_bytes) for share in STATE_SHARES]
    levels = []
    for name, limit in compared:
        within = [e for e in entries if isfinite(e.point.quality) and getattr(e.point, axis) <= limit * SLACK]
        best: dict[str, tuple[ComparedPoint, int]] = {}
        for family in dict.fromkeys(entry.family for entry in entries):
            members = [entry for entry in within if entry.family == family]
            if members:
                best[family] = (min(members, key=lambda entry: quality.cost(entry.point)), len(members))
        if best:
            levels.append(MemoryLevel(name=name, limit=limit, best=best))
    return tuple(levels)


def choose_level(levels: Sequence[MemoryLevel], *, adamw_bytes: int) -> MemoryLevel | None:
    """The level that the sentence is about: that of most families; among equals, PREFERRED_SHARES decides."""
    order = [share * adamw_bytes for share in PREFERRED_SHARES]
    ranked = sorted(levels, key=lambda lv: (-len(lv.best), order.index(lv.limit) if lv.limit in order else 0))
    return ranked[0] if ranked else None


def summary_sentence(
    entries: Sequence[ComparedPoint],
    levels: Sequence[MemoryLevel],
    *,
    metric: str,
    quality: Objective,
    adamw_bytes: int,
) -> str:
    """Which family is best at equal memory, whether the difference is significant, and the quality of fp32 AdamW."""
    level = choose_level(levels, adamw_bytes=adamw_bytes)
    if level is None:
        return f"No run has a finite {metric} within any of the compared limits."
    ranked = sorted(level.best.items(), key=lambda item: quality.cost(item[1][0].point))
    better = "higher" if quality.higher_is_better else "lower"
    (first, (best, num_points)), others = ranked[0], ranked[1:]
    parts = [f"Within {level.name}, {first} is best: {metric} {_quality_text(best, num_points)}, {better} is better."]
    for family, (entry, num_points) in others:
        name = family.capitalize() if family in ("uniform", "random feasible") else family  # a study's name stays
        parts.append(f"{name}: {_quality_text(entry, num_points)}.")
    if others:
        parts.append(_significance(best.point, others[0][1][0].point, rival=others[0][0]))
    adamw = [entry for entry in entries if entry.allocator == ADAMW and isfinite(entry.point.quality)]
    if adamw:
        best = min(adamw, key=lambda entry: quality.cost(entry.point))
        parts.append(f"fp32 AdamW, all of its state: {_quality_text(best)}.")
    return " ".join(parts)


def _quality_text(entry: ComparedPoint, num_points: int = 1) -> str:
    """The quality of a point that is the best of `num_points`, with its spread over seeds."""
    point = entry.point
    seeds = "1 seed" if point.num_seeds == 1 else f"{point.num_seeds} seeds"
    spread = "" if point.quality_spread is None else f"sd {point.quality_spread:.2g}, "
    selection = f", the best of {num_points} points" if num_points > 1 else ""
    return f"{point.quality:.4g} ({spread}{seeds}){selection}"


def _significance(best: FrontierPoint, rival_point: FrontierPoint, *, rival: str) -> str:
    """The difference of two means with its 95 % interval by Welch's unpaired test: points need not share seeds."""
    gap = abs(best.quality - rival_point.quality)
    variances = [(p.quality_spread**2 / p.num_seeds, p.num_seeds) for p in (best, rival_point) if p.quality_spread]
    if best.quality_spread is None or rival_point.quality_spread is None:
        return f"With one seed the difference of {gap:.2g} to {rival} is not distinguishable from chance."
    error = sqrt(sum(variance for variance, _ in variances))
    degrees = error**4 / sum(variance**2 / (n - 1) for variance, n in variances) if variances else 1
    half = student_quantile(0.975, degrees=int(degrees)) * error  # fewer degrees of freedom are the safe side
    text = f"The difference of {gap:.2g} to {rival} is"
    if gap > half:
        return f"{text} beyond its 95 % interval (±{half:.2g})."
    return f"{text} within its 95 % interval (±{half:.2g}), so it is not distinguishable from chance."
