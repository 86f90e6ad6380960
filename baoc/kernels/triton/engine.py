"""Steps several tables at once: one upload, one launch per table, matching on the device, all in one CUDA graph.

The launch path of a fused step, in order:

1. `FusedBackend` groups tensors into tables: one `FusedTable` per rule, codecs, weights and type (`kinds.Kind`). An
   `Engine` holds all tables of a device and lays their rows of addresses and settings side by side in one buffer.
2. `Engine.stage` (host): `Gradients.refresh` reads the address of each gradient; `Settings.fill` computes one row of
   settings per parameter group, rule and step count, and spreads it over the tensors. Both go up through a pinned slot
   of the `Upload`. Nothing waits for the device, unless it is more than `SLOTS` steps behind.
3. `Engine.run` (device): each table is one launch of its family's kernel, whose programs find their tensor by
   `chunk_tensor` and read addresses, settings and thresholds from the buffer; for matched blocks `match_kernel`
   computes what a second, small launch (`repair`) takes off where the factor of this step was too large. Ranks that
   have parts of the tensors add their sums up before it (`all_reduce_sums`).
4. All of that takes what it needs from buffers that never move, so it is captured in a CUDA graph when a variant
   (types of gradients, matched, marked) has run once, and replayed from then on (`Graphs`). Memory for the step alone
   (Muon's matrix products) is taken before, and where it lies belongs to the variant.
5. Non-finite elements are left out by the kernels themselves and counted; the host reads the counts as they arrive.
"""

import ctypes
import gc
import logging
import struct
from collections.abc import Callable, Hashable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from importlib import import_module
from itertools import accumulate, pairwise
from pathlib import Path
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from baoc.cache import ensure_private_folder
from baoc.kernels.triton.kinds import NUM_THRESHOLDS, Call, Options
from baoc.kernels.triton.staging import Gradients, Settings, Upload, memory_of
from baoc.kernels.triton.table import WIDTH, FusedTable

if TYPE_CHECKING:
    from baoc.kernels.triton.matching import Marks

log = logging.getLogger(__name__)
MOST_GRAPHS = 24  # variants kept: gradients that wander between layouts are launched plainly
_TRIES = 3  # captures that may fail before steps are launched plainly for good
_PAD = 4  # tensors: slices of a table begin at multiples of 16 bytes, so that kernels are compiled once
_NUM_SHARED = NUM_THRESHOLDS + 4  # numbers for all tensors: lanes, the phase (and padding)
_PER_PHASE = 0x85EBCA77  # as baoc.optim.weights
_SUM_LANES, _MATCH_LANES = 1024, 64


class Engine:
    """The buffers that tables share and the order of launches. All tables are on one device.

    A step is `stage` (the host's part) and `run` (the device's). `mark` comes before both where gradients are looked at
    first. `num_nonfinite_host` follows `num_nonfinite` without anyone waiting: what it says may be some steps old.
    """

    def __init__(self, tables: Sequence[FusedTable], *, graphs: bool = True):
        from triton import knobs  # as late as the kernels, for it takes half a second and is not everywhere

        ensure_private_folder("TRITON_CACHE_DIR", Path(knobs.cache.dir))
        self.tables = list(tables)
        self.device = self.tables[0].device
        self._begins = _padded_ends(len(table.params) for table in self.tables)
        self.size = self._begins[-1]
        self.gradients = Gradients(self.tables, begins=self._begins)
        self.places = self.gradients.places
        self.settings = Settings(self.tables, places=self.places, size=self.size)
        self._needs_thresholds = any(table.needs_thresholds for table in self.tables)
        self.graphs = Graphs(self.device, on=graphs)
        self._workspace_tables = [table for table in self.tables if table.kind.family.takes_workspace]
        self._allocate()
        self._lay_out_blocks()
        self._bind()
        self._marks: Marks | None = None  # made when gradients are first marked
        # Set where tensors are sharded: all-reduces `sums` and `num_skipped`. Every rank calls it equally often.
        self.all_reduce_sums: Callable[[], None] | None = None

    # -- buffers --------------------------------------------------------------------------------------------------

    def _allocate(self) -> None:
        size, device = self.size, self.device
        self._upload = Upload(size * (8 + 4 * WIDTH) + 4 * _NUM_SHARED, num_back=size, device=device)
        bytes_ = self._upload.device
        self.grad_ptrs = bytes_[: size * 8].view(torch.int64)
        self._settings = bytes_[size * 8 : size * (8 + 4 * WIDTH)].view(torch.float32).view(size, WIDTH)
        self._thresholds = bytes_[size * (8 + 4 * WIDTH) :].view(torch.float32)
        self._staging = [self._views(slot) for slot in self._upload.slots]
        self._held = [-1] * len(self._staging)  # which addresses a slot holds, as `Gradients.version` says
        self._on_device = -1  # and which the device holds
        self.ptrs = self._spread([row for table in self.tables for row in table.addresses], width=WIDTH)
        shapes = [shape for table in self.tables for shape in table.shapes]
        self._shapes = self._spread([[s.numel, s.rows, s.cols, int(s.transposed)] for s in shapes], width=4)
        self.numels = self._shapes[:, 0].contiguous()
        self.unsharded_numels = self.numels  # those that `sums` are over
        self.repair = torch.zeros(size, dtype=torch.float32, device=device)
        self.sums = torch.zeros(size, dtype=torch.float32, device=device)
        self.num_skipped = torch.zeros(size, dtype=torch.int32, device=device)
        self.num_nonfinite, self.num_nonfinite_host = self._upload.back, self._upload.received
        self._programs = _padded_ends(table.num_chunks for table in self.tables)
        self.partial = torch.zeros(max(self._programs[-1], 1), dtype=torch.float32, device=device)

    def _spread(self, rows: list[list[int]], *, width: int) -> Tensor:
        """One row per tensor -> int64 [size, width] on the device, each row at its tensor's place."""
        spread = torch.zeros(self.size, width, dtype=torch.int64, device="cpu")
        spread[self.places] = torch.tensor(rows, dtype=torch.int64, device="cpu")
        return spread.to(self.device)

    def _views(self, slot: Tensor) -> tuple[memoryview, Tensor, memoryview]:
        """Addresses (int64), settings (fp32 [tensors, 8]) and what all share (fp32) in a slot of the upload."""
        memory, addresses, settings = memory_of(slot), self.size * 8, self.size * 4 * WIDTH
        return (
            memory[:addresses].cast("q"),
            slot[addresses : addresses + settings].view(torch.float32).view(self.size, WIDTH),
            memory[addresses + settings :].cast("f"),
        )

    def _lay_out_blocks(self) -> None:
        """Programs of each tensor, and matched blocks: the tensors that share a match, in whatever tables."""
        blocks: dict[int, list[int]] = {}
        spans: list[list[int]] = []
        self.matches: dict[int, Tensor] = {}
        for table, begin, program in zip(self.tables, self._begins, self._programs, strict=False):
            spans += [[program + first, program + last] for first, last in pairwise(table.firsts)]
            for index, match in enumerate(table.matches):
                if match is not None:
                    self.matches[id(match)] = match
                    blocks.setdefault(id(match), []).append(begin + index)
        self._spans = self._spread(spans, width=2).to(torch.int32)
        members = [place for places in blocks.values() for place in places] or [0]
        self._members = torch.tensor(members, dtype=torch.int32, device="cpu").to(self.device)
        ends = list(accumulate((len(places) for places in blocks.values()), initial=0))
        self._blocks = torch.tensor(ends, dtype=torch.int32, device="cpu").to(self.device)

    def _bind(self) -> None:
        for table, begin, program in zip(self.tables, self._begins, self._programs, strict=False):
            end = begin + len(table.params)
            table.ptrs, table.numels = self.ptrs[begin:end], self.numels[begin:end]
            table.shape_tensor, table.grad_ptrs = self._shapes[begin:end], self.grad_ptrs[begin:end]
            table.settings, table.thresholds = self._settings[begin:end], self._thresholds
            table.repair, table.num_skipped = self.repair[begin:end], self.num_skipped[begin:end]
            table.num_nonfinite, table.steps = self.num_nonfinite[begin:end], self.settings.steps[begin:end]
            table.partial = self.partial[program : program + max(table.num_chunks, 1)]

    @property
    def nbytes(self) -> int:
        """Device bytes held beyond the optimizer's state, the tables' own included."""
        own = (self.ptrs, self._shapes, self.numels, self.repair, self.sums, self.num_skipped)
        more = (self.partial, self._spans, self._blocks, self._members)
        total = self._upload.nbytes + sum(t.numel() * t.element_size() for t in (*own, *more))
        return total + sum(table.nbytes for table in self.tables) + (self._marks.nbytes if self._marks else 0)

    # -- the host's part ------------------------------------------------------------------------------------------

    def stage(self, options: Sequence[Options], *, thresholds: memoryview | None = None, phase: int = 0) -> None:
        """Sends addresses and settings of the coming step, and counts it.

        `phase` is that of the step, `thresholds` what `kernel_thresholds` makes of the codecs' lanes of it.
        """
        self.gradients.refresh()
        if thresholds is None and self._needs_thresholds:
            kinds = [table.kind for table in self.tables if table.needs_thresholds]
            raise ValueError(f"{kinds[0]} rounds by thresholds: pass those of this step's phase")
        _, settings, shared = self._staging[self._place()]
        self.settings.fill(options, gradients=self.gradients, out=settings)
        if self._needs_thresholds and thresholds is not None:
            shared[:NUM_THRESHOLDS] = thresholds
            struct.pack_into("I", shared, 4 * NUM_THRESHOLDS, phase * _PER_PHASE % 2**32)
        self._upload.send()
        self._on_device = self.gradients.version
        self.settings.advance()

    def _place(self) -> int:
        """The slot to fill, with the addresses of the gradients in it."""
        slot = self._upload.slot()
        if self._held[slot] != self.gradients.version:
            self._staging[slot][0][:] = memoryview(self.gradients.addresses)
            self._held[slot] = self.gradients.version
        return slot

    # -- the device's part ----------------------------------------------------------------------------------------

    def run(
        self,
        *,
        matched: bool,
        marked: bool = False,
        measure: Sequence[FusedTable] = (),
        other_ranks_measure: bool = False,
    ) -> None:
        """Kernels, and what they count comes back. `measure`: tables with blocks that have no own RMS yet, which is
        found before they step; `other_ranks_measure`: so have other ranks, who share.
        """
        workspace = self._take_workspace()
        if (measure or other_ranks_measure) and matched:
            for table in measure:
                launch(table, Call(mode="measure", track=True, marked=marked))
            self._add_up()
            self._match(measure=True)
        # Room is taken anew in each step, and as a rule where it was in the last.
        lies = (0, 0) if workspace is None else (workspace.data_ptr(), workspace.numel())
        key = (self.gradients.variant_number, matched, marked, *lies)
        for number, launch_part in enumerate(self._parts(matched=matched, marked=marked)):
            if number:
                self._add_up()  # which no graph captures
            if self.graphs.on:
                self.graphs.run((number, key), launch_part)
            else:
                launch_part()
        self._upload.receive()
        for table in self._workspace_tables:
            table.workspace = None

    def _parts(self, *, matched: bool, marked: bool) -> list[Callable[[], None]]:
        """The launches of a step; in two parts where ranks add their sums up between them."""
        begin, end = (partial(part, matched=matched, marked=marked) for part in (self._step, self._finish))

        def whole() -> None:
            begin()
            end()

        return [begin, end] if matched and self.all_reduce_sums is not None else [whole]

    def _take_workspace(self) -> Tensor | None:
        """Memory for the step alone, shared by the tables that need some, which step one after the other.

        Within a cap there may be the bytes but, between gradients, no place for so many together: then tables take half
        for good, and more launches.
        """
        if not self._workspace_tables:
            return None
        families = [(table, import_module(table.kind.family.module)) for table in self._workspace_tables]
        while True:
            needs = [family.workspace_bytes(table) for table, family in families]
            try:
                workspace = torch.empty(max(needs), dtype=torch.uint8, device=self.device)
            except torch.OutOfMemoryError:
                largest = [one for one, need in zip(families, needs, strict=True) if need == max(needs)]
                if not all([family.halve_workspace(table) for table, family in largest]):
                    raise
            else:
                break
        for table in self._workspace_tables:
            table.workspace = workspace
        return workspace

    def _step(self, *, matched: bool, marked: bool) -> None:
        """Kernels one after the other: a graph of those takes the least to launch. Streams side by side would fill the
        gaps between tables, and cost more than that (30 us of a step of 800)."""
        for table in self.tables:
            on = matched and table.matches[0] is not None
            launch(table, Call(matched=on, track=on, marked=marked))

    def _finish(self, *, matched: bool, marked: bool) -> None:
        """Matches updates."""
        matching = [table for table in self.tables if matched and table.matches[0] is not None]
        if matching:
            if self.all_reduce_sums is None:
                self.sum()
            self._match(measure=False)
            for table in matching:
                launch(table, Call(mode="repair", matched=True, marked=marked))

    def sum(self) -> None:
        """Sums of squares by tensor from those by program."""
        from baoc.kernels.triton.matching import sum_kernel

        sum_kernel[(self.size,)](self.partial, self._spans, self._settings, self.sums, LANES=_SUM_LANES)

    def _add_up(self) -> None:
        self.sum()
        if self.all_reduce_sums is not None:
            self.all_reduce_sums()

    def _match(self, *, measure: bool) -> None:
        from baoc.kernels.triton.matching import match_kernel

        if not self.matches:
            return
        match_kernel[(len(self.matches),)](
            self._blocks,
            self._members,
            self.unsharded_numels,
            self.grad_ptrs,
            self.ptrs,
            self.sums,
            self.num_skipped,
            self.repair,
            MEASURE=measure,
            LANES=_MATCH_LANES,
        )

    # -- non-finite gradients -------------------------------------------------------------------------------------

    def mark(self, *, first: bool = True) -> None:
        """Non-finite elements of all gradients become -0.0, in place, and are counted; nobody waits.

        `first` False: these gradients were marked before, so their -0.0 stay.
        """
        from baoc.kernels.triton.matching import Marks, mark_strided_

        self.gradients.refresh()
        self._send_addresses()
        self._marks = self._marks or Marks(self.tables, places=self.places, size=self.size)
        self._marks.mark(self.grad_ptrs, numels=self.numels, num_nonfinite=self.num_nonfinite, first=first)
        for index in self.gradients.copied:
            grad = self.gradients.params[index].grad
            assert grad is not None
            self.num_nonfinite[self.places[index]] += mark_strided_(grad, first=first)

    def _send_addresses(self) -> None:
        """Sends the addresses that a kernel may write to, not those of copies; does nothing if the device has them."""
        copied = self.gradients.copied
        if not copied and self._on_device == self.gradients.version:
            return
        slot = self._place()
        if copied:
            for index in copied:
                self._staging[slot][0][self.places[index]] = 0
            self._held[slot] = -1
        self._on_device = self._held[slot]
        self._upload.send(8 * self.size)

    def read_num_nonfinite(self) -> None:
        """Brings `num_nonfinite_host` up to date, waiting for the device."""
        self._upload.receive(wait=True)


def _padded_ends(lengths: Iterable[int]) -> list[int]:
    """Where slices of these lengths begin, padded, and where the last one ends."""
    return list(accumulate((-(-length // _PAD) * _PAD for length in lengths), initial=0))


def launch(table: FusedTable, call: Call) -> None:
    """The launch of the table's family."""
    if table.num_chunks:
        import_module(table.kind.family.module).launch(table, call)


# -- CUDA graphs: one replay instead of a launch per kernel ------------------------------------------------------------


def capturing() -> bool:
    """True while someone captures the current stream."""
    return torch.cuda.is_initialized() and torch.cuda.is_current_stream_capturing()


class Graphs:
    """`run(key, launch)` launches plainly the first time for a key, then captures, and replays.

    What is launched must take all it needs from buffers that never move, and be the same whenever `key` is. A capture
    that fails is tried again at the next step; after some, `on` is False.
    """

    def __init__(self, device: torch.device, *, on: bool):
        self.device = device
        self.on = on and device.type == "cuda"
        self._failed = 0
        self._warm: set[Hashable] = set()
        self._graphs: dict[Hashable, torch.cuda.CUDAGraph] = {}

    def run(self, key: Hashable, launch: Callable[[], None]) -> None:
        graph = self._graphs.get(key)
        if graph is None and key in self._warm and len(self._graphs) < MOST_GRAPHS:
            graph = self.capture(launch)
            if graph is not None:
                self._graphs[key] = graph
        if graph is None:
            self._warm.add(key)
            launch()
        else:
            graph.replay()

    def capture(self, launch: Callable[[], None]) -> torch.cuda.CUDAGraph | None:
        """On a stream of its own, as capturing needs; other threads may go on using the device."""
        graph = torch.cuda.CUDAGraph()
        stream = torch.cuda.Stream(self.device)
        stream.wait_stream(torch.cuda.current_stream(self.device))
        begun = False
        try:
            with nothing_collected(), torch.cuda.stream(stream):
                _room_for_generator(self.device)
                graph.capture_begin(capture_error_mode="thread_local")
                begun = True
                try:
                    launch()
                finally:
                    graph.capture_end()
        except RuntimeError as error:
            if not begun:  # torch ends the process where a graph is destroyed whose capture could not begin: it stays
                ctypes.pythonapi.Py_IncRef(ctypes.py_object(graph))
            self.give_up(error)
            return None
        torch.cuda.current_stream(self.device).wait_stream(stream)
        return graph

    def give_up(self, error: RuntimeError) -> None:
        """Launches this step plainly, and all later ones after `_TRIES` failures."""
        self._failed += 1
        self.on = self._failed < _TRIES
        what = "is tried again" if self.on else "is launched plainly from now on"
        log.warning("the optimizer step could not be captured in a CUDA graph and %s: %s", what, error)


def _room_for_generator(device: torch.device) -> None:
    """Makes torch's allocator hold, for the current stream, what beginning a capture takes; raises OutOfMemoryError.

    The first capture gives the device's random generator a seed and an offset in device memory, of 8 bytes each. Where
    those find no memory a graph is left half registered, and to free it ends the process ("should be registered").
    """
    seed, offset = (torch.empty(1, dtype=torch.int64, device=device) for _ in range(2))
    del seed, offset


@contextmanager
def nothing_collected() -> Iterator[None]:
    """Python's collector rests: what it frees may be a CUDA graph, of an optimizer that is gone, and to free one is not
    permitted while another is captured, which ends the capture."""
    was_on = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_on:
            gc.enable()
