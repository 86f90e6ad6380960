"""Which elements of a gradient a step can use: numbers of magnitude below 2^48. All others count as non-finite.

Their squares are below 2^96, so that sums of 2^31 of them, over a line, a tensor or a model, are finite in fp32.
Without the limit one element of 1e20 would make the second moment that it shares with a row, a block or a quantiser's
group infinite for good. The limit is the same for all rules, so that states may migrate between any two of them.
"""

import torch
from torch import Tensor

LIMIT = 2.0**48
# Bits of the limit by dtype; in fp16, whose numbers are all below it, of infinity. Bits compare as magnitudes do.
LIMIT_BITS = {torch.float32: 0x57800000, torch.bfloat16: 0x5780, torch.float16: 0x7C00}


def usable(grad: Tensor) -> Tensor:
    """True where an element is usable, in the shape of `grad`. Allocates only bools."""
    return (grad < LIMIT) & (grad > -LIMIT)
