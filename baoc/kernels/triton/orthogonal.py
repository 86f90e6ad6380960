"""Newton-Schulz steps on stacks of matrices, on tensor cores in fp16: one kernel computes all products.

With G = X X^T a step is X <- P X, P = a I + b G + c G^2, so that G <- P G P. Several steps are therefore products of
squares of the shorter side s, which commute and are symmetric: half of their tiles are computed, and each is stored
twice. X is updated, and G computed from it anew, after each of `polar.STRETCHES`. A product of symmetric matrices costs
s^3 operations instead of 2 s^3, and products with X are needed 4 times in 5 steps, not 10. fp16 has 3 bits more than
bf16, and numbers here lie between 0 and 4; what is less than 1e-7 of the norm is lost.
"""

from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor

from baoc.kernels.polar import STRETCHES, A, B, C, workspace_spans
from baoc.kernels.triton.table import start


@triton.jit
def product_kernel(
    a, b, c, out, rows, cols, depth, a_size, a_row, a_step, b_size, b_row, b_step, out_size, alpha, beta, gamma,
    SYMMETRIC: tl.constexpr, ADDS: tl.constexpr, EVEN: tl.constexpr, M: tl.constexpr, N: tl.constexpr, K: tl.constexpr,
):  # fmt: skip
    """out = alpha a b^T + beta c + gamma I of each matrix of a stack; of symmetric ones, tiles from the diagonal on."""
    tile, matrix = tl.program_id(0), tl.program_id(1).to(tl.int64)
    if SYMMETRIC:
        down = ((tl.sqrt(8.0 * tile + 1.0) - 1.0) * 0.5).to(tl.int32)
        down = tl.where(down * (down + 1) // 2 > tile, down - 1, down)
        down = tl.where((down + 1) * (down + 2) // 2 <= tile, down + 1, down)
        across = tile - down * (down + 1) // 2  # at most `down`
    else:
        across = tile // tl.cdiv(rows, M)
        down = tile % tl.cdiv(rows, M)
    row, col, step = down * M + tl.arange(0, M), across * N + tl.arange(0, N), tl.arange(0, K)
    # Lines beyond the last load an existing line, and are not stored.
    a_at = a + matrix * a_size + (row % rows).to(tl.int64)[:, None] * a_row + step[None, :] * a_step
    b_at = b + matrix * b_size + (col % cols).to(tl.int64)[None, :] * b_row + step[:, None] * b_step
    total = tl.zeros([M, N], dtype=tl.float32)
    for begin in range(0, depth, K):
        if EVEN:
            x, y = tl.load(a_at), tl.load(b_at)
        else:
            x = tl.load(a_at, mask=step[None, :] < depth - begin, other=0.0)
            y = tl.load(b_at, mask=step[:, None] < depth - begin, other=0.0)
        total = tl.dot(x, y, total)
        a_at += K * a_step
        b_at += K * b_step
    inside = (row < rows)[:, None] & (col < cols)[None, :]
    at = matrix * out_size + row.to(tl.int64)[:, None] * cols + col[None, :]
    if ADDS:
        total = alpha * total + beta * tl.load(c + at, mask=inside, other=0.0).to(tl.float32)
        total += tl.where(row[:, None] == col[None, :], gamma, 0.0)
    result = total.to(tl.float16)
    tl.store(out + at, result, mask=inside)
    if SYMMETRIC:  # noqa: SIM102 (one is the compiler's, the other the program's)
        if down != across:
            mirrored = matrix * out_size + col.to(tl.int64)[:, None] * cols + row[None, :]
            tl.store(out + mirrored, tl.trans(result), mask=tl.trans(inside))


@dataclass(frozen=True, slots=True, kw_only=True)
class Tiles:
    """Launch config of a product: a program computes `m` rows and `n` columns, over `k` of the depth at a time."""

    m: int = 128
    n: int = 128
    k: int = 64
    warps: int = 4
    stages: int = 3


LARGE, SMALL = Tiles(), Tiles(m=64, n=64, k=32)
_LARGE_FROM = 512  # shorter side from which on LARGE gives enough tiles for all multiprocessors


def product(a: Tensor, b: Tensor, out: Tensor, *, symmetric: bool, c: Tensor | None = None, tiles: Tiles | None = None,
            scales: tuple[float, float, float] = (1.0, 0.0, 0.0)) -> None:  # fmt: skip
    """out = alpha a b^T + beta c + gamma I, for fp16 stacks a [num, rows, depth] and b [num, cols, depth] of any
    strides. `scales` are (alpha, beta, gamma). Without c, out = a b^T."""
    num, rows, depth = a.shape
    cols = b.shape[1]
    tiles = tiles or (LARGE if min(rows, cols) >= _LARGE_FROM else SMALL)
    down, across = -(-rows // tiles.m), -(-cols // tiles.n)
    programs = down * (down + 1) // 2 if symmetric else down * across
    start(
        product_kernel, (programs, num), a, b, out if c is None else c, out, rows, cols, depth, *a.stride(),
        *b.stride(), out.stride(0), *scales, SYMMETRIC=symmetric, ADDS=c is not None, EVEN=depth % tiles.k == 0,
        M=tiles.m, N=tiles.n, K=tiles.k, num_warps=tiles.warps, num_stages=tiles.stages,
    )  # fmt: skip


def orthogonalize(workspace: Tensor, *, num: int, lines: int, length: int) -> Tensor:
    """Orthogonalizes the matrices at the beginning of `workspace`; the result is a view of `workspace` too.

    `workspace` is uint8 of at least `polar.workspace_bytes`; the matrices are fp16 [num, lines, length] with norms of
    at most 1. Allocates nothing and does not synchronize.
    """
    parts = [workspace[begin:end].view(torch.float16) for begin, end in workspace_spans(num, lines, length)]
    short, wide = min(lines, length), lines <= length
    x, other = (part.view(num, lines, length) for part in parts[:2])
    squares = [part.view(num, short, short) for part in parts[2:]]
    for steps in STRETCHES:
        gram = other.view(-1)[: num * short * short].view(num, short, short)
        side = x if wide else x.mT
        product(side, side, gram, symmetric=True)
        q = p = _polynomial(gram, squares[0])
        for _ in range(steps - 1):
            free = next(square for square in squares if square is not p and square is not q)
            product(p, gram, free, symmetric=True)
            product(p, free, gram, symmetric=True)
            p = _polynomial(gram, free)
            free = next(square for square in squares if square is not p and square is not q)
            product(p, q, free, symmetric=True)
            q = free
        product(*((q, x.mT) if wide else (x, q)), other, symmetric=False)
        x, other = other, x
    return x


def _polynomial(gram: Tensor, out: Tensor) -> Tensor:
    product(gram, gram, out, c=gram, scales=(C, B, A), symmetric=True)
    return out
