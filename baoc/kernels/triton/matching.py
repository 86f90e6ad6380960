"""The small kernels that run beside the steps of an `Engine`.

`sum_kernel` and `match_kernel` match the RMS of updates. A step scales its updates by target / RMS, with the RMS of
the block's last update, and sums their squares. `match_kernel` turns these sums into the new RMS and into the factor
that the step should have used (`baoc.optim.matching.factor`). Where the two factors differ, as after a surge of the
gradient, a repairing launch of the step's kernel adds the difference.

`mark_kernel` turns non-finite elements of gradients into -0.0, and true -0.0 into 0.0 before. Clipping by norm or value
keeps a -0.0 and no norm counts it, so the step still knows which elements to leave out.
"""

# pyright: reportArgumentType=false, reportAttributeAccessIssue=false, reportPossiblyUnboundVariable=false
# pyright: reportOperatorIssue=false, reportCallIssue=false, reportIndexIssue=false
# Device code: Triton's compiler gives these names types that Python's annotations do not know.

from collections.abc import Sequence
from typing import TYPE_CHECKING

import torch
import triton
import triton.language as tl
from torch import Tensor

from baoc.kernels.triton.elementwise import MATCH_AT, WIDTH, matched_factor
from baoc.kernels.usable import LIMIT_BITS, usable

if TYPE_CHECKING:
    from baoc.kernels.triton.table import FusedTable

_PER_LR = tl.constexpr(7)
_TINY = tl.constexpr(1e-30)  # as baoc.optim.matching
_CHUNK = 2048  # elements of a gradient that a program marks


@triton.jit
def sum_kernel(
    partial,  # fp32[programs]
    spans,  # int32[tensors, 2]: first and last program, excluded, of each tensor
    settings,  # fp32[tensors, 8]
    sums,  # fp32[tensors]
    LANES: tl.constexpr,
):  # fmt: skip
    """sums[tensor] = sum of squares of its update per lr, in an order that depends on the table alone."""
    tensor = tl.program_id(0)
    last = tl.load(spans + 2 * tensor + 1)
    lanes = tl.arange(0, LANES)
    total = tl.zeros([LANES], dtype=tl.float32)
    for begin in range(tl.load(spans + 2 * tensor), last, LANES):
        total += tl.load(partial + begin + lanes, mask=begin + lanes < last, other=0.0)
    per_lr = tl.load(settings + tensor * WIDTH + _PER_LR)
    tl.store(sums + tensor, tl.sum(total) * per_lr * per_lr)


@triton.jit
def match_kernel(
    blocks,  # int32[blocks + 1]: where the tensors of each block begin in `members`
    members,  # int32[]: tensors
    numels,  # int64[tensors]
    grad_ptrs,  # int64[tensors]
    ptrs,  # int64[tensors, 8]
    sums,  # fp32[tensors]
    skipped,  # int32[tensors]: read and set back to 0
    repair,  # fp32[tensors]: what the factor lacked
    MEASURE: tl.constexpr,  # only own RMS, of blocks that have none yet
    LANES: tl.constexpr,
):
    """One program per block; a block without gradients is left as it is."""
    block = tl.program_id(0)
    first, last = tl.load(blocks + block), tl.load(blocks + block + 1)
    match_addr = tl.load(ptrs + tl.load(members + first) * WIDTH + MATCH_AT)
    match = match_addr.to(tl.pointer_type(tl.float32))
    target, own = tl.load(match), tl.load(match + 1)
    used = matched_factor(match_addr)
    lanes = tl.arange(0, LANES)
    own_square = tl.zeros([LANES], dtype=tl.float32)
    count = tl.zeros([LANES], dtype=tl.float32)
    stepped = tl.zeros([LANES], dtype=tl.int32)
    for begin in range(first, last, LANES):
        inside = begin + lanes < last
        tensor = tl.load(members + begin + lanes, mask=inside, other=0)
        there = tl.load(grad_ptrs + tensor, mask=inside, other=0) != 0
        total = tl.load(sums + tensor, mask=there, other=0.0)
        num = (tl.load(numels + tensor, mask=there, other=0) - tl.load(skipped + tensor, mask=there, other=0)).to(
            tl.float32
        )
        rms = tl.maximum(tl.sqrt(total / tl.maximum(num, 1.0)), _TINY)
        usual = tl.minimum(used, tl.maximum(target, 1.0) / rms)
        factor = tl.where(own > _TINY, usual, target / rms)
        factor = tl.where(rms > _TINY, factor, used)  # the update is zero, so there is nothing to repair
        own_square += total
        count += num
        stepped += there.to(tl.int32)
        tl.store(skipped + tensor, 0, mask=there)
        if not MEASURE:
            tl.store(repair + tensor, tl.where(there, factor - used, 0.0), mask=inside)
    if tl.sum(stepped) > 0:
        num = tl.maximum(tl.sum(count), 1.0)
        new = tl.sqrt(tl.sum(own_square) / num)
        tl.store(match + 1, tl.where(own < 0.0, new, own) if MEASURE else new)


@triton.jit
def mark_kernel(
    owner,  # int32[chunks]: tensor of each chunk
    first_chunk,  # int32[tensors]
    numels,  # int64[tensors]
    grad_ptrs,  # int64[tensors]
    codes,  # int32[tensors]: which type its gradient has
    nonfinite,  # int64[tensors]: counts non-finite elements
    CODE: tl.constexpr,  # of the type that this launch looks at
    BITS: tl.constexpr,  # integers as wide as it
    LIMIT: tl.constexpr,  # bits of the size from which on elements count as non-finite
    FIRST: tl.constexpr,  # no marks yet: every -0.0 is a true one
    CHUNK: tl.constexpr,
):
    """Marks the gradients in place; writes only where something changes."""
    pid = tl.program_id(0)
    tensor = tl.load(owner + pid)
    grad_addr = tl.load(grad_ptrs + tensor)
    if (grad_addr != 0) & (tl.load(codes + tensor) == CODE):
        start = (pid - tl.load(first_chunk + tensor)).to(tl.int64) * CHUNK
        at = start + tl.arange(0, CHUNK)
        inside = at < tl.load(numels + tensor)
        pointer = tl.multiple_of(grad_addr, BITS.primitive_bitwidth // 8).to(tl.pointer_type(BITS)) + at
        bits = tl.load(pointer, mask=inside, other=0).to(tl.int32)
        MARK: tl.constexpr = -(2 ** (BITS.primitive_bitwidth - 1))
        finite = (bits & ~MARK) < LIMIT
        change = ~finite
        if FIRST:
            change = change | (bits == MARK)
        tl.store(pointer, tl.where(finite, 0, MARK).to(BITS), mask=inside & change)
        num_nonfinite = tl.sum(tl.where(finite, 0, 1))
        tl.atomic_add(nonfinite + tensor, num_nonfinite.to(tl.int64), mask=num_nonfinite > 0, sem="relaxed")


class Marks:
    """Which chunk of which gradient each program looks at. Made when gradients are first marked."""

    def __init__(self, tables: "Sequence[FusedTable]", *, places: Sequence[int], size: int):
        self._tables = tables
        self._places = torch.tensor(places, dtype=torch.int64, device="cpu")
        self._device = tables[0].device
        numels = torch.zeros(size, dtype=torch.int64, device="cpu")
        numels[self._places] = torch.tensor(
            [param.numel() for table in tables for param in table.params], dtype=torch.int64, device="cpu"
        )
        chunks = (numels + _CHUNK - 1) // _CHUNK
        first = torch.zeros(size, dtype=torch.int64, device="cpu")
        torch.cumsum(chunks[:-1], 0, out=first[1:])
        owner = torch.repeat_interleave(torch.arange(size, dtype=torch.int32, device="cpu"), chunks)
        self._count = len(owner)
        self._owner, self._first = owner.to(self._device), first.to(torch.int32).to(self._device)
        self._dtypes: list[torch.dtype] = []
        self._codes = torch.zeros(size, dtype=torch.int32, device=self._device)

    @property
    def nbytes(self) -> int:
        return sum(t.numel() * t.element_size() for t in (self._owner, self._first, self._codes))

    def mark(self, grad_ptrs: Tensor, *, numels: Tensor, num_nonfinite: Tensor, first: bool) -> None:
        """One launch per type of gradients, of which there is usually one."""
        dtypes = [table.grad_dtype for table in self._tables]
        if dtypes != self._dtypes:
            self._note(dtypes)
        for code, (dtype, limit) in enumerate(LIMIT_BITS.items()):
            if dtype in dtypes and self._count:
                mark_kernel[(self._count,)](
                    self._owner,
                    self._first,
                    numels,
                    grad_ptrs,
                    self._codes,
                    num_nonfinite,
                    CODE=code,
                    BITS=tl.int32 if dtype.itemsize == 4 else tl.int16,
                    LIMIT=limit,
                    FIRST=first,
                    CHUNK=_CHUNK,
                )

    def _note(self, dtypes: list[torch.dtype]) -> None:
        codes = torch.zeros(len(self._codes), dtype=torch.int32, device="cpu")
        order = list(LIMIT_BITS)
        codes[self._places] = torch.tensor(
            [order.index(table.grad_dtype) for table in self._tables for _ in table.params],
            dtype=torch.int32,
            device="cpu",
        )
        self._codes.copy_(codes)
        self._dtypes = dtypes


def mark_strided_(grad: Tensor, *, first: bool) -> Tensor:
    """Marks a strided gradient, which no kernel reads in place. Returns its non-finite elements, on its device."""
    nonfinite = ~usable(grad)
    if first:
        grad.masked_fill_(grad == 0, 0.0)
    grad.masked_fill_(nonfinite, -0.0)
    return nonfinite.sum()
