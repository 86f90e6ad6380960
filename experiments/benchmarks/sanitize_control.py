"""A plain Triton kernel, for `sanitize.py --specs control`: what a tool reports of it is Triton's own way."""

import torch
import triton
import triton.language as tl


@triton.jit
def sums_kernel(source, before, lines, columns, whole, NUM: tl.constexpr):
    """Sums along both sides of tiles of 8 x 256, of which two warps have a line each; what was there `before` by line,
    which a thread of one warp reads, is added to these; and the sum of the lines'. Both warps have a line's sum, and
    both write it, the same number to the same place, when it goes to the threads that read what was there before."""
    total = tl.zeros([256], dtype=tl.float32)
    of_lines = tl.zeros([8], dtype=tl.float32)
    row, column = tl.arange(0, 8), tl.arange(0, 256)
    for begin in range(0, NUM, 8):
        tile = tl.load(source + (begin + row)[:, None] * 256 + column[None, :])
        squares = tl.sum(tile * tile, axis=1) + tl.load(before + begin + row)
        tl.store(lines + begin + row, squares)
        of_lines += squares
        total += tl.sum(tile * (1.0 / squares)[:, None], axis=0)
    tl.store(columns + column, total)
    tl.store(whole, tl.sum(of_lines))


def sum_both_ways(device: str = "cuda") -> None:
    source = torch.randn(128, 256, device=device)
    before, lines, columns, whole = (torch.ones(size, device=device) for size in (128, 128, 256, 1))
    sums_kernel[(1,)](source, before, lines, columns, whole, NUM=128, num_warps=8)  # pyright: ignore
    expected = source.square().sum(1) + 1
    torch.testing.assert_close(whole[0], expected.sum(), rtol=1e-4, atol=1e-4)
    torch.testing.assert_close(columns, (source / expected[:, None]).sum(0), rtol=1e-4, atol=1e-4)
    torch.testing.assert_close(lines, expected, rtol=1e-4, atol=1e-4)
    print("control: the sums are right", flush=True)
