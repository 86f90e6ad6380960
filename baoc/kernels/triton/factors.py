"""Factors of a chunk's elements by line and column of the stored matrix, and where each element lies."""

# pyright: reportArgumentType=false, reportAttributeAccessIssue=false, reportPossiblyUnboundVariable=false
# pyright: reportOperatorIssue=false, reportCallIssue=false, reportIndexIssue=false
# Device code: Triton's compiler gives these names types that Python's annotations do not know.

import triton
import triton.language as tl

from baoc.kernels.triton.device import tile_of


@triton.jit
def position(start, length, WIDE: tl.constexpr):
    """Line of an element, and its place in it. WIDE: elements are more than 32 bits count."""
    line = start // length if WIDE else (start.to(tl.int32) // length.to(tl.int32)).to(tl.int64)
    return line, (start - line * length).to(tl.int32)


@triton.jit
def further(line, rest, part, width, CHUNK: tl.constexpr, REPEAT: tl.constexpr):
    """The position `part` chunks further on; dividing is slow, and lines are hardly ever that short."""
    rest += part * CHUNK
    over = rest // width if width < CHUNK * REPEAT else tl.where(rest >= width, 1, 0)
    return line + over, rest - over * width


@triton.jit
def _line_factors(line_at, line, rest, width, inside, vectors, CHUNK: tl.constexpr, HOW: tl.constexpr):
    """Factors by line of a chunk's elements, shaped as `line`; of two lines at most they are two numbers."""
    by_line = vectors + line_at
    if HOW == "aligned" or HOW == "two":
        first = tl.load(by_line)
        factors = tl.where(line == 0, first, tl.load(by_line + 1, mask=rest + CHUNK > width, other=1.0))
    elif HOW == "groups":
        factors = tl.load(by_line + line)
    else:
        factors = tl.load(by_line + line, mask=inside, other=1.0)
    return factors


@triton.jit
def _column_factors(column_at, place, inside, vectors, HOW: tl.constexpr):
    by_column = vectors + column_at // 32 * 32 + place  # vectors begin at multiples of it, which is told like this
    return tl.load(by_column, mask=inside, other=1.0) if HOW == "any" else tl.load(by_column)


@triton.jit
def factors_of(
    line_at, column_at, rest, width, inside, scale, vectors, ADAFACTOR: tl.constexpr, CHUNK: tl.constexpr,
    HOW: tl.constexpr,
):  # fmt: skip
    """Factors of Adafactor's updates, by line and column; of others, by what of both there is."""
    line, place = _places(rest, width, CHUNK, HOW)
    if ADAFACTOR:
        factors = scale * _line_factors(line_at, line, rest, width, inside, vectors, CHUNK, HOW)
        factors = factors * _column_factors(column_at, place, inside, vectors, HOW)
    elif line_at >= 0:
        factors = _line_factors(line_at, line, rest, width, inside, vectors, CHUNK, HOW) + place * 0.0
    else:
        factors = _column_factors(column_at, place, inside, vectors, HOW)
    return factors


@triton.jit
def _places(rest, width, CHUNK: tl.constexpr, HOW: tl.constexpr):
    """Line, and place in it, of the elements of a chunk that begins at place `rest` of line 0. Dividing by element is
    slow; HOW says what makes it needless: "two" lines are all there can be, of whole groups if "aligned", or "groups"
    lie in one line each."""
    tile, groups = tile_of(CHUNK)
    if HOW == "groups" or HOW == "aligned":
        group, num = rest // 32 + groups, width // 32
        line = group // num if HOW == "groups" else tl.where(group >= num, 1, 0)
        place = (group - line * num) * 32 + tl.arange(0, 32)[None, :]
    elif HOW == "two":
        line = tl.where(rest + tile >= width, 1, 0)
        place = rest + tile - line * width
    else:
        line = (rest + tile) // width
        place = rest + tile - line * width
    return line, place
