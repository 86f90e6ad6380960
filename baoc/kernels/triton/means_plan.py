"""Where shared v and Adafactor keep what they sum along lines and columns, and which program sums what. No Triton.

A matrix is seen as it lies in memory: lines, and positions in a line, called columns. A program's sums go to a place of
its own, and a job adds them up in order, so that results never depend on which program was first.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from baoc.kernels.triton.kinds import GROUP, PACKED, Shape
from baoc.kernels.triton.matrix_kinds import shares_lines, stored, whole_lines
from baoc.kernels.triton.table import FusedTable, cached_per_table

PLACES = 8  # columns of `places`
NONE, WHOLE = -1, -2  # in place of a vector: there is none; a program steps whole lines and needs none
LINES, PIECE = 32, 2048  # lines and elements of each that a program sums
ROWS, COLUMNS = 512, 128  # lines that it sums over, and columns
JOB_LENGTH = 256  # means that a program finishes
TILE, LONGEST = 2048, 8192  # elements that a program of whole lines holds, but at least a line; its longest line
PER_WARP, PER_WARP_CODED = 512, 256  # elements of it by warp; fewer where m takes registers to decode
LARGE_LINES, SMALL_LINES = 512, 128  # lines of a program that holds as many elements as TILE
_LARGE = 2**27  # elements from which on its sums are over more lines, so that they need little memory
_PAD = 32  # vectors and sums begin at multiples of it


def _width(shape: Shape) -> int:
    """A line's elements, up to the next power of two."""
    return max(64, 1 << (stored(shape)[1] - 1).bit_length())


@dataclass(frozen=True, slots=True, kw_only=True)
class Programs:
    """Which tensor (or job) each program of a launch works on, and the first program of each."""

    owner: Tensor  # int32 [count]
    first: Tensor  # int32 [tensors]
    count: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Jobs:
    """Means to finish from partial sums.

    `rows` is int64 [jobs, 8]: tensor, first sum, sums of each mean, number of means, first place in the vectors,
    elements of each mean, column of the state's address, first tile.
    """

    rows: Tensor
    programs: Programs


class Plan:
    """Programs and buffers of one table. Buffers are the table's (`FusedTable.buffer`), so its `nbytes` has them."""

    def __init__(self, table: FusedTable):
        self._table, self._rule, self._device = table, table.kind.rule, table.device
        self.adafactor, self.norm = self._rule.startswith("adafactor"), self._rule == "column_norm"
        coded = table.kind.traits.has_m and table.kind.m not in ("fp32", "bf16")
        self.per_warp = PER_WARP_CODED if coded else PER_WARP
        self._is_large = sum(shape.numel for shape in table.shapes) >= _LARGE
        self._vectors = self._sums = self._tiles = 0
        self._places = [[NONE, NONE, 0, 0, 0, 0, 0, 0] for _ in table.shapes]
        line_jobs: list[list[int]] = []
        column_jobs: list[list[int]] = []
        for index, shape in enumerate(table.shapes):
            self._add(index, shape, line_jobs, column_jobs)
        whole = {place[0] == WHOLE for place in self._places}
        self.kinds = "both" if len(whole) > 1 else "lines" if True in whole else "parts"  # of programs that step
        self.line_sums = self._programs([self._line_programs(s) for s in table.shapes])
        self.column_sums = self._programs([self._column_programs(s) for s in table.shapes])
        self.whole = self._whole_programs() if self.adafactor else {}
        self.line_jobs, self.column_jobs = self._jobs(line_jobs), self._jobs(column_jobs)
        self._allocate()
        del self._table  # which plans are kept by, weakly

    # -- what is summed how ---------------------------------------------------------------------------------------

    def _needs(self, shape: Shape) -> tuple[bool, bool]:
        """Whether means of lines and of columns are needed."""
        if self.adafactor:
            return True, True
        lines = shares_lines(self._rule, shape)
        return lines, not lines

    def _at_once(self, shape: Shape) -> bool:
        """True if Adafactor sums lines and columns in one go."""
        return self.adafactor and stored(shape)[1] <= LONGEST

    def lines_per_program(self, width: int) -> int:
        """Lines of (up to) `width` elements that a program sums at once: few of long ones, for there are fewer."""
        lines = LARGE_LINES if self._is_large else SMALL_LINES
        return max(lines * TILE // max(width, TILE), 64)

    def _line_programs(self, shape: Shape) -> int:
        if not self._needs(shape)[0] or self._at_once(shape) or whole_lines(self._rule, shape):
            return 0
        lines, length = stored(shape)
        return -(-lines // LINES) * -(-length // PIECE)

    def _column_programs(self, shape: Shape) -> int:
        if not self._needs(shape)[1] or self._at_once(shape):
            return 0
        lines, length = stored(shape)
        return -(-lines // ROWS) * -(-length // COLUMNS)

    def _add(self, index: int, shape: Shape, line_jobs: list[list[int]], column_jobs: list[list[int]]) -> None:
        """Places of one tensor's vectors and sums, and its jobs."""
        lines, length = stored(shape)
        place, (by_line, by_column) = self._places[index], self._needs(shape)
        line_column, column_column = (4, 3) if self.adafactor and shape.transposed else (3, 4 if self.adafactor else 3)
        if whole_lines(self._rule, shape):
            place[0] = WHOLE
        elif by_line:
            parts = 0 if self._at_once(shape) else -(-length // PIECE)
            tiles = -(-lines // (self.lines_per_program(_width(shape)) if self._at_once(shape) else JOB_LENGTH))
            place[0], place[2], place[4], place[5] = self._take(lines, parts, tiles)
            if parts:
                line_jobs.append([index, place[2], parts, lines, place[0], length, line_column, place[4]])
        if by_column:
            parts = -(-lines // (self.lines_per_program(_width(shape)) if self._at_once(shape) else ROWS))
            tiles = -(-length // JOB_LENGTH)
            place[1], place[3], place[6], place[7] = self._take(length, parts, tiles)
            column_jobs.append([index, place[3], parts, length, place[1], lines, column_column, place[6]])

    def _take(self, length: int, parts: int, tiles: int) -> tuple[int, int, int, int]:
        """Room for a vector, its partial sums and sums over its tiles: where each begins, and the number of tiles."""
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
        return Programs(owner=self._keep(owner), first=self._keep(first.to(torch.int32)), count=len(owner))

    def _whole_programs(self) -> dict[tuple[int, bool, bool], Programs]:
        """Programs that sum lines and columns at once, by the width they are compiled for, if it is aligned, and if
        lines are whole groups of an 8-bit m."""
        shapes, vector, kind = self._table.shapes, self._table.config.vector, self._table.kind
        grouped = kind.traits.has_m and kind.m not in ("fp32", "bf16", *PACKED)
        keys = [
            (_width(shape), length % vector == 0, grouped and length % GROUP == 0) if self._at_once(shape) else None
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
        return Jobs(rows=self._keep(table), programs=programs)

    # -- buffers --------------------------------------------------------------------------------------------------

    def _keep(self, tensor: Tensor) -> Tensor:
        """On the device, counted among the table's bytes."""
        return self._table.buffer(f"plan {len(self._table._buffers)}", lambda: tensor.to(self._device))

    def _zeros(self, *shape: int, dtype: torch.dtype = torch.float32) -> Tensor:
        return self._keep(torch.zeros(shape, dtype=dtype, device=self._device))

    def _allocate(self) -> None:
        self.places = self._keep(torch.tensor(self._places, dtype=torch.int64, device="cpu"))
        self.vectors = self._zeros(max(self._vectors, 1))  # factors of the update by line and by column
        self.sums = self._zeros(max(self._sums, 1))  # of g^2
        self.counts = self._zeros(max(self._sums, 1), dtype=torch.int16)  # of what is left out of them
        squares = max(self._sums, 1) if self.adafactor else 1
        self.squares = self._zeros(squares)  # of what is stepped, divided by the root of the line's mean
        self.tiles = self._zeros(max(self._tiles, 1), 3)
        self.scales = self._zeros(len(self._places))  # factor of a tensor's update, clipping included


plan_of = cached_per_table(Plan)
