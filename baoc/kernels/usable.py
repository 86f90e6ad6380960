"""Which elements of a gradient a step can use: numbers below 2^48 in size. All others count as non-finite.

Squares of what is left are below 2^96, so sums of 2^31 of them, of a line, a tensor or a whole model, are fp32 numbers.
Without a limit below fp32's own, one element of 1e20 would make the second moment that it shares with a row, a block
or a quantiser's group infinite for good. The same limit holds for every rule, so that no rule's states depend on which
rule they come from.
"""

import torch
from torch import Tensor

LIMIT = 2.0**48
# Bits of the limit in each type; in fp16, whose numbers are all below it, of infinity. Magnitudes compare as bits do.
LIMIT_BITS = {torch.float32: 0x57800000, torch.bfloat16: 0x5780, torch.float16: 0x7C00}


def usable(grad: Tensor) -> Tensor:
    """True where an element is a number below the limit, in the shape of `grad`; takes no memory but for bools."""
    return (grad < LIMIT) & (grad > -LIMIT)
