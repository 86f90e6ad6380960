"""Which matrices of a Muon table are orthogonalized together, and the memory that takes. Needs no Triton."""

from collections.abc import Iterable, Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

from baoc.kernels.polar import padded, workspace_bytes
from baoc.kernels.triton.kinds import Shape
from baoc.kernels.triton.matrix_kinds import stored
from baoc.kernels.triton.table import FusedTable, cached_per_table

# Bytes that a batch may take: enough that products of matrices of 768 keep an H100 busy. One matrix may take more.
BATCH_BYTES = 256 * 2**20


def batches(shapes: Iterable[Shape], *, ranks: int = 1, max_bytes: int | None = None) -> Iterator[list[int]]:
    """Indices of matrices that are orthogonalized together: of one shape, as many as `room` bytes of each rank hold
    (None: BATCH_BYTES), in equal shares."""
    max_bytes = BATCH_BYTES if max_bytes is None else max_bytes
    same: dict[tuple[int, int], list[int]] = {}
    for index, shape in enumerate(shapes):
        same.setdefault(stored(shape), []).append(index)
    for sides, members in same.items():
        most = ranks * max(1, max_bytes // workspace_bytes(1, *whole_sides(sides, ranks=ranks)))
        share = -(-len(members) // -(-len(members) // most))
        for begin in range(0, len(members), share):
            yield members[begin : begin + share]


def whole_sides(sides: tuple[int, int], *, ranks: int) -> tuple[int, int]:
    """Lines and length of a matrix as it is orthogonalized, of which each rank had as many lines."""
    return padded(-(-sides[0] // ranks) * ranks), padded(sides[1])


def temporary_bytes(shapes: Iterable[Shape], *, ranks: int = 1, max_bytes: int | None = None) -> int:
    """Peak bytes of a step of these matrices beyond its states; `ranks` share the matrices."""
    shapes = list(shapes)
    found = batches(shapes, ranks=ranks, max_bytes=max_bytes)
    sides = ((len(batch), whole_sides(stored(shapes[batch[0]]), ranks=ranks)) for batch in found)
    return max((workspace_bytes(-(-num // ranks), *whole) for num, whole in sides), default=0)


@dataclass(frozen=True, slots=True, kw_only=True)
class Batch:
    """Matrices of [own_lines, own_length] that are stepped together, [lines, length] with what pads them.

    Where ranks have some lines of each, these are of one rank's part, and `whole_lines` those of all, padded.
    `owner` int32 [programs] is the tensor of each program, `members` int32 [num] the tensors, by place in the batch.
    """

    num: int
    lines: int
    length: int
    own_lines: int
    own_length: int
    whole_lines: int
    owner: Tensor
    members: Tensor


class Plan:
    """Batches and small buffers of one table, all of them the table's (`FusedTable.buffer`), as its `nbytes` has."""

    def __init__(self, table: FusedTable):
        device, num, max_bytes = table.device, len(table.params), table.max_workspace_bytes

        def keep(name: str, tensor: Tensor) -> Tensor:
            return table.buffer(f"muon {name} {max_bytes}", lambda: tensor.to(device))

        self.batches: list[Batch] = []
        first, slots = [0] * num, [0] * num
        ranks = table.shards.size if table.shards is not None else 1
        for index, members in enumerate(batches(table.unsharded_shapes, ranks=ranks, max_bytes=max_bytes)):
            owner: list[int] = []
            for slot, member in enumerate(members):
                first[member], slots[member] = len(owner), slot
                owner += [member] * (table.chunk_starts[member + 1] - table.chunk_starts[member])
            own_lines, own_length = stored(table.shapes[members[0]])
            sides = stored(table.unsharded_shapes[members[0]])
            whole_lines, length = whole_sides(sides, ranks=ranks)
            owners, kept = keep(f"owner {index}", _int32(owner)), keep(f"members {index}", _int32(members))
            self.batches.append(
                Batch(
                    num=len(members),
                    lines=whole_lines if ranks == 1 else -(-sides[0] // ranks),
                    length=length,
                    own_lines=own_lines,
                    own_length=own_length,
                    whole_lines=whole_lines,
                    owner=owners,
                    members=kept,
                )
            )
        self.first = keep("first", _int32(first))  # program of each tensor in its batch's launch
        self.slots = keep("slots", _int32(slots))
        # The update is the polar factor times this, as baoc.optim.rules.muon.
        sizes = [max(1.0, shape.rows / shape.cols) ** 0.5 for shape in table.unsharded_shapes]
        self.sizes = keep("sizes", torch.tensor(sizes, dtype=torch.float32, device="cpu"))
        programs = max(table.num_chunks, 1)
        self.tops = keep("tops", torch.zeros(programs, dtype=torch.float32, device="cpu"))
        self.sums = keep("sums", torch.zeros(programs, dtype=torch.float32, device="cpu"))
        self.scales = keep("scales", torch.zeros(num, 2, dtype=torch.float32, device="cpu"))
        self.totals = keep("totals", torch.zeros(num, 2, dtype=torch.float32, device="cpu"))
        self.factors = keep("factors", torch.ones(num, dtype=torch.float32, device="cpu"))
        self.workspace_bytes = temporary_bytes(table.unsharded_shapes, ranks=ranks, max_bytes=max_bytes)


def _int32(numbers: list[int]) -> Tensor:
    return torch.tensor(numbers, dtype=torch.int32, device="cpu")


_plans = cached_per_table(lambda _: dict[int | None, Plan]())


def plan_of(table: FusedTable) -> Plan:
    """The table's plan within its `max_workspace_bytes`."""
    made = _plans(table)
    if table.max_workspace_bytes not in made:
        made[table.max_workspace_bytes] = Plan(table)
    return made[table.max_workspace_bytes]


def halve_workspace(table: FusedTable) -> bool:
    """Has the table's batches take half of what they take, one matrix at least; False where they cannot, and on several
    ranks, who exchange batches and so must have the same."""
    before, kept = plan_of(table).workspace_bytes, table.max_workspace_bytes
    if table.shards is None:
        table.max_workspace_bytes = before // 2
        if plan_of(table).workspace_bytes < before:
            return True
    table.max_workspace_bytes = kept
    return False
