"""Drops gradients during a probe's backward pass, as gradient release does in training."""

from collections.abc import Sequence

from torch import Tensor
from torch.utils.hooks import RemovableHandle

from baoc.optim.shards import local_shard
from baoc.profiling.tracker import PeakMeter


class GradientDropper:
    """Inside `with`, sets a block's gradients to None as soon as all its parameters have theirs. No blocks: no-op.

    `gradients_bytes`: the largest total of gradients alive at once. `stepping_bytes`: the largest live total of all
    tensors at the points where a block would be stepped.
    """

    def __init__(self, blocks: Sequence[Sequence[Tensor]], *, meter: PeakMeter):
        self.gradients_bytes = 0
        self.stepping_bytes = 0
        self._blocks = [[param for param in block if param.requires_grad] for block in blocks]
        self._meter = meter
        self._block_of = {param: block for block in self._blocks for param in block}
        self._handles: list[RemovableHandle] = []

    def __enter__(self) -> "GradientDropper":
        self._handles = [param.register_post_accumulate_grad_hook(self._on_gradient) for param in self._block_of]
        return self

    def __exit__(self, *exc: object) -> None:
        for handle in self._handles:
            handle.remove()

    def _on_gradient(self, param: Tensor) -> None:
        alive = [other.grad for other in self._block_of if other.grad is not None]
        self.gradients_bytes = max(self.gradients_bytes, storage_bytes(alive))
        block = self._block_of[param]
        if all(other.grad is not None for other in block):
            self._drop(block)

    def _drop(self, block: Sequence[Tensor]) -> None:
        self.stepping_bytes = max(self.stepping_bytes, self._meter.current_bytes)
        for param in block:
            param.grad = None

    def finish(self) -> None:
        """Ends a backward pass: drops blocks of which only some parameters received a gradient."""
        for block in self._blocks:
            if any(param.grad is not None for param in block):
                self._drop(block)


def storage_bytes(tensors: Sequence[Tensor]) -> int:
    """Bytes of the storages behind `tensors`, a shared one once. Of sharded tensors, this rank's shard."""
    sparse = [part for tensor in tensors if tensor.is_sparse for part in (tensor._indices(), tensor._values())]
    dense = [local_shard(tensor) for tensor in tensors if not tensor.is_sparse]
    storages = [part.untyped_storage() for part in (*sparse, *dense)]
    return sum({storage._cdata: storage.nbytes() for storage in storages}.values())
