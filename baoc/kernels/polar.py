"""Newton-Schulz steps towards the polar factor of many matrices at once, for Muon; torch alone, no Triton.

The quintic is the one that Muon's authors tuned for speed: singular values end between .7 and 1.2, not at 1.
"""

import torch
from torch import Tensor

A, B, C = 3.4445, -4.7750, 2.0315  # of x (a + b x^2 + c x^4), steep at 0
STEPS = 5
_ALIGNED = 256  # bytes: parts of the room begin at multiples of it
_UNIT, _LONG_UNIT, _LONG = 8, 64, 1024  # sides are multiples of these, of the second from the third on


def padded(side: int) -> int:
    """A side of a matrix as products are fast with: lines of odd lengths would be read two bytes at a time. What pads
    it is zero, before and after each step.
    """
    unit = _LONG_UNIT if side >= _LONG else _UNIT
    return -(-side // unit) * unit


def room_bytes(num: int, lines: int, length: int) -> int:
    """Bytes that `orthogonalize` of `num` matrices [lines, length] takes, those of the matrices included."""
    short = min(lines, length)
    return 2 * _up(2 * num * lines * length) + 2 * _up(2 * num * short * short)


def orthogonalize(room: Tensor, *, num: int, lines: int, length: int) -> Tensor:
    """The matrices that lie first in `room` (bf16 [num, lines, length], norms at most 1), orthogonalized, in `room`.

    `room` is uint8 of at least `room_bytes`. Products go by the shorter side, and what is added to them is added before
    they are rounded. Waits for nothing, and takes no memory of its own but what cuBLAS does.
    """
    sizes = [num * lines * length] * 2 + [num * min(lines, length) ** 2] * 2
    parts, begin = [], 0
    for size in sizes:
        parts.append(room[begin : begin + 2 * size].view(torch.bfloat16))
        begin += _up(2 * size)
    x, other = (part.view(num, lines, length) for part in parts[:2])
    gram, poly = (part.view(num, min(lines, length), -1) for part in parts[2:])
    wide = lines <= length
    with torch.autocast(room.device.type, enabled=False):  # a step in backward may be inside of one
        for _ in range(STEPS):
            torch.bmm(x, x.mT, out=gram) if wide else torch.bmm(x.mT, x, out=gram)
            torch.baddbmm(gram, gram, gram, beta=B, alpha=C, out=poly)
            left, right = (poly, x) if wide else (x, poly)
            torch.baddbmm(x, left, right, beta=A, out=other)
            x, other = other, x
    return x


def _up(nbytes: int) -> int:
    return -(-nbytes // _ALIGNED) * _ALIGNED
