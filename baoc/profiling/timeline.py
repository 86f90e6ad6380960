"""The stretches of a step between one gradient (or one 16-bit copy of a weight) and the next, each by its peak.

What a step would hold with weights of 16 bits follows from them: how many gradients, and which copies that autocast
had made, were there at each peak. Works with tracked storages and with CUDA's allocator alike.
"""

import weakref
from collections.abc import Mapping
from typing import Any

from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.hooks import RemovableHandle

from baoc.profiling.tracker import PeakMeter
from baoc.types import Moment

MOST_MOMENTS = 16  # of forward, backward or validation; neighbours are joined, which only loses sharpness


class Timeline(TorchDispatchMode):
    """Records moments while it is entered: `with Timeline(meter, named=...) as line: ...; line.moments(name)`.

    `named`: the trainable parameters. `order` is that in which gradients came. `dropped` is to be called when gradients
    are set to None, and `held` says that they were there from the start.
    """

    def __init__(self, meter: PeakMeter, *, named: Mapping[str, Tensor], held: bool):
        super().__init__()
        self._meter = meter
        self._named = named
        self._by_storage = {param.untyped_storage()._cdata: name for name, param in named.items()}
        self._copies: dict[str, tuple[weakref.ref[Any], int]] = {}
        self._moments: list[Moment] = []
        self._hooks: list[RemovableHandle] = []
        self._alive: dict[str, int] = {}
        self._gradients: int | None = None if held else 0
        self._reserved = 0
        self.order: list[str] = []

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
        self._close()
        for hook in self._hooks:
            hook.remove()

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        out = func(*args, **(kwargs or {}))
        if func.name().startswith(("aten::_to_copy", "aten::to.")) and isinstance(out, Tensor):
            self._copied(args[0], out)
        return out

    def dropped(self) -> None:
        """Gradients are gone from here on, and come one by one."""
        self._close()
        self._gradients = 0

    def moments(self, name: str) -> tuple[Moment, ...]:
        """What was recorded, neighbours joined; on CUDA raised to the peak of reserved memory."""
        found = self._moments
        slack = max(0, self._reserved - max((moment.num_bytes for moment in found), default=0))
        joined: list[Moment] = []
        for whole in (True, False):  # with all gradients, and with those that have come
            part = [moment for moment in found if (moment.gradients is None) is whole]
            size = -(-len(part) // MOST_MOMENTS) or 1
            joined += [_joined(part[at : at + size], name=name, slack=slack) for at in range(0, len(part), size)]
        return tuple(joined)

    def _copied(self, source: Any, copy: Tensor) -> None:
        """A parameter was cast to fewer bits; what lives from here on contains the copy."""
        name = self._by_storage.get(source.untyped_storage()._cdata) if isinstance(source, Tensor) else None
        if name is None or copy.element_size() >= source.element_size():
            return
        self._close()
        storage = copy.untyped_storage()
        self._copies[name] = weakref.ref(storage), storage.nbytes()
        self._alive = self._living()

    def _arrived(self, name: str) -> None:
        self._close()
        if self._gradients is not None and name not in self.order:
            self.order.append(name)
            self._gradients = len(self.order)

    def _living(self) -> dict[str, int]:
        return {name: nbytes for name, (storage, nbytes) in self._copies.items() if storage() is not None}

    def _close(self) -> None:
        """Ends a stretch and begins the next."""
        living = self._living()
        there = {name: nbytes for name, nbytes in self._alive.items() if name in living}
        peak = self._meter.peak_allocated_bytes
        self._moments.append(Moment(name="", num_bytes=peak, gradients=self._gradients, copies=there))
        self._reserved = max(self._reserved, self._meter.peak_bytes)
        self._alive = living
        self._meter.reset_peak()


def _joined(moments: list[Moment], *, name: str, slack: int) -> Moment:
    """One moment that is none of them less: the largest peak, the fewest gradients, the copies that all have."""
    counts = [moment.gradients for moment in moments if moment.gradients is not None]
    shared = set.intersection(*(set(moment.copies) for moment in moments))
    return Moment(
        name=name,
        num_bytes=max(moment.num_bytes for moment in moments) + slack,
        gradients=min(counts) if counts else None,
        copies={key: nbytes for key, nbytes in moments[0].copies.items() if key in shared},
    )
