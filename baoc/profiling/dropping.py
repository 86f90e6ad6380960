"""Drops gradients in the backward pass of a probe, as an optimizer that releases them does after stepping a block."""

from collections.abc import Callable, Mapping, Sequence

from torch import Tensor
from torch.utils.hooks import RemovableHandle

from baoc.profiling.tracker import PeakMeter

# Of gradients in order (block, bytes), and how many each block has: blocks that are stepped together, one by one.
Grouping = Callable[[Sequence[tuple[str, int]], Mapping[str, int]], Sequence[Sequence[str]]]


class Dropped:
    """Inside of `with`, a block's gradients go as soon as all of its parameters have theirs; without blocks, nothing.

    With `grouping`, from the second backward on they wait for those of the blocks that are stepped together with it.
    `gradients_bytes`: the most that gradients took at once. `stepping_bytes`: the most that was alive, all in all, at
    the moments when a block would be stepped.
    """

    def __init__(self, blocks: Sequence[Sequence[Tensor]], *, meter: PeakMeter, grouping: Grouping | None = None):
        self.gradients_bytes = 0
        self.stepping_bytes = 0
        self._blocks = {str(at): [param for param in block if param.requires_grad] for at, block in enumerate(blocks)}
        self._meter = meter
        self._grouping = grouping
        self._name_of = {param: name for name, block in self._blocks.items() for param in block}
        self._order: list[tuple[str, int]] = []  # of the first backward
        self._group_of: dict[str, tuple[str, ...]] = {}
        self._waiting: list[str] = []  # blocks of one group that have all their gradients
        self._handles: list[RemovableHandle] = []

    def __enter__(self) -> "Dropped":
        self._handles = [param.register_post_accumulate_grad_hook(self._ready) for param in self._name_of]
        return self

    def __exit__(self, *exc: object) -> None:
        for handle in self._handles:
            handle.remove()

    def _ready(self, param: Tensor) -> None:
        alive = [other.grad for other in self._name_of if other.grad is not None]
        self.gradients_bytes = max(self.gradients_bytes, storage_bytes(alive))
        name = self._name_of[param]
        if self._grouping is not None and not self._group_of and param.grad is not None:
            self._order.append((name, param.grad.nbytes))
        if all(other.grad is not None for other in self._blocks[name]):
            self._is_whole(name)

    def _is_whole(self, name: str) -> None:
        group = self._group_of.get(name, (name,))
        if self._waiting and self._group_of.get(self._waiting[0]) != group:
            self._drop_waiting()
        self._waiting.append(name)
        if len(self._waiting) == len(group):
            self._drop_waiting()

    def _drop_waiting(self) -> None:
        names, self._waiting = self._waiting, []
        self.stepping_bytes = max(self.stepping_bytes, self._meter.current_bytes)
        for name in names:
            for param in self._blocks[name]:
                param.grad = None

    def finish(self) -> None:
        """Ends a backward: blocks of which some parameters had no gradient are stepped now."""
        self._waiting = [name for name, block in self._blocks.items() if any(param.grad is not None for param in block)]
        if self._waiting:
            self._drop_waiting()
        if self._order and self._grouping is not None:
            left = {name: len(self._blocks[name]) for name, _ in self._order}
            groups = self._grouping(self._order, left)
            self._group_of, self._order = {name: tuple(group) for group in groups for name in group}, []


def storage_bytes(tensors: Sequence[Tensor]) -> int:
    """Bytes of the storages of `tensors`, each once."""
    return sum({t.untyped_storage()._cdata: t.untyped_storage().nbytes() for t in tensors}.values())
