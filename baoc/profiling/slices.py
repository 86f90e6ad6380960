"""Chooses the sampled elements of every parameter and lays them out in one flat buffer.

The sampled elements of one parameter are a piece. With one buffer, statistics take a few large operations instead of
many small ones. Each piece is padded to a multiple of the quantisation group, so that groups in the buffer are those of
the optimizer. Pieces of one shape are adjacent, so that matrices are processed as a batch.
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
MIN_CHUNK = 2**15  # elements that a float64 sum takes at a time, at least
MAX_CHUNKS = 16  # of a float64 sum over the buffer
NUM_BANDS = 8  # row bands per matrix, so that q, k and v of a fused projection are all sampled


@dataclass(frozen=True, slots=True, kw_only=True)
class Piece:
    """The sampled elements of one parameter, of `shape` (rows, cols) as stored, or (numel,) of a vector.

    Args:
        sampled: `param` with the piece's shape.
        block: index of the parameter's block.
        rows: indices of the sampled rows, ascending; None means the first ones.
        offset: of the first element in the buffer.
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
        """Elements that the piece takes in the buffer."""
        return -(-self.numel // GROUP) * GROUP

    @property
    def is_matrix(self) -> bool:
        return self.param.matrix_shape is not None


@dataclass(frozen=True, slots=True, kw_only=True)
class MatrixBatch:
    """`count` adjacent matrices of one sampled shape, from piece `first` on."""

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
class LocalRows:
    """Rows `begin:end` of a piece are on this rank. For vectors, elements instead of rows.

    Args:
        num_local_rows: rows of the parameter that are on this rank, sampled or not.
        rows: indices of the piece's rows among these; None means the first `end - begin`.
    """

    begin: int
    end: int
    num_local_rows: int
    rows: Tensor | None


class Buffer(NamedTuple):
    """The sampled elements of a step's gradients. `pieces`: a view of `flat` for each piece, in its shape."""

    flat: Tensor
    pieces: list[Tensor]


class Slices:
    """The pieces of all `blocks`, together about `max_elements` elements at most.

    Small blocks are sampled completely, large ones get equal shares. Of a matrix, bands of full rows are sampled, of a
    vector a prefix. If the share is less than MIN_ROWS rows, the first columns of MIN_ROWS rows are sampled instead.
    If it is less than two quantisation groups per parameter, some parameters are left out, but never all of a block;
    only this floor may exceed `max_elements`.

    Attributes:
        batches: the matrices by shape.
        local_rows: the rows of each piece on this rank, all of them before `restrict_to_local`.
        lengths: int64 [pieces], quantisation groups per piece, for segment sums.
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
        *offsets, self.numel = [0, *accumulate(piece.padded for piece in pieces)]
        self.pieces = tuple(replace(piece, offset=offset) for piece, offset in zip(pieces, offsets, strict=True))
        self._chunk = max(MIN_CHUNK, self.numel // MAX_CHUNKS // GROUP * GROUP)  # elements summed at a time
        self.batches = _batches(self.pieces)
        self.local_rows = [_local_rows(piece, span=None) for piece in self.pieces]
        self._pieces_of: dict[str, list[int]] = {}
        for index, piece in enumerate(self.pieces):
            self._pieces_of.setdefault(piece.param.name, []).append(index)
        self.lengths = torch.tensor([piece.padded // GROUP for piece in self.pieces], device=device)
        order = sorted(range(len(self.pieces)), key=lambda i: self.pieces[i].block)
        pieces_per_block = [0] * len(blocks)
        for piece in self.pieces:
            pieces_per_block[piece.block] += 1
        self._by_block = torch.tensor(order, device=device)  # int64 [pieces]: indices of pieces, ordered by block
        self._pieces_per_block = torch.tensor(pieces_per_block, device=device)  # int64 [blocks]

    @classmethod
    def within(
        cls, blocks: Sequence[Block], *, max_bytes: int, per_element: float, per_piece: int, device: torch.device
    ) -> "Slices":
        """Slices whose buffers and index tensors take at most `max_bytes`, as far as their floor allows.

        Bytes of buffers are given `per_element` and `per_piece`. The number of elements shrinks by the excess, and 1 %
        for padding, until they fit; 8 tries at most.
        """
        elements = max_bytes / per_element
        slices = cls(blocks, max_elements=int(elements), device=device)
        for _ in range(8):
            nbytes = per_element * slices.numel + per_piece * len(slices.pieces) + slices.nbytes
            if nbytes <= max_bytes:
                break
            elements *= 0.99 * max_bytes / nbytes
            slices = cls(blocks, max_elements=int(elements), device=device)
        return slices

    @property
    def nbytes(self) -> int:
        return sum(tensor.nbytes for tensor in self.tensors())

    def tensors(self) -> list[Tensor]:
        rows = {id(part.rows): part.rows for part in (*self.pieces, *self.local_rows) if part.rows is not None}
        return [*rows.values(), self.lengths, self._by_block, self._pieces_per_block]

    def new(self, device: torch.device) -> Tensor:
        return torch.zeros(self.numel, dtype=torch.float32, device=device)

    def buffer(self, device: torch.device) -> Buffer:
        flat = self.new(device)
        return Buffer(flat, [flat[p.offset : p.offset + p.numel].view(p.shape) for p in self.pieces])

    def restrict_to_local(self, shards: Mapping[str, Shard]) -> None:
        """Makes `gather_` copy this rank's rows of sharded parameters, so that a sum over ranks is the whole sample.

        Unsharded parameters are copied on rank 0 only.
        """
        is_rank_0 = next(iter(shards.values())).group.rank == 0
        for index, piece in enumerate(self.pieces):
            shard, end = shards.get(piece.param.name), piece.param.numel if is_rank_0 else 0
            span = (0, end) if shard is None else (shard.offset, shard.offset + local_shard(shard.param).numel())
            self.local_rows[index] = _local_rows(piece, span=span)

    def gather_(self, buffer: Buffer, *, grads: Mapping[str, Tensor]) -> None:
        """Copies the sampled elements of `grads` (by parameter name) into the buffer; all others stay as they are."""
        for name, grad in grads.items():
            for index in self._pieces_of.get(name, ()):
                local, piece = self.local_rows[index], buffer.pieces[index]
                target = piece[local.begin : local.end]
                if not target.numel():
                    continue
                num_rows = local.num_local_rows
                rows = grad if grad.ndim and len(grad) == num_rows else grad.reshape(num_rows, -1)
                rows = rows[: len(target)] if local.rows is None else rows.index_select(0, local.rows)
                target.copy_(rows.reshape(len(target), -1)[:, : piece.shape[-1]].reshape(target.shape))

    def sums(self, flat: Tensor) -> Tensor:
        """Per piece, the sum of its elements of `flat`: float64 [pieces], deterministic."""
        # In chunks, as torch makes a float64 copy of what it sums up in float64.
        chunks = [chunk.view(-1, GROUP).sum(1, dtype=torch.float64) for chunk in flat.split(self._chunk)]
        return self.sums_of_groups(torch.cat(chunks))

    def dots(self, a: Tensor, b: Tensor) -> Tensor:
        """`sums(a * b)`, without the product of all elements in memory."""
        chunks = [
            (part_a * part_b).view(-1, GROUP).sum(1, dtype=torch.float64)
            for part_a, part_b in zip(a.split(self._chunk), b.split(self._chunk), strict=True)
        ]
        return self.sums_of_groups(torch.cat(chunks))

    def sums_of_groups(self, groups: Tensor) -> Tensor:
        """Per piece, the sum of one float64 number per quantisation group: [groups] -> [pieces]."""
        return torch.segment_reduce(groups, "sum", lengths=self.lengths, unsafe=True)

    def block_sums(self, values: Tensor) -> Tensor:
        """Per block, the sum over its pieces: float64 [pieces, ...] -> [blocks, ...]."""
        return torch.segment_reduce(values[self._by_block], "sum", lengths=self._pieces_per_block, axis=0, unsafe=True)


def stored_shape(param: ParamInfo) -> tuple[int, int]:
    """(rows, columns) of a matrix as it is stored."""
    matrix = param.matrix_shape
    assert matrix is not None
    return (matrix[1], matrix[0]) if param.transposed else matrix


def _local_rows(piece: Piece, *, span: tuple[int, int] | None) -> LocalRows:
    """`span`: begin and end of this rank's elements of the parameter; None if it has all."""
    num_rows = stored_shape(piece.param)[0] if piece.is_matrix else piece.param.numel
    if span is None:
        return LocalRows(begin=0, end=piece.shape[0], num_local_rows=num_rows, rows=piece.rows)
    width = piece.param.numel // num_rows
    first, last = span[0] // width, span[1] // width
    if piece.rows is None:
        size = piece.shape[0]
        return LocalRows(begin=min(first, size), end=min(last, size), num_local_rows=last - first, rows=None)
    rows = piece.rows.tolist()
    begin, end = bisect_left(rows, first), bisect_left(rows, last)
    return LocalRows(begin=begin, end=end, num_local_rows=last - first, rows=piece.rows[begin:end] - first)


def _water_level(sizes: Sequence[int], *, total: int) -> float:
    """The number c such that sum(min(size, c)) is `total` (water-filling); the largest size if all fit."""
    remaining = float(total)
    sizes = sorted(sizes)
    for index, size in enumerate(sizes):
        equal_share = remaining / (len(sizes) - index)
        if size > equal_share:
            return max(equal_share, 1.0)
        remaining -= size
    return float(max(sizes, default=0))


def _evenly_spaced(params: Sequence[ParamInfo], *, count: int) -> list[ParamInfo]:
    """`count` of `params`, at least one if there is one, evenly spread."""
    count = max(1, min(count, len(params)))
    return [params[i * len(params) // count] for i in range(count)] if params else []


def _piece(param: ParamInfo, *, block: int, fraction: float, device: torch.device) -> Piece:
    """The piece that samples about `fraction` of the elements of `param`."""
    if param.matrix_shape is None:
        shape: tuple[int, ...] = (min(param.numel, max(GROUP, int(fraction * param.numel))),)
        return Piece(param=param, sampled=replace(param, shape=shape, dtype="float32"), block=block, rows=None)
    rows, cols = stored_shape(param)
    numel = int(fraction * rows * cols)
    if fraction >= 1 or numel >= MIN_ROWS * cols:
        num_rows, num_cols = max(2, min(rows, int(fraction * rows))), cols
    else:  # two rows at least, or it would be no matrix
        num_rows = min(rows, MIN_ROWS, max(2, numel // min(GROUP, cols)))
        num_cols = min(cols, max(GROUP, numel // num_rows // GROUP * GROUP))
    row_indices = None
    if num_rows < rows:
        row_indices = torch.tensor(_row_bands(rows, count=num_rows), device=device)
        num_rows = len(row_indices)
    sampled = replace(param, shape=(num_rows, num_cols), dtype="float32")
    return Piece(param=param, sampled=sampled, block=block, rows=row_indices)


def _row_bands(rows: int, *, count: int) -> list[int]:
    """About `count` row indices: up to NUM_BANDS contiguous bands, evenly spread, of a multiple of MIN_ROWS rows each.

    Bands start at multiples of MIN_ROWS, so that neighbours that a rule folds together stay together. If there are too
    few rows for two bands, there is one in the middle.
    """
    bands = min(NUM_BANDS, count // MIN_ROWS)
    if bands < 2:
        start = (rows - count) // 2 // MIN_ROWS * MIN_ROWS
        return list(range(start, start + count))
    height = count // bands // MIN_ROWS * MIN_ROWS
    starts = [i * (rows - height) // (bands - 1) // MIN_ROWS * MIN_ROWS for i in range(bands)]
    return [row for start in starts for row in range(start, start + height)]


def _batches(pieces: Sequence[Piece]) -> tuple[MatrixBatch, ...]:
    """The matrices among `pieces`, which are sorted by shape, as one batch for each shape."""
    runs: dict[tuple[tuple[int, ...], bool], list[int]] = {}
    for index, piece in enumerate(pieces):
        if piece.is_matrix:
            runs.setdefault((piece.shape, piece.sampled.transposed), []).append(index)
    return tuple(
        MatrixBatch(
            first=indices[0],
            count=len(indices),
            offset=pieces[indices[0]].offset,
            padded=pieces[indices[0]].padded,
            shape=(shape[0], shape[1]),
            transposed=transposed,
        )
        for (shape, transposed), indices in runs.items()
    )
