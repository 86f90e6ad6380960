"""Plans the sums of shared v and Adafactor along lines and columns: buffers, programs, jobs. Needs no Triton.

A matrix is seen as it lies in memory: lines, and positions in a line, called columns. Each program stores its partial
sums at an offset of its own, and a job adds them up in order, so that results do not depend on the order of programs.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from baoc.kernels.triton.kinds import GROUP, PACKED, Shape
from baoc.kernels.triton.matrix_kinds import shares_lines, stored, whole_lines
from baoc.kernels.triton.table import FusedTable

OFFSETS = 8  # columns of `offsets`
NONE, WHOLE = -1, -2  # in place of a vector's offset: no vector; none needed, as a program steps complete lines
LINES, PIECE = 32, 2048  # of `line_sums_kernel`: lines of a program, and elements of each
ROWS, COLUMNS = 512, 128  # of `column_sums_kernel`: lines that a program sums over, and its columns
JOB_LENGTH = 256  # of `finish_kernel`: means that a program finishes
# Of `lines_kernel`, whose programs sum complete lines:
TILE, LONGEST = 2048, 8192  # elements that a program holds at once, if a line is not longer; the longest line
PER_WARP, PER_WARP_CODED = 512, 256  # elements of TILE per warp; fewer where decoding m takes registers
LARGE_LINES, SMALL_LINES = 512, 128  # lines of a program, if TILE holds a line; of large tables and of others
_LARGE = 2**27  # elements of a large table, whose partial sums would take much memory over few lines
_PAD = 32  # vectors and sums begin at multiples of it


def _width(shape: Shape) -> int:
    """Length of a line, rounded up to a power of two."""
    return max(64, 1 << (stored(shape)[1] - 1).bit_length())


@dataclass(frozen=True, slots=True, kw_only=True)
class Programs:
    """Assignment of a launch's programs to tensors (or jobs)."""

    owner: Tensor  # int32 [count]: tensor of each program
    first: Tensor  # int32 [tensors]: first program of each tensor
    count: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Jobs:
    """Means to finish from partial sums.

    `rows` is int64 [jobs, 8]: tensor, offset of its sums, partial sums of each mean, number of means, offset of its
    vector, elements of each mean, column of the state's address, first tile.
    """

    rows: Tensor
    programs: Programs


class Plan:
    """Programs and buffers of one table. The buffers are the table's (`FusedTable.buffer`) and counted in its bytes.

    `offsets` is int64 [tensors, 8]: offsets of the vectors by line and by column, offsets of the sums by line and by
    column, first tile and number of tiles by line, and the same by column.
    """

    def __init__(self, table: FusedTable):
        self._table, self._rule, self._device = table, table.kind.rule, table.device
        self.adafactor, self.norm = self._rule.startswith("adafactor"), self._rule == "column_norm"
        coded = table.kind.traits.has_m and table.kind.m not in ("fp32", "bf16")
        self.per_warp = PER_WARP_CODED if coded else PER_WARP
        self._is_large = sum(shape.numel for shape in table.shapes) >= _LARGE
        self._vectors = self._sums = self._tiles = 0
        self._offsets = [[NONE, NONE, 0, 0, 0, 0, 0, 0] for _ in table.shapes]
        line_jobs: list[list[int]] = []
        column_jobs: list[list[int]] = []
        for index, shape in enumerate(table.shapes):
            self._add(index, shape, line_jobs, column_jobs)
        whole = {offsets[0] == WHOLE for offsets in self._offsets}
        self.kinds = "both" if len(whole) > 1 else "lines" if True in whole else "parts"  # what programs step
        self.line_sums = self._programs([self._num_line_programs(s) for s in table.shapes])
        self.column_sums = self._programs([self._num_column_programs(s) for s in table.shapes])
        self.both_sums = self._both_programs() if self.adafactor else {}
        self.line_jobs, self.column_jobs = self._jobs(line_jobs), self._jobs(column_jobs)
        self._allocate()
        del self._table  # which holds the plan

    # -- layout of sums and vectors -------------------------------------------------------------------------------

    def _summed_axes(self, shape: Shape) -> tuple[bool, bool]:
        """Whether the rule needs means by line, and by column."""
        if self.adafactor:
            return True, True
        lines = shares_lines(self._rule, shape)
        return lines, not lines

    def _sums_both(self, shape: Shape) -> bool:
        """True if one kernel (`lines_kernel`) sums by line and by column."""
        return self.adafactor and stored(shape)[1] <= LONGEST

    def lines_per_program(self, width: int) -> int:
        """Lines of up to `width` elements that a program of `lines_kernel` sums: fewer of long lines."""
        lines = LARGE_LINES if self._is_large else SMALL_LINES
        return max(lines * TILE // max(width, TILE), 64)

    def _num_line_programs(self, shape: Shape) -> int:
        if not self._summed_axes(shape)[0] or self._sums_both(shape) or whole_lines(self._rule, shape):
            return 0
        lines, length = stored(shape)
        return -(-lines // LINES) * -(-length // PIECE)

    def _num_column_programs(self, shape: Shape) -> int:
        if not self._summed_axes(shape)[1] or self._sums_both(shape):
            return 0
        lines, length = stored(shape)
        return -(-lines // ROWS) * -(-length // COLUMNS)

    def _add(self, index: int, shape: Shape, line_jobs: list[list[int]], column_jobs: list[list[int]]) -> None:
        """Reserves a tensor's vectors and sums, and appends its jobs."""
        lines, length = stored(shape)
        offsets, (by_line, by_column) = self._offsets[index], self._summed_axes(shape)
        line_column, column_column = (4, 3) if self.adafactor and shape.transposed else (3, 4 if self.adafactor else 3)
        if whole_lines(self._rule, shape):
            offsets[0] = WHOLE
        elif by_line:
            parts = 0 if self._sums_both(shape) else -(-length // PIECE)
            tiles = -(-lines // (self.lines_per_program(_width(shape)) if self._sums_both(shape) else JOB_LENGTH))
            offsets[0], offsets[2], offsets[4], offsets[5] = self._reserve(lines, parts, tiles)
            if parts:
                line_jobs.append([index, offsets[2], parts, lines, offsets[0], length, line_column, offsets[4]])
        if by_column:
            parts = -(-lines // (self.lines_per_program(_width(shape)) if self._sums_both(shape) else ROWS))
            tiles = -(-length // JOB_LENGTH)
            offsets[1], offsets[3], offsets[6], offsets[7] = self._reserve(length, parts, tiles)
            column_jobs.append([index, offsets[3], parts, length, offsets[1], lines, column_column, offsets[6]])

    def _reserve(self, length: int, parts: int, tiles: int) -> tuple[int, int, int, int]:
        """Reserves a vector, its partial sums and its tiles. Returns the offset of each, and the number of tiles."""
        vector, sums, tile = self._vectors, self._sums, self._tiles
        self._vectors += -(-length // _PAD) * _PAD
        self._sums += -(-length * parts // _PAD) * _PAD
        self._tiles += tiles
        return vector, sums, tile, tiles

    # -- programs -------------------------------------------------------------------------------------------------

    def _programs(self, counts: Sequence[int]) -> Programs:
        wanted = torch.tensor(list(counts), dtype=torch.int64, device="cpu")
        first = torch.cumsum(wanted, 0) - wanted
        owner = torch.repeat_interleave(torch.arange(len(wanted), dtype=torch.int32, device="cpu"), wanted)
        return Programs(owner=self._buffer(owner), first=self._buffer(first.to(torch.int32)), count=len(owner))

    def _both_programs(self) -> dict[tuple[int, bool, bool], Programs]:
        """Programs of `lines_kernel`, by what it is compiled for: width of lines, whether they are aligned, and whether
        they are complete groups of an 8-bit m."""
        shapes, vector, kind = self._table.shapes, self._table.config.vector, self._table.kind
        grouped = kind.traits.has_m and kind.m not in ("fp32", "bf16", *PACKED)
        keys = [
            (_width(shape), length % vector == 0, grouped and length % GROUP == 0) if self._sums_both(shape) else None
            for shape, length in ((shape, stored(shape)[1]) for shape in shapes)
        ]
        counts = [-(-stored(shape)[0] // self.lines_per_program(_width(shape))) for shape in shapes]
        return {
            key: self._programs([count if own == key else 0 for own, count in zip(keys, counts, strict=True)])
            for key in dict.fromkeys(keys)
            if key is not None
        }

    def _jobs(self, rows: list[list[int]]) -> Jobs:
        programs = self._programs([-(-row[3] // JOB_LENGTH) for row in rows])
        table = torch.tensor(rows or [[0] * 8], dtype=torch.int64, device="cpu")
        return Jobs(rows=self._buffer(table), programs=programs)

    # -- buffers --------------------------------------------------------------------------------------------------

    def _buffer(self, tensor: Tensor) -> Tensor:
        """Makes the tensor a buffer of the table, on its device."""
        return self._table.buffer(f"plan {len(self._table._buffers)}", lambda: tensor.to(self._device))

    def _zeros(self, *shape: int, dtype: torch.dtype = torch.float32) -> Tensor:
        return self._buffer(torch.zeros(shape, dtype=dtype, device=self._device))

    def _allocate(self) -> None:
        self.offsets = self._buffer(torch.tensor(self._offsets, dtype=torch.int64, device="cpu"))
        self.vectors = self._zeros(max(self._vectors, 1))  # factors of the update by line and by column
        self.sums = self._zeros(max(self._sums, 1))  # partial sums of g^2
        self.counts = self._zeros(max(self._sums, 1), dtype=torch.int16)  # skipped elements of each
        # Partial sums of squared updates, which are divided by the root of the line's average only.
        self.squares = self._zeros(max(self._sums, 1) if self.adafactor else 1)
        self.tiles = self._zeros(max(self._tiles, 1), 3)  # sums of averages, of squared updates, of elements
        self.scales = self._zeros(len(self._offsets))  # Adafactor's factor of a tensor's update


def plan_of(table: FusedTable) -> Plan:
    if not table.plans:
        table.plans[None] = Plan(table)
    return table.plans[None]
