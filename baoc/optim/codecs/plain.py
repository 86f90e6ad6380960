"""fp32 and bf16: one number per element and no scales."""

from collections.abc import Sequence

import torch
from torch import Tensor

from baoc.core.catalogue import CODECS
from baoc.optim.codecs.base import add_lanes_, lanes
from baoc.types import CodecInfo

_BF16_MAX = torch.finfo(torch.bfloat16).max


class Fp32:
    """The numbers themselves: decoding returns the stored tensor, and encoding that same tensor is free."""

    in_place = True

    def __init__(self, info: CodecInfo):
        self.info = info

    def allocate(self, shape: Sequence[int], device: torch.device | str) -> dict[str, Tensor]:
        return {"": torch.zeros(tuple(shape), dtype=torch.float32, device=device)}

    def encode_(
        self, parts: dict[str, Tensor], values: Tensor, *, phase: int | None = None, new: Tensor | None = None
    ) -> None:
        if values is not parts[""]:
            parts[""].copy_(values)

    def decode(self, parts: dict[str, Tensor], shape: Sequence[int]) -> Tensor:
        return parts[""]


class Bf16:
    """Rounded to bfloat16: relative error at most 2^-8 to nearest, 2^-7 with a phase."""

    in_place = False

    def __init__(self, info: CodecInfo):
        self.info = info

    def allocate(self, shape: Sequence[int], device: torch.device | str) -> dict[str, Tensor]:
        return {"": torch.zeros(tuple(shape), dtype=torch.bfloat16, device=device)}

    def encode_(
        self, parts: dict[str, Tensor], values: Tensor, *, phase: int | None = None, new: Tensor | None = None
    ) -> None:
        kept = values.nan_to_num(nan=0.0).clamp_(-_BF16_MAX, _BF16_MAX)
        if phase is not None:
            # Adding up to one bf16 step to the bits and cutting the rest off rounds up in that share of the steps.
            bits = kept.reshape(-1).view(torch.int32)
            add_lanes_(bits, ((1 - lanes(phase, bits.device)) * 2**16).to(torch.int32))
            kept = bits.bitwise_and_(-(2**16)).view(torch.float32).view(values.shape)
        parts[""].copy_(kept)

    def decode(self, parts: dict[str, Tensor], shape: Sequence[int]) -> Tensor:
        return parts[""].to(torch.float32)


PLAIN = (Fp32(CODECS["fp32"]), Bf16(CODECS["bf16"]))
