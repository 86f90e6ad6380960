"""Options to run the global batch: their footprints and seconds, from a few measured micro-batches, and the best one.

Micro-batch, accumulation, activation recomputation, gradient release and allocation are decided together, as each may
spend the bytes that another saves. Nothing here runs a network.
"""

import math
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, fields, replace
from itertools import accumulate, product

from baoc.errors import BadInputError, InfeasibleBudgetError
from baoc.planning.cost import grouped_bytes, native_bytes
from baoc.planning.messages import more_specs, too_small_host
from baoc.planning.planner import Planner
from baoc.types import Block, Budget, Footprint, LatencyTable, Option, PeakInterval, Plan
from baoc.units import format_bytes

STATE_ADVICE = "more catalogue.specs, such as '*', or fewer roles in catalogue.keep_fp32_roles"
OBJECTIVES = ("quality", "throughput", "balanced")
RATE_TOLERANCE = 0.02  # rates that differ by less count as equal: steps are not predicted better
MAX_CORRECTIONS = 3  # of a number of recomputed layers that was interpolated too low
_LINEAR_FIELDS = ("forward_backward_bytes", "validation_bytes", "resident_bytes", "context_bytes", "reserve_bytes")


@dataclass(frozen=True, slots=True, kw_only=True)
class Axes:
    """The values to choose from: micro-batches, numbers of recomputed layers, and gradient release.

    `recomputed`: the fewest and the most recomputed layers of `num_layers`; numbers between them may be added as
    options. Gradient release needs a micro-batch of the whole batch.
    """

    micro_batches: tuple[int, ...]
    recomputed: tuple[int, ...]
    num_layers: int = 0
    release: tuple[bool, ...] = (False,)

    def option_keys(self, *, batch_size: int) -> list[tuple[int, int, bool]]:
        """`Option.key` of every combination with the fewest and the most recomputed layers."""
        return [
            (size, recomputed, release)
            for recomputed in self.recomputed
            for size in self.micro_batches
            for release in self.release
            if not release or size == batch_size
        ]


@dataclass(frozen=True, slots=True, kw_only=True)
class MicroBatchMeasurement:
    """The measured footprint of a micro-batch; `seconds` of its forward and backward, NaN if not timed."""

    micro_batch: int
    footprint: Footprint
    seconds: float = math.nan


def divisors(batch_size: int) -> list[int]:
    return [size for size in range(1, batch_size + 1) if batch_size % size == 0]


def footprint_at(measurements: Sequence[MicroBatchMeasurement], *, micro_batch: int) -> Footprint:
    """The footprint at a micro-batch: its measured one, else on the line through the two largest measurements.
    Activations grow in proportion to samples. A single measurement is returned as it is, with the other micro-batch."""
    ordered = sorted(measurements, key=lambda measurement: measurement.micro_batch)
    for measurement in ordered:
        if measurement.micro_batch == micro_batch:
            return measurement.footprint
    if len(ordered) == 1:
        return replace(ordered[0].footprint, micro_batch=micro_batch)
    low, high = ordered[-2:]
    share = (micro_batch - low.micro_batch) / (high.micro_batch - low.micro_batch)

    def line(a: int, b: int) -> int:
        return math.ceil(a + share * max(0, b - a))  # more samples never need less

    values = {name: line(getattr(low.footprint, name), getattr(high.footprint, name)) for name in _LINEAR_FIELDS}
    intervals = _intervals(low.footprint.intervals, high.footprint.intervals, line=line)
    return replace(high.footprint, micro_batch=micro_batch, intervals=intervals, **values)


def _intervals(
    low: Sequence[PeakInterval], high: Sequence[PeakInterval], *, line: Callable[[int, int], int]
) -> tuple[PeakInterval, ...]:
    """Intervals on the same line, or none if both footprints have different ones: then savings count for less."""
    same = [(a.name, a.gradients) for a in low] == [(b.name, b.gradients) for b in high]
    if not same:
        return ()
    return tuple(replace(b, num_bytes=line(a.num_bytes, b.num_bytes)) for a, b in zip(low, high, strict=True))


def upper_bound_at(measurements: Sequence[MicroBatchMeasurement], *, micro_batch: int) -> Footprint:
    """`footprint_at`, but from a single smaller measurement an upper bound. There everything beside weights and
    gradients is taken to grow in proportion to samples."""
    footprint = footprint_at(measurements, micro_batch=micro_batch)
    if len(measurements) > 1 or measurements[0].micro_batch >= micro_batch:
        return footprint
    share = micro_batch / measurements[0].micro_batch

    def scaled(num_bytes: int, *, gradients: int | None) -> int:
        constant = footprint.weights_bytes + (footprint.gradients_bytes if gradients is None else 0)
        return constant + math.ceil(share * max(0, num_bytes - constant))

    return replace(
        footprint,
        forward_backward_bytes=scaled(footprint.forward_backward_bytes, gradients=0),
        validation_bytes=scaled(footprint.validation_bytes, gradients=0),
        intervals=tuple(replace(m, num_bytes=scaled(m.num_bytes, gradients=m.gradients)) for m in footprint.intervals),
    )


def interpolate(fewer: Footprint, more: Footprint, *, share: float, not_recomputed: Collection[str] = ()) -> Footprint:
    """An upper bound of the footprint with a number of recomputed layers between those of two footprints.

    `share`: how far the number is from that of `fewer` (0) to that of `more` (1). `not_recomputed`: parameters of
    layers that are not recomputed; their autocast copies live until backward, as in `fewer`.

    With each further recomputed layer, the activations of one layer less are alive at a moment of the step, until none
    are. So bytes at a moment fall with the number and then stay constant. The peak is the largest of such functions,
    thus convex, and lies on the line between two numbers or below it.
    """

    def line(a: int, b: int) -> int:
        return math.ceil(a + share * (b - a))

    values = {name: line(getattr(fewer, name), getattr(more, name)) for name in _LINEAR_FIELDS}
    comparable = fewer.gradient_order == more.gradient_order and fewer.intervals and more.intervals
    intervals = _joined(fewer.intervals, more.intervals, line=line, not_recomputed=not_recomputed) if comparable else ()
    return replace(more, intervals=intervals, **values)


def _joined(
    fewer: Sequence[PeakInterval],
    more: Sequence[PeakInterval],
    *,
    line: Callable[[int, int], int],
    not_recomputed: Collection[str],
) -> tuple[PeakInterval, ...]:
    """Intervals of both footprints, joined, with bytes on the line between them.

    Each number of live gradients that begins an interval in either begins one here. Which moments of both footprints
    with this number belong together is unknown, so each is joined with each.
    """
    result: list[PeakInterval] = []
    for name in dict.fromkeys(m.name for m in (*fewer, *more)):
        by_count = [_by_gradients([m for m in intervals if m.name == name]) for intervals in (fewer, more)]
        for count in dict.fromkeys([*by_count[0], *by_count[1]]):
            pairs = [_covering(intervals, count=count) for intervals in by_count]
            if not all(pairs):
                return ()  # intervals that the other footprint lacks: only the largest ones can be compared
            joined = [
                PeakInterval(
                    name=name,
                    num_bytes=line(a.num_bytes, b.num_bytes),
                    gradients=count,
                    copies={key: n for key, n in a.copies.items() if key in b.copies or key in not_recomputed},
                )
                for a, b in product(*pairs)
            ]
            result += _undominated(joined)
    return tuple(result)


def _by_gradients(intervals: Sequence[PeakInterval]) -> dict[int | None, list[PeakInterval]]:
    """Number of live gradients -> the intervals that may be the peak."""
    counts = dict.fromkeys(interval.gradients for interval in intervals)
    return {count: _undominated([m for m in intervals if m.gradients == count]) for count in counts}


def _undominated(intervals: Sequence[PeakInterval]) -> list[PeakInterval]:
    """The intervals that may be the largest for some choice of 16-bit parameters."""
    result: list[PeakInterval] = []
    for interval in sorted(intervals, key=lambda m: (-m.num_bytes, len(m.copies))):
        if not any(other.copies.keys() <= interval.copies.keys() for other in result):
            result.append(interval)
    return result


def _covering(by_count: Mapping[int | None, list[PeakInterval]], *, count: int | None) -> list[PeakInterval]:
    """The intervals with `count` live gradients: those of the largest number in `by_count` up to it."""
    if count is None:
        return by_count.get(None, [])
    begun = [number for number in by_count if number is not None and number <= count]
    return by_count[max(begun)] if begun else []


def smallest_number(fits: Callable[[int], bool], *, most: int) -> int:
    """The smallest number from 0 to `most` that `fits`, by bisection: if n fits, so does n + 1, and `most` fits."""
    low, high = 0, most
    while low < high:
        middle = (low + high) // 2
        low, high = (low, middle) if fits(middle) else (middle + 1, high)
    return high


def with_gradient_release(footprint: Footprint, *, blocks: Sequence[Block], grouped: bool) -> Footprint | None:
    """The footprint with gradient release, in which backward steps a block and frees its gradients.

    `grouped`: blocks are stepped in groups, as on a GPU (`cost.grouped_bytes`). None if the footprint has no intervals,
    as the gradients that are alive at its peak are then unknown.
    """
    order = footprint.gradient_order
    if not footprint.intervals:
        return None
    gradients = {param.name: native_bytes(param) for block in blocks for param in block.params}
    total = sum(gradients.values())
    of_first = [0, *accumulate(gradients.get(name, 0) for name in order)]
    live_bytes = peak_gradients_bytes(order, blocks=blocks) + (grouped_bytes(total) if grouped else 0)
    intervals = tuple(
        replace(
            interval,
            num_bytes=interval.num_bytes
            - (total if interval.gradients is None else max(0, of_first[interval.gradients] - live_bytes)),
            gradients=0,
        )
        for interval in footprint.intervals
    )
    return replace(
        footprint,
        intervals=intervals,
        forward_backward_bytes=max((m.num_bytes for m in intervals if m.name != "validation"), default=0),
        validation_bytes=max((m.num_bytes for m in intervals if m.name == "validation"), default=0),
        resident_bytes=footprint.resident_bytes - max(0, total - live_bytes),
    )


def peak_gradients_bytes(order: Sequence[str], *, blocks: Sequence[Block]) -> int:
    """The most bytes of gradients alive at once, if they come in `order` and a block frees its own after its last."""
    block_of = {param.name: (block.name, param) for block in blocks for param in block.params}
    num_missing = {block.name: len(block.params) for block in blocks}
    block_bytes = dict.fromkeys(num_missing, 0)
    live_bytes = most = 0
    for name in order:
        block, param = block_of[name]
        live_bytes += native_bytes(param)
        block_bytes[block] += native_bytes(param)
        num_missing[block] -= 1
        most = max(most, live_bytes)
        if not num_missing[block]:
            live_bytes -= block_bytes[block]
    return most


def seconds_at(measurements: Sequence[MicroBatchMeasurement], *, micro_batch: int) -> float:
    """Seconds of one micro-batch: linear between measurements, extrapolated from the two largest."""
    timed = sorted((m for m in measurements if not math.isnan(m.seconds)), key=lambda m: m.micro_batch)
    if not timed:
        return math.nan
    if len(timed) == 1:
        return timed[0].seconds * micro_batch / timed[0].micro_batch
    above = next((at for at in range(1, len(timed)) if timed[at].micro_batch >= micro_batch), len(timed) - 1)
    low, high = timed[above - 1], timed[above]
    slope = max(0.0, (high.seconds - low.seconds) / (high.micro_batch - low.micro_batch))
    return max(low.seconds + slope * (micro_batch - low.micro_batch), 0.0) or timed[0].seconds


def make_option(
    planner: Planner,
    *,
    footprint: Footprint,
    batch_size: int,
    recomputed: int,
    num_layers: int,
    latency: LatencyTable,
    release: bool = False,
    propose: Callable[[], Plan] | None = None,
) -> Option:
    """The plan of `planner` with this footprint and latency as an option, or an option that says why no plan fits. Sets
    the planner's footprint and latency. `propose` replaces `planner.propose`."""
    micro_batch = footprint.micro_batch
    planner.footprint, planner.latency = footprint, latency
    option = Option(
        micro_batch=micro_batch,
        accumulation=batch_size // micro_batch,
        recomputed=recomputed,
        num_layers=num_layers,
        release=release,
        reference_s=latency.reference_step_s,
    )
    try:
        plan = planner.propose() if propose is None else propose()
    except InfeasibleBudgetError as error:
        if error.least_step_s is None:
            host = error.least_host_bytes
            why = f"needs {format_bytes(host)} on the host" if host else "does not fit even with the least state"
            return replace(option, peak_bytes=error.least_feasible_bytes, least_host_bytes=host, why=why)
        allowed_s = (planner.budget.step_time or 0.0) * latency.reference_step_s
        why = f"too slow: {error.least_step_s * 1e3:.3g} ms, {allowed_s * 1e3:.3g} ms allowed"
        return replace(option, peak_bytes=error.least_feasible_bytes, fastest_s=error.least_step_s, why=why)
    choices = plan.allocation.choices
    step_s = planner.step_seconds(choices)
    formats = sorted({planner.specs[spec].weights for spec in choices.values()})
    return replace(
        option,
        weights=" ".join(formats),
        peak_bytes=plan.peak_bytes,
        state_bytes=plan.allocation.state_bytes,
        samples_per_s=batch_size / step_s if step_s > 0 else math.nan,
        step_s=step_s,
        risk=plan.allocation.risk,
    )


def best_option(options: Sequence[Option], *, objective: str) -> Option | None:
    """The option of least risk, of most samples per second, or nearest to both; None if none fits.

    `quality`: the fastest of the options within 2 % of the least risk. `throughput`: the least risky of those within
    2 % of the highest rate. `balanced`: the least distance to the best of both, in units of the ranges that fitting
    options span. Among equals the larger micro-batch wins. Gradient release changes the meaning of clipping by norm, so
    `quality` takes it only if nothing fits without, the others only if it gains something. Raises BadInputError for
    another objective.
    """
    if objective not in OBJECTIVES:
        raise BadInputError(f"unknown objective {objective!r}: choose one of {', '.join(OBJECTIVES)}")
    fitting = [option for option in options if option.fits]
    if objective == "quality":
        fitting = [option for option in fitting if not option.release] or fitting
    if not fitting:
        return None
    rates = {id(option): 0.0 if math.isnan(option.samples_per_s) else option.samples_per_s for option in fitting}
    top_rate, risks = max(rates.values()), [option.risk or 0.0 for option in fitting]
    least_risk = min(risks)
    risk_range = max(max(risks) - least_risk, 1e-12)

    def key(option: Option) -> tuple[float, ...]:
        risk, rate = option.risk or 0.0, rates[id(option)]
        if objective == "quality":
            near = risk <= (1 + RATE_TOLERANCE) * least_risk + 1e-9
            return (not near, -rate if near else risk, risk, option.recomputed, -option.micro_batch)
        if objective == "throughput":
            near = rate >= (1 - RATE_TOLERANCE) * top_rate
            return (not near, risk if near else -rate, option.release, -rate, -option.micro_batch)
        slowness = 1 - rate / top_rate if top_rate else 0.0
        return (math.hypot(slowness, (risk - least_risk) / risk_range), risk, option.release, -option.micro_batch)

    return min(fitting, key=key)


def promising_recomputed_counts(
    planner: Planner,
    *,
    most: int,
    footprint: Callable[[int], Footprint | None],
    plan: Plan | None,
    least_bytes: int | None,
) -> list[int]:
    """Numbers of recomputed layers between 0 and `most` that may be better than both, by their `footprint`s.

    These are the fewest layers with which the allocation of `plan`, made for `most`, holds the memory budget, the
    fewest with which any allocation does, and a number that is larger by what takes about the same time. `least_bytes`:
    the peak of the least allocation without recomputed layers; None leaves the latter two out. The list is empty
    without a memory budget or without a plan. Changes the planner's footprint.
    """
    memory = planner.budget.memory_bytes
    if memory is None or plan is None:
        return []
    choices = plan.allocation.choices

    def peak_bytes(number: int) -> float:
        planner.footprint = footprint(number)
        return math.inf if planner.footprint is None else planner.peak_bytes(choices, state_bytes=0)

    state_bytes = plan.peak_bytes - peak_bytes(most)
    numbers = {smallest_number(lambda number: peak_bytes(number) + state_bytes <= memory, most=most)}
    if least_bytes is not None and least_bytes > memory >= plan.least_feasible_bytes:
        ends = (least_bytes, plan.least_feasible_bytes)
        number = _fewest_that_fit(planner, most=most, footprint=footprint, ends=ends)
        # A step is three forwards, so this many more layers take about the same time and leave more room for states.
        numbers |= {number, number + int(3 * RATE_TOLERANCE * most)}
    return sorted(number for number in numbers if 0 < number < most)


def _fewest_that_fit(
    planner: Planner, *, most: int, footprint: Callable[[int], Footprint | None], ends: tuple[int, int]
) -> int:
    """About the fewest recomputed layers with which any allocation fits.

    By a line between the `ends`, the least bytes with no and with `most` recomputed layers, then corrected upwards by
    its slope if the least bytes are above the line.
    """
    memory = planner.budget.memory_bytes or 0
    slope = (ends[0] - ends[1]) / most
    number = math.ceil((ends[0] - memory) / slope)
    for _ in range(MAX_CORRECTIONS):
        planner.footprint = footprint(number) if number < most else None
        if planner.footprint is None or (over := planner.least_feasible_bytes() - memory) <= 0:
            break
        number = min(most, number + max(1, math.ceil(over / slope)))
    return number


def option_rows(options: Sequence[Option]) -> list[dict[str, object]]:
    """Rows of options.csv; bytes are None for an option that was not planned."""
    rows: list[dict[str, object]] = []
    for option in options:
        row: dict[str, object] = {"option": option.name, **{f.name: getattr(option, f.name) for f in fields(option)}}
        rows.append(row if option.peak_bytes else row | {"peak_bytes": None, "state_bytes": None})
    return rows


def no_option_fits(
    options: Sequence[Option],
    *,
    budget: Budget,
    axes: Axes,
    specs: Collection[str] = (),
    least_bytes: int | None = None,
) -> InfeasibleBudgetError:
    """The refusal if no option fits, with the least budget and the pinned settings that could lower it.

    The need of an option that should have fitted and ran out of memory is unknown. The least budget is then that of the
    others, or `least_bytes`, which a plan confirmed.
    """
    slow = [option for option in options if not math.isnan(option.fastest_s)]
    if slow:
        return _none_is_fast(slow, options=options, budget=budget)
    hosted = min((o for o in options if o.least_host_bytes), key=lambda o: o.least_host_bytes or 0, default=None)
    if hosted is not None:
        return too_small_host(budget, needed_bytes=hosted.least_host_bytes or 0, least_bytes=hosted.peak_bytes)
    memory = budget.memory_bytes or 0
    least = min(options, key=lambda option: (option.peak_bytes <= memory, option.peak_bytes))
    if budget.memory_bytes is None:  # a state fraction: no micro-batch makes states smaller
        return InfeasibleBudgetError(
            f"budget {budget.name} cannot be met by any of {len(options)} options: the least state takes "
            f"{least.peak_bytes} bytes, whatever the micro-batch. What would lower it: {STATE_ADVICE}",
            budget_bytes=0,
            least_feasible_bytes=least.peak_bytes,
            advice=(STATE_ADVICE,),
        )
    advice = [*_pins(axes), "a smaller model.size", more_specs(specs)]
    takes = f"{format_bytes(least.peak_bytes)}, {least.peak_bytes} bytes ({least.name})"
    all_ran_out = f"all ran out of memory when they were tried, the one that was to take least with {takes}"
    need = all_ran_out if least.peak_bytes <= memory else f"the least that one takes is {takes}"
    if least_bytes is not None:
        need = f"the least that was found to do is {format_bytes(least_bytes)}, {least_bytes} bytes"
    return InfeasibleBudgetError(
        f"budget {budget.name} cannot be met by any of {len(options)} options: it allows "
        f"{format_bytes(memory)} ({memory} bytes), and {need}. What would lower it: {'; '.join(advice)}",
        budget_bytes=memory,
        least_feasible_bytes=least_bytes or max(least.peak_bytes, memory + 1),
        advice=tuple(advice),
    )


def _none_is_fast(slow: Sequence[Option], *, options: Sequence[Option], budget: Budget) -> InfeasibleBudgetError:
    """The refusal if some options hold the memory budget, but none the step time."""
    fastest = min(slow, key=lambda option: option.fastest_s)
    ratio = fastest.fastest_s / fastest.reference_s
    advice = (f"budget.step_time={math.ceil(ratio * 100) / 100:.2f} or more", "more memory")
    return InfeasibleBudgetError(
        f"budget {budget.name} with step_time={budget.step_time:g} cannot be met by any of {len(options)} options: of "
        f"those that hold the memory the fastest, {fastest.name}, takes {fastest.fastest_s * 1e3:.3g} ms a step, "
        f"{ratio:.3f} times the {fastest.reference_s * 1e3:.3g} ms of fused AdamW with the fastest micro-batch that "
        f"was tried. Give {', or '.join(advice)}",
        budget_bytes=budget.memory_bytes or 0,
        least_feasible_bytes=fastest.peak_bytes,
        advice=advice,
        least_step_s=fastest.fastest_s,
    )


def _pins(axes: Axes) -> list[str]:
    """Advice about settings that the user fixed and that keep bytes from falling."""
    advice = []
    if max(axes.recomputed) < axes.num_layers or not axes.num_layers:
        advice.append("model.checkpointing=null, where the model can recompute activations")
    if axes.release == (True,):
        advice.append("optim.release_gradients=null, which lets the batch be cut into micro-batches")
    elif len(axes.micro_batches) == 1 and axes.micro_batches[0] > 1:
        advice.append(f"a smaller micro_batch than the {axes.micro_batches[0]} that was asked for, or micro_batch=auto")
    return advice
