"""What a codec is: how a state tensor of fp32 numbers is kept between two steps.

Averages with a slow decay stand still or ratchet upwards when they are rounded to nearest at every step (v at beta2 =
.999 moves .1 % per step, half a bf16 or 8-bit step is .2 to .4 %). So encoding takes a `phase`: with it, rounding up or
down is decided by a low-discrepancy sequence over steps and lanes, whose mean over steps is the exact value. No random
state is involved: the same phase gives the same bits.
"""

from collections.abc import Sequence
from functools import lru_cache
from typing import Protocol, runtime_checkable

import torch
from torch import Tensor
from torch.nn.functional import pad

from baoc.types import CodecInfo

LANES = 32
# 1/p and 1/p^2 of p = 1.3247..., the plastic number: the two-dimensional additive sequence of least discrepancy known.
_PER_STEP, _PER_LANE = 0.7548776662466927, 0.5698402909980532


@runtime_checkable
class Codec(Protocol):
    """One way to keep a tensor. Objects are stateless and shared; the registry keeps one per name.

    `parts` maps "" to the payload, which has the shape of the state (flat where two codes share a byte), and ".scale"
    to the scales where there are any. Zero comes back as exactly zero, a positive number kept as v never comes back as
    zero, and NaN or infinity is never stored (NaN becomes 0, infinities the largest number the codec has). fp32 keeps
    whatever it is given.
    """

    @property
    def info(self) -> CodecInfo: ...

    @property
    def in_place(self) -> bool:
        """True if `decode` returns the stored tensor itself, so that writing to it is storing."""
        ...

    def allocate(self, shape: Sequence[int], device: torch.device | str) -> dict[str, Tensor]:
        """Parts that decode to zeros; together exactly `info.nbytes(numel)` bytes."""
        ...

    def encode_(
        self, parts: dict[str, Tensor], values: Tensor, *, phase: int | None = None, new: Tensor | None = None
    ) -> None:
        """Stores `values` (fp32, shape of the state). `phase` None rounds to nearest; else see the module's text.

        `new`, a mask: where it is False the value is the one that is stored already, and must stay. It is rounded to
        nearest, so its code stays unless its group's scale moves; a scale is made by the new values, but no smaller
        than those that stay need.
        """
        ...

    def decode(self, parts: dict[str, Tensor], shape: Sequence[int]) -> Tensor:
        """The stored numbers as fp32 of `shape`."""
        ...


def thresholds(phase: int, *, new: Tensor | None, group: int, device: torch.device) -> Tensor:
    """Lanes for groups of elements: fp32 [group], or [groups, group] with 1/2 where `new` is False."""
    pattern = lanes(phase, device).repeat(group // LANES)
    if new is None:
        return pattern
    flat = new.reshape(-1)
    flat = pad(flat, (0, -len(flat) % group), value=True).view(-1, group)
    return torch.where(flat, pattern, 0.5)


@lru_cache(maxsize=16)
def lanes(phase: int, device: torch.device) -> Tensor:
    """fp32[32] in (0, 1]: a fraction of at least this rounds up in step `phase`; one per element index modulo 32."""
    return lanes_of(phase, 1)[0].to(device, non_blocking=True)


def lanes_of(first: int, count: int) -> Tensor:
    """fp32[count, 32] on the CPU: those of phases one after another."""
    phases = torch.arange(first, first + count, dtype=torch.float64, device="cpu")[:, None]
    steps = torch.arange(LANES, dtype=torch.float64, device="cpu") * _PER_LANE + phases * _PER_STEP
    return (1 - torch.frac(steps)).to(torch.float32).clamp_(min=2**-24)


def add_lanes_(flat: Tensor, pattern: Tensor) -> Tensor:
    """Adds `pattern` ([32]) to a flat tensor, over and over along its elements; returns it."""
    whole = flat.numel() // LANES * LANES
    flat[:whole].view(-1, LANES).add_(pattern)
    flat[whole:].add_(pattern[: flat.numel() - whole])
    return flat
