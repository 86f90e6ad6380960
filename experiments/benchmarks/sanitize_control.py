"""A plain Triton kernel, for `sanitize.py --specs control`: what a tool reports of it is Triton's own way."""

import torch
import triton
import triton.language as tl


@triton.jit
def sums_kernel(source, lines, columns, NUM: tl.constexpr):
    """Sums along both sides of tiles of 32 x 64; each of the warps has all columns' sums, and stores them."""
    total = tl.zeros([64], dtype=tl.float32)
    row, column = tl.arange(0, 32), tl.arange(0, 64)
    for begin in range(0, NUM, 32):
        tile = tl.load(source + (begin + row)[:, None] * 64 + column[None, :])
        tl.store(lines + begin + row, tl.sum(tile * tile, axis=1))
        total += tl.sum(tile, axis=0)
    tl.store(columns + column, total)


def sum_both_ways(device: str = "cuda") -> None:
    source = torch.randn(128, 64, device=device)
    lines, columns = torch.empty(128, device=device), torch.empty(64, device=device)
    sums_kernel[(1,)](source, lines, columns, NUM=128, num_warps=4)  # pyright: ignore[reportArgumentType]
    torch.testing.assert_close(columns, source.sum(0), rtol=1e-4, atol=1e-4)
    torch.testing.assert_close(lines, source.square().sum(1), rtol=1e-4, atol=1e-4)
    print("control: the sums are right", flush=True)
