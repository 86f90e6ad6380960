"""Chooses the sampled elements of every parameter and lays them out in one flat buffer.

With one buffer, statistics take a few large operations instead of many small ones. Each parameter's piece is padded to
whole quantisation groups, so that groups in the buffer are those of the optimizer. Pieces of one shape are adjacent, so
that matrices are processed as a batch.
"""

from bisect import bisect_left
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import accumulate
from typing import NamedTuple

import torch
from torch import Tensor

from baoc.core.catalogue import GROUP
from baoc.optim.shards import Shard, local_shard
from baoc.types import Block, ParamInfo

MIN_ROWS = 8  # of a sampled matrix: fewer do not show what sharing along fan-out loses
MIN_CHUNK, MAX_CHUNKS = 2**15, 16  # elements of a chunk at least, and chunks, in which float64 sums are taken
NUM_BANDS = 8  # row bands per matrix, so that all parts of a fused q, k, v are sampled


@dataclass(frozen=True, slots=True, kw_only=True)
class Piece:
    """The sampled elements of one parameter. `shape` is (rows, cols) as stored, or (numel,) of a vector.

    `sampled` describes them as a parameter of that shape. `rows` are the sampled rows; None means all.
    """

    param: ParamInfo
    sampled: ParamInfo
    block: int
    rows: Tensor | None
    offset: int = 0

    @property
    def shape(self) -> tuple[int, ...]:
        return self.sampled.shape

    @property
    def numel(self) -> int:
        return self.sampled.numel

    @property
    def padded(self) -> int:
        return -(-self.numel // GROUP) * GROUP

    @property
    def is_matrix(self) -> bool:
        return self.param.matrix_shape is not None


@dataclass(frozen=True, slots=True, kw_only=True)
class Batch:
    """Adjacent matrices of one sampled shape: `count` of them from piece `first` on."""

    first: int
    count: int
    offset: int
    padded: int
    shape: tuple[int, int]
    transposed: bool

    def view(self, flat: Tensor) -> Tensor:
        """[count, fan_out, fan_in] view of the buffer."""
        rows, cols = self.shape
        pieces = flat[self.offset : self.offset + self.count * self.padded].view(self.count, self.padded)
        matrices = pieces[:, : rows * cols].unflatten(1, (rows, cols))
        return matrices.transpose(1, 2) if self.transposed else matrices


@dataclass(frozen=True, slots=True, kw_only=True)
class Part:
    """Rows `begin:end` of a piece (elements of a vector) are on this rank. `rows`: their indices among the rank's
    `lines` rows of the parameter; None: the first `end - begin` of them."""

    begin: int
    end: int
    lines: int
    rows: Tensor | None


class Buffer(NamedTuple):
    """The sampled elements of one gradient, and the view of each piece."""

    flat: Tensor
    targets: list[Tensor]


class Slices:
    """The pieces of all `blocks`, together about `max_elements` elements at most.

    Small blocks are sampled whole and large ones get equal shares. Of a matrix, bands of whole rows are sampled, of a
    vector a prefix. If the share is less than MIN_ROWS rows, the first columns of MIN_ROWS rows are sampled instead. If
    it is less than two quantisation groups per parameter, some parameters are left out, but never all of a block; only
    this floor may exceed `max_elements`. `lengths`: quantisation groups per piece, for segment sums. `parts`: what this
    process has of each piece, all of it unless `keep_own` was told of shards.
    """

    def __init__(self, blocks: Sequence[Block], *, max_elements: int, device: torch.device):
        share = _water_level([block.numel for block in blocks], total=max_elements)
        pieces: list[Piece] = []
        for index, block in enumerate(blocks):
            params = [param for param in block.params if param.numel > 0]
            if share < block.numel:
                params = _evenly_spaced(params, count=int(share // (2 * GROUP)))
            fraction = min(1.0, share / max(1, sum(param.numel for param in params)))
            pieces += [_piece(param, block=index, fraction=fraction, device=device) for param in params]
        pieces.sort(key=lambda piece: (not piece.is_matrix, piece.shape, piece.sampled.transposed))  # stable
        self.blocks = tuple(blocks)
        self.pieces, self.numel = _placed(pieces)
        self._chunk = max(MIN_CHUNK, self.numel // MAX_CHUNKS // GROUP * GROUP)  # elements summed at a time
        self.batches = _batches(self.pieces)
        self.parts = [_part(piece, span=None) for piece in self.pieces]
        self._pieces_of: dict[str, list[int]] = {}
        for index, piece in enumerate(self.pieces):
            self._pieces_of.setdefault(piece.param.name, []).append(index)
        self.lengths = torch.tensor([piece.padded // GROUP for piece in self.pieces], device=device)
        order = sorted(range(len(self.pieces)), key=lambda i: self.pieces[i].block)
        held = [0] * len(blocks)
        for piece in self.pieces:
            held[piece.block] += 1
        self._by_block = torch.tensor(order, device=device)
        self._held = torch.tensor(held, device=device)

    @classmethod
    def within(
        cls, blocks: Sequence[Block], *, max_bytes: int, per_element: float, per_piece: int, device: torch.device
    ) -> "Slices":
        """Slices that hold at most `max_bytes` with all that is kept for them, as far as their floor allows."""
        elements = max_bytes / per_element
        slices = cls(blocks, max_elements=int(elements), device=device)
        for _ in range(8):
            held = per_element * slices.numel + per_piece * len(slices.pieces) + slices.nbytes
            if held <= max_bytes:
                break
            elements *= 0.99 * max_bytes / held
            slices = cls(blocks, max_elements=int(elements), device=device)
        return slices

    @property
    def nbytes(self) -> int:
        """Bytes of the index tensors."""
        return sum(tensor.nbytes for tensor in self.tensors())

    def tensors(self) -> list[Tensor]:
        """The index tensors, each once."""
        rows = {id(held.rows): held.rows for held in (*self.pieces, *self.parts) if held.rows is not None}
        return [*rows.values(), self.lengths, self._by_block, self._held]

    def new(self, device: torch.device) -> Tensor:
        """A zeroed float32 buffer."""
        return torch.zeros(self.numel, dtype=torch.float32, device=device)

    def buffer(self, device: torch.device) -> Buffer:
        flat = self.new(device)
        return Buffer(flat, [flat[p.offset : p.offset + p.numel].view(p.shape) for p in self.pieces])

    def keep_own(self, shards: Mapping[str, Shard]) -> None:
        """From here on `gather_` takes this rank's rows; of a parameter that is whole on all ranks the first one's."""
        first = next(iter(shards.values())).group.rank == 0
        for index, piece in enumerate(self.pieces):
            shard, end = shards.get(piece.param.name), piece.param.numel if first else 0
            span = (0, end) if shard is None else (shard.offset, shard.offset + local_shard(shard.param).numel())
            self.parts[index] = _part(piece, span=span)

    def gather_(self, buffer: Buffer, *, grads: Mapping[str, Tensor]) -> None:
        """Copies the sampled elements of `grads` (by parameter name) into the buffer; all others stay as they are."""
        for name, grad in grads.items():
            for index in self._pieces_of.get(name, ()):
                part, target = self.parts[index], buffer.targets[index]
                own = target[part.begin : part.end]
                if not own.numel():
                    continue
                rows = grad if grad.ndim and len(grad) == part.lines else grad.reshape(part.lines, -1)
                rows = rows[: len(own)] if part.rows is None else rows.index_select(0, part.rows)
                own.copy_(rows.reshape(len(own), -1)[:, : target.shape[-1]].reshape(own.shape))

    def sums(self, flat: Tensor) -> Tensor:
        """Per piece the sum of its elements of `flat`: [num pieces] float64, deterministic."""
        # By parts, as torch makes a float64 copy of what it sums up in float64.
        parts = [part.view(-1, GROUP).sum(1, dtype=torch.float64) for part in flat.split(self._chunk)]
        return self.group_sums(torch.cat(parts))

    def dots(self, one: Tensor, other: Tensor) -> Tensor:
        """Per piece the sum of products, as `sums` of `one * other`, which is never there at once."""
        parts = [
            (a * b).view(-1, GROUP).sum(1, dtype=torch.float64)
            for a, b in zip(one.split(self._chunk), other.split(self._chunk), strict=True)
        ]
        return self.group_sums(torch.cat(parts))

    def group_sums(self, groups: Tensor) -> Tensor:
        """Per piece the sum of one float64 number per quantisation group."""
        return torch.segment_reduce(groups, "sum", lengths=self.lengths, unsafe=True)

    def block_sums(self, values: Tensor) -> Tensor:
        """Per block the sum over its pieces: [num pieces, ...] float64 -> [num blocks, ...]."""
        return torch.segment_reduce(values[self._by_block], "sum", lengths=self._held, axis=0, unsafe=True)


def stored_shape(param: ParamInfo) -> tuple[int, int]:
    """(rows, columns) of a matrix as it is stored."""
    matrix = param.matrix_shape
    assert matrix is not None
    return (matrix[1], matrix[0]) if param.transposed else matrix


def _part(piece: Piece, *, span: tuple[int, int] | None) -> Part:
    """`span`: first and last element of the parameter that are here; None where all are."""
    lines = stored_shape(piece.param)[0] if piece.is_matrix else piece.param.numel
    if span is None:
        return Part(begin=0, end=piece.shape[0], lines=lines, rows=piece.rows)
    width = piece.param.numel // lines
    begin, end = span[0] // width, span[1] // width
    if piece.rows is None:
        most = piece.shape[0]
        return Part(begin=min(begin, most), end=min(end, most), lines=end - begin, rows=None)
    rows = piece.rows.tolist()
    low, high = bisect_left(rows, begin), bisect_left(rows, end)
    return Part(begin=low, end=high, lines=end - begin, rows=piece.rows[low:high] - begin)


def _water_level(sizes: Sequence[int], *, total: int) -> float:
    """The number of elements c such that sum(min(size, c)) is `total`; the largest size where all fit."""
    left = float(total)
    sizes = sorted(sizes)
    for index, size in enumerate(sizes):
        even = left / (len(sizes) - index)
        if size > even:
            return max(even, 1.0)
        left -= size
    return float(max(sizes, default=0))


def _evenly_spaced(params: Sequence[ParamInfo], *, count: int) -> list[ParamInfo]:
    """`count` of `params`, at least one if there is one, evenly spread."""
    count = max(1, min(count, len(params)))
    return [params[i * len(params) // count] for i in range(count)] if params else []


def _piece(param: ParamInfo, *, block: int, fraction: float, device: torch.device) -> Piece:
    if param.matrix_shape is None:
        shape: tuple[int, ...] = (min(param.numel, max(GROUP, int(fraction * param.numel))),)
        return Piece(param=param, sampled=_as_param(param, shape), block=block, rows=None)
    rows, cols = stored_shape(param)
    wanted = int(fraction * rows * cols)
    if fraction >= 1 or wanted >= MIN_ROWS * cols:
        num_rows, num_cols = max(2, min(rows, int(fraction * rows))), cols
    else:  # two rows at least, or it would be no matrix
        num_rows = min(rows, MIN_ROWS, max(2, wanted // min(GROUP, cols)))
        num_cols = min(cols, max(GROUP, wanted // num_rows // GROUP * GROUP))
    index = None
    if num_rows < rows:
        index = torch.tensor(_row_bands(rows, count=num_rows), device=device)
        num_rows = len(index)
    return Piece(param=param, sampled=_as_param(param, (num_rows, num_cols)), block=block, rows=index)


def _as_param(param: ParamInfo, shape: tuple[int, ...]) -> ParamInfo:
    return ParamInfo(
        name=param.name, shape=shape, dtype="float32", role=param.role, depth=param.depth, transposed=param.transposed
    )


def _row_bands(rows: int, *, count: int) -> list[int]:
    """About `count` row indices: up to NUM_BANDS contiguous bands, evenly spread, of a multiple of MIN_ROWS rows each.

    Starts are multiples of MIN_ROWS, so neighbours that a rule folds together stay together. Too few rows for two bands
    give one in the middle.
    """
    bands = min(NUM_BANDS, count // MIN_ROWS)
    if bands < 2:
        start = (rows - count) // 2 // MIN_ROWS * MIN_ROWS
        return list(range(start, start + count))
    height = count // bands // MIN_ROWS * MIN_ROWS
    starts = [i * (rows - height) // (bands - 1) // MIN_ROWS * MIN_ROWS for i in range(bands)]
    return [row for start in starts for row in range(start, start + height)]


def _placed(pieces: Sequence[Piece]) -> tuple[tuple[Piece, ...], int]:
    """The pieces with their offsets, and the buffer's size."""
    ends = [0, *accumulate(piece.padded for piece in pieces)]
    return tuple(replace(piece, offset=offset) for piece, offset in zip(pieces, ends, strict=False)), ends[-1]


def _batches(pieces: Sequence[Piece]) -> tuple[Batch, ...]:
    runs: dict[tuple[tuple[int, ...], bool], list[int]] = {}
    for index, piece in enumerate(pieces):
        if piece.is_matrix:
            runs.setdefault((piece.shape, piece.sampled.transposed), []).append(index)
    return tuple(
        Batch(
            first=indices[0],
            count=len(indices),
            offset=pieces[indices[0]].offset,
            padded=pieces[indices[0]].padded,
            shape=(shape[0], shape[1]),
            transposed=transposed,
        )
        for (shape, transposed), indices in runs.items()
    )
