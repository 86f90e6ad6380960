"""Ways to run the global batch: their footprints and seconds from those of a few micro-batches, and which is best.

Micro-batch, accumulation, activation recomputation, gradient release, weights and allocation belong together, as bytes
that one of them saves are what another may spend. Nothing here runs a network.
"""

import math
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, fields, replace
from itertools import product

from baoc.errors import BadInputError, InfeasibleBudgetError
from baoc.planning.cost import grouped_bytes, native_bytes
from baoc.planning.messages import more_specs, too_small_host
from baoc.planning.planner import Planner
from baoc.types import Block, Budget, Footprint, LatencyTable, Option, PeakInterval, Plan
from baoc.units import format_bytes

STATE_ADVICE = "more catalogue.specs, such as '*', or fewer roles in catalogue.keep_fp32_roles"
OBJECTIVES = ("quality", "throughput", "balanced")
RATE_TOLERANCE = 0.02  # rates that differ by less are one: so well are steps predicted at best
CORRECTIONS = 3  # of a number of recomputed layers that a line promised too low
_LINES = ("forward_backward_bytes", "validation_bytes", "resident_bytes", "context_bytes", "reserve_bytes")


@dataclass(frozen=True, slots=True, kw_only=True)
class Axes:
    """The open axes of a decision: micro-batches, number of recomputed layers, and released gradients.

    `recomputed`: the least and the most recomputed layers, out of `num_layers`; any number between them is an option
    too. Gradients are released only where the whole batch is one micro-batch.
    """

    micro_batches: tuple[int, ...]
    recomputed: tuple[int, ...]
    num_layers: int = 0
    release: tuple[bool, ...] = (False,)

    def option_keys(self, *, batch_size: int) -> list[tuple[int, int, bool]]:
        """Every combination with the least and the most recomputed layers, see `Option.key`."""
        return [
            (size, recomputed, release)
            for recomputed in self.recomputed
            for size in self.micro_batches
            for release in self.release
            if not release or size == batch_size
        ]


@dataclass(frozen=True, slots=True, kw_only=True)
class MicroBatchMeasurement:
    """Measured footprint of a micro-batch; `seconds` of its forward and backward, NaN where not timed."""

    micro_batch: int
    footprint: Footprint
    seconds: float = math.nan


def divisors(batch_size: int) -> list[int]:
    """Micro-batches that make up `batch_size` in whole steps, ascending."""
    return [size for size in range(1, batch_size + 1) if batch_size % size == 0]


def footprint_at(trials: Sequence[MicroBatchMeasurement], *, micro_batch: int) -> Footprint:
    """The footprint at any micro-batch: measured where it was tried, else on the line through the two largest trials.

    Activations grow in proportion to samples. With a single trial its own footprint is all there is.
    """
    ordered = sorted(trials, key=lambda trial: trial.micro_batch)
    for trial in ordered:
        if trial.micro_batch == micro_batch:
            return trial.footprint
    if len(ordered) == 1:
        return replace(ordered[0].footprint, micro_batch=micro_batch)
    low, high = ordered[-2:]
    share = (micro_batch - low.micro_batch) / (high.micro_batch - low.micro_batch)

    def line(a: int, b: int) -> int:
        return math.ceil(a + share * max(0, b - a))  # more samples never need less

    made = {name: line(getattr(low.footprint, name), getattr(high.footprint, name)) for name in _LINES}
    intervals = _intervals(low.footprint.intervals, high.footprint.intervals, line=line)
    return replace(high.footprint, micro_batch=micro_batch, intervals=intervals, **made)


def _intervals(
    low: Sequence[PeakInterval], high: Sequence[PeakInterval], *, line: Callable[[int, int], int]
) -> tuple[PeakInterval, ...]:
    """Intervals on the same line, where both trials have the same ones; else none, and savings count for less."""
    alike = [(a.name, a.gradients) for a in low] == [(b.name, b.gradients) for b in high]
    if not alike:
        return ()
    return tuple(replace(b, num_bytes=line(a.num_bytes, b.num_bytes)) for a, b in zip(low, high, strict=True))


def upper_bound_at(trials: Sequence[MicroBatchMeasurement], *, micro_batch: int) -> Footprint:
    """As `footprint_at`; from a single smaller trial the most that more samples may take: all beside weights and
    gradients grows with them."""
    found = footprint_at(trials, micro_batch=micro_batch)
    if len(trials) > 1 or trials[0].micro_batch >= micro_batch:
        return found
    share = micro_batch / trials[0].micro_batch

    def most(num_bytes: int, *, gradients: int | None) -> int:
        there = found.weights_bytes + (found.gradients_bytes if gradients is None else 0)
        return there + math.ceil(share * max(0, num_bytes - there))

    return replace(
        found,
        forward_backward_bytes=most(found.forward_backward_bytes, gradients=0),
        validation_bytes=most(found.validation_bytes, gradients=0),
        intervals=tuple(replace(m, num_bytes=most(m.num_bytes, gradients=m.gradients)) for m in found.intervals),
    )


def interpolate(fewer: Footprint, more: Footprint, *, share: float, kept: Collection[str] = ()) -> Footprint:
    """The footprint where a number of recomputed layers is between those of two others: `share` of the way from
    `fewer` to `more`. `kept`: the parameters of layers that are not recomputed, whose copies of autocast stay for
    backward as they do with `fewer`.

    At any moment of a step, each further layer of those that ran before it is one less to keep activations of, and
    layers after it take nothing either way. So bytes at a moment fall with the number and then stay; the peak, as the
    largest of such functions, is convex, and on the line between two numbers or below it.
    """

    def line(a: int, b: int) -> int:
        return math.ceil(a + share * (b - a))

    made = {name: line(getattr(fewer, name), getattr(more, name)) for name in _LINES}
    alike = fewer.gradient_order == more.gradient_order and fewer.intervals and more.intervals
    intervals = _joined(fewer.intervals, more.intervals, line=line, kept=kept) if alike else ()
    return replace(more, intervals=intervals, **made)


def _joined(
    fewer: Sequence[PeakInterval],
    more: Sequence[PeakInterval],
    *,
    line: Callable[[int, int], int],
    kept: Collection[str],
) -> tuple[PeakInterval, ...]:
    """Intervals from each number of gradients that begins one in either, whose bytes are on the line between both.

    With as many gradients it is not known which moments of both belong together, so each is joined with each.
    """
    found: list[PeakInterval] = []
    for name in dict.fromkeys(m.name for m in (*fewer, *more)):
        steps = [_by_gradients([m for m in of if m.name == name]) for of in (fewer, more)]
        for count in dict.fromkeys([*steps[0], *steps[1]]):
            ends = [_covering(of, count=count) for of in steps]
            if not all(ends):
                return ()  # of other kinds: only the largest of each footprint can be compared
            joined = [
                PeakInterval(
                    name=name,
                    num_bytes=line(a.num_bytes, b.num_bytes),
                    gradients=count,
                    copies={key: size for key, size in a.copies.items() if key in b.copies or key in kept},
                )
                for a, b in product(*ends)
            ]
            found += _undominated(joined)
    return tuple(found)


def _by_gradients(intervals: Sequence[PeakInterval]) -> dict[int | None, list[PeakInterval]]:
    """By the number of gradients the intervals that may be the peak."""
    counts = dict.fromkeys(interval.gradients for interval in intervals)
    return {count: _undominated([m for m in intervals if m.gradients == count]) for count in counts}


def _undominated(intervals: Sequence[PeakInterval]) -> list[PeakInterval]:
    """Without those beside which another one takes no less whichever of the parameters are of 16 bits."""
    found: list[PeakInterval] = []
    for interval in sorted(intervals, key=lambda m: (-m.num_bytes, len(m.copies))):
        if not any(other.copies.keys() <= interval.copies.keys() for other in found):
            found.append(interval)
    return found


def _covering(steps: Mapping[int | None, list[PeakInterval]], *, count: int | None) -> list[PeakInterval]:
    """The intervals in which so many gradients are alive: the last that begin with as many or fewer."""
    if count is None:
        return steps.get(None, [])
    begun = [number for number in steps if number is not None and number <= count]
    return steps[max(begun)] if begun else []


def smallest_number(fits: Callable[[int], bool], *, most: int) -> int:
    """The smallest number from 0 to `most` that `fits`, where any number above one that does fits too, and `most`
    does."""
    low, high = 0, most
    while low < high:
        middle = (low + high) // 2
        low, high = (low, middle) if fits(middle) else (middle + 1, high)
    return high


def with_gradient_release(footprint: Footprint, *, blocks: Sequence[Block], grouped: bool) -> Footprint | None:
    """The footprint under gradient release: a block's gradients are freed once all of them have been computed and used.

    `grouped`: blocks are stepped in groups, as on a GPU (`cost.grouped_bytes`). None without the footprint's intervals,
    which tell which gradients are alive at the peak.
    """
    order = footprint.gradient_order
    if not footprint.intervals:
        return None
    gradients = {param.name: native_bytes(param) for block in blocks for param in block.params}
    total, sums = sum(gradients.values()), [0]
    held_bytes = peak_gradients_bytes(order, blocks=blocks) + (grouped_bytes(total) if grouped else 0)
    for name in order:
        sums.append(sums[-1] + gradients.get(name, 0))
    intervals = tuple(
        replace(
            interval,
            num_bytes=interval.num_bytes - _dropped(interval, total=total, sums=sums, held_bytes=held_bytes),
            gradients=0,
        )
        for interval in footprint.intervals
    )
    return replace(
        footprint,
        intervals=intervals,
        forward_backward_bytes=max((m.num_bytes for m in intervals if m.name != "validation"), default=0),
        validation_bytes=max((m.num_bytes for m in intervals if m.name == "validation"), default=0),
        resident_bytes=footprint.resident_bytes - max(0, total - held_bytes),
    )


def peak_gradients_bytes(order: Sequence[str], *, blocks: Sequence[Block]) -> int:
    """The most bytes of gradients at once where they come in `order` and a block drops its own after its last one."""
    block_of = {param.name: (block.name, param) for block in blocks for param in block.params}
    missing = {block.name: len(block.params) for block in blocks}
    come = dict.fromkeys(missing, 0)
    held = most = 0
    for name in order:
        block, param = block_of[name]
        held += native_bytes(param)
        come[block] += native_bytes(param)
        missing[block] -= 1
        most = max(most, held)
        if not missing[block]:
            held -= come[block]
    return most


def _dropped(interval: PeakInterval, *, total: int, sums: Sequence[int], held_bytes: int) -> int:
    """Gradients that are not there in an interval: all of the step before, or what came and went in this one."""
    return total if interval.gradients is None else max(0, sums[interval.gradients] - held_bytes)


def seconds_at(trials: Sequence[MicroBatchMeasurement], *, micro_batch: int) -> float:
    """Seconds of one micro-batch, piecewise linear between trials, and on from the two largest."""
    timed = sorted((trial for trial in trials if not math.isnan(trial.seconds)), key=lambda trial: trial.micro_batch)
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
    """The best allocation of `planner` with this footprint, as an option; one that does not fit says why not.
    `propose`: what to ask for it, once the planner has footprint and latency; else the planner itself.

    `latency.base_step_s` is all of a step but the optimizer's part, `reference_step_s` what step_time is a ratio to.
    """
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
    """The option of least risk, of most samples per second, or nearest to having both; None where none fits.

    `quality`: of the options within 2 % of the least risk the fastest. `throughput`: of those within 2 % of the highest
    rate the one of least risk. `balanced`: least distance to the best of both, each measured by the range that fitting
    options span. Of equals the larger micro-batch. Released gradients change what clipping by norm means, so `quality`
    takes them only where nothing fits without, the others only where they gain something. Raises BadInputError for
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
    top, riskiest = max(rates.values()), max(option.risk or 0.0 for option in fitting)
    least = min(option.risk or 0.0 for option in fitting)
    span = max(riskiest - least, 1e-12)

    def key(option: Option) -> tuple[float, ...]:
        risk, rate = option.risk or 0.0, rates[id(option)]
        if objective == "quality":
            near = risk <= (1 + RATE_TOLERANCE) * least + 1e-9
            return (not near, -rate if near else risk, risk, option.recomputed, -option.micro_batch)
        if objective == "throughput":
            near = rate >= (1 - RATE_TOLERANCE) * top
            return (not near, risk if near else -rate, option.release, -rate, -option.micro_batch)
        slow = 1 - rate / top if top else 0.0
        return (math.hypot(slow, (risk - least) / span), risk, option.release, -option.micro_batch)

    return min(fitting, key=key)


def promising_recomputed_counts(
    planner: Planner,
    *,
    most: int,
    footprint: Callable[[int], Footprint | None],
    plan: Plan | None,
    least_bytes: int | None,
) -> list[int]:
    """Numbers of recomputed layers between 0 and `most` that may be better than both, by their `footprint`s: the fewest
    with which the allocation of `plan`, made for `most`, still holds the budget's memory, the fewest with which any
    does, and as many more as take about the same time.

    `least_bytes`: what the allocation of least state takes without recomputed layers, None where that number does not
    matter. Nothing where memory is not limited, or there is no plan.
    """
    memory = planner.budget.memory_bytes
    if memory is None or plan is None:
        return []
    choices = plan.allocation.choices

    def peak_bytes(number: int) -> float:
        planner.footprint = footprint(number)
        return math.inf if planner.footprint is None else planner.peak_bytes(choices, state_bytes=0)

    state_bytes = plan.peak_bytes - peak_bytes(most)
    found = {smallest_number(lambda number: peak_bytes(number) + state_bytes <= memory, most=most)}
    if least_bytes is not None and least_bytes > memory >= plan.least_feasible_bytes:
        number = _fewest_of_any(planner, most=most, footprint=footprint, ends=(least_bytes, plan.least_feasible_bytes))
        found |= {
            number,
            number + int(3 * RATE_TOLERANCE * most),
        }  # a rate alike, of three forwards, with more room for states
    return sorted(number for number in found if 0 < number < most)


def _fewest_of_any(
    planner: Planner, *, most: int, footprint: Callable[[int], Footprint | None], ends: tuple[int, int]
) -> int:
    """About the fewest recomputed layers with which any allocation holds the memory: on the line from what the least
    one takes without any to what it takes with `most`, and on by its slope where it takes more than the line says."""
    memory = planner.budget.memory_bytes or 0
    slope = (ends[0] - ends[1]) / most
    number = math.ceil((ends[0] - memory) / slope)
    for _ in range(CORRECTIONS):
        planner.footprint = footprint(number) if number < most else None
        if planner.footprint is None or (over := planner.least_feasible_bytes() - memory) <= 0:
            break
        number = min(most, number + max(1, math.ceil(over / slope)))
    return number


def option_rows(options: Sequence[Option]) -> list[dict[str, object]]:
    """Rows for options.csv; no bytes where an option was not planned."""
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
    """The refusal where no option fits; it names the least budget, and what is pinned that could lower it.

    Of an option that was to fit and ran out of memory nobody knows what it takes: the least is that of the others, or
    `least_bytes` where so many were found to be enough.
    """
    slow = [option for option in options if not math.isnan(option.fastest_s)]
    if slow:
        return _none_is_fast(slow, options=options, budget=budget)
    hosted = min((o for o in options if o.least_host_bytes), key=lambda o: o.least_host_bytes or 0, default=None)
    if hosted is not None:
        return too_small_host(budget, needed_bytes=hosted.least_host_bytes or 0, least_bytes=hosted.peak_bytes)
    memory = budget.memory_bytes or 0
    least = min(options, key=lambda option: (option.peak_bytes <= memory, option.peak_bytes))
    if budget.memory_bytes is None:  # of states alone, which no micro-batch makes smaller
        return InfeasibleBudgetError(
            f"budget {budget.name} cannot be met by any of {len(options)} options: the least state takes "
            f"{least.peak_bytes} bytes, whatever the micro-batch. What would lower it: {STATE_ADVICE}",
            budget_bytes=0,
            least_feasible_bytes=least.peak_bytes,
            advice=(STATE_ADVICE,),
        )
    advice = [*_pins(axes), "a smaller model.size", more_specs(specs)]
    takes = f"{format_bytes(least.peak_bytes)}, {least.peak_bytes} bytes ({least.name})"
    ran_out = f"all ran out of memory when they were tried, the one that was to take least with {takes}"
    told = ran_out if least.peak_bytes <= memory else f"the least that one takes is {takes}"
    if least_bytes is not None:
        told = f"the least that was found to do is {format_bytes(least_bytes)}, {least_bytes} bytes"
    return InfeasibleBudgetError(
        f"budget {budget.name} cannot be met by any of {len(options)} options: it allows "
        f"{format_bytes(memory)} ({memory} bytes), and {told}. What would lower it: {'; '.join(advice)}",
        budget_bytes=memory,
        least_feasible_bytes=least_bytes or max(least.peak_bytes, memory + 1),
        advice=tuple(advice),
    )


def _none_is_fast(slow: Sequence[Option], *, options: Sequence[Option], budget: Budget) -> InfeasibleBudgetError:
    """Some options hold the memory, but none of them the time."""
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
    """Advice about requested settings that keep bytes from falling."""
    found = []
    if max(axes.recomputed) < axes.num_layers or not axes.num_layers:
        found.append("model.checkpointing=null, where the model can recompute activations")
    if axes.release == (True,):
        found.append("optim.release_gradients=null, which lets the batch be cut into micro-batches")
    elif len(axes.micro_batches) == 1 and axes.micro_batches[0] > 1:
        found.append(f"a smaller micro_batch than the {axes.micro_batches[0]} that was asked for, or micro_batch=auto")
    return found
