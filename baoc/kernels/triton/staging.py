"""The host's part of a step: gradient addresses and settings of each tensor, and their upload to the device.

Few rows of settings serve all tensors (parameter group x rule x step count), so a step computes those and copies them
to the tensors. Per tensor it reads the gradient's address and nothing else, as long as gradients stay where they were.
"""

import ctypes
import struct
import time
import weakref
from array import array
from collections import deque
from collections.abc import Callable, Hashable, Sequence
from contextlib import suppress
from functools import partial, reduce
from itertools import chain
from operator import attrgetter, or_
from typing import Any, NamedTuple

import torch
from torch import Tensor

from baoc.kernels.cpp.grad_addresses import grad_addresses
from baoc.kernels.triton.kinds import WIDTH, Options, Row
from baoc.kernels.triton.table import FusedTable, KeptLaunches, start

SLOTS = 3  # uploads that the host may be ahead of the device before it waits
PATIENCE_S, _POLL_S = 0.1, 5e-5  # of such a wait: until it asks whether the device failed, and between looks
MOST_LAYOUTS = 16  # sets of gradient addresses whose properties are cached
_DTYPES = (torch.float32, torch.bfloat16, torch.float16)  # of gradients that kernels read
_ALIGNMENT_MASK = 31  # low bits of an address that are 0 if it is aligned for every launch config
_FEW = 16  # so few gradients have dtype and strides checked at every step
_get_grad: Callable[[Tensor], Any] = attrgetter("grad")
_get_dtype: Callable[[Any], torch.dtype] = attrgetter("dtype")
# Called through the class, which is a third faster than the lookup in each tensor.
_data_ptr, _is_contiguous = Tensor.data_ptr, Tensor.is_contiguous

Variant = tuple[tuple[torch.dtype, bool], ...]  # dtype of the gradients that each table reads, and if they are aligned


class _Layout(NamedTuple):
    """Properties of gradients at certain addresses."""

    addresses: array
    active: list[bool]
    dtypes: list[torch.dtype]
    read_dtypes: list[torch.dtype]
    variant: Variant


class Gradients:
    """Addresses of the gradients of all tables, and what launches depend on: dtype, alignment, who has one.

    A launch reads contiguous gradients of one dtype. A table whose gradients differ reads fp32; those of another dtype
    and strided ones (`copied`) are read from copies. Dtypes and strides are checked when a set of addresses is new,
    because gradients of many parameters mostly reuse earlier addresses; of up to `_FEW` gradients they are checked in
    every step.

    Args:
        starts: index of each table's first tensor in arrays over all tensors, and the length of these arrays.
    """

    def __init__(self, tables: Sequence[FusedTable], *, starts: Sequence[int]):
        self.tables = tables
        self.params = [param for table in tables for param in table.params]
        self.places = [
            start + i for start, table in zip(starts, tables, strict=False) for i in range(len(table.params))
        ]
        self.addresses = array("q", bytes(8 * starts[-1]))
        self.version = 0  # counts changes of `addresses`
        self.active = [False] * len(self.params)  # True for parameters with a gradient
        self.num_changes = 0  # of `active`
        self.variant: Variant = ()
        self.variant_number = 0  # equal for equal variants
        self.copied: list[int] = []  # parameters whose gradients are read from copies
        self.layouts: dict[Hashable, _Layout] = {}
        self._variant_numbers: dict[Variant, int] = {}
        self._starts = starts
        self._table_of = [table for table in tables for _ in table.params]
        self._dtypes = [table.grad_dtype for table in self._table_of]
        self._read_dtypes = list(self._dtypes)  # which the launch of each parameter reads
        self._last = array("q")  # addresses at the last refresh, in order of `params`, -1 without a gradient
        self._reader = grad_addresses(self.params) if len(self.params) > _FEW else None
        self._layout: _Layout | None = None  # the present one, if it is cached
        self._copies: list[Tensor] = []

    def refresh(self) -> None:
        """Reads the addresses of all gradients. A sparse one has no address: torch raises."""
        reader = self._reader
        if reader is not None and reader.read():
            if reader.addresses != self._last:
                addresses = reader.addresses[:]  # the next read overwrites it
                self._recall_or_inspect(addresses, key=addresses.tobytes())
                self._last = addresses
        else:
            grads = list(map(_get_grad, self.params))
            addresses = _addresses(grads)
            self._recall_or_inspect(addresses, key=(addresses.tobytes(), *map(_dtype_and_contiguity, grads)))
            self._last = addresses
        if self.copied:
            self._copy()

    def _recall_or_inspect(self, addresses: array, *, key: Hashable) -> None:
        """Takes the gradients' properties from the cache, or inspects and caches them."""
        current, layout = self._layout, self.layouts.get(key)
        if layout is not None and layout is current:
            return
        self._layout = layout
        if layout is None:
            self._inspect(addresses.tolist(), list(map(_get_grad, self.params)))
            if not self.copied:
                if len(self.layouts) >= MOST_LAYOUTS:
                    self.layouts.clear()
                layout = _Layout(self.addresses, self.active, self._dtypes, self._read_dtypes, self.variant)
                self.layouts[key] = self._layout = layout
            return
        self.copied = []
        self._dtypes, self._read_dtypes = layout.dtypes, layout.read_dtypes
        self.addresses = layout.addresses
        self.version += 1
        self._set_variant(layout.variant)
        self._set_active(layout.active)
        for table, (dtype, aligned) in zip(self.tables, layout.variant, strict=True):
            table.grad_dtype, table.grads_aligned = dtype, aligned

    def _inspect(self, addresses: list[int], grads: Sequence[Tensor | None]) -> None:
        """Finds dtypes, strides and missing gradients at new addresses."""
        complete = -1 not in addresses
        dtypes = list(map(_get_dtype, grads)) if complete else list(map(_dtype_or, grads, self._dtypes))
        if dtypes != self._dtypes:
            self._set_table_dtypes(grads)
            self._dtypes = dtypes
            self._read_dtypes = [table.grad_dtype for table in self._table_of]
        if complete and dtypes == self._read_dtypes and all(map(_is_contiguous, grads)):
            self.copied = []
        else:
            self.copied = [
                index
                for index, (grad, dtype, read) in enumerate(zip(grads, dtypes, self._read_dtypes, strict=True))
                if grad is not None and (dtype is not read or not grad.is_contiguous())
            ]
        self._set_active([True] * len(addresses) if complete else [address >= 0 for address in addresses])
        self._set_addresses(addresses if complete else [max(address, 0) for address in addresses])

    def _set_active(self, active: list[bool]) -> None:
        if active != self.active:
            self.active = active
            self.num_changes += 1

    def _set_variant(self, variant: Variant) -> None:
        self.variant = variant
        self.variant_number = self._variant_numbers.setdefault(variant, len(self._variant_numbers))

    def _set_table_dtypes(self, grads: Sequence[Tensor | None]) -> None:
        """Gives each table the dtype of its gradients, fp32 if they differ."""
        begin = 0
        for table in self.tables:
            own = grads[begin : begin + len(table.params)]
            begin += len(own)
            dtypes = {grad.dtype for grad in own if grad is not None} or {table.grad_dtype}
            dtype = dtypes.pop()
            table.grad_dtype = torch.float32 if dtypes or dtype not in _DTYPES else dtype

    def _set_addresses(self, addresses: list[int]) -> None:
        """Stores the addresses, given in order of `params`, at the tensors' places, and notes their alignment."""
        all_aligned = not reduce(or_, addresses, 0) & _ALIGNMENT_MASK
        placed = array("q", bytes(8 * self._starts[-1]))
        first = 0
        for table, begin in zip(self.tables, self._starts, strict=False):
            own = addresses[first : first + len(table.params)]
            first += len(own)
            placed[begin : begin + len(own)] = array("q", own)
            size = table.grad_dtype.itemsize
            table.grads_aligned = all_aligned or all(table.is_aligned(address, size) for address in own)
        self._set_variant(tuple((table.grad_dtype, table.grads_aligned) for table in self.tables))
        if placed != self.addresses or not self.version:
            self.addresses = placed  # a new object, because cached layouts keep the old ones
            self.version += 1

    def _copy(self) -> None:
        """Copies the gradients that no launch can read in place, anew in every step."""
        addresses, self._copies = [max(address, 0) for address in self._last], []
        for index in self.copied:
            grad = self.params[index].grad
            assert grad is not None
            self._copies.append(grad.to(self._table_of[index].grad_dtype).contiguous())
            addresses[index] = self._copies[-1].data_ptr()
        self._set_addresses(addresses)


def _addresses(grads: Sequence[Tensor | None]) -> array:
    """Address of each gradient, -1 where there is none."""
    try:
        return array("q", map(_data_ptr, grads))
    except TypeError:  # some are None
        return array("q", [-1 if grad is None else grad.data_ptr() for grad in grads])


def _dtype_or(grad: Tensor | None, default: torch.dtype) -> torch.dtype:
    return default if grad is None else grad.dtype


def _dtype_and_contiguity(grad: Tensor | None) -> tuple[torch.dtype, bool] | None:
    return None if grad is None else (grad.dtype, grad.is_contiguous())


class Settings:
    """Settings of all tensors in one step, and the count of each tensor's steps.

    Tensors with equal settings form a class (`_Class`); a step computes one row of settings for each class. Others may
    write to `steps` (fp32 [tensors], CPU), through views too: its version counter shows that.
    """

    def __init__(self, tables: Sequence[FusedTable], *, places: Sequence[int], size: int):
        self.steps = torch.zeros(size, dtype=torch.float32, device="cpu")
        self._places = torch.tensor(places, dtype=torch.int64, device="cpu")
        self._rules = [table.kind.traits for table in tables for _ in table.params]
        self._groups = [group for table in tables for group in table.groups]
        first_steps = [step for table in tables for step in table.first_steps]
        self.steps[self._places] = torch.tensor(first_steps, dtype=torch.float32, device="cpu")
        self._increments = torch.zeros(size, dtype=torch.float32, device="cpu")  # of `steps` by a step
        self._classes: list[_Class] = []
        self._class_of = torch.zeros(size, dtype=torch.int64, device="cpu")
        self._classified = (-1, -1)  # versions of `steps` and of `Gradients.active` that the classes are of

    def fill(self, options: Sequence[Options], *, gradients: Gradients, out: Tensor) -> None:
        """Writes the settings of the coming step to `out`, fp32 [tensors, WIDTH] on the CPU."""
        if self._classified != (self.steps._version, gradients.num_changes):
            self._classify(gradients)
        rows = [cls.row(options[cls.group], cls.step + 1) for cls in self._classes]
        self._pack_rows(self._row_bytes, 0, *chain.from_iterable(rows))
        torch.index_select(self._rows, 0, self._class_of, out=out)

    def advance(self) -> None:
        """Counts a step of each tensor that has a gradient, if its rule counts steps."""
        self.steps.add_(self._increments)
        for cls in self._classes:
            cls.step += cls.increment
        self._classified = (self.steps._version, self._classified[1])

    def _classify(self, gradients: Gradients) -> None:
        """Groups tensors by rule, parameter group, step count, and whether they count the coming step."""
        steps = self.steps[self._places].tolist()
        increments = [
            int(rule.counts_steps and active) for rule, active in zip(self._rules, gradients.active, strict=True)
        ]
        keys = [
            (rule.row, group, int(step) if rule.counts_steps else 0, increment)
            for rule, group, step, increment in zip(self._rules, self._groups, steps, increments, strict=True)
        ]
        distinct = {key: index for index, key in enumerate(dict.fromkeys(keys))}
        self._classes = [_Class(*key) for key in distinct]
        self._increments[self._places] = torch.tensor(increments, dtype=torch.float32, device="cpu")
        self._class_of[self._places] = torch.tensor([distinct[key] for key in keys], dtype=torch.int64, device="cpu")
        self._row_bytes = bytearray(4 * WIDTH * len(distinct))
        self._pack_rows = struct.Struct(f"{WIDTH * len(distinct)}f").pack_into
        self._rows = torch.frombuffer(self._row_bytes, dtype=torch.float32).view(-1, WIDTH)
        self._classified = (self.steps._version, gradients.num_changes)


class _Class:
    """Tensors with equal settings: the rule's function, the parameter group, the steps so far and what a step adds."""

    __slots__ = ("group", "increment", "row", "step")

    def __init__(self, row: Callable[[Options, int], Row], group: int, step: int, increment: int):
        self.row, self.group, self.step, self.increment = row, group, step, increment


class Upload:
    """A small device buffer that the host refills every step, without waiting for the device or racing with it.

    `slot()` names one of SLOTS pinned slots for the host to fill, and `send()` copies it to `device` (uint8 [nbytes]),
    whose address never changes. `receive()` copies `back` (int64 [num_back] on the device) to `received` on the CPU.

    Kernels move both, because a copy of torch takes the host 10 us, as recording an event does, and a kernel in a CUDA
    graph nearly nothing. `copy_up` and `receive` are what a graph may hold: the device counts the uploads itself, so
    that one graph serves all slots, and copies the count to the host, which tells by it which slots are free. Before a
    launch or replay of `copy_up`, set `sending`; after it, call `sent()`. If a launch raises in between, the
    next `slot()` sets `num_sent` to the device's count.
    """

    def __init__(self, nbytes: int, *, num_back: int, device: torch.device):
        assert nbytes % 8 == 0, "kernels copy words of 8 bytes"
        _free_retired()
        self.device = torch.zeros(nbytes, dtype=torch.uint8, device=device)
        self.back = torch.zeros(num_back, dtype=torch.int64, device=device)
        self._num_copied = torch.zeros(1, dtype=torch.int64, device=device)  # uploads, as the device counts them
        pinned = partial(torch.zeros, dtype=torch.uint8, pin_memory=device.type == "cuda", device="cpu")
        self._slots = pinned(SLOTS, -(-nbytes // 16) * 16)
        self.slots = [slot[:nbytes] for slot in self._slots]
        self._received, self._pinned_count = pinned(8 * num_back), pinned(8)
        self.received = memory_of(self._received)
        self._launches = KeptLaunches()
        self.num_copied_host = memory_of(self._pinned_count).cast("q")  # [1]: follows `_num_copied` asynchronously
        self.num_sent = 0
        self.sending = False
        memory = (self._slots, self._received, self._pinned_count)
        weakref.finalize(self, RETIRED.append, (device, memory)).atexit = False

    def slot(self) -> int:
        """Index of the slot to fill, the same until it is sent. The slot still has the bytes of an older step."""
        if self.sending:
            self._resync_count()
        elif self.num_sent - self.num_copied_host[0] >= SLOTS:
            self._wait()
        return self.num_sent % SLOTS

    def _wait(self) -> None:
        """Waits until the device has copied the oldest slot. Raises torch's error if the device failed."""
        deadline = time.monotonic() + PATIENCE_S
        while self.num_sent - self.num_copied_host[0] >= SLOTS:
            time.sleep(_POLL_S)
            # The query raises if the device failed. If the stream is idle, the copy is on another or was not launched.
            if time.monotonic() > deadline and torch.cuda.current_stream(self.device.device).query():
                return self._resync_count()

    def _resync_count(self) -> None:
        """Waits for the device and sets `num_sent` to its count."""
        if self.device.is_cuda:
            torch.cuda.synchronize(self.device.device)
        self.num_sent, self.sending = self.num_copied_host[0], False

    def send(self, nbytes: int | None = None) -> None:
        """Copies the slot, or its first `nbytes`, to the device on the current stream, and moves to the next slot."""
        self.sending = True
        self.copy_up(nbytes)
        self.sent()

    def copy_up(self, nbytes: int | None = None) -> None:
        """Launches the copy of the next slot to the device: the one after that of the last launch or replay."""
        from baoc.kernels.triton.copies import COPY_BLOCK_SIZE, copy_slot_kernel

        words = (self.device.nbytes if nbytes is None else nbytes) // 8

        def start_copy() -> None:
            slots, uploaded = self._slots.view(torch.int64), self.device.view(torch.int64)
            start(
                copy_slot_kernel, (1,), slots, uploaded, self._num_copied, self._pinned_count.view(torch.int64),
                words, slots.shape[1], SLOTS, COPY_BLOCK_SIZE,
            )  # fmt: skip

        self._launches.run(("up", words), start_copy)

    def sent(self) -> None:
        """Moves to the next slot, as the last one is on its way."""
        self.num_sent += 1
        self.sending = False

    def receive(self, *, wait: bool = False) -> None:
        """Copies `back` to the host: asynchronously, or before this returns with `wait`."""
        from baoc.kernels.triton.copies import COPY_BLOCK_SIZE, copy_kernel

        received = self._received.view(torch.int64)
        if wait:
            received.copy_(self.back)
        else:
            self._launches.run(
                "back", lambda: start(copy_kernel, (1,), self.back, received, len(received), COPY_BLOCK_SIZE)
            )


# Pinned memory of collected uploads, by device. A kernel, of which torch knows nothing, may still read or write it, so
# torch must not give it to others yet. The device is not asked when an upload is collected: that may be in any thread,
# while another one captures a graph, which a synchronization would spoil.
RETIRED: deque[tuple[torch.device, tuple[Tensor, ...]]] = deque()


def _free_retired() -> None:
    """Gives back the pinned memory of collected uploads, after their devices have done what they had to do."""
    retired: list[tuple[torch.device, tuple[Tensor, ...]]] = []
    with suppress(IndexError):
        while True:
            retired.append(RETIRED.popleft())
    for device in {device for device, _ in retired if device.type == "cuda"}:
        if torch.cuda.is_current_stream_capturing():
            RETIRED.extend(retired)
            return
        with suppress(RuntimeError):  # the device failed: it reads nothing any more
            torch.cuda.synchronize(device)


def memory_of(tensor: Tensor) -> memoryview:
    """A writable view of the bytes of a contiguous CPU tensor, which the caller has to keep alive."""
    assert tensor.device.type == "cpu" and tensor.is_contiguous()
    if not tensor.numel():
        return memoryview(bytearray())
    return memoryview((ctypes.c_char * tensor.nbytes).from_address(tensor.data_ptr())).cast("B")
