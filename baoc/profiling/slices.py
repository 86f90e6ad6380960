"""Chooses the sampled elements of every parameter and lays them out in one flat buffer.

With one buffer, statistics take a few large operations instead of many small ones. Each parameter's piece is padded to
whole quantisation groups, so that groups in the buffer are those of the optimizer. Pieces of one shape are adjacent, so
that matrices are processed as a batch.
"""

from bisect import bisect_left
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from baoc.core.catalogue import GROUP
from baoc.optim.shards import Shard, local
from baoc.types import Block, ParamInfo

MIN_ROWS = 8  # of a sampled matrix: fewer do not show what sharing along fan-out loses
LEAST_PART, MOST_PARTS = 2**15, 16
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
    def matrix(self) -> bool:
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
class Cut:
    """The sampled rows, or elements of a vector, from `begin` to `end` lie on this rank: `rows` of the `lines` that it
    has of the parameter, or the first ones."""

    begin: int
    end: int
    lines: int
    rows: Tensor | None


class Slices:
    """The pieces of all `blocks`, together about `max_elements` elements at most.

    Small blocks are sampled whole and large ones get equal shares. Of a matrix, bands of whole rows are sampled, of a
    vector a prefix. If the share is less than MIN_ROWS rows, the first columns of MIN_ROWS rows are sampled instead. If
    it is less than two quantisation groups per parameter, some parameters are left out, but never all of a block; only
    this floor may exceed `max_elements`. `lengths`: quantisation groups per piece, for segment sums.
    """

    def __init__(self, blocks: Sequence[Block], *, max_elements: int, device: torch.device):
        share = _share([block.numel for block in blocks], total=max_elements)
        pieces: list[Piece] = []
        for index, block in enumerate(blocks):
            params = [param for param in block.params if param.numel > 0]
            if share < block.numel:
                params = _spread(params, count=int(share // (2 * GROUP)))
            fraction = min(1.0, share / max(1, sum(param.numel for param in params)))
            pieces += [_piece(param, block=index, fraction=fraction, device=device) for param in params]
        pieces.sort(key=lambda piece: (not piece.matrix, piece.shape, piece.sampled.transposed))  # stable
        self.blocks = tuple(blocks)
        self.pieces, self.numel = _placed(pieces)
        self._part = max(LEAST_PART, self.numel // MOST_PARTS // GROUP * GROUP)  # elements that are summed up at a time
        self.batches = _batches(self.pieces)
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
        """The index tensors."""
        return [*(p.rows for p in self.pieces if p.rows is not None), self.lengths, self._by_block, self._held]

    def new(self, device: torch.device) -> Tensor:
        """A zeroed float32 buffer."""
        return torch.zeros(self.numel, dtype=torch.float32, device=device)

    def targets(self, flat: Tensor) -> list[Tensor]:
        """Per piece the view of `flat` that holds it."""
        return [flat[p.offset : p.offset + p.numel].view(p.shape) for p in self.pieces]

    def gather_(self, targets: Sequence[Tensor], *, grads: Mapping[str, Tensor | None]) -> None:
        """Copies the sampled elements of `grads` (by parameter name) into the views; a missing gradient counts as 0."""
        for piece, target in zip(self.pieces, targets, strict=True):
            grad = grads[piece.param.name]
            if grad is None:
                target.zero_()
            else:
                target.copy_(_sampled(grad, piece))

    def cuts(self, shards: Mapping[str, Shard]) -> list["Cut"]:
        """Per piece what this rank has of it; of a parameter that is whole on all ranks the first one."""
        first = next(iter(shards.values())).shards.rank == 0
        found = []
        for piece in self.pieces:
            shard, end = shards.get(piece.param.name), piece.param.numel if first else 0
            span = (0, end) if shard is None else (shard.first, shard.first + local(shard.owner).numel())
            found.append(_cut(piece, span=span))
        return found

    def gather_rows_(
        self, targets: Sequence[Tensor], *, cuts: Sequence["Cut"], grads: Mapping[str, Tensor | None]
    ) -> None:
        """As `gather_`, of this rank's parts of gradients. Others' elements are 0, so that a sum over ranks has all."""
        for piece, cut, target in zip(self.pieces, cuts, targets, strict=True):
            grad = grads[piece.param.name]
            target.zero_()
            if grad is None or cut.begin >= cut.end:
                continue
            lines = grad.reshape(cut.lines, -1)
            taken = lines[: cut.end - cut.begin] if cut.rows is None else lines.index_select(0, cut.rows)
            own = target[cut.begin : cut.end]
            own.copy_(taken[:, : target.shape[-1]].reshape(own.shape))

    def gather_part_(self, targets: Sequence[Tensor], *, grads: Mapping[str, Tensor]) -> None:
        """Copies the sampled elements of these gradients into their views; all other views stay as they are."""
        for name, grad in grads.items():
            for index in self._pieces_of.get(name, ()):
                targets[index].copy_(_sampled(grad, self.pieces[index]))

    def sums(self, flat: Tensor) -> Tensor:
        """Per piece the sum of its elements of `flat`: [num pieces] float64, deterministic."""
        # By parts, as torch makes a float64 copy of what it sums up in float64.
        parts = [part.view(-1, GROUP).sum(1, dtype=torch.float64) for part in flat.split(self._part)]
        return self.group_sums(torch.cat(parts))

    def dots(self, one: Tensor, other: Tensor) -> Tensor:
        """Per piece the sum of products, as `sums` of `one * other`, which is never there at once."""
        parts = [
            (a * b).view(-1, GROUP).sum(1, dtype=torch.float64)
            for a, b in zip(one.split(self._part), other.split(self._part), strict=True)
        ]
        return self.group_sums(torch.cat(parts))

    def group_sums(self, groups: Tensor) -> Tensor:
        """Per piece the sum of one float64 number per quantisation group."""
        return torch.segment_reduce(groups, "sum", lengths=self.lengths, unsafe=True)

    def block_sums(self, values: Tensor) -> Tensor:
        """Per block the sum over its pieces: [num pieces, ...] float64 -> [num blocks, ...]."""
        return torch.segment_reduce(values[self._by_block], "sum", lengths=self._held, axis=0, unsafe=True)


def stored_matrix(grad: Tensor) -> Tensor:
    """The tensor without its dimensions of size 1: what is left of it starts with the rows of the stored matrix."""
    return grad.squeeze()


def _sampled(grad: Tensor, piece: Piece) -> Tensor:
    if not piece.matrix:
        return grad.reshape(-1)[: piece.numel].view(piece.shape)
    grad = stored_matrix(grad)
    if piece.rows is not None:
        grad = grad.index_select(0, piece.rows)
    grad = grad.reshape(piece.shape[0], -1)
    return grad[:, : piece.shape[1]]


def _cut(piece: Piece, *, span: tuple[int, int]) -> Cut:
    """`span`: first and last element of the parameter that are here."""
    lines = stored_matrix(torch.empty(piece.param.shape, device="meta")).shape[0] if piece.matrix else piece.param.numel
    width = piece.param.numel // lines
    begin, end = span[0] // width, span[1] // width
    if piece.rows is None:
        most = piece.shape[0]
        return Cut(begin=min(begin, most), end=min(end, most), lines=end - begin, rows=None)
    rows = piece.rows.tolist()
    low, high = bisect_left(rows, begin), bisect_left(rows, end)
    return Cut(begin=low, end=high, lines=end - begin, rows=piece.rows[low:high] - begin)


def _share(sizes: Sequence[int], *, total: int) -> float:
    """The number of elements c such that sum(min(size, c)) is `total`; the largest size where all fit."""
    left = float(total)
    sizes = sorted(sizes)
    for index, size in enumerate(sizes):
        even = left / (len(sizes) - index)
        if size > even:
            return max(even, 1.0)
        left -= size
    return float(max(sizes, default=0))


def _spread(params: Sequence[ParamInfo], *, count: int) -> list[ParamInfo]:
    """`count` of `params`, at least one if there is one, evenly spread."""
    count = max(1, min(count, len(params)))
    return [params[i * len(params) // count] for i in range(count)] if params else []


def _piece(param: ParamInfo, *, block: int, fraction: float, device: torch.device) -> Piece:
    matrix = param.matrix_shape
    if matrix is None:
        shape: tuple[int, ...] = (min(param.numel, max(GROUP, int(fraction * param.numel))),)
        return Piece(param=param, sampled=_as_param(param, shape), block=block, rows=None)
    rows, cols = (matrix[1], matrix[0]) if param.transposed else matrix
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
    placed: list[Piece] = []
    offset = 0
    for piece in pieces:
        placed.append(
            Piece(param=piece.param, sampled=piece.sampled, block=piece.block, rows=piece.rows, offset=offset)
        )
        offset += piece.padded
    return tuple(placed), offset


def _batches(pieces: Sequence[Piece]) -> tuple[Batch, ...]:
    runs: dict[tuple[tuple[int, ...], bool], list[int]] = {}
    for index, piece in enumerate(pieces):
        if piece.matrix:
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
