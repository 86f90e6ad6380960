"""The host's part of a step: collects gradient addresses and settings of each tensor, and copies them to the device.

Few rows of settings serve all tensors (parameter group x step), so a step computes those and spreads them; per tensor
it reads the gradient's address and nothing else, as long as gradients stay where they were. All of it goes up through
one pinned slot of an `Upload`.
"""

import ctypes
import struct
from array import array
from collections.abc import Callable, Hashable, Sequence
from functools import reduce
from itertools import chain
from operator import attrgetter, or_
from typing import Any, NamedTuple

import torch
from torch import Tensor

from baoc.kernels.cpp.grad_addresses import grad_addresses
from baoc.kernels.triton.kinds import Options, Row
from baoc.kernels.triton.table import WIDTH, FusedTable

_TYPES = (torch.float32, torch.bfloat16, torch.float16)  # of gradients, as kernels read them
_ALIGNED = 31  # of addresses: enough for every vector that a cut may ask for
_FEW = 16  # gradients that are looked at closely in every step
SLOTS = 3  # uploads that the host may be ahead of the device before it waits
MOST_LAYOUTS = 16  # sets of addresses that are remembered
_GRAD: Callable[[Tensor], Any] = attrgetter("grad")
_DTYPE: Callable[[Any], torch.dtype] = attrgetter("dtype")
# Of the class: a third faster than looked up in each tensor.
_DATA_PTR, _IS_CONTIGUOUS = Tensor.data_ptr, Tensor.is_contiguous


def _dtype_or(grad: Tensor | None, known: torch.dtype) -> torch.dtype:
    return known if grad is None else grad.dtype


def _addresses(grads: Sequence[Tensor | None]) -> array:
    try:
        return array("q", map(_DATA_PTR, grads))  # pyright: ignore[reportArgumentType]
    except TypeError:  # some have none
        return array("q", [-1 if grad is None else grad.data_ptr() for grad in grads])


def _look(grad: Tensor | None) -> tuple[torch.dtype, bool] | None:
    return None if grad is None else (grad.dtype, grad.is_contiguous())


Variant = tuple[tuple[torch.dtype, bool], ...]


class _Layout(NamedTuple):
    """Properties of gradients at certain addresses, as `Gradients` found them."""

    addresses: array
    active: list[bool]
    dtypes: list[torch.dtype]
    wanted: list[torch.dtype]
    variant: Variant


class Gradients:
    """Addresses of the gradients of all tables. `begins[i]` is where table i begins in arrays over all tensors.

    A launch reads contiguous gradients of one type. A table with several types reads fp32; those of another type and
    strided ones (`copied`) are read from copies. Types and strides are checked when the set of addresses is new, since
    gradients of many parameters mostly reuse earlier addresses; where gradients are few, in every step.
    """

    def __init__(self, tables: Sequence[FusedTable], *, begins: Sequence[int]):
        self.tables = tables
        self.params = [param for table in tables for param in table.params]
        self.places = [b + i for b, table in zip(begins, tables, strict=False) for i in range(len(table.params))]
        self.addresses = array("q", bytes(8 * begins[-1]))
        self.version = 0  # of the addresses
        self.active = [False] * len(self.params)  # which have a gradient
        self.num_changes = 0  # of that
        self.variant: Variant = ()  # of each table: gradients' type, and if aligned
        self.variant_number = 0  # the same for the same
        self._variants: dict[Variant, int] = {}
        self.copied: list[int] = []
        self._begins = begins
        self._owners = [table for table in tables for _ in table.params]
        self._dtypes = [table.grad_dtype for table in self._owners]
        self._wanted = list(self._dtypes)  # the type that the launch of each reads
        self._seen = array("q")
        self._reader = grad_addresses(self.params) if len(self.params) > _FEW else None
        self.layouts: dict[Hashable, _Layout] = {}
        self._layout: _Layout | None = None  # the present one, if it is remembered
        self._copies: list[Tensor] = []

    def refresh(self) -> None:
        """Takes note of where the gradients are. A sparse one has no address: torch raises."""
        reader = self._reader
        if reader is not None and reader.read():
            if reader.addresses != self._seen:
                seen = reader.addresses[:]  # the next read overwrites it
                self._recall_or_notice(seen, key=seen.tobytes())
                self._seen = seen
        else:
            grads = list(map(_GRAD, self.params))
            seen = _addresses(grads)
            self._recall_or_notice(seen, key=(seen.tobytes(), *map(_look, grads)))
            self._seen = seen
        if self.copied:
            self._copy()

    def _recall_or_notice(self, seen: array, *, key: Hashable) -> None:
        now, layout = self._layout, self.layouts.get(key)
        if layout is not None and layout is now:
            return
        self._layout = layout
        if layout is None:
            self._notice(seen.tolist(), list(map(_GRAD, self.params)))
            if not self.copied:
                if len(self.layouts) >= MOST_LAYOUTS:
                    self.layouts.clear()
                layout = _Layout(self.addresses, self.active, self._dtypes, self._wanted, self.variant)
                self.layouts[key] = self._layout = layout
            return
        self.copied = []
        self._dtypes, self._wanted = layout.dtypes, layout.wanted
        self.addresses = layout.addresses
        self.version += 1
        self._take_variant(layout.variant)
        self._take_active(layout.active)
        for table, (dtype, aligned) in zip(self.tables, layout.variant, strict=True):
            table.grad_dtype, table.grads_aligned = dtype, aligned

    def _notice(self, seen: list[int], grads: Sequence[Tensor | None]) -> None:
        """Gradients that were not there before: their types, strides, and who has one."""
        whole = -1 not in seen
        dtypes = list(map(_DTYPE, grads)) if whole else list(map(_dtype_or, grads, self._dtypes))
        if dtypes != self._dtypes:
            self._notice_types(grads)
            self._dtypes = dtypes
            self._wanted = [table.grad_dtype for table in self._owners]
        if whole and dtypes == self._wanted and all(map(_IS_CONTIGUOUS, grads)):
            self.copied = []
        else:
            self.copied = [
                index
                for index, (grad, dtype, wanted) in enumerate(zip(grads, dtypes, self._wanted, strict=True))
                if grad is not None and (dtype is not wanted or not grad.is_contiguous())
            ]
        self._take_active([True] * len(seen) if whole else [address >= 0 for address in seen])
        self._place(seen if whole else [max(address, 0) for address in seen])

    def _take_active(self, active: list[bool]) -> None:
        if active != self.active:
            self.active = active
            self.num_changes += 1

    def _take_variant(self, variant: Variant) -> None:
        self.variant, self.variant_number = variant, self._variants.setdefault(variant, len(self._variants))

    def _notice_types(self, grads: Sequence[Tensor | None]) -> None:
        begin = 0
        for table in self.tables:
            own = grads[begin : begin + len(table.params)]
            begin += len(own)
            dtypes = {grad.dtype for grad in own if grad is not None} or {table.grad_dtype}
            alone = dtypes.pop()
            table.grad_dtype = torch.float32 if dtypes or alone not in _TYPES else alone

    def _place(self, addresses: list[int]) -> None:
        """Puts the addresses, in order of `params`, where kernels look for them."""
        all_aligned = not reduce(or_, addresses, 0) & _ALIGNED
        placed = array("q", bytes(8 * self._begins[-1]))
        first = 0
        for table, begin in zip(self.tables, self._begins, strict=False):
            own = addresses[first : first + len(table.params)]
            first += len(own)
            placed[begin : begin + len(own)] = array("q", own)
            size = table.grad_dtype.itemsize
            table.grads_aligned = all_aligned or all(table.is_aligned(address, size) for address in own)
        self._take_variant(tuple((table.grad_dtype, table.grads_aligned) for table in self.tables))
        if placed != self.addresses or not self.version:
            self.addresses = placed  # another object: layouts keep those that were
            self.version += 1

    def _copy(self) -> None:
        """Copies of those that no launch can read, in every step anew, for what they hold is new."""
        addresses, self._copies = [max(address, 0) for address in self._seen], []
        for index in self.copied:
            grad = self.params[index].grad
            assert grad is not None
            self._copies.append(grad.to(self._owners[index].grad_dtype).contiguous())
            addresses[index] = self._copies[-1].data_ptr()
        self._place(addresses)


class Settings:
    """Settings of all tensors in one step, and the count of each tensor's steps.

    `steps` (fp32 [tensors], CPU) may be written to from outside, through views too: that is noticed.
    """

    def __init__(self, tables: Sequence[FusedTable], *, places: Sequence[int], size: int):
        self.steps = torch.zeros(size, dtype=torch.float32, device="cpu")
        self._places = torch.tensor(places, dtype=torch.int64, device="cpu")
        self._rules = [table.kind.traits for table in tables for _ in table.params]
        self._groups = [group for table in tables for group in table.groups]
        first = [step for table in tables for step in table.first_steps]
        self.steps[self._places] = torch.tensor(first, dtype=torch.float32, device="cpu")
        self._added = torch.zeros(size, dtype=torch.float32, device="cpu")
        self._classes: list[_Class] = []  # of every distinct setting
        self._class_of = torch.zeros(size, dtype=torch.int64, device="cpu")
        self._known = (-1, -1)

    def fill(self, options: Sequence[Options], *, gradients: Gradients, out: Tensor) -> None:
        """Writes the settings of the coming step to `out`, fp32 [tensors, 8] on the CPU."""
        if self._known != (self.steps._version, gradients.num_changes):
            self._classify(gradients)
        rows = [cls.make(options[cls.group], cls.step + 1) for cls in self._classes]
        self._pack(self._bytes, 0, *chain.from_iterable(rows))
        torch.index_select(self._rows, 0, self._class_of, out=out)

    def advance(self) -> None:
        """Counts the step of those that have a gradient."""
        self.steps.add_(self._added)
        for cls in self._classes:
            cls.step += cls.added
        self._known = (self.steps._version, self._known[1])

    def _classify(self, gradients: Gradients) -> None:
        steps = self.steps[self._places].tolist()
        added = [int(rule.counts_steps and active) for rule, active in zip(self._rules, gradients.active, strict=True)]
        keys = [
            (rule.row, group, int(step) if rule.counts_steps else 0, add)
            for rule, group, step, add in zip(self._rules, self._groups, steps, added, strict=True)
        ]
        distinct = {key: index for index, key in enumerate(dict.fromkeys(keys))}
        self._classes = [_Class(*key) for key in distinct]
        self._added[self._places] = torch.tensor(added, dtype=torch.float32, device="cpu")
        self._class_of[self._places] = torch.tensor([distinct[key] for key in keys], dtype=torch.int64, device="cpu")
        self._bytes = bytearray(4 * WIDTH * len(distinct))
        self._pack = struct.Struct(f"{WIDTH * len(distinct)}f").pack_into
        self._rows = torch.frombuffer(self._bytes, dtype=torch.float32).view(-1, WIDTH)
        self._known = (self.steps._version, gradients.num_changes)


class _Class:
    """Tensors with the same settings: who makes them, from which parameter group, and the steps they have made."""

    __slots__ = ("added", "group", "make", "step")

    def __init__(self, make: Callable[[Options, int], Row], group: int, step: int, added: int):
        self.make, self.group, self.step, self.added = make, group, step, added


class Upload:
    """A small device buffer that the host refills every step, without waiting for the device and without racing it.

    The host fills one of a few pinned slots (`slot()`), and `send()` copies it to `device` (uint8 [nbytes]), whose
    address never changes. An event behind the copy says when the slot is free again. `receive()` brings `back` (int64
    [num_back] on the device) to `received` on the CPU.
    """

    def __init__(self, nbytes: int, *, num_back: int, device: torch.device):
        self.on_cuda = device.type == "cuda"
        self.device = torch.zeros(nbytes, dtype=torch.uint8, device=device)
        self.back = torch.zeros(num_back, dtype=torch.int64, device=device)
        self.slots = [self._pinned(nbytes) for _ in range(SLOTS if self.on_cuda else 1)]
        self._received = self._pinned(8 * num_back)
        self.received = memory_of(self._received)
        self.events = [torch.cuda.Event(blocking=True) for _ in self.slots] if self.on_cuda else []
        self._next = 0

    @property
    def nbytes(self) -> int:
        return self.device.nbytes + self.back.nbytes

    def _pinned(self, nbytes: int) -> Tensor:
        return torch.zeros(nbytes, dtype=torch.uint8, pin_memory=self.on_cuda, device="cpu")

    def slot(self) -> int:
        """The slot to fill, the same until it is sent. It still holds an older step's bytes: write all that matter."""
        if self.on_cuda:
            self.events[self._next].synchronize()  # at once where it was never sent
        return self._next

    def send(self, nbytes: int | None = None) -> None:
        """The slot's bytes, or the first of them, go up on the current stream; the next slot is to be filled."""
        self.device[:nbytes].copy_(self.slots[self._next][:nbytes], non_blocking=True)
        if self.on_cuda:
            self.events[self._next].record()
        self._next = (self._next + 1) % len(self.slots)

    def receive(self, *, wait: bool = False) -> None:
        """Copies `back` to the host, where it is when this returns if that is to `wait`."""
        self._received.copy_(self.back.view(torch.uint8), non_blocking=not wait)


def memory_of(tensor: Tensor) -> memoryview:
    """The bytes of a contiguous tensor on the CPU, to read and write; keep the tensor alive meanwhile."""
    assert tensor.device.type == "cpu" and tensor.is_contiguous()
    if not tensor.numel():
        return memoryview(bytearray())
    return memoryview((ctypes.c_char * tensor.nbytes).from_address(tensor.data_ptr())).cast("B")
