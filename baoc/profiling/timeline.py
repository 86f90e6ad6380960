"""The stretches of a step between one gradient (or one 16-bit copy of a weight) and the next, each by its peak.

What a step would hold with weights of 16 bits follows from them: how many gradients, and which copies that autocast
had made, were there at each peak. Works with tracked storages and with CUDA's allocator alike.
"""

import heapq
import weakref
from collections.abc import Mapping, Sequence
from itertools import accumulate
from typing import Any

from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.hooks import RemovableHandle

from baoc.profiling.tracker import PeakMeter
from baoc.types import Moment

MOST_MOMENTS = 16  # with all gradients, and again with those that have come; neighbours are joined beyond
DROPPED, COPIED, DIED, ARRIVED, ENDED = "dropped", "copied ", "died", "arrived ", "ended"  # what ends a stretch


class Timeline(TorchDispatchMode):
    """Records moments while it is entered: `with Timeline(meter, named=...) as line: ...; line.moments(name)`.

    `named`: the trainable parameters. `order` is that in which gradients came. `dropped` is to be called when gradients
    are set to None, and `held` says that they were there from the start. `stretches` are the moments as they were
    recorded, each named by what ended it.
    """

    def __init__(self, meter: PeakMeter, *, named: Mapping[str, Tensor], held: bool):
        super().__init__()
        self._meter = meter
        self._named = named
        self._by_storage = {param.untyped_storage()._cdata: name for name, param in named.items()}
        self._copies: dict[str, weakref.ref[Any]] = {}
        self._hooks: list[RemovableHandle] = []
        self._alive: dict[str, int] = {}
        self._gradients: int | None = None if held else 0
        self._reserved = 0
        self._ran = False  # an operator, since the last stretch ended
        self.order: list[str] = []
        self.stretches: list[Moment] = []

    def __enter__(self) -> "Timeline":
        self._hooks = [
            param.register_post_accumulate_grad_hook(lambda _, name=name: self._arrived(name))
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
        if not self._ran:  # what went since the last stretch ended is not of this one
            self._meter.reset_peak()
            self._ran = True
        out = func(*args, **(kwargs or {}))
        if isinstance(out, Tensor) and func.name().startswith(("aten::_to_copy", "aten::to.")):
            self._copied(args[0], out)
        return out

    def dropped(self) -> None:
        """Gradients are gone from here on, and come one by one."""
        self._close(DROPPED)
        self._gradients = 0

    def reserve(self, num_bytes: int) -> None:
        """So much is reserved, for reasons that the meter has not seen."""
        self._reserved = max(self._reserved, num_bytes)

    @property
    def slack_bytes(self) -> int:
        """What was reserved beyond the largest stretch."""
        return max(0, self._reserved - max((moment.num_bytes for moment in self.stretches), default=0))

    def moments(self, name: str) -> tuple[Moment, ...]:
        """What was recorded, neighbours joined; on CUDA raised to the peak of reserved memory."""
        sizes = {key: param.untyped_storage().nbytes() for key, param in self._named.items()}
        return joined(self.stretches, name=name, slack=self.slack_bytes, gradients=[sizes[key] for key in self.order])

    def _copied(self, source: Any, copy: Tensor) -> None:
        """A parameter was cast to fewer bits; what lives from here on contains the copy."""
        name = self._by_storage.get(source.untyped_storage()._cdata) if isinstance(source, Tensor) else None
        if name is None or copy.element_size() >= source.element_size():
            return
        self._close(COPIED + name)
        storage = copy.untyped_storage()
        self._copies[name] = weakref.ref(storage, lambda dead: self._died(name, dead))
        self._alive[name] = storage.nbytes()

    def _died(self, name: str, dead: Any) -> None:
        """A copy is gone: what lived up to here contained it. Several that go at once end one stretch."""
        if self._copies.get(name) is not dead:
            return
        if self._ran:
            self._close(DIED)
        del self._copies[name], self._alive[name]

    def _arrived(self, name: str) -> None:
        self._close(ARRIVED + name)
        self._meter.arrived(self._named[name])
        if self._gradients is not None and name not in self.order:
            self.order.append(name)
            self._gradients = len(self.order)

    def _close(self, event: str) -> None:
        """Ends a stretch and begins the next."""
        peak = self._meter.peak_allocated_bytes
        self.stretches.append(Moment(name=event, num_bytes=peak, gradients=self._gradients, copies=dict(self._alive)))
        self._reserved = max(self._reserved, self._meter.peak_bytes)
        self._ran = False
        self._meter.reset_peak()


def joined(stretches: Sequence[Moment], *, name: str, slack: int, gradients: Sequence[int]) -> tuple[Moment, ...]:
    """At most MOST_MOMENTS with all gradients and as many with those that have come, called `name`, each `slack` bytes
    larger. `gradients`: bytes of each, in the order in which they come.

    None is less than any of the stretches that it stands for. Which are joined depends on gradients and copies alone,
    so that micro-batches of two sizes have the same moments.
    """
    sums = [0, *accumulate(gradients)]
    found: list[Moment] = []
    for whole in (True, False):
        groups = [_Group(m, sums=sums) for m in stretches if (m.gradients is None) is whole]
        found += [group.moment(name, slack=slack) for group in _thinned(groups)]
    return tuple(found)


class _Group:
    """Neighbouring stretches: the largest peak, the fewest gradients, the copies that all have."""

    def __init__(self, moment: Moment, *, sums: Sequence[int]):
        self.num_bytes, self.gradients, self.copies = moment.num_bytes, moment.gradients, moment.copies
        self._any = moment.copies
        self._least = self._most = sums[moment.gradients or 0]
        self._sums = sums

    def lost(self, other: "_Group") -> int:
        """Bytes of copies and gradients that only some stretches of both have."""
        differ = sum(nbytes for key, nbytes in self._any.items() if key not in other.copies or key not in self.copies)
        differ += sum(nbytes for key, nbytes in other._any.items() if key not in self._any)
        return differ + max(self._most, other._most) - min(self._least, other._least)

    def join(self, other: "_Group") -> None:
        self.num_bytes = max(self.num_bytes, other.num_bytes)
        if self.gradients is not None and other.gradients is not None:
            self.gradients = min(self.gradients, other.gradients)
        self.copies = {key: nbytes for key, nbytes in self.copies.items() if key in other.copies}
        self._any = {**self._any, **other._any}
        self._least, self._most = min(self._least, other._least), max(self._most, other._most)

    def moment(self, name: str, *, slack: int) -> Moment:
        return Moment(name=name, num_bytes=self.num_bytes + slack, gradients=self.gradients, copies=self.copies)


def _thinned(groups: list[_Group]) -> list[_Group]:
    """Neighbours joined, those first that lose least, until MOST_MOMENTS are left."""
    after = {at: at + 1 for at in range(len(groups) - 1)}
    before = {at + 1: at for at in range(len(groups) - 1)}
    version = [0] * len(groups)
    queue = [(groups[at].lost(groups[at + 1]), at, at + 1, 0, 0) for at in after]
    heapq.heapify(queue)
    alive = set(range(len(groups)))
    while len(alive) > MOST_MOMENTS:
        _, at, other, *versions = heapq.heappop(queue)
        if at not in alive or after.get(at) != other or versions != [version[at], version[other]]:
            continue
        groups[at].join(groups[other])
        alive.discard(other)
        version[at] += 1
        after.pop(at)
        if (third := after.pop(other, None)) is not None:
            after[at], before[third] = third, at
            heapq.heappush(queue, (groups[at].lost(groups[third]), at, third, version[at], version[third]))
        if (first := before.get(at)) is not None:
            heapq.heappush(queue, (groups[first].lost(groups[at]), first, at, version[first], version[at]))
    return [groups[at] for at in sorted(alive)]
