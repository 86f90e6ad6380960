"""Marking non-finite gradients of all tables in one pass, in place: they become -0.0 (see `matching`)."""

from collections.abc import Sequence

import torch
from torch import Tensor

from baoc.kernels.triton.table import FusedTable
from baoc.kernels.usable import LIMIT_BITS, usable

_CHUNK = 2048


class Marks:
    """Which chunk of which gradient each program looks at. Made when gradients are first marked."""

    def __init__(self, tables: Sequence[FusedTable], *, places: Sequence[int], size: int):
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

    def mark(self, grad_ptrs: Tensor, *, numels: Tensor, num_bad: Tensor, first: bool) -> None:
        """One launch per type of gradients, of which there is usually one."""
        import triton.language as tl

        from baoc.kernels.triton.matching import mark_kernel

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
                    num_bad,
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
    bad = ~usable(grad)
    if first:
        grad.masked_fill_(grad == 0, 0.0)
    grad.masked_fill_(bad, -0.0)
    return bad.sum()
