"""Muon by kernels for matrices whose rows are split over ranks: each rank orthogonalizes some of them, whole.

Matrices of one shape are stepped in batches. In a batch every rank averages the gradients of its rows, gets all rows of
its share of the matrices, and gives back the rows of what it made of them: two messages. The states never leave their
rank. Norms and the sums of matching are added up by a message each, before weights are touched. See
`kernels.triton.muon`. Matrices of which a rank has no rows are gathered whole by all ranks, and stepped eagerly.
"""

from collections.abc import Iterable

from torch import Tensor

from baoc.kernels import Shape, available, fits
from baoc.kernels.triton import muon_plan
from baoc.optim.backends.fused import FusedBackend
from baoc.optim.shards import Shard, local, shard_of
from baoc.optim.state import LiveBlock

_PER_ELEMENT = 48  # bytes at most that an eager step takes for each element of a matrix


def temporary_bytes(params: Iterable[Tensor]) -> int:
    """The most that a step of sharded `params` takes beside states, where all of their matrices run Muon."""
    most, by_kernel, size = 0, [], 1
    for param in params:
        shard = shard_of(param)
        if shard is None or param.ndim < 2 or not param.numel():
            continue
        size = shard.shards.size
        if available(param.device) and fits(local(param)) and _all_have_rows(shard):
            by_kernel.append(Shape(numel=param.numel(), rows=len(param), cols=param.numel() // len(param)))
        else:
            most = max(most, _PER_ELEMENT * param.numel())
    return max(most, muon_plan.temporary_bytes(by_kernel, ranks=size))


def _all_have_rows(shard: Shard) -> bool:
    size, rows = shard.shards.size, len(shard.owner)
    return (size - 1) * -(-rows // size) < rows


class ExchangedBackend(FusedBackend):
    """Nothing is captured, as ranks send messages between the kernels."""

    name = "exchanged"
    graphs = False

    @staticmethod
    def refusal(block: LiveBlock) -> str:
        """The same on all ranks."""
        if not all(slot.gathers for slot in block.slots):
            return "it steps matrices of which ranks hold some rows"
        if not all(slot.shard is not None and _all_have_rows(slot.shard) for slot in block.slots):
            return "a rank has no rows of one of its matrices"
        return FusedBackend.refusal(block)
