"""Dominance, hypervolume and knee of runs, and the rows of frontier.csv.

Functions of `costs` minimise all objectives; `Objective.cost` negates those that are better when higher.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import compress
from math import isfinite, log2
from statistics import fmean, stdev
from typing import Any

from baoc.types import FrontierPoint

_OBJECTIVES = ("quality", "peak_bytes", "state_bytes", "samples_per_s")
MAX_DOUBLINGS = 7.0  # anything below 1/128 of the reference counts as 1/128: no state is not infinitely good
HYPERVOLUME_UNIT = "quality x doublings"


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
    """Points with their `dominated` flags. `reference` is in the objectives' own units and order. `hypervolume` is
    measured from the reference along `Objective.gain`, with at most MAX_DOUBLINGS per axis of bytes or samples/s."""

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
    is_finite = [all(map(isfinite, cost)) for cost in costs]
    finite_costs = list(compress(costs, is_finite))
    on_front = iter(pareto(finite_costs))
    dominated = [not (finite and next(on_front)) for finite in is_finite]
    if reference is None:
        worst = [max(values) for values in zip(*finite_costs, strict=True)] or [0.0] * len(objectives)
        reference = [-value if o.higher_is_better else value for o, value in zip(objectives, worst, strict=True)]
    marked = [replace(point, dominated=flag) for point, flag in zip(points, dominated, strict=True)]
    front = [point for point in marked if not point.dominated]
    relative_costs = [_relative_cost(point, objectives=objectives, reference=reference) for point in front]
    return Frontier(
        points=tuple(marked),
        objectives=tuple(objectives),
        reference=tuple(float(value) for value in reference),
        hypervolume=hypervolume(relative_costs, reference=[0.0] * len(objectives)),
    )


def doublings(value: float, *, up_to: float) -> float:
    """log2(up_to / value), clipped to [-MAX_DOUBLINGS, MAX_DOUBLINGS]; 0 for two zeros.

    The clip gives 0 bytes (the rule `sign` has no state) a position that does not outweigh all others: a budget of 1 %
    is 6.6 doublings below AdamW's state, and anything below 1/128 counts as 7.
    """
    if value <= 0 or up_to <= 0:
        return MAX_DOUBLINGS * ((up_to > 0) - (value > 0))
    return max(-MAX_DOUBLINGS, min(log2(up_to) - log2(value), MAX_DOUBLINGS))


def _relative_cost(
    point: FrontierPoint, *, objectives: Sequence[Objective], reference: Sequence[float]
) -> tuple[float, ...]:
    """Coordinates of a point relative to the reference, which is 0 on every axis; minimised."""
    return tuple(-o.gain(point, reference=value) for o, value in zip(objectives, reference, strict=True))


def pareto(costs: Sequence[Sequence[float]]) -> list[bool]:
    """For each point, whether no other one dominates it. Equal points do not dominate each other."""
    return [not any(_dominates(other, cost) for other in costs) for cost in costs]


def _dominates(a: Sequence[float], b: Sequence[float]) -> bool:
    pairs = list(zip(a, b, strict=True))
    return all(x <= y for x, y in pairs) and any(x < y for x, y in pairs)


def hypervolume(costs: Sequence[Sequence[float]], *, reference: Sequence[float]) -> float:
    """Exact volume that the points dominate up to `reference` (minimised).

    Sweeps along the last axis: between two neighbouring values lies a slice of one dimension less times a height.
    Points that are not better than the reference in every dimension add nothing. Pass the front alone: dominated points
    change nothing and cost time.
    """
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
    """The hypervolume after each of `points`, in their order: how fast a search finds its front. Never decreases, as
    points with a non-finite objective add nothing.

    Args:
        reference: in the objectives' own units; the axes are those of a Frontier's hypervolume.
    """
    front: list[tuple[float, ...]] = []
    history: list[float] = []
    volume = 0.0
    for point in points:
        cost = _relative_cost(point, objectives=objectives, reference=reference)
        is_finite = all(isfinite(objective.cost(point)) for objective in objectives)
        if is_finite and not any(_dominates(other, cost) for other in front):
            front = [other for other in front if not _dominates(cost, other)] + [cost]
            volume = hypervolume(front, reference=[0.0] * len(objectives))
        history.append(volume)
    return history


def knee(points: Sequence[FrontierPoint], *, quality: Objective, memory: Objective) -> FrontierPoint | None:
    """The point of the front beyond which more memory buys little quality; None if the front has none.

    It is the point farthest below the line through the front's ends (Kneedle; Satopaa et al., 2011), with quality
    scaled to its range and bytes as doublings up to the largest. There is none if no point lies below that line.
    """
    costs = [(quality.cost(point), memory.cost(point)) for point in points]
    finite = [(cost, point) for cost, point in zip(costs, points, strict=True) if all(map(isfinite, cost))]
    on_front = pareto([cost for cost, _ in finite])
    front = sorted(compress(finite, on_front), key=lambda entry: entry[0][1])
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
    farthest = max(range(len(front)), key=lambda i: below[i])
    return front[farthest][1] if below[farthest] > 1e-9 else None


def average_seeds(points: Sequence[FrontierPoint]) -> tuple[FrontierPoint, ...]:
    """One point per (task, model, label), in order of first appearance, of points that are single runs.

    Quality and throughput are means over seeds. Bytes are the maximum, since a budget must hold for each seed. The
    spread is the sample standard deviation of the quality.
    """
    groups: dict[tuple[str, str, str], list[FrontierPoint]] = {}
    for point in points:
        assert point.num_seeds == 1, f"{point.run} is a mean over seeds already"
        groups.setdefault((point.task, point.model, point.label), []).append(point)
    return tuple(_mean(group) for group in groups.values())


def _mean(group: Sequence[FrontierPoint]) -> FrontierPoint:
    qualities = [point.quality for point in group]
    has_spread = len(group) > 1 and all(map(isfinite, qualities))
    return replace(
        group[0],
        run=" ".join(point.run for point in group),
        quality=fmean(qualities),
        peak_bytes=max(point.peak_bytes for point in group),
        state_bytes=max(point.state_bytes for point in group),
        samples_per_s=fmean(point.samples_per_s for point in group),
        num_seeds=len(group),
        quality_spread=stdev(qualities) if has_spread else None,
        dominated=False,
    )


def frontier_rows(frontier: Frontier) -> list[dict[str, Any]]:
    """The rows of frontier.csv: undominated points first, each group by quality, best first."""
    by_quality = next((o for o in frontier.objectives if o.name == "quality"), Objective(name="quality"))
    ranked = sorted(frontier.points, key=lambda point: (point.dominated, by_quality.cost(point)))
    names = ("run", "task", "model", "label", *_OBJECTIVES, "num_seeds", "num_ranks", "quality_spread", "dominated")
    return [{name: getattr(point, name) for name in names} for point in ranked]
