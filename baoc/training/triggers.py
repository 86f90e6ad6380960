"""When a run thinks again about its allocation: never, once after warm-up, every so often, or when gradients drift.

A trigger sees step counts and statistics only, never a clock, so the same run reallocates at the same steps.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from math import isfinite, log

from baoc.config.schema import ReallocationConfig
from baoc.types import Profile


@dataclass(frozen=True, slots=True, kw_only=True)
class TriggerInputs:
    """What a trigger decides by. `last_decision` is 0 before the first one; `reference` is that decision's profile,
    None also where a resumed run could not use it; `watched_from` is the step after which sampling began."""

    step: int
    last_decision: int
    profile: Callable[[], Profile]
    reference: Profile | None
    watched_from: int = 0


Trigger = Callable[[ReallocationConfig, TriggerInputs], bool]


def _off(_: ReallocationConfig, __: TriggerInputs) -> bool:
    return False


def _has_statistics(settings: ReallocationConfig, now: TriggerInputs) -> bool:
    """Whether there are enough statistics to decide by, also where a resumed run has none of those before."""
    return now.step - now.watched_from >= settings.warmup_steps


def _once(settings: ReallocationConfig, now: TriggerInputs) -> bool:
    return now.last_decision == 0 and _has_statistics(settings, now)


def _interval(settings: ReallocationConfig, now: TriggerInputs) -> bool:
    if now.last_decision == 0:
        return _once(settings, now)
    return now.step - now.last_decision >= settings.interval and _has_statistics(settings, now)


def _drift(settings: ReallocationConfig, now: TriggerInputs) -> bool:
    """Looks every `interval` steps, as a profile is not free, and decides anew only where the statistics moved by more
    than `drift_threshold`, or where there are none to compare with."""
    if not _interval(settings, now):
        return False
    if now.reference is None:
        return True
    due = (now.step - now.last_decision) % settings.interval == 0
    return due and drift(now.reference, now.profile()) > settings.drift_threshold


def drift(before: Profile, after: Profile) -> float:
    """Mean over blocks of |log ratio| of gradient RMS, noise and anisotropy; blocks that lack a value are left out."""
    moves = []
    for block, old in before.stats.items():
        new = after.stats.get(block)
        if new is None:
            continue
        for name in ("grad_rms", "noise", "anisotropy"):
            a, b = getattr(old, name), getattr(new, name)
            if isfinite(a) and isfinite(b) and a > 0 and b > 0:
                moves.append(abs(log(b / a)))
    return sum(moves) / len(moves) if moves else 0.0


TRIGGERS: Mapping[str, Trigger] = {"off": _off, "once": _once, "interval": _interval, "drift": _drift}
