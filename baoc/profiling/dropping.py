"""Drops gradients in the backward pass of a probe, as an optimizer that releases them does after stepping a block."""

from collections.abc import Sequence

from torch import Tensor
from torch.utils.hooks import RemovableHandle

from baoc.profiling.tracker import PeakMeter


class Dropped:
    """Inside of `with`, a block's gradients go as soon as all of its parameters have theirs; without blocks, nothing.

    `gradients_bytes`: the most that gradients took at once. `stepping_bytes`: the most that was alive, all in all, at
    the moments when a block would be stepped.
    """

    def __init__(self, blocks: Sequence[Sequence[Tensor]], *, meter: PeakMeter):
        self.gradients_bytes = 0
        self.stepping_bytes = 0
        self._blocks = [[param for param in block if param.requires_grad] for block in blocks]
        self._meter = meter
        self._block_of = {param: block for block in self._blocks for param in block}
        self._handles: list[RemovableHandle] = []

    def __enter__(self) -> "Dropped":
        self._handles = [param.register_post_accumulate_grad_hook(self._ready) for param in self._block_of]
        return self

    def __exit__(self, *exc: object) -> None:
        for handle in self._handles:
            handle.remove()

    def _ready(self, param: Tensor) -> None:
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
        """Ends a backward: blocks of which some parameters had no gradient are stepped now."""
        for block in self._blocks:
            if any(param.grad is not None for param in block):
                self._drop(block)


def storage_bytes(tensors: Sequence[Tensor]) -> int:
    """Bytes of the storages of `tensors`, each once."""
    return sum({t.untyped_storage()._cdata: t.untyped_storage().nbytes() for t in tensors}.values())
