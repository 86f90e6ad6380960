"""When a run thinks again about its allocation: never, once after warm-up, every so often, or when gradients drift.

A trigger sees step counts and statistics only, never a clock, so the same run reallocates at the same steps.
"""

from collections.abc import Callable
from math import isfinite, log

from baoc.config.schema import ReallocationConfig
from baoc.types import Profile


def is_due(
    settings: ReallocationConfig,
    *,
    step: int,
    last_decision: int,
    profile: Callable[[], Profile],
    reference: Profile | None,
    watched_from: int = 0,
) -> bool:
    """Whether to plan again after `step`; `last_decision` is 0 before the first one, and sampling began after step
    `watched_from`. Drift is looked at every `interval` steps, as a profile is not free; where there is no `reference`,
    the last decision's profile, as in a run that was resumed, it counts as drifted."""
    if settings.mode == "off" or step - watched_from < settings.warmup_steps:
        return False
    if last_decision == 0:
        return True
    since = step - last_decision
    if settings.mode == "once" or since < settings.interval:
        return False
    if settings.mode == "interval" or reference is None:
        return True
    return since % settings.interval == 0 and drift(reference, profile()) > settings.drift_threshold


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
