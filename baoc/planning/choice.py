"""Chooses which ways to run the batch are measured, until no unmeasured one could beat the best or time is up.

The rate of an option is known in three ways. It is promised by lines through small trials, compared by timing two of
its steps, or tried: bytes and seconds as in training. Each costs more than the one before and is wrong by less. An
option is measured as long as its rate, times the error that is stated for the way it is known, could make it the best.
"""

import math
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

from baoc.planning.microbatch import RATE_TOLERANCE, best_option
from baoc.types import Option

PROMISED, COMPARED = 0.35, 0.06  # by how much of the true rate a promised one is wrong at most, and a compared one
BOUND = 0.05  # and above that of an option which does no more for a sample
WORTH_S = 100.0  # of which a second of deciding is a percent; a longer run is worth more of them


@dataclass(frozen=True, slots=True, kw_only=True)
class OptionMeasurer:
    """How options are measured.

    Args:
        measure: compares an option, or tries one that was compared; returns all options as they are known then.
        cost_s: about the seconds that this takes, of one that `is_tried` (else compared).
        left_s: seconds that deciding may still take.
        run_s: of the run that is decided for, by its rate in samples per second.
    """

    measure: Callable[[Option], list[Option]]
    cost_s: Callable[[Option, bool], float]
    left_s: Callable[[], float]
    run_s: Callable[[float], float]


@dataclass(frozen=True, slots=True, kw_only=True)
class OptionChoice:
    """`chosen` is one of `options` and was tried; None where none found room. `left`: those that could have been the
    best, by at most `gain` of the rate. `measured`: how often options were; `won`: of the rate, over the option that
    promised most, 0 where that had no room."""

    options: list[Option]
    chosen: Option | None
    rivals: tuple[Option, ...] = ()
    gain: float = 0.0
    measured: int = 0
    won: float = 0.0


def choose_option(options: Sequence[Option], *, objective: str, race: OptionMeasurer) -> OptionChoice:
    """The best option by `objective` of those that were tried.

    The most promising one is compared first, then whatever could beat the best so far, most gain for its seconds first;
    what leads then is tried, and what could beat it at its true rate is measured in turn. An option is left out where
    the seconds that it takes are worth more than what it may gain: a percent of the rate for each, less in a run of
    more than WORTH_S, of which they are a smaller part. With no seconds left and nothing tried, one option at most is
    compared, if it is surest to be fast, and what leads then is tried; where none had room, the one that takes the
    fewest bytes beside states is next.
    """
    options, times, late = list(options), Counter[tuple[int, int, bool]](), False
    first = best_option(options, objective=objective)
    while (
        following := _next(
            [o for o in options if o.tried or times[o.key] < 2],  # twice, and not tried: nor would a third time
            objective=objective,
            race=race,
            late=late,
        )
    ) is not None:
        late = race.left_s() <= 0
        options = race.measure(following)
        times[following.key] += 1
    measured = times.total()
    chosen = best_option([option for option in options if option.tried], objective=objective)
    if chosen is None:
        return OptionChoice(options=options, chosen=None, measured=measured)
    measured_ones = _measured(options)
    rivals = tuple(o for o in options if could_win(o, measured=measured_ones, objective=objective, over=chosen))
    gain = max((max_rate(option, measured=measured_ones) / chosen.samples_per_s - 1 for option in rivals), default=0.0)
    of_first = [option for option in options if first and option.key == first.key and option.fits]
    won = max((chosen.samples_per_s / o.samples_per_s - 1 for o in of_first if o.compared or o.tried), default=0.0)
    marked = replace(chosen, chosen=True)
    marks = [marked if option.key == chosen.key else option for option in options]
    return OptionChoice(
        options=marks, chosen=marked, rivals=rivals, gain=max(0.0, gain), measured=measured, won=max(0.0, won)
    )


def _next(options: Sequence[Option], *, objective: str, race: OptionMeasurer, late: bool) -> Option | None:
    """The option to measure next; None if none is left. `late`: the last one was measured with no seconds left."""
    measured = _measured(options)
    leader = best_option(measured, objective=objective)
    if leader is None:  # something has to be run
        fitting = [option for option in options if late and option.fits]
        least = min(fitting, key=lambda option: option.peak_bytes - option.state_bytes, default=None)
        return least or best_option(options, objective=objective)
    left_s = race.left_s() - (0.0 if leader.tried else race.cost_s(leader, True))
    price = 1 / max(WORTH_S, race.run_s(leader.samples_per_s))
    worth: dict[int, float] = {}
    for index, option in enumerate(options):
        cost_s = race.cost_s(option, option.compared)
        if cost_s <= left_s and could_win(option, measured=measured, objective=objective, over=leader):
            gain = _expected_gain(option, measured=measured, over=leader)
            if gain >= price * cost_s:
                worth[index] = gain / max(cost_s, 1e-9)
    if worth:
        return options[max(worth, key=lambda index: worth[index])]
    if leader.tried:
        return None
    if not any(option.tried and option.fits for option in options):
        return leader if late else _surest(options, objective=objective)
    return leader if race.cost_s(leader, True) <= race.left_s() else None


def _surest(options: Sequence[Option], *, objective: str) -> Option | None:
    """The best one where each is as slow as it may be. One that was compared may be behind a promise that is far above
    it, as small micro-batches are that were measured because they are small."""
    slow = {
        option.key: replace(option, samples_per_s=option.samples_per_s / (1 + _error(option))) for option in options
    }
    found = best_option(list(slow.values()), objective=objective)
    return next((option for option in options if found and option.key == found.key), None)


def _measured(options: Sequence[Option]) -> list[Option]:
    return [option for option in options if option.fits and (option.compared or option.tried)]


def could_win(option: Option, *, measured: Sequence[Option], objective: str, over: Option) -> bool:
    """Whether an option that was not tried would be the best of those that were measured, at the rate it may have."""
    if option.tried or not option.fits or option.key == over.key or math.isnan(option.samples_per_s):
        return False
    hoped = replace(option, samples_per_s=max_rate(option, measured=measured))
    return best_option([over, hoped], objective=objective) is hoped


def max_rate(option: Option, *, measured: Sequence[Option]) -> float:
    """The most samples per second that an option may have: by its own rate, and by those that were measured of options
    which launch no more for a sample, and compute no more but for the layers that they recompute."""
    bounds = [
        (1 + BOUND) * other.samples_per_s * max(1.0, forward_passes(other) / forward_passes(option))
        for other in measured
        if other.micro_batch >= option.micro_batch and other.release <= option.release and other.key != option.key
    ]
    return min([option.samples_per_s / (1 - _error(option)), *bounds])


def forward_passes(option: Option) -> float:
    """What is computed for a sample, in forward passes: one, two of backward, and the layers that it computes again."""
    return 3 + option.recomputed / max(1, option.num_layers)


def _error(option: Option) -> float:
    return 0.0 if option.tried else COMPARED if option.compared else PROMISED


def _expected_gain(option: Option, *, measured: Sequence[Option], over: Option) -> float:
    """Mean of what it gains over another one's rate, as a share of that, if its own is anywhere within its error. Less
    risk at a rate alike is worth half of what rates may differ by."""
    rate, high = over.samples_per_s, max_rate(option, measured=measured)
    low = min(high, option.samples_per_s / (1 + _error(option)))
    if low >= rate:
        gain = (low + high) / 2 - rate
    else:
        gain = max(0.0, high - rate) ** 2 / (2 * (high - low)) if high > low else 0.0
    return max(gain / rate, RATE_TOLERANCE / 2)
