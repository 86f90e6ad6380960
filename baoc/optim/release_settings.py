"""How gradients are released, who may look at them, and when it cannot be: what `optim.release` is told and asked."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Protocol

from torch import Tensor

from baoc.errors import BadInputError


@dataclass(frozen=True, slots=True, kw_only=True)
class GradientRelease:
    """How gradients are clipped before they are released, as nobody can do it after the backward.

    `clip_norm`: the most that the Euclidean norm of all gradients may be. The norm that they are scaled by is that of
    the *previous* step, because the one of this step is known when it is over. In the first step, which has none before
    it, each block is scaled to at most its share of the limit, clip_norm sqrt(elements of the block / of all): else one
    large first gradient would stay in every average of squares for long. `clip_value`: the most that an element may be,
    in size. Either may be None.
    """

    clip_norm: float | None = None
    clip_value: float | None = None

    def __post_init__(self) -> None:
        for key in ("clip_norm", "clip_value"):
            value = getattr(self, key)
            if value is not None and not value > 0:
                raise BadInputError(f"{key} of gradient release is {value}: give a positive number, or None")


class PartObserver(Protocol):
    """Who wants to see the final gradients of a step, which come block by block."""

    def begin_parts(self) -> None:
        """A step begins."""
        ...

    def see_part(self, grads: Mapping[str, Tensor], /) -> None:
        """The final gradients of some parameters, by name; they are gone afterwards."""
        ...

    def finish_parts(self) -> None:
        """All have been seen; what did not come had no gradient."""
        ...


def settings_of(release: bool | GradientRelease) -> GradientRelease | None:
    """What `release=` of an optimizer means. Raises BadInputError for anything but a bool or GradientRelease."""
    if isinstance(release, GradientRelease):
        return release
    if not isinstance(release, bool):
        raise BadInputError(f"release={release!r}: give True, False, or GradientRelease(clip_norm=...)")
    return GradientRelease() if release else None


def check_policy(nonfinite: str) -> None:
    """Raises BadInputError for the policy that would have to take back what was stepped."""
    if nonfinite == "skip_step":
        raise BadInputError(
            "nonfinite=skip_step leaves all as it is if any gradient element is non-finite, but with gradient release "
            "other blocks have been stepped by then: use skip_element or raise"
        )
