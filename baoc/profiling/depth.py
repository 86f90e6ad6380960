"""Extrapolates the footprint of a deep network from two truncated ones with the same layers: 32 layers from 4 and 5.

The bytes of each interval of a step are linear in the number of layers and in the index of the layer that runs, so two
depths determine them. If layers differ, or intervals do not match, there is no result, and the caller runs the network
with all layers.

1. `find_layer_stack` finds the ModuleList, whose layers must be alike; `LayerStack.truncated` keeps its first layers.
2. The caller probes SHALLOW and DEEP layers, with raw intervals, and calls `extrapolated`.
3. `_layer_passes` groups the intervals of each by pass (forward, backward, outside of layers) and by layer.
4. `_extrapolated` makes the intervals of one pass over all layers, by `_extrapolated_bytes` and `_copies`.
5. `_with_gradient_counts` adds what a Timeline would know: the gradients alive in each interval, and their order.
"""

import operator
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from itertools import groupby

from torch import nn

from baoc.profiling.timeline import ARRIVED, COPY_FREED, DROPPED, merge_intervals
from baoc.types import Footprint, PeakInterval

SHALLOW, DEEP = 4, 5  # numbers of layers that are run
MIDDLE = 2  # index of the layer among DEEP ones that is neither first, last nor next to these
_INDEX_NAMES = frozenset({"layer_idx", "layer_id", "layer_index"})  # of modules that know their layer


@dataclass(frozen=True, slots=True)
class LayerStack:
    """The ModuleList `parent.name` of a network's `layers`. `prefix`: the beginning of the names of its parameters."""

    parent: nn.Module
    name: str
    prefix: str
    layers: tuple[nn.Module, ...]

    @property
    def depth(self) -> int:
        return len(self.layers)

    @contextmanager
    def truncated(self, depth: int) -> Iterator[None]:
        """Inside, the network has only its first `depth` layers."""
        all_layers = self.parent._modules[self.name]
        self.parent._modules[self.name] = nn.ModuleList(self.layers[:depth])
        try:
            yield
        finally:
            self.parent._modules[self.name] = all_layers


def find_layer_stack(module: nn.Module, *, layers: Sequence[nn.Module]) -> LayerStack | None:
    """The ModuleList of these `layers`; None if they differ, or are too few to gain from running two depths."""
    if len(layers) <= DEEP + 1 or len({_signature(layer) for layer in layers}) > 1:
        return None
    for name, child in module.named_modules():
        if isinstance(child, nn.ModuleList) and len(child) == len(layers) and all(map(operator.is_, child, layers)):
            parent, _, last = name.rpartition(".")
            return LayerStack(module.get_submodule(parent), last, f"{name}.", tuple(layers))
    return None


def _signature(layer: nn.Module) -> tuple[object, ...]:
    """Equal for layers that take the same bytes: classes, plain attributes, shapes, dtypes, what is trained."""
    signature: list[object] = []
    for name, child in layer.named_modules():
        plain = {k: v for k, v in vars(child).items() if isinstance(v, int | float | str) and k not in _INDEX_NAMES}
        signature.append((name, type(child), tuple(sorted(plain.items()))))
    signature += [(n, tuple(p.shape), p.dtype, p.requires_grad) for n, p in layer.named_parameters()]
    return (*signature, *((n, tuple(b.shape), b.dtype) for n, b in layer.named_buffers()))


# -- from two depths to any -------------------------------------------------------------------------------------------

_Event = tuple[str, PeakInterval]  # the event that ended an interval, without the layer's prefix of the parameter name


@dataclass(frozen=True, slots=True)
class _LayerPass:
    """One pass over all layers, forward or backward: the order of the layers, and the events of each.

    Events outside of layers are a pass of their own, with order (None,).
    """

    order: tuple[int | None, ...]
    events: Mapping[int | None, Sequence[_Event]]


def extrapolated(
    shallow: Footprint, deep: Footprint, *, layers: LayerStack, sizes: Mapping[str, int]
) -> Footprint | None:
    """The footprint with all `layers`; None if the intervals of the two footprints do not match.

    Args:
        shallow, deep: footprints with SHALLOW and DEEP layers, of `probe_footprint(merge_intervals=False)`.
        sizes: bytes of each gradient with all layers, by parameter name.
    """
    prefix, depth = layers.prefix, layers.depth
    shallow_passes = _layer_passes(shallow.intervals, prefix=prefix, depth=SHALLOW)
    deep_passes = _layer_passes(deep.intervals, prefix=prefix, depth=DEEP)
    if shallow_passes is None or deep_passes is None or len(shallow_passes) != len(deep_passes):
        return None
    intervals: list[PeakInterval] = []
    for shallow_pass, deep_pass in zip(shallow_passes, deep_passes, strict=True):
        of_pass = _extrapolated(shallow_pass, deep_pass, prefix=prefix, depth=depth)
        if of_pass is None:
            return None
        intervals += of_pass
    gradients_alive = shallow.intervals[0].gradients is None
    intervals, order = _with_gradient_counts(intervals, gradients_alive=gradients_alive)
    slack = max(f.forward_backward_bytes - max(m.num_bytes for m in f.intervals) for f in (shallow, deep))
    merged = merge_intervals(intervals, name="training", slack=slack, gradients=[sizes[name] for name in order])
    values: dict[str, int] = {}
    for name in ("weights_bytes", "gradients_bytes", "resident_bytes", "settled_bytes", "ema_bytes"):
        at_shallow, at_deep = getattr(shallow, name), getattr(deep, name)
        values[name] = at_shallow + (depth - SHALLOW) * (at_deep - at_shallow)
    peak = max(interval.num_bytes for interval in merged)
    return replace(deep, **values, intervals=merged, gradient_order=order, forward_backward_bytes=peak)


def _layer_passes(intervals: Sequence[PeakInterval], *, prefix: str, depth: int) -> list[_LayerPass] | None:
    """The intervals by pass; None if a pass does not visit each layer once, in order."""
    located: list[tuple[int | None, _Event]] = []
    layer: int | None = None
    for interval in intervals:
        event = interval.name
        if event != COPY_FREED:  # a freed copy belongs to the layer that ran last
            layer, event = _locate(event, prefix=prefix)
        located.append((layer, (event, interval)))
    segments = [(layer, [event for _, event in run]) for layer, run in groupby(located, key=lambda item: item[0])]
    passes: list[_LayerPass] = []
    for outside, run in groupby(segments, key=lambda segment: segment[0] is None):
        of_pass = list(run)
        order = tuple(layer for layer, _ in of_pass)
        if not outside and order not in (tuple(range(depth)), tuple(reversed(range(depth)))):
            return None
        passes.append(_LayerPass(order, dict(of_pass)))
    return passes


def _locate(event: str, *, prefix: str) -> tuple[int | None, str]:
    """(layer, event without the layer's prefix of the parameter name); (None, event) outside of layers."""
    kind, _, name = event.partition(" ")
    if not name.startswith(prefix):
        return None, event
    layer, _, rest = name.removeprefix(prefix).partition(".")
    return int(layer), f"{kind} {rest}"


def _extrapolated(shallow: _LayerPass, deep: _LayerPass, *, prefix: str, depth: int) -> list[PeakInterval] | None:
    """The intervals of one pass over `depth` layers; None if the measured inner layers are not alike."""
    outside, backward = shallow.order == (None,), shallow.order[0] == SHALLOW - 1
    if outside != (deep.order == (None,)) or backward != (deep.order[0] == DEEP - 1):
        return None
    layers: list[int | None] = [None] if outside else list(range(depth))
    intervals: list[PeakInterval] = []
    for layer in reversed(layers) if backward else layers:
        events = _extrapolated_bytes(shallow, deep, layer=layer, depth=depth)
        if events is None:
            return None
        models = deep.events[_model_layer(layer, depth=depth)]
        for (event, num_bytes), (_, model) in zip(events, models, strict=True):
            kind, _, rest = event.partition(" ")
            name = event if layer is None or not rest else f"{kind} {prefix}{layer}.{rest}"
            copies = _copies(model, layer=layer, depth=depth, prefix=prefix)
            intervals.append(PeakInterval(name=name, num_bytes=num_bytes, copies=copies))
    # The rule by which copies are extrapolated must reproduce those that were measured.
    for layer, events in deep.events.items():
        for (_, interval), (_, model) in zip(events, deep.events[_model_layer(layer, depth=DEEP)], strict=True):
            if dict(interval.copies) != _copies(model, layer=layer, depth=DEEP, prefix=prefix):
                return None
    return intervals


def _extrapolated_bytes(
    shallow: _LayerPass, deep: _LayerPass, *, layer: int | None, depth: int
) -> list[tuple[str, int]] | None:
    """(event, bytes) of each interval of one of `depth` layers; None if the measured bytes are not linear.

    Bytes of an inner layer: those of layer 1 of SHALLOW, plus a slope for each layer that the network has more, plus a
    slope for each layer after 1. The first and last layer, and events outside of layers, have the first slope only.
    """
    if layer is None or layer in (0, depth - 1):
        in_shallow, in_deep = (None, None) if layer is None else (0, 0) if layer == 0 else (SHALLOW - 1, DEEP - 1)
        measured = [shallow.events[in_shallow], deep.events[in_deep]]
    else:
        measured = [shallow.events[1], deep.events[1], shallow.events[2], deep.events[2], deep.events[3]]
    if len({tuple(event for event, _ in events) for events in measured}) > 1:
        return None
    extrapolated: list[tuple[str, int]] = []
    for (event, a), (_, b), *inner in zip(*measured, strict=True):
        per_depth = b.num_bytes - a.num_bytes
        per_layer = inner[0][1].num_bytes - a.num_bytes if inner else 0
        if inner and any(inner[at][1].num_bytes != b.num_bytes + at * per_layer for at in (1, 2)):
            return None
        layers_after_1 = layer - 1 if layer is not None and inner else 0
        num_bytes = a.num_bytes + (depth - SHALLOW) * per_depth + layers_after_1 * per_layer
        extrapolated.append((event, num_bytes))
    return extrapolated


def _copies(interval: PeakInterval, *, layer: int | None, depth: int, prefix: str) -> dict[str, int]:
    """The copies alive while `layer` of `depth` layers runs. `interval`: the measured one of its model layer."""
    measured: dict[int | None, dict[str, int]] = {}  # layer of DEEP -> name within the layer -> bytes
    for name, num_bytes in interval.copies.items():
        of_layer, rest = _locate(f" {name}", prefix=prefix)
        measured.setdefault(of_layer, {})[rest[1:]] = num_bytes
    copies = dict(measured.get(None, {}))
    for other in range(depth):
        of_model = measured.get(_model_layer(other, depth=depth, running=layer), {})
        copies |= {f"{prefix}{other}.{rest}": num_bytes for rest, num_bytes in of_model.items()}
    return copies


def _model_layer(layer: int | None, *, depth: int, running: int | None = None) -> int | None:
    """The layer of DEEP ones from which `layer` of `depth` ones is extrapolated.

    The first and the last layer have models of their own, as their copies may live longer. The model of an inner layer
    is the middle one, or for copies the one before or after it, as `layer` comes before or after the `running` layer.
    """
    if layer is None or layer in (0, depth - 1):
        return None if layer is None else 0 if layer == 0 else DEEP - 1
    if running in (None, 0, depth - 1, layer):
        return MIDDLE
    return MIDDLE + (1 if layer > running else -1)


def _with_gradient_counts(
    intervals: Sequence[PeakInterval], *, gradients_alive: bool
) -> tuple[list[PeakInterval], tuple[str, ...]]:
    """The intervals with the number of gradients alive in each, and the order in which gradients arrive."""
    counted: list[PeakInterval] = []
    order: list[str] = []
    count: int | None = None if gradients_alive else 0
    for interval in intervals:
        counted.append(replace(interval, gradients=count))
        kind, _, name = interval.name.partition(" ")
        if interval.name == DROPPED:
            count = 0
        elif f"{kind} " == ARRIVED and count is not None and name not in order:
            order.append(name)
            count = len(order)
    return counted, tuple(order)
