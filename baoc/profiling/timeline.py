"""Splits a step into intervals between gradients (and between bf16 copies of weights) and records the peak of each.

A plan derives from them the peak of a step with bf16 weights: each interval knows how many gradients, and which copies
made by autocast, are alive all through it. Works with tracked storages and with CUDA's allocator.
"""

import weakref
from collections.abc import Mapping, Sequence
from itertools import accumulate, pairwise
from typing import Any

from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.hooks import RemovableHandle

from baoc.profiling.tracker import PeakMeter
from baoc.types import PeakInterval

# Intervals of a footprint: so many with all gradients alive, and as many with those of this step. More are merged with
# their neighbours, as a plan goes through all of them for each candidate.
MAX_INTERVALS = 16
# The event that ends a raw interval. COPIED and ARRIVED are followed by the parameter's name.
DROPPED, COPIED, COPY_FREED, ARRIVED, ENDED = "dropped", "copied ", "died", "arrived ", "ended"


class Timeline(TorchDispatchMode):
    """Records intervals inside `with Timeline(...) as timeline`; `timeline.merged(name)` returns them afterwards.

    Attributes:
        intervals: the raw intervals, each named by the event that ended it.
        order: names of the parameters in the order in which their gradients arrived.

    Args:
        named: the trainable parameters by name.
        gradients_alive: whether the gradients of the step before are alive at the start.
    """

    def __init__(self, meter: PeakMeter, *, named: Mapping[str, Tensor], gradients_alive: bool):
        super().__init__()
        self._meter = meter
        self._named = named
        self._by_storage = {param.untyped_storage()._cdata: name for name, param in named.items()}
        self._copies: dict[str, weakref.ref[Any]] = {}
        self._copy_bytes: dict[str, int] = {}  # of the copies that are alive
        self._hooks: list[RemovableHandle] = []
        self._num_gradients: int | None = None if gradients_alive else 0  # None: those of the step before, all alive
        self._reserved_bytes = 0
        self._ran = False  # whether an operator ran since the last interval ended
        self.order: list[str] = []
        self.intervals: list[PeakInterval] = []

    def __enter__(self) -> "Timeline":
        self._hooks = [
            param.register_post_accumulate_grad_hook(lambda _, name=name: self._on_gradient(name))
            for name, param in self._named.items()
        ]
        self._meter.reset_peak()
        super().__enter__()
        return self

    def __exit__(self, *exc: Any) -> None:
        super().__exit__(*exc)
        self._close(ENDED)
        self._copies.clear()
        for hook in self._hooks:
            hook.remove()

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        if not self._ran:  # tensors freed since the last interval ended do not belong to this one
            self._meter.reset_peak()
            self._ran = True
        out = func(*args, **(kwargs or {}))
        if isinstance(out, Tensor) and func.name().startswith(("aten::_to_copy", "aten::to.")):
            self._on_copy(args[0], out)
        return out

    supports_higher_order_operators = True  # compiled layers hold them, such as attention under a random state

    @classmethod
    def ignore_compile_internals(cls) -> bool:
        """Lets compiled layers run compiled: torch's allocator counts their bytes, and their casts make no copies."""
        return True

    def dropped(self) -> None:
        """To be called when gradients were set to None: from here on they arrive one by one."""
        self._close(DROPPED)
        self._num_gradients = 0

    def raise_reserved(self, num_bytes: int) -> None:
        """Raises the peak of reserved memory to at least `num_bytes`, which an emulated allocator computed."""
        self._reserved_bytes = max(self._reserved_bytes, num_bytes)

    @property
    def slack_bytes(self) -> int:
        """Reserved bytes beyond the largest interval: unused parts of the allocator's pages."""
        return max(0, self._reserved_bytes - max((interval.num_bytes for interval in self.intervals), default=0))

    def merged(self, name: str) -> tuple[PeakInterval, ...]:
        """The intervals, merged to at most MAX_INTERVALS of each kind, called `name`, with the slack added to each."""
        gradients = [self._named[key].untyped_storage().nbytes() for key in self.order]
        return merge_intervals(self.intervals, name=name, slack=self.slack_bytes, gradients=gradients)

    def _on_copy(self, source: Any, copy: Tensor) -> None:
        """Ends an interval if autocast cast a parameter to fewer bits; the copy is alive from the next one on."""
        name = self._by_storage.get(source.untyped_storage()._cdata) if isinstance(source, Tensor) else None
        if name is None or copy.element_size() >= source.element_size():
            return
        self._close(COPIED + name)
        storage = copy.untyped_storage()
        self._copies[name] = weakref.ref(storage, lambda dead: self._on_copy_freed(name, dead))
        self._copy_bytes[name] = storage.nbytes()

    def _on_copy_freed(self, name: str, dead: Any) -> None:
        """Ends an interval in which the copy was alive. Copies freed with no operator between them end one interval."""
        if self._copies.get(name) is not dead:
            return
        if self._ran:
            self._close(COPY_FREED)
        del self._copies[name], self._copy_bytes[name]

    def _on_gradient(self, name: str) -> None:
        self._close(ARRIVED + name)
        gradient, allocator = self._named[name].grad, self._meter.allocator
        if allocator is not None and gradient is not None:
            allocator.record_gradient(gradient.untyped_storage()._cdata)
        if self._num_gradients is not None and name not in self.order:
            self.order.append(name)
            self._num_gradients = len(self.order)

    def _close(self, event: str) -> None:
        self.intervals.append(
            PeakInterval(
                name=event,
                num_bytes=self._meter.peak_allocated_bytes,
                gradients=self._num_gradients,
                copies=dict(self._copy_bytes),
            )
        )
        self._reserved_bytes = max(self._reserved_bytes, self._meter.peak_bytes)
        self._ran = False
        self._meter.reset_peak()


def merge_intervals(
    intervals: Sequence[PeakInterval], *, name: str, slack: int, gradients: Sequence[int]
) -> tuple[PeakInterval, ...]:
    """Merges `intervals` to at most MAX_INTERVALS with all gradients alive and as many with those of this step.

    A merged interval predicts no less than any of those it stands for. Which are merged depends on gradients and copies
    alone, never on activations, so that probes of two micro-batch sizes give matching intervals.

    Args:
        name: of the merged intervals.
        slack: bytes added to each.
        gradients: bytes of each gradient, in the order in which they come.
    """
    sums = [0, *accumulate(gradients)]  # bytes of the first n gradients
    merged: list[PeakInterval] = []
    for all_alive in (True, False):
        groups = [_Group(interval, sums=sums) for interval in intervals if (interval.gradients is None) is all_alive]
        merged += [group.interval(name, slack=slack) for group in _merge_to_limit(groups)]
    return tuple(merged)


class _Group:
    """Merged neighbours: the largest peak, the fewest gradients, and the copies that are alive in all of them."""

    def __init__(self, interval: PeakInterval, *, sums: Sequence[int]):
        self.num_bytes, self.gradients, self.copies = interval.num_bytes, interval.gradients, interval.copies
        self._copies_in_any = interval.copies  # copies that are alive in some of them
        self._min_gradient_bytes = self._max_gradient_bytes = sums[interval.gradients or 0]

    def loss(self, other: "_Group") -> int:
        """Bytes of copies and gradients that are alive in some but not all intervals of both groups: merging them
        makes a plan ignore these savings."""
        copies = sum(n for key, n in self._copies_in_any.items() if key not in other.copies or key not in self.copies)
        copies += sum(n for key, n in other._copies_in_any.items() if key not in self._copies_in_any)
        most = max(self._max_gradient_bytes, other._max_gradient_bytes)
        return copies + most - min(self._min_gradient_bytes, other._min_gradient_bytes)

    def merge(self, other: "_Group") -> None:
        self.num_bytes = max(self.num_bytes, other.num_bytes)
        if self.gradients is not None and other.gradients is not None:
            self.gradients = min(self.gradients, other.gradients)
        self.copies = {key: nbytes for key, nbytes in self.copies.items() if key in other.copies}
        self._copies_in_any = {**self._copies_in_any, **other._copies_in_any}
        self._min_gradient_bytes = min(self._min_gradient_bytes, other._min_gradient_bytes)
        self._max_gradient_bytes = max(self._max_gradient_bytes, other._max_gradient_bytes)

    def interval(self, name: str, *, slack: int) -> PeakInterval:
        return PeakInterval(name=name, num_bytes=self.num_bytes + slack, gradients=self.gradients, copies=self.copies)


def _merge_to_limit(groups: list[_Group]) -> list[_Group]:
    """Merges the two neighbours that lose least, again and again, until MAX_INTERVALS groups are left."""
    losses = [group.loss(other) for group, other in pairwise(groups)]
    while len(groups) > MAX_INTERVALS:
        at = losses.index(min(losses))
        groups[at].merge(groups.pop(at + 1))
        del losses[at]
        for pair in (at - 1, at):  # the losses that the merged group is part of
            if 0 <= pair < len(losses):
                losses[pair] = groups[pair].loss(groups[pair + 1])
    return groups
