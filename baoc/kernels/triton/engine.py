"""Steps all tables of a device together: one upload, one kernel launch per table, one CUDA graph.

The launch path of a fused step, in the order of calls:

1. `FusedBackend` (optim/backends/fused.py), of which each device has one, sorts parameters into tables, one
   `FusedTable` per `Kind` (rule, codecs, weights format) and dtype, and builds an `Engine` of them. The engine puts the
   rows of all tables into shared device buffers, and `_bind` gives each table its slices of them.
2. `Engine.stage` prepares the step on the host. `Gradients.refresh` reads the address of each gradient. `Settings.fill`
   computes a row of settings (step size, decay, ...) for each parameter group, rule and step count, and copies it to
   the tensors that share it. Both, and the rounding thresholds, are written to a pinned slot of the `Upload`. The host
   waits only if it is more than `SLOTS` uploads ahead of the device.
3. `Engine.run` launches the kernels. `Upload.copy_up` copies the slot to the device. Then `_step` calls `launch` for
   each table, which is `launch` of `elementwise`, `matrix`, `foam` or `muon`. A program finds its tensor in
   `program_tensor`, reads the tensor's addresses and settings from its rows, and steps one chunk of it.
4. Tables whose updates are matched, that is scaled by target / RMS, are repaired. Step 3 used the RMS of the update
   before. `sum_kernel` adds up the squares of this update, `match_kernel` computes the factor that should have been
   used, and the table's kernel runs again in mode "repair": it subtracts
   size x (right factor - used factor) x update. Where tensors are sharded, `all_reduce_sums` comes before it.
5. `Upload.receive` copies counters back to the host: non-finite gradient elements, which the kernels leave out. The
   host reads them at a later step, without waiting.
6. `Graphs.run` wraps steps 3 to 5. The first step of a variant (dtypes and alignment of gradients, matched, marked,
   address of the workspace) launches each kernel, the second is captured as a CUDA graph, later ones replay that. This
   is why kernels read everything from buffers that never move.
"""

import ctypes
import gc
import logging
import struct
from collections.abc import Callable, Hashable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from importlib import import_module
from itertools import accumulate, pairwise
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

import torch
from torch import Tensor

from baoc.cache import ensure_private_folder
from baoc.kernels.triton import muon_plan
from baoc.kernels.triton.kinds import NUM_THRESHOLDS, WIDTH, Call, Options
from baoc.kernels.triton.staging import Gradients, Settings, Upload, memory_of
from baoc.kernels.triton.table import FusedTable, KeptLaunches, start

if TYPE_CHECKING:
    from baoc.kernels.triton.marks import Marks

log = logging.getLogger(__name__)
MOST_GRAPHS = 24  # captured variants; gradients that keep changing layouts are launched without a graph
_MAX_FAILED_CAPTURES = 3  # after these no more captures are tried
_PAD = 4  # tensors: slices of buffers then begin at multiples of 16 bytes, so that kernels are compiled only once
_NUM_SHARED = NUM_THRESHOLDS + 4  # fp32 numbers for all tensors: thresholds, bits of the phase, padding
_PER_PHASE = 0x85EBCA77  # as baoc.optim.weights
_SUM_BLOCK_SIZE, _MATCH_BLOCK_SIZE = 1024, 64


class _SlotViews(NamedTuple):
    """Parts of a pinned slot of the upload, as the host writes them."""

    addresses: memoryview  # int64 [tensors]
    settings: Tensor  # fp32 [tensors, WIDTH]
    thresholds: memoryview  # fp32 [_NUM_SHARED]


class Engine:
    """The buffers that the tables of one device share, and the order of their launches.

    A step is `stage` (host) and `run` (device). `mark` comes before both where gradients are clipped or reduced before
    the step. `places[i]` is the index of tensor i, counted over all tables, in the engine's arrays.
    `num_nonfinite_host` follows `num_nonfinite` asynchronously, so it may be some steps old.
    """

    def __init__(self, tables: Sequence[FusedTable], *, graphs: bool = True):
        from triton import knobs  # imported late, like the kernels: it takes half a second and is not always installed

        ensure_private_folder("TRITON_CACHE_DIR", Path(knobs.cache.dir))
        self.tables = list(tables)
        self.device = self.tables[0].device
        self._table_starts = _padded_starts(len(table.params) for table in self.tables)
        self.size = self._table_starts[-1]
        self.gradients = Gradients(self.tables, starts=self._table_starts)
        self.places = self.gradients.places
        self.settings = Settings(self.tables, places=self.places, size=self.size)
        self._needs_thresholds = any(table.needs_thresholds for table in self.tables)
        self.graphs = Graphs(self.device, on=graphs)
        self._launches = KeptLaunches()
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
        # Bytes of an upload: int64 addresses, then fp32 settings, then what all tensors share.
        self._settings_at, self._thresholds_at = 8 * size, (8 + 4 * WIDTH) * size
        self._upload = Upload(self._thresholds_at + 4 * _NUM_SHARED, num_back=size, device=device)
        uploaded = self._upload.device
        self.grad_ptrs = uploaded[: self._settings_at].view(torch.int64)
        self._settings = uploaded[self._settings_at : self._thresholds_at].view(torch.float32).view(size, WIDTH)
        self._thresholds = uploaded[self._thresholds_at :].view(torch.float32)
        self._slots = [self._slot_views(slot) for slot in self._upload.slots]
        self._staged = False  # a slot is filled and not sent yet
        self._slot_versions = [-1] * len(self._slots)  # `Gradients.version` of the addresses in each slot
        self._device_version = -1  # and on the device
        self.ptrs = self._at_places([row for table in self.tables for row in table.addresses], width=WIDTH)
        shapes = [shape for table in self.tables for shape in table.shapes]
        self._shapes = self._at_places([[s.numel, s.rows, s.cols, int(s.transposed)] for s in shapes], width=4)
        self.numels = self._shapes[:, 0].contiguous()
        self.unsharded_numels = self.numels  # the elements that `sums` are over
        self.repair = torch.zeros(size, dtype=torch.float32, device=device)
        self.sums = torch.zeros(size, dtype=torch.float32, device=device)
        self.num_skipped = torch.zeros(size, dtype=torch.int32, device=device)
        self.num_nonfinite, self.num_nonfinite_host = self._upload.back, self._upload.received
        self._program_starts = _padded_starts(table.num_programs for table in self.tables)
        self.partial = torch.zeros(max(self._program_starts[-1], 1), dtype=torch.float32, device=device)

    def _at_places(self, rows: list[list[int]], *, width: int) -> Tensor:
        """One row per tensor -> int64 [size, width] on the device, each row at its tensor's place."""
        placed = torch.zeros(self.size, width, dtype=torch.int64, device="cpu")
        placed[self.places] = torch.tensor(rows, dtype=torch.int64, device="cpu")
        return placed.to(self.device)

    def _slot_views(self, slot: Tensor) -> _SlotViews:
        memory = memory_of(slot)
        settings = slot[self._settings_at : self._thresholds_at].view(torch.float32)
        return _SlotViews(
            addresses=memory[: self._settings_at].cast("q"),
            settings=settings.view(self.size, WIDTH),
            thresholds=memory[self._thresholds_at :].cast("f"),
        )

    def _lay_out_blocks(self) -> None:
        """Range of programs of each tensor, and the tensors of each matched block, which may lie in several tables."""
        members: dict[int, list[int]] = {}  # places by the block's match
        spans: list[list[int]] = []
        self.matches: dict[int, Tensor] = {}
        for table, begin, program in zip(self.tables, self._table_starts, self._program_starts, strict=False):
            spans += [[program + first, program + last] for first, last in pairwise(table.program_starts)]
            for index, match in enumerate(table.matches):
                if match is not None:
                    self.matches[id(match)] = match
                    members.setdefault(id(match), []).append(begin + index)
        self._program_spans = self._at_places(spans, width=2).to(torch.int32)
        places = [place for block in members.values() for place in block] or [0]
        self._block_members = torch.tensor(places, dtype=torch.int32, device="cpu").to(self.device)
        starts = list(accumulate(map(len, members.values()), initial=0))
        self._block_starts = torch.tensor(starts, dtype=torch.int32, device="cpu").to(self.device)

    def _bind(self) -> None:
        """Gives each table its slices of the buffers."""
        for table, begin, program in zip(self.tables, self._table_starts, self._program_starts, strict=False):
            end = begin + len(table.params)
            table.ptrs, table.numels = self.ptrs[begin:end], self.numels[begin:end]
            table.shape_tensor, table.grad_ptrs = self._shapes[begin:end], self.grad_ptrs[begin:end]
            table.settings, table.thresholds = self._settings[begin:end], self._thresholds
            table.repair, table.num_skipped = self.repair[begin:end], self.num_skipped[begin:end]
            table.num_nonfinite, table.steps = self.num_nonfinite[begin:end], self.settings.steps[begin:end]
            table.partial = self.partial[program : program + max(table.num_programs, 1)]

    # -- the host's part ------------------------------------------------------------------------------------------

    def stage(self, options: Sequence[Options], *, thresholds: memoryview | None = None, phase: int = 0) -> None:
        """Prepares gradient addresses and settings of the coming step, which `run` sends, and counts the step.

        Args:
            options: the settings of each parameter group.
            thresholds: this step's row of `kernel_thresholds`; tables that round by thresholds need it.
            phase: the number from which stochastic rounding draws its bits, usually that of the step.
        """
        self.gradients.refresh()
        slot = self._slots[self._fill_addresses()]
        self.settings.fill(options, gradients=self.gradients, out=slot.settings)
        if self._needs_thresholds:
            assert thresholds is not None, "a table rounds by thresholds"
            slot.thresholds[:NUM_THRESHOLDS] = thresholds
            struct.pack_into("I", slot.thresholds, 4 * NUM_THRESHOLDS, phase * _PER_PHASE % 2**32)
        self._staged = True
        self.settings.advance()

    def _fill_addresses(self) -> int:
        """Writes the gradients' addresses to the next slot of the upload, unless it has them. Returns its index."""
        slot = self._upload.slot()
        if self._slot_versions[slot] != self.gradients.version:
            self._slots[slot].addresses[:] = memoryview(self.gradients.addresses)
            self._slot_versions[slot] = self.gradients.version
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
        """Sends the staged step and launches its kernels, by a graph where there is one.

        If nothing was staged since the last call, the same step is launched again.

        Args:
            matched: scale updates of matched blocks to their target RMS.
            marked: gradients have marks (`mark`), whose elements are left out.
            measure: tables with matched blocks that have had no update yet; their RMS is measured before the step.
            other_ranks_measure: another rank measures, so that this one takes part in the all-reduce.
        """
        workspace = self._take_workspace()
        if matched and (measure or other_ranks_measure):
            self.send()
            for table in measure:
                launch(table, Call(mode="measure", track=True, marked=marked))
            self._sum_over_ranks()
            self._match(measure=True)
        # The workspace is allocated anew in each step, mostly at the same address.
        address = (0, 0) if workspace is None else (workspace.data_ptr(), workspace.numel())
        # Set before the launch: if that raises, nobody knows whether the device has counted the upload.
        staged = self._upload.sending = self._staged
        variant = (staged, self.gradients.variant_number, matched, marked, *address)
        if matched and self.all_reduce_sums is not None:
            self.graphs.run((0, variant), lambda: self._step(staged=staged, matched=True, marked=marked))
            self._sum_over_ranks()  # not captured
            self.graphs.run((1, variant), lambda: self._finish(matched=True, marked=marked))
        else:
            self.graphs.run((0, variant), lambda: self._whole_step(staged=staged, matched=matched, marked=marked))
        if staged:
            self._upload.sent()
            self._was_sent()
        for table in self._workspace_tables:
            table.workspace = None

    def _take_workspace(self) -> Tensor | None:
        """Allocates the temporary memory of this step; tables that need some use it one after the other.

        Under a memory cap fragmentation may leave enough bytes but no contiguous range. Then the tables with the
        largest need halve it for good, at the price of more launches. Raises OutOfMemoryError if they cannot.
        """
        if not self._workspace_tables:
            return None
        while True:
            needs = [muon_plan.plan_of(table).workspace_bytes for table in self._workspace_tables]
            try:
                workspace = torch.empty(max(needs), dtype=torch.uint8, device=self.device)
                break
            except torch.OutOfMemoryError:
                pairs = zip(self._workspace_tables, needs, strict=True)
                if not all([muon_plan.halve_workspace(table) for table, need in pairs if need == max(needs)]):
                    raise
        for table in self._workspace_tables:
            table.workspace = workspace
        return workspace

    def send(self) -> None:
        """Copies what was staged to the device, for launches without `run`, which does it itself."""
        if self._staged:
            self._upload.send()
            self._was_sent()

    def _was_sent(self) -> None:
        self._device_version = self.gradients.version
        self._staged = False

    def _whole_step(self, *, staged: bool, matched: bool, marked: bool) -> None:
        self._step(staged=staged, matched=matched, marked=marked)
        if matched and self._matched_tables():
            self.sum_squares()
        self._finish(matched=matched, marked=marked)

    def _step(self, *, staged: bool, matched: bool, marked: bool) -> None:
        """Copies what was staged to the device and steps each table by one launch, one after the other.

        A graph of launches in sequence is the fastest to replay. Parallel streams would fill the gaps between tables
        and cost more than that: 30 us of a step of 800.
        """
        if staged:
            self._upload.copy_up()
        for table in self.tables:
            scaled = matched and table.matches[0] is not None
            launch(table, Call(matched=scaled, track=scaled, marked=marked))

    def _matched_tables(self) -> list[FusedTable]:
        return [table for table in self.tables if table.matches[0] is not None]

    def _finish(self, *, matched: bool, marked: bool) -> None:
        """Corrects matched updates that were scaled by too large a factor, where `sums` are those of this step, and
        copies the counts of non-finite elements to the host."""
        tables = self._matched_tables() if matched else []
        if tables:
            self._match(measure=False)
        for table in tables:
            launch(table, Call(mode="repair", matched=True, marked=marked))
        self._upload.receive()

    def sum_squares(self) -> None:
        """Adds up the squares of the update: from one number per program to one per tensor (`sums`)."""
        from baoc.kernels.triton.matching import sum_kernel

        self._launches.run(
            "sum",
            lambda: start(
                sum_kernel, (self.size,), self.partial, self._program_spans, self._settings, self.sums,
                BLOCK_SIZE=_SUM_BLOCK_SIZE,
            ),
        )  # fmt: skip

    def _sum_over_ranks(self) -> None:
        self.sum_squares()
        if self.all_reduce_sums is not None:
            self.all_reduce_sums()

    def _match(self, *, measure: bool) -> None:
        """Stores the RMS of each matched block; with `measure` only of blocks that have none, else `repair` too."""
        from baoc.kernels.triton.matching import match_kernel

        if not self.matches:
            return
        self._launches.run(
            ("match", measure),
            lambda: start(
                match_kernel, (len(self.matches),), self._block_starts, self._block_members, self.unsharded_numels,
                self.grad_ptrs, self.ptrs, self.sums, self.num_skipped, self.repair, MEASURE=measure,
                BLOCK_SIZE=_MATCH_BLOCK_SIZE,
            ),
            of=self.unsharded_numels,
        )  # fmt: skip

    # -- non-finite gradients -------------------------------------------------------------------------------------

    def mark(self, *, first: bool = True) -> None:
        """Sets non-finite elements of all gradients to -0.0, in place, and counts them; does not synchronize.

        `first` False: these gradients were marked before, so that a -0.0 is a mark and stays.
        """
        from baoc.kernels.triton.marks import Marks, mark_strided_

        self.gradients.refresh()
        self._send_addresses()
        self._marks = self._marks or Marks(self.tables, places=self.places, size=self.size)
        self._marks.mark(self.grad_ptrs, numels=self.numels, num_nonfinite=self.num_nonfinite, first=first)
        for index in self.gradients.copied:
            grad = self.gradients.params[index].grad
            assert grad is not None
            self.num_nonfinite[self.places[index]] += mark_strided_(grad, first=first)

    def _send_addresses(self) -> None:
        """Sends the addresses of gradients that a kernel can write in place, unless the device has them.

        A gradient that steps read from a copy counts as missing here: its copy must not be marked in its stead.
        """
        copied = self.gradients.copied
        if not copied and self._device_version == self.gradients.version:
            return
        slot = self._fill_addresses()
        if copied:
            for index in copied:
                self._slots[slot].addresses[self.places[index]] = 0
            self._slot_versions[slot] = -1
        self._device_version = self._slot_versions[slot]
        self._upload.send(8 * self.size)

    def read_num_nonfinite(self) -> None:
        """Brings `num_nonfinite_host` up to date; waits for the device."""
        self._upload.receive(wait=True)


def _padded_starts(lengths: Iterable[int]) -> list[int]:
    """Where each slice of a shared buffer begins, padded to `_PAD`, and where the last one ends."""
    return list(accumulate((-(-length // _PAD) * _PAD for length in lengths), initial=0))


def launch(table: FusedTable, call: Call) -> None:
    """Launches the kernels of the table's family: `launch` of `elementwise`, `matrix`, `foam` or `muon`."""
    if table.num_programs:
        import_module(table.kind.family.module).launch(table, call)


# -- CUDA graphs: one replay instead of a launch per kernel ------------------------------------------------------------


def capturing() -> bool:
    """True while the current stream is being captured."""
    return torch.cuda.is_initialized() and torch.cuda.is_current_stream_capturing()


class Graphs:
    """CUDA graphs by key: `run` launches the kernels at a key's first call, captures them at its second, then replays.

    Launches must read only buffers that never move, and be the same whenever `key` is. A capture that fails is tried
    again at the next step; after `_MAX_FAILED_CAPTURES` failures `on` is False.
    """

    def __init__(self, device: torch.device, *, on: bool):
        self.device = device
        self.on = on and device.type == "cuda"
        self._failed = 0
        self._launched: set[Hashable] = set()
        self._graphs: dict[Hashable, torch.cuda.CUDAGraph] = {}

    def run(self, key: Hashable, launch: Callable[[], None]) -> None:
        if not self.on:
            return launch()
        graph = self._graphs.get(key)
        if graph is None and key in self._launched and len(self._graphs) < MOST_GRAPHS:
            graph = self.capture(launch)
            if graph is not None:
                self._graphs[key] = graph
        if graph is None:
            self._launched.add(key)
            launch()
        else:
            graph.replay()

    def capture(self, launch: Callable[[], None]) -> torch.cuda.CUDAGraph | None:
        """Captures `launch` on a stream of its own; None if that fails. Other threads may go on using the device."""
        graph = torch.cuda.CUDAGraph()
        stream = torch.cuda.Stream(self.device)
        stream.wait_stream(torch.cuda.current_stream(self.device))
        begun = False
        try:
            with nothing_collected(), torch.cuda.stream(stream):
                _reserve_generator_memory(self.device)
                graph.capture_begin(capture_error_mode="thread_local")
                begun = True
                try:
                    launch()
                finally:
                    graph.capture_end()
        except RuntimeError as error:
            if not begun:  # torch aborts the process where it frees a graph whose capture did not begin: keep it alive
                ctypes.pythonapi.Py_IncRef(ctypes.py_object(graph))
            self.give_up(error)
            return None
        torch.cuda.current_stream(self.device).wait_stream(stream)
        return graph

    def give_up(self, error: RuntimeError) -> None:
        """Counts a failed capture and logs it; turns graphs off after `_MAX_FAILED_CAPTURES`."""
        self._failed += 1
        self.on = self._failed < _MAX_FAILED_CAPTURES
        what = "is tried again" if self.on else "is launched plainly from now on"
        log.warning("the optimizer step could not be captured in a CUDA graph and %s: %s", what, error)


def _reserve_generator_memory(device: torch.device) -> None:
    """Makes torch's allocator cache what the beginning of a capture allocates; raises OutOfMemoryError.

    The first capture on a device allocates a seed and an offset for its random generator, 8 bytes each. If that fails,
    torch leaves the graph half registered, and freeing it aborts the process ("should be registered").
    """
    seed, offset = (torch.empty(1, dtype=torch.int64, device=device) for _ in range(2))
    del seed, offset


@contextmanager
def nothing_collected() -> Iterator[None]:
    """Disables Python's garbage collector inside.

    It might free a CUDA graph of an optimizer that is gone, and CUDA does not permit that during a capture.
    """
    was_on = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_on:
            gc.enable()
