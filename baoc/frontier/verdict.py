"""What a page says in words: the best of each family at equal memory, and a sentence for who did not start the sweep.

A budget is what a reader brings along, so families are compared at most so much memory: shares of fp32 AdamW's state,
or the sweep's own memory budgets. The best of many looks better than it is: each is told with how many there were.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from math import isfinite, sqrt

from baoc.frontier.pareto import Objective
from baoc.types import FrontierPoint
from baoc.units import format_bytes

SHARES = (0.5, 0.25, 0.1, 0.03)  # of fp32 AdamW's state
HEADLINES = (0.25, 0.1, 0.5, 0.03)  # the level of the sentence: the first of these at which all families have a point
SLACK = 1.001  # a budget of a quarter is met at a quarter and a few bytes of padding
ADAMW = "uniform_adamw"


@dataclass(frozen=True, slots=True, kw_only=True)
class Entry:
    """A point of a frontier with what a comparison needs: its family and the budget it was given."""

    point: FrontierPoint
    family: str
    allocator: str
    memory_limit: int | None = None  # bytes, where it ran under a memory budget


@dataclass(frozen=True, slots=True, kw_only=True)
class Level:
    """The best point of each family that has one within `limit` bytes of `axis`, and how many it is the best of."""

    name: str
    axis: str
    limit: float
    best: Mapping[str, tuple[Entry, int]]


def levels(entries: Sequence[Entry], *, quality: Objective, adamw_bytes: int) -> tuple[Level, ...]:
    """At shares of fp32 AdamW's state (`adamw_bytes`); where runs had memory budgets, at these, by peak memory."""
    limits = sorted({e.memory_limit for e in entries if e.memory_limit is not None}, reverse=True)
    asked = [(f"{format_bytes(limit)} peak memory", "peak_bytes", float(limit)) for limit in limits]
    if not asked:
        asked = [(f"{share:.0%} of fp32 AdamW's state", "state_bytes", share * adamw_bytes) for share in SHARES]
    told = []
    for name, axis, limit in asked:
        best: dict[str, tuple[Entry, int]] = {}
        for family in dict.fromkeys(e.family for e in entries):
            fits = [
                e
                for e in entries
                if e.family == family and isfinite(e.point.quality) and getattr(e.point, axis) <= limit * SLACK
            ]
            if fits:
                best[family] = (min(fits, key=lambda e: quality.cost(e.point)), len(fits))
        told.append(Level(name=name, axis=axis, limit=limit, best=best))
    return tuple(level for level in told if level.best)


def headline(found: Sequence[Level], *, adamw_bytes: int) -> Level | None:
    """The level that the sentence is about: where most families have a point, a quarter of the state before others."""
    order = [share * adamw_bytes for share in HEADLINES]
    ranked = sorted(found, key=lambda lv: (-len(lv.best), order.index(lv.limit) if lv.limit in order else 0))
    return ranked[0] if ranked else None


def sentence(
    entries: Sequence[Entry], found: Sequence[Level], *, metric: str, quality: Objective, adamw_bytes: int
) -> str:
    """Who is best at equal memory, whether that is told from chance, and what fp32 AdamW reaches without a limit."""
    level = headline(found, adamw_bytes=adamw_bytes)
    if level is None:
        return f"No run has a finite {metric} within any of the compared limits."
    ranked = sorted(level.best.items(), key=lambda item: quality.cost(item[1][0].point))
    better = "higher" if quality.higher_is_better else "lower"
    (first, (best, of)), others = ranked[0], ranked[1:]
    parts = [
        f"Within {level.name}, {first} is best: {metric} {_told(best.point)}{_chosen(of)}, {better} is better.",
        *[f"{_named(family)}: {_told(e.point)}{_chosen(n)}." for family, (e, n) in others],
    ]
    if others:
        parts.append(_chance(best.point, others[0][1][0].point, rival=others[0][0]))
    whole = [e for e in entries if e.allocator == ADAMW and isfinite(e.point.quality)]
    if whole:
        parts.append(f"fp32 AdamW, all of its state: {_told(min(whole, key=lambda e: quality.cost(e.point)).point)}.")
    return " ".join(parts)


def _told(point: FrontierPoint) -> str:
    if point.quality_spread is None:
        return f"{point.quality:.4g} ({'1 seed' if point.num_seeds == 1 else f'{point.num_seeds} seeds'})"
    return f"{point.quality:.4g} (sd {point.quality_spread:.2g}, {point.num_seeds} seeds)"


def _chosen(of: int) -> str:
    return f", the best of {of} points" if of > 1 else ""


def _chance(best: FrontierPoint, rival_point: FrontierPoint, *, rival: str) -> str:
    """Two standard errors of the difference of two means; unpaired, as points need not share their seeds."""
    gap = abs(best.quality - rival_point.quality)
    if best.quality_spread is None or rival_point.quality_spread is None:
        return f"With one seed the difference of {gap:.2g} to {rival} is not told from chance."
    error = sqrt(best.quality_spread**2 / best.num_seeds + rival_point.quality_spread**2 / rival_point.num_seeds)
    told = "beyond" if gap > 2 * error else "within"
    verdict = "" if gap > 2 * error else ", so it is not told from chance"
    return f"The difference of {gap:.2g} to {rival} is {told} two standard errors ({2 * error:.2g}){verdict}."


def _named(family: str) -> str:
    """At the start of a sentence; a study keeps its name as it is."""
    return family.capitalize() if family in ("uniform", "random feasible") else family
