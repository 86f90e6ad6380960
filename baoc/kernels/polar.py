"""Newton-Schulz steps towards the polar factor of many matrices at once, for Muon: constants and room. No Triton.

The quintic is the one that Muon's authors tuned for speed: singular values end between .7 and 1.2, not at 1.
"""

A, B, C = 3.4445, -4.7750, 2.0315  # of x (a + b x^2 + c x^4), steep at 0
STEPS = 5
# Steps that are taken on X X^T alone before X itself is brought up to date: its small eigenvalues carry the rounding of
# the large ones, and each step makes those that fell below zero about 12 times as large.
STRETCHES = (2, 3)
_ALIGNED = 256  # bytes: parts of the room begin at multiples of it
_UNIT, _LONG_UNIT, _LONG = 16, 64, 1024  # sides are multiples of these, of the second from the third on


def padded(side: int) -> int:
    """A side of a matrix as products are fast with: lines of odd lengths would be read two bytes at a time. What pads
    it is zero, before and after each step.
    """
    unit = _LONG_UNIT if side >= _LONG else _UNIT
    return -(-side // unit) * unit


def workspace_spans(num: int, lines: int, length: int) -> list[tuple[int, int]]:
    """Where in the room `orthogonalize` keeps what it has: begin and end in bytes of two stacks of the matrices and of
    three of squares of the shorter side, all of 16-bit numbers. A fourth stack of squares lies in that of the matrices
    which is not in use.
    """
    sizes = [2 * num * lines * length] * 2 + [2 * num * min(lines, length) ** 2] * 3
    parts, begin = [], 0
    for size in sizes:
        parts.append((begin, begin + size))
        begin += -(-size // _ALIGNED) * _ALIGNED
    return parts


def workspace_bytes(num: int, lines: int, length: int) -> int:
    """Bytes that `orthogonalize` of `num` matrices [lines, length] takes, those of the matrices included."""
    return -(-workspace_spans(num, lines, length)[-1][1] // _ALIGNED) * _ALIGNED


def products(lines: int, length: int) -> float:
    """Floating-point operations of one matrix's products, of symmetric ones the half that is computed."""
    short, long = sorted((lines, length))
    total = 0.0
    for steps in STRETCHES:
        squares = 4 * steps - 3  # p of each step; q but in the first, two for the next X X^T but in the last
        total += short * short * long + squares * short**3 + 2 * short * short * long
    return total
