"""Newton-Schulz iteration towards the polar factor of a stack of matrices, for Muon: constants, workspace, operations.

The quintic polynomial is the one that Muon's authors tuned for speed: singular values end between .7 and 1.2, not at 1.
Needs no Triton; `baoc.kernels.triton.orthogonal` has the kernel.
"""

A, B, C = 3.4445, -4.7750, 2.0315  # of x (a + b x^2 + c x^4), steep at 0
STEPS = 5
# Steps that are taken on X X^T alone before X itself is updated. More would be inaccurate: the small eigenvalues of
# X X^T carry the rounding errors of the large ones, and a step multiplies those that fell below zero by about 12.
STRETCHES = (2, 3)
_ALIGNMENT = 256  # bytes: spans of the workspace begin at multiples of it
_UNIT, _LONG_UNIT, _LONG = 16, 64, 1024  # sides are padded to multiples of _UNIT, from _LONG on of _LONG_UNIT


def padded(side: int) -> int:
    """A side of a matrix, padded so that products are fast: lines of odd length would be read two bytes at a time. The
    padding is zero, before and after each step.
    """
    unit = _LONG_UNIT if side >= _LONG else _UNIT
    return -(-side // unit) * unit


def workspace_spans(num: int, lines: int, length: int) -> list[tuple[int, int]]:
    """Layout of the workspace of `orthogonalize`: (begin, end) in bytes of two stacks of matrices [num, lines, length]
    and of three stacks of squares of the shorter side, all fp16. A fourth stack of squares shares memory with whichever
    stack of matrices is not in use.
    """
    sizes = [2 * num * lines * length] * 2 + [2 * num * min(lines, length) ** 2] * 3
    spans, begin = [], 0
    for size in sizes:
        spans.append((begin, begin + size))
        begin += -(-size // _ALIGNMENT) * _ALIGNMENT
    return spans


def workspace_bytes(num: int, lines: int, length: int) -> int:
    """Bytes of the workspace for `num` matrices [lines, length], the matrices included."""
    return -(-workspace_spans(num, lines, length)[-1][1] // _ALIGNMENT) * _ALIGNMENT
