"""Extrapolates the footprint of a deep network from two shallow ones with the same layers: 32 layers from 4 and 5.

The bytes of each interval of a step are linear in the number of layers and in the index of the layer that runs, so two
depths determine them. Where layers differ, or intervals do not match, there is no result and the whole network is run.
"""

import operator
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from itertools import groupby

from torch import nn

from baoc.profiling.timeline import ARRIVED, DIED, DROPPED, merge_intervals
from baoc.types import Footprint, PeakInterval

SHALLOW, DEEP = 4, 5  # numbers of layers that are run
INNER = 2  # of DEEP layers the one that has an inner one on each side
_INDEX_NAMES = frozenset({"layer_idx", "layer_id", "layer_index"})  # of modules that know their layer


@dataclass(frozen=True, slots=True)
class LayerStack:
    """The ModuleList of a network's layers: `holder.name`; `prefix` starts the names of its parameters."""

    holder: nn.Module
    name: str
    prefix: str
    parts: tuple[nn.Module, ...]

    @property
    def depth(self) -> int:
        return len(self.parts)

    @contextmanager
    def truncated(self, depth: int) -> Iterator[None]:
        """Inside, the network has only its first `depth` layers."""
        whole = self.holder._modules[self.name]
        self.holder._modules[self.name] = nn.ModuleList(self.parts[:depth])
        try:
            yield
        finally:
            self.holder._modules[self.name] = whole


def find_layer_stack(module: nn.Module, *, parts: Sequence[nn.Module]) -> LayerStack | None:
    """The ModuleList that holds `parts`; None if they differ, or are too few to gain from running two depths."""
    if len(parts) <= DEEP + 1 or len({_signature(part) for part in parts}) > 1:
        return None
    for name, child in module.named_modules():
        if isinstance(child, nn.ModuleList) and len(child) == len(parts) and all(map(operator.is_, child, parts)):
            holder, _, last = name.rpartition(".")
            return LayerStack(module.get_submodule(holder), last, f"{name}.", tuple(parts))
    return None


def _signature(part: nn.Module) -> tuple[object, ...]:
    """Equal for layers that take the same bytes: classes, plain attributes, shapes, dtypes, what is trained."""
    found: list[object] = []
    for name, child in part.named_modules():
        plain = {k: v for k, v in vars(child).items() if isinstance(v, int | float | str) and k not in _INDEX_NAMES}
        found.append((name, type(child), tuple(sorted(plain.items()))))
    found += [(n, tuple(p.shape), p.dtype, p.requires_grad) for n, p in part.named_parameters()]
    return (*found, *((n, tuple(b.shape), b.dtype) for n, b in part.named_buffers()))


# -- from two depths to any -------------------------------------------------------------------------------------------

_Event = tuple[str, PeakInterval]  # the event that ended an interval, without the layer's prefix of the parameter name


@dataclass(frozen=True, slots=True)
class _LayerPass:
    """A pass over all layers, forward or backward, with the events of each. Order (None,): events outside of layers."""

    order: tuple[int | None, ...]
    events: Mapping[int | None, Sequence[_Event]]


def extrapolated(
    short: Footprint, long: Footprint, *, layers: LayerStack, sizes: Mapping[str, int]
) -> Footprint | None:
    """The footprint with all `layers`; None where the intervals of the two footprints do not match.

    Args:
        short, long: footprints with SHALLOW and DEEP layers, of `probe_footprint(merge_intervals=False)`.
        sizes: bytes of each gradient of the whole network, by parameter name.
    """
    prefix, depth = layers.prefix, layers.depth
    low = _layer_passes(short.intervals, prefix=prefix, depth=SHALLOW)
    high = _layer_passes(long.intervals, prefix=prefix, depth=DEEP)
    if low is None or high is None or len(low) != len(high):
        return None
    intervals: list[PeakInterval] = []
    for a, b in zip(low, high, strict=True):
        made = _extrapolated(a, b, prefix=prefix, depth=depth)
        if made is None:
            return None
        intervals += made
    intervals, order = _counted(intervals, held=short.intervals[0].gradients is None)

    def line(a: int, b: int) -> int:
        return a + (depth - SHALLOW) * (b - a)

    slack = max(f.forward_backward_bytes - max(m.num_bytes for m in f.intervals) for f in (short, long))
    fields = ("weights_bytes", "gradients_bytes", "resident_bytes", "settled_bytes", "ema_bytes")
    values = {name: line(getattr(short, name), getattr(long, name)) for name in fields}
    merged = merge_intervals(intervals, name="training", slack=slack, gradients=[sizes[name] for name in order])
    peak = max(interval.num_bytes for interval in merged)
    return replace(long, **values, intervals=merged, gradient_order=order, forward_backward_bytes=peak)


def _layer_passes(intervals: Sequence[PeakInterval], *, prefix: str, depth: int) -> list[_LayerPass] | None:
    """The intervals by pass; None where a pass does not visit each layer once, in order."""
    placed: list[tuple[int | None, _Event]] = []
    at: int | None = None
    for interval in intervals:
        event, layer = interval.name, at
        if event != DIED:  # a freed copy belongs to the layer that ran last
            layer, event = _place(event, prefix=prefix)
        placed.append((layer, (event, interval)))
        at = layer
    segments = [(layer, [event for _, event in run]) for layer, run in groupby(placed, key=lambda item: item[0])]
    found: list[_LayerPass] = []
    for outside, run in groupby(segments, key=lambda segment: segment[0] is None):
        part = list(run)
        order = tuple(layer for layer, _ in part)
        if not outside and order not in (tuple(range(depth)), tuple(reversed(range(depth)))):
            return None
        found.append(_LayerPass(order, dict(part)))
    return found


def _place(event: str, *, prefix: str) -> tuple[int | None, str]:
    """(layer, event without the layer's prefix of the parameter name); (None, event) outside of layers."""
    kind, _, name = event.partition(" ")
    if not name.startswith(prefix):
        return None, event
    layer, _, rest = name.removeprefix(prefix).partition(".")
    return int(layer), f"{kind} {rest}"


def _extrapolated(low: _LayerPass, high: _LayerPass, *, prefix: str, depth: int) -> list[PeakInterval] | None:
    """The intervals of one pass over `depth` layers; None where inner layers of the measured ones are not alike."""
    outside, down = low.order == (None,), low.order[0] == SHALLOW - 1
    if outside != (high.order == (None,)) or down != (high.order[0] == DEEP - 1):
        return None
    layers: list[int | None] = [None] if outside else list(range(depth))
    made: list[PeakInterval] = []
    for layer in reversed(layers) if down else layers:
        events = _events(low, high, layer=layer, depth=depth)
        if events is None:
            return None
        for (event, num_bytes), (_, like) in zip(events, high.events[_like(layer, depth=depth)], strict=True):
            kind, _, rest = event.partition(" ")
            name = event if layer is None or not rest else f"{kind} {prefix}{layer}.{rest}"
            copies = _copies(like, layer=layer, depth=depth, prefix=prefix)
            made.append(PeakInterval(name=name, num_bytes=num_bytes, copies=copies))
    for layer, events in high.events.items():
        for (_, interval), (_, like) in zip(events, high.events[_like(layer, depth=DEEP)], strict=True):
            if dict(interval.copies) != _copies(like, layer=layer, depth=DEEP, prefix=prefix):
                return None
    return made


def _events(low: _LayerPass, high: _LayerPass, *, layer: int | None, depth: int) -> list[tuple[str, int]] | None:
    """(event, bytes) of each interval of one of `depth` layers; None where the measured bytes are not linear."""
    if layer is None or layer in (0, depth - 1):
        of_low, of_high = (None, None) if layer is None else (0, 0) if layer == 0 else (SHALLOW - 1, DEEP - 1)
        runs = [low.events[of_low], high.events[of_high]]
    else:
        runs = [low.events[1], high.events[1], low.events[2], high.events[2], high.events[3]]
    if len({tuple(event for event, _ in run) for run in runs}) > 1:
        return None
    found: list[tuple[str, int]] = []
    for (event, a), (_, b), *inner in zip(*runs, strict=True):
        deeper = b.num_bytes - a.num_bytes
        further = inner[0][1].num_bytes - a.num_bytes if inner else 0
        if inner and any(inner[at][1].num_bytes != b.num_bytes + at * further for at in (1, 2)):
            return None
        steps = layer - 1 if layer is not None and inner else 0
        found.append((event, a.num_bytes + (depth - SHALLOW) * deeper + steps * further))
    return found


def _copies(interval: PeakInterval, *, layer: int | None, depth: int, prefix: str) -> dict[str, int]:
    """The copies that are alive in an interval of `layer` of `depth` ones, by the interval of the like one of DEEP."""
    held: dict[int | None, dict[str, int]] = {}
    for name, num_bytes in interval.copies.items():
        at, rest = _place(f" {name}", prefix=prefix)
        held.setdefault(at, {})[rest[1:]] = num_bytes
    found = held.get(None, {})
    for other in range(depth):
        there = held.get(_like(other, depth=depth, seen_from=layer), {})
        found = {**found, **{f"{prefix}{other}.{rest}": num_bytes for rest, num_bytes in there.items()}}
    return found


def _like(layer: int | None, *, depth: int, seen_from: int | None = None) -> int | None:
    """The layer of DEEP ones that stands for one of `depth`. First and last stand for themselves, as their copies may
    live longer; those between stand before or behind the layer that runs."""
    if layer is None or layer in (0, depth - 1):
        return None if layer is None else 0 if layer == 0 else DEEP - 1
    if seen_from in (None, 0, depth - 1, layer):
        return INNER
    return INNER + (1 if layer > seen_from else -1)


def _counted(intervals: Sequence[PeakInterval], *, held: bool) -> tuple[list[PeakInterval], tuple[str, ...]]:
    """The intervals with the number of gradients alive in each, and the order in which gradients come."""
    made: list[PeakInterval] = []
    order: list[str] = []
    count: int | None = None if held else 0
    for interval in intervals:
        made.append(replace(interval, gradients=count))
        kind, _, name = interval.name.partition(" ")
        if interval.name == DROPPED:
            count = 0
        elif f"{kind} " == ARRIVED and count is not None and name not in order:
            order.append(name)
            count = len(order)
    return made, tuple(order)
