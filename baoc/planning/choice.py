"""Chooses which options to measure, until no other option could beat the best one or time is up.

The rate (samples per second) of an option comes from one of three sources, each more expensive and more accurate than
the one before: extrapolated from small micro-batch measurements; compared, by timing two of its steps; or tried, with
bytes and seconds as in training. An option is measured as long as it could be the best within its source's error.
"""

import math
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

from baoc.planning.microbatch import RATE_TOLERANCE, best_option
from baoc.types import Option

# Largest error of a rate, as a share of the true one
EXTRAPOLATED_ERROR, COMPARED_ERROR = 0.35, 0.06
BOUND_ERROR = 0.05  # of the bound by an option that does no more work per sample
WORTH_S = 100.0  # a second of measuring has to gain a percent of the rate; less in a run longer than this


@dataclass(frozen=True, slots=True, kw_only=True)
class OptionMeasurer:
    """How options are measured.

    Args:
        measure: compares an option, or tries one that was compared; returns all options, updated.
        cost_s: (option, whether it is to be tried, else compared) -> estimated seconds of `measure`.
        remaining_s: seconds that measuring may still take.
        run_s: samples per second -> seconds of the run to be decided for.
    """

    measure: Callable[[Option], list[Option]]
    cost_s: Callable[[Option, bool], float]
    remaining_s: Callable[[], float]
    run_s: Callable[[float], float]


@dataclass(frozen=True, slots=True, kw_only=True)
class OptionChoice:
    options: list[Option]
    chosen: Option | None  # one of `options` that was tried; None if none had room
    rivals: tuple[Option, ...] = ()  # options that could still be better
    gain: float = 0.0  # share of the rate that the best of the rivals may gain at most
    num_measured: int = 0  # calls of `measure`
    won: float = 0.0  # share of the rate gained over the option that seemed best at first; 0 if that had no room


def choose_option(options: Sequence[Option], *, objective: str, measurer: OptionMeasurer) -> OptionChoice:
    """Measures options and returns the best tried one by `objective`.

    The option that seems best is compared first. Then come options that could beat the best compared one, the most gain
    per second first. The leader is tried, and options that could beat its true rate are measured in turn. An option is
    skipped if measuring it costs more than it may gain (WORTH_S). If time is up with nothing tried, one more option is
    compared at most, the one that is surest to be fast, and the leader is tried. If no option had room, the one of
    fewest bytes without state is next.
    """
    options, times, late = list(options), Counter[tuple[int, int, bool]](), False
    first = best_option(options, objective=objective)
    while (
        following := _next(
            [o for o in options if o.tried or times[o.key] < 2],  # not tried at the second time: nor at a third
            objective=objective,
            measurer=measurer,
            late=late,
        )
    ) is not None:
        late = measurer.remaining_s() <= 0
        options = measurer.measure(following)
        times[following.key] += 1
    num_measured = times.total()
    chosen = best_option([option for option in options if option.tried], objective=objective)
    if chosen is None:
        return OptionChoice(options=options, chosen=None, num_measured=num_measured)
    measured = _measured(options)
    rivals = tuple(o for o in options if could_win(o, measured=measured, objective=objective, over=chosen))
    gain = max((max_rate(option, measured=measured) / chosen.samples_per_s - 1 for option in rivals), default=0.0)
    of_first = [option for option in options if first and option.key == first.key and option.fits]
    won = max((chosen.samples_per_s / o.samples_per_s - 1 for o in of_first if o.compared or o.tried), default=0.0)
    marked = replace(chosen, chosen=True)
    marks = [marked if option.key == chosen.key else option for option in options]
    return OptionChoice(
        options=marks, chosen=marked, rivals=rivals, gain=max(0.0, gain), num_measured=num_measured, won=max(0.0, won)
    )


def _next(options: Sequence[Option], *, objective: str, measurer: OptionMeasurer, late: bool) -> Option | None:
    """The option to measure next; None if none is worth it. `late`: time was up before the last measurement."""
    measured = _measured(options)
    leader = best_option(measured, objective=objective)
    if leader is None:  # an option has to be found, whatever the time
        fitting = [option for option in options if late and option.fits]
        smallest = min(fitting, key=lambda option: option.peak_bytes - option.state_bytes, default=None)
        return smallest or best_option(options, objective=objective)
    remaining_s = measurer.remaining_s() - (0.0 if leader.tried else measurer.cost_s(leader, True))
    gain_per_s = 1 / max(WORTH_S, measurer.run_s(leader.samples_per_s))
    worth: dict[int, float] = {}
    for index, option in enumerate(options):
        cost_s = measurer.cost_s(option, option.compared)
        if cost_s <= remaining_s and could_win(option, measured=measured, objective=objective, over=leader):
            gain = _expected_gain(option, measured=measured, over=leader)
            if gain >= gain_per_s * cost_s:
                worth[index] = gain / max(cost_s, 1e-9)
    if worth:
        return options[max(worth, key=lambda index: worth[index])]
    if leader.tried:
        return None
    if not any(option.tried and option.fits for option in options):
        return leader if late else _surest(options, objective=objective)
    return leader if measurer.cost_s(leader, True) <= measurer.remaining_s() else None


def _surest(options: Sequence[Option], *, objective: str) -> Option | None:
    """The option that is best if each is as slow as its error allows. A compared option may lose to an extrapolated one
    that is far above it, as small micro-batches do."""
    slowest = [replace(option, samples_per_s=option.samples_per_s / (1 + _error(option))) for option in options]
    best = best_option(slowest, objective=objective)
    return next((option for option in options if best and option.key == best.key), None)


def _measured(options: Sequence[Option]) -> list[Option]:
    return [option for option in options if option.fits and (option.compared or option.tried)]


def could_win(option: Option, *, measured: Sequence[Option], objective: str, over: Option) -> bool:
    """Whether an option that was not tried would be better than `over` at its largest possible rate."""
    if option.tried or not option.fits or option.key == over.key or math.isnan(option.samples_per_s):
        return False
    fastest = replace(option, samples_per_s=max_rate(option, measured=measured))
    return best_option([over, fastest], objective=objective) is fastest


def max_rate(option: Option, *, measured: Sequence[Option]) -> float:
    """The most samples per second that an option may have, by its own rate and by rates of measured options. These
    launch no more kernels per sample; what they recompute more is taken into account."""
    bounds = [
        (1 + BOUND_ERROR) * other.samples_per_s * max(1.0, forward_passes(other) / forward_passes(option))
        for other in measured
        if other.micro_batch >= option.micro_batch and other.release <= option.release and other.key != option.key
    ]
    return min([option.samples_per_s / (1 - _error(option)), *bounds])


def forward_passes(option: Option) -> float:
    """Work per sample in forward passes: one forward, two for backward, and the share of recomputed layers."""
    return 3 + option.recomputed / max(1, option.num_layers)


def _error(option: Option) -> float:
    if option.tried:
        return 0.0
    return COMPARED_ERROR if option.compared else EXTRAPOLATED_ERROR


def _expected_gain(option: Option, *, measured: Sequence[Option], over: Option) -> float:
    """The mean gain over another option's rate, as a share of it, with the own rate uniform within its error. It is at
    least half of RATE_TOLERANCE, which stands for less risk at about the same rate."""
    rate, high = over.samples_per_s, max_rate(option, measured=measured)
    low = min(high, option.samples_per_s / (1 + _error(option)))
    if low >= rate:
        gain = (low + high) / 2 - rate
    else:
        gain = max(0.0, high - rate) ** 2 / (2 * (high - low)) if high > low else 0.0
    return max(gain / rate, RATE_TOLERANCE / 2)
