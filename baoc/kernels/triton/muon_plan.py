"""Batches of a Muon table: the matrices that are orthogonalized together, and their memory. Needs no Triton."""

from collections.abc import Iterable, Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

from baoc.kernels.polar import padded, workspace_bytes
from baoc.kernels.triton.kinds import Shape
from baoc.kernels.triton.matrix_kinds import stored
from baoc.kernels.triton.table import FusedTable

# Workspace of a batch: enough that products of 768 x 768 matrices keep an H100 busy. A single matrix may take more.
BATCH_BYTES = 256 * 2**20


def batches(shapes: Iterable[Shape], *, ranks: int = 1, max_bytes: int | None = None) -> Iterator[list[int]]:
    """Yields the indices of each batch: matrices of one shape, as many as fit in `max_bytes` of workspace on each rank
    (BATCH_BYTES by default), spread evenly over the batches of that shape."""
    max_bytes = BATCH_BYTES if max_bytes is None else max_bytes
    by_sides: dict[tuple[int, int], list[int]] = {}
    for index, shape in enumerate(shapes):
        by_sides.setdefault(stored(shape), []).append(index)
    for sides, members in by_sides.items():
        most = ranks * max(1, max_bytes // workspace_bytes(1, *whole_sides(sides, ranks=ranks)))
        share = -(-len(members) // -(-len(members) // most))
        for begin in range(0, len(members), share):
            yield members[begin : begin + share]


def whole_sides(sides: tuple[int, int], *, ranks: int) -> tuple[int, int]:
    """Padded (lines, length) of a matrix as it is orthogonalized; `ranks` hold equally many of its lines."""
    return padded(-(-sides[0] // ranks) * ranks), padded(sides[1])


def temporary_bytes(shapes: Iterable[Shape], *, ranks: int = 1, max_bytes: int | None = None) -> int:
    """Bytes of workspace that a step of these matrices needs on each of `ranks`, which share the matrices."""
    shapes = list(shapes)
    needs = (
        workspace_bytes(-(-len(batch) // ranks), *whole_sides(stored(shapes[batch[0]]), ranks=ranks))
        for batch in batches(shapes, ranks=ranks, max_bytes=max_bytes)
    )
    return max(needs, default=0)


@dataclass(frozen=True, slots=True, kw_only=True)
class Batch:
    """Matrices of one shape that are orthogonalized together.

    A matrix is [own_lines, own_length], and [lines, length] with padding. Where matrices are sharded, these are the
    sides of one rank's shard; complete and padded, a matrix has `unsharded_lines`. `owner` (int32 [programs]) is the
    tensor of each program, `members` (int32 [num]) the tensor at each place in the batch.
    """

    num: int
    lines: int
    length: int
    own_lines: int
    own_length: int
    unsharded_lines: int
    owner: Tensor
    members: Tensor


class Plan:
    """Batches and small buffers of one table. The buffers are the table's (`FusedTable.buffer`)."""

    def __init__(self, table: FusedTable):
        device, num, max_bytes = table.device, len(table.params), table.max_workspace_bytes

        def buffer(name: str, tensor: Tensor) -> Tensor:
            return table.buffer(f"muon {name} {max_bytes}", lambda: tensor.to(device))

        self.batches: list[Batch] = []
        first, slots = [0] * num, [0] * num
        ranks = table.shards.size if table.shards is not None else 1
        for index, members in enumerate(batches(table.unsharded_shapes, ranks=ranks, max_bytes=max_bytes)):
            owner: list[int] = []
            for slot, member in enumerate(members):
                first[member], slots[member] = len(owner), slot
                owner += [member] * (table.program_starts[member + 1] - table.program_starts[member])
            own_lines, own_length = stored(table.shapes[members[0]])
            sides = stored(table.unsharded_shapes[members[0]])
            unsharded_lines, length = whole_sides(sides, ranks=ranks)
            lines = unsharded_lines if ranks == 1 else -(-sides[0] // ranks)
            batch = Batch(
                num=len(members), lines=lines, length=length, own_lines=own_lines, own_length=own_length,
                unsharded_lines=unsharded_lines, owner=buffer(f"owner {index}", _int32(owner)),
                members=buffer(f"members {index}", _int32(members)),
            )  # fmt: skip
            self.batches.append(batch)
        self.first = buffer("first", _int32(first))  # first program of each tensor in its batch's launch
        self.slots = buffer("slots", _int32(slots))  # place of each tensor in its batch
        # The update is the polar factor times this, as in baoc.optim.rules.muon.
        sizes = [max(1.0, shape.rows / shape.cols) ** 0.5 for shape in table.unsharded_shapes]
        self.sizes = buffer("sizes", torch.tensor(sizes, dtype=torch.float32, device="cpu"))
        programs = max(table.num_programs, 1)
        self.tops = buffer("tops", torch.zeros(programs, dtype=torch.float32, device="cpu"))
        self.sums = buffer("sums", torch.zeros(programs, dtype=torch.float32, device="cpu"))
        self.scales = buffer("scales", torch.zeros(num, 2, dtype=torch.float32, device="cpu"))
        self.totals = buffer("totals", torch.zeros(num, 2, dtype=torch.float32, device="cpu"))
        self.factors = buffer("factors", torch.ones(num, dtype=torch.float32, device="cpu"))
        self.workspace_bytes = temporary_bytes(table.unsharded_shapes, ranks=ranks, max_bytes=max_bytes)


def _int32(numbers: list[int]) -> Tensor:
    return torch.tensor(numbers, dtype=torch.int32, device="cpu")


def plan_of(table: FusedTable) -> Plan:
    """The table's plan within its `max_workspace_bytes`."""
    if table.max_workspace_bytes not in table.plans:
        table.plans[table.max_workspace_bytes] = Plan(table)
    return table.plans[table.max_workspace_bytes]


def halve_workspace(table: FusedTable) -> bool:
    """Halves the workspace of the table's batches. Returns False, and changes nothing, if each batch is one matrix
    already, and for sharded matrices, whose ranks must have the same batches."""
    before, limit = plan_of(table).workspace_bytes, table.max_workspace_bytes
    if table.shards is None:
        table.max_workspace_bytes = before // 2
        if plan_of(table).workspace_bytes < before:
            return True
    table.max_workspace_bytes = limit
    return False
