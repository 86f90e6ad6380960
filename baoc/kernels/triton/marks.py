"""Marks non-finite elements of gradients by -0.0, so that a later step knows which elements to leave out.

Clipping by norm or value, and reductions over ranks, keep a -0.0, and no norm counts it. A true -0.0 becomes 0.0 first.
"""

from collections.abc import Sequence
from typing import TYPE_CHECKING

import torch
import triton
import triton.language as tl
from torch import Tensor

from baoc.kernels.usable import LIMIT_BITS, usable

if TYPE_CHECKING:
    from baoc.kernels.triton.table import FusedTable

_CHUNK = 2048  # elements of a gradient that a program marks


@triton.jit
def mark_kernel(
    owner,  # int32[chunks]: tensor of each chunk
    first_chunk,  # int32[tensors]
    numels,  # int64[tensors]
    grad_ptrs,  # int64[tensors]
    codes,  # int32[tensors]: dtype of the gradient, as an index of LIMIT_BITS
    nonfinite,  # int64[tensors]: counts non-finite elements
    CODE: tl.constexpr,  # the dtype that this launch marks
    BITS: tl.constexpr,  # the integer dtype of the same width
    LIMIT: tl.constexpr,  # magnitude bits from which on an element counts as non-finite
    FIRST: tl.constexpr,  # no marks yet: every -0.0 is a true one
    CHUNK: tl.constexpr,
):
    """Marks the gradients in place, one chunk per program; writes only elements that change."""
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
    """The chunks of all gradients of an engine, and the launches that mark them."""

    def __init__(self, tables: "Sequence[FusedTable]", *, places: Sequence[int], size: int):
        self._tables = tables
        self._places = torch.tensor(places, dtype=torch.int64, device="cpu")
        self._device = tables[0].device
        numels = torch.zeros(size, dtype=torch.int64, device="cpu")
        by_tensor = [param.numel() for table in tables for param in table.params]
        numels[self._places] = torch.tensor(by_tensor, dtype=torch.int64, device="cpu")
        chunks = (numels + _CHUNK - 1) // _CHUNK
        first = torch.zeros(size, dtype=torch.int64, device="cpu")
        torch.cumsum(chunks[:-1], 0, out=first[1:])
        owner = torch.repeat_interleave(torch.arange(size, dtype=torch.int32, device="cpu"), chunks)
        self._num_programs = len(owner)
        self._owner, self._first = owner.to(self._device), first.to(torch.int32).to(self._device)
        self._dtypes: list[torch.dtype] = []
        self._codes = torch.zeros(size, dtype=torch.int32, device=self._device)

    def mark(self, grad_ptrs: Tensor, *, numels: Tensor, num_nonfinite: Tensor, first: bool) -> None:
        """Marks all gradients, by one launch per dtype."""
        dtypes = [table.grad_dtype for table in self._tables]
        if dtypes != self._dtypes:
            self._set_dtypes(dtypes)
        for code, (dtype, limit) in enumerate(LIMIT_BITS.items()):
            if dtype in dtypes and self._num_programs:
                mark_kernel[(self._num_programs,)](
                    self._owner, self._first, numels, grad_ptrs, self._codes, num_nonfinite, CODE=code,
                    BITS=tl.int32 if dtype.itemsize == 4 else tl.int16, LIMIT=limit, FIRST=first, CHUNK=_CHUNK,
                )  # fmt: skip

    def _set_dtypes(self, dtypes: list[torch.dtype]) -> None:
        codes = torch.zeros(len(self._codes), dtype=torch.int32, device="cpu")
        by_tensor = [list(LIMIT_BITS).index(table.grad_dtype) for table in self._tables for _ in table.params]
        codes[self._places] = torch.tensor(by_tensor, dtype=torch.int32, device="cpu")
        self._codes.copy_(codes)
        self._dtypes = dtypes


def mark_strided_(grad: Tensor, *, first: bool) -> Tensor:
    """Marks a strided gradient in place, by torch. Returns the number of non-finite elements, on its device."""
    nonfinite = ~usable(grad)
    if first:
        grad.masked_fill_(grad == 0, 0.0)
    grad.masked_fill_(nonfinite, -0.0)
    return nonfinite.sum()
