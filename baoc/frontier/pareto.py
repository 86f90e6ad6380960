"""Dominance, hypervolume and knee of runs, and the rows of frontier.csv.

All objectives are minimised inside; those that are better when higher are negated first.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from math import isfinite, log2
from statistics import fmean, stdev
from typing import Any

from baoc.types import FrontierPoint

_VALUES = ("quality", "peak_bytes", "state_bytes", "samples_per_s")
MAX_DOUBLINGS = 7.0  # 1/128 of the reference and less count alike: no state at all is not infinitely good
MEASURE = "quality x doublings"  # unit of a frontier's hypervolume


@dataclass(frozen=True, slots=True, kw_only=True)
class Objective:
    """One axis of a frontier: a numeric field of FrontierPoint and its direction."""

    name: str
    higher_is_better: bool = False

    def cost(self, point: FrontierPoint) -> float:
        """The value to be minimised."""
        value = float(getattr(point, self.name))
        return -value if self.higher_is_better else value

    def gain(self, point: FrontierPoint, *, reference: float) -> float:
        """How much better than `reference` (in the objective's own unit) a point is, along the axis of a hypervolume.

        Quality counts linearly, bytes and samples/s in doublings: their ratios carry over between devices and networks,
        their differences do not. In plain bytes, a front that keeps 2 % of the state would have 98 % of the volume
        whatever else it found.
        """
        value = float(getattr(point, self.name))
        if self.name == "quality":
            return value - reference if self.higher_is_better else reference - value
        ends = (reference, value) if self.higher_is_better else (value, reference)
        return doublings(ends[0], up_to=ends[1])


@dataclass(frozen=True, slots=True, kw_only=True)
class Frontier:
    """Points with their `dominated` flags, in the given order. `reference` is in the objectives' own units and order.
    `hypervolume` is measured from the reference along `Objective.gain`, with at most MAX_DOUBLINGS per axis of bytes or
    samples/s."""

    points: tuple[FrontierPoint, ...]
    objectives: tuple[Objective, ...]
    reference: tuple[float, ...]
    hypervolume: float

    @property
    def best(self) -> tuple[FrontierPoint, ...]:
        return tuple(point for point in self.points if not point.dominated)


def build_frontier(
    points: Sequence[FrontierPoint], *, objectives: Sequence[Objective], reference: Sequence[float] | None = None
) -> Frontier:
    """Marks dominated points and measures the hypervolume of the rest; a non-finite objective counts as dominated.

    Args:
        reference: the worst finite value of each objective by default. Hypervolumes compare only for the same one.
    """
    costs = [tuple(objective.cost(point) for objective in objectives) for point in points]
    finite = [all(isfinite(value) for value in cost) for cost in costs]
    alive = [cost for cost, ok in zip(costs, finite, strict=True) if ok]
    kept = iter(pareto(alive))
    dominated = [not (ok and next(kept)) for ok in finite]
    if reference is None:
        worst = [max(values) for values in zip(*alive, strict=True)] or [0.0] * len(objectives)
        reference = [-value if o.higher_is_better else value for o, value in zip(objectives, worst, strict=True)]
    best = [point for point, bad in zip(points, dominated, strict=True) if not bad]
    relative_costs = [_relative_cost(point, objectives=objectives, reference=reference) for point in best]
    return Frontier(
        points=tuple(replace(point, dominated=flag) for point, flag in zip(points, dominated, strict=True)),
        objectives=tuple(objectives),
        reference=tuple(float(value) for value in reference),
        hypervolume=hypervolume(relative_costs, reference=[0.0] * len(objectives)),
    )


def doublings(value: float, *, up_to: float) -> float:
    """How often `value` doubles to reach `up_to`: log2 of their ratio, negative if `value` is larger. Clipped to
    MAX_DOUBLINGS either way, so that 0 bytes (`sign` keeps no state) has a position that does not outweigh the rest: a
    budget of 1 % is 6.6 doublings below AdamW's state, and everything further down counts as 7. 0 for two zeros."""
    if value <= 0 or up_to <= 0:
        return MAX_DOUBLINGS * ((up_to > 0) - (value > 0))
    return max(-MAX_DOUBLINGS, min(log2(up_to) - log2(value), MAX_DOUBLINGS))


def _relative_cost(
    point: FrontierPoint, *, objectives: Sequence[Objective], reference: Sequence[float]
) -> tuple[float, ...]:
    """Coordinates of a point relative to the reference, which is 0 on every axis; minimised."""
    return tuple(-o.gain(point, reference=value) for o, value in zip(objectives, reference, strict=True))


def pareto(costs: Sequence[Sequence[float]]) -> list[bool]:
    """For each point whether no other one dominates it; equal points all stay."""
    return [not any(_dominates(other, cost) for other in costs) for cost in costs]


def _dominates(a: Sequence[float], b: Sequence[float]) -> bool:
    pairs = list(zip(a, b, strict=True))
    return all(x <= y for x, y in pairs) and any(x < y for x, y in pairs)


def hypervolume(costs: Sequence[Sequence[float]], *, reference: Sequence[float]) -> float:
    """Exact volume that the points dominate up to `reference` (minimised), swept along the last axis: between two
    values lies a slice of one dimension less times a height. Points that are not better than the reference in every
    dimension add nothing. Give the front alone where there are many points."""
    inside = [cost for cost in costs if all(c < r for c, r in zip(cost, reference, strict=True))]
    if not inside:
        return 0.0
    heights = sorted({cost[-1] for cost in inside})
    if len(reference) == 1:
        return reference[0] - heights[0]
    return sum(
        hypervolume([cost[:-1] for cost in inside if cost[-1] <= level], reference=reference[:-1]) * (above - level)
        for level, above in zip(heights, [*heights[1:], reference[-1]], strict=True)
    )


def hypervolume_history(
    points: Sequence[FrontierPoint], *, objectives: Sequence[Objective], reference: Sequence[float]
) -> list[float]:
    """The hypervolume after each of `points`, in their order: how fast a search finds its front. Never decreases.

    Args:
        reference: in the objectives' own units; the axes are those of a Frontier's hypervolume.

    Points with a non-finite objective add nothing.
    """
    kept: list[tuple[float, ...]] = []
    found: list[float] = []
    for point in points:
        relative = _relative_cost(point, objectives=objectives, reference=reference)
        if all(isfinite(objective.cost(point)) for objective in objectives) and not any(
            _dominates(other, relative) for other in kept
        ):
            kept = [other for other in kept if not _dominates(relative, other)] + [relative]
            found.append(hypervolume(kept, reference=[0.0] * len(objectives)))
        else:
            found.append(found[-1] if found else 0.0)
    return found


def knee(points: Sequence[FrontierPoint], *, quality: Objective, memory: Objective) -> FrontierPoint | None:
    """The point of a front of two objectives beyond which more memory buys little quality. It is the point farthest
    below the line through the front's ends (Kneedle; Satopaa et al., 2011), with quality scaled to its range and bytes
    to their doublings up to the largest. None if no point lies below that line, as for fewer than three."""
    costs = [(quality.cost(point), memory.cost(point)) for point in points]
    known = [(cost, point) for cost, point in zip(costs, points, strict=True) if all(map(isfinite, cost))]
    kept = pareto([cost for cost, _ in known])
    front = sorted((entry for entry, best in zip(known, kept, strict=True) if best), key=lambda entry: entry[0][1])
    if len(front) < 3:
        return None
    logs = [-doublings(cost[1], up_to=front[-1][0][1]) for cost, _ in front]
    worst, best = front[0][0][0], front[-1][0][0]
    if logs[-1] <= logs[0] or worst <= best:
        return None
    below = [
        1.0 - (x - logs[0]) / (logs[-1] - logs[0]) - (cost[0] - best) / (worst - best)
        for x, (cost, _) in zip(logs, front, strict=True)
    ]
    at = max(range(len(front)), key=lambda index: below[index])
    return front[at][1] if below[at] > 1e-9 else None


def average_seeds(points: Sequence[FrontierPoint]) -> tuple[FrontierPoint, ...]:
    """One point per (task, model, label), in order of first appearance: means of quality and throughput over seeds.
    Bytes are the maximum over seeds, since a budget must hold for each. The spread is the sample standard deviation of
    the quality. The points must not be means already."""
    groups: dict[tuple[str, str, str], list[FrontierPoint]] = {}
    for point in points:
        assert point.num_seeds == 1, f"{point.run} is a mean over seeds already"
        groups.setdefault((point.task, point.model, point.label), []).append(point)
    return tuple(_mean(group) for group in groups.values())


def _mean(group: Sequence[FrontierPoint]) -> FrontierPoint:
    qualities = [point.quality for point in group]
    several = len(group) > 1 and all(isfinite(quality) for quality in qualities)
    return replace(
        group[0],
        run=" ".join(point.run for point in group),
        quality=fmean(qualities),
        peak_bytes=max(point.peak_bytes for point in group),
        state_bytes=max(point.state_bytes for point in group),
        samples_per_s=fmean(point.samples_per_s for point in group),
        num_seeds=len(group),
        quality_spread=stdev(qualities) if several else None,
        dominated=False,
    )


def frontier_rows(frontier: Frontier) -> list[dict[str, Any]]:
    """The rows of frontier.csv: undominated points first, each group by quality, best first."""
    by_quality = next((o for o in frontier.objectives if o.name == "quality"), Objective(name="quality"))
    ranked = sorted(frontier.points, key=lambda point: (point.dominated, by_quality.cost(point)))
    names = ("run", "task", "model", "label", *_VALUES, "num_seeds", "num_ranks", "quality_spread", "dominated")
    return [{name: getattr(point, name) for name in names} for point in ranked]
