"""The footprint of a deep network from two shallow ones, where its parts are alike: 32 layers from 4 and from 5.

Bytes at every moment of a pass are linear in the number of layers and in the place of the layer that runs, so two
depths say all. Where parts differ, or moments do not line up, there is no such footprint and the whole network is run.
"""

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from itertools import groupby

from torch import nn

from baoc.profiling.timeline import ARRIVED, DIED, DROPPED, joined
from baoc.types import Footprint, Moment

SHORT, LONG = 4, 5  # depths that are run
_PLACES = frozenset({"layer_idx", "layer_id", "layer_index"})  # attributes that say which layer it is


@dataclass(frozen=True, slots=True)
class Layers:
    """The list that a network's parts are in: `holder.name`, `prefix` being its name in the whole module."""

    holder: nn.Module
    name: str
    prefix: str
    parts: tuple[nn.Module, ...]

    @property
    def depth(self) -> int:
        return len(self.parts)

    @contextmanager
    def cut(self, depth: int) -> Iterator[None]:
        """Inside, the network has the first `depth` parts only."""
        whole = self.holder._modules[self.name]
        self.holder._modules[self.name] = nn.ModuleList(self.parts[:depth])
        try:
            yield
        finally:
            self.holder._modules[self.name] = whole


def layers_of(module: nn.Module, *, parts: Sequence[nn.Module]) -> Layers | None:
    """The list of `parts`, if all of them are alike and there are more than it takes to run two depths."""
    if len(parts) <= LONG + 1 or len({_likeness(part) for part in parts}) > 1:
        return None
    for name, child in module.named_modules():
        if isinstance(child, nn.ModuleList) and len(child) == len(parts) and all(map(_same, child, parts)):
            holder, _, last = name.rpartition(".")
            return Layers(module.get_submodule(holder), last, f"{name}.", tuple(parts))
    return None


def _same(one: nn.Module, other: nn.Module) -> bool:
    return one is other


def _likeness(part: nn.Module) -> tuple[object, ...]:
    """What two parts have in common that take the same bytes: classes, plain settings, shapes, what is trained."""
    found: list[object] = []
    for name, child in part.named_modules():
        plain = {k: v for k, v in vars(child).items() if isinstance(v, int | float | str) and k not in _PLACES}
        found.append((name, type(child), tuple(sorted(plain.items()))))
    found += [(n, tuple(p.shape), p.dtype, p.requires_grad) for n, p in part.named_parameters()]
    return (*found, *((n, tuple(b.shape), b.dtype) for n, b in part.named_buffers()))


# -- from two depths to any -------------------------------------------------------------------------------------------

_Event = tuple[str, Moment]  # what ended a stretch, the layer's own part of the parameter's name in it


@dataclass(frozen=True, slots=True)
class _Sweep:
    """All layers one after the other, up or down: the events of each. Or a single `None`: events outside of layers."""

    order: tuple[int | None, ...]
    events: Mapping[int | None, Sequence[_Event]]


def extended(short: Footprint, long: Footprint, *, layers: Layers, sizes: Mapping[str, int]) -> Footprint | None:
    """The footprint with all `layers` from those with SHORT and LONG of them, both with all their stretches.

    `sizes`: bytes of each gradient of the whole network. None where the two do not line up.
    """
    prefix, depth = layers.prefix, layers.depth
    low, high = _sweeps(short.moments, prefix=prefix, depth=SHORT), _sweeps(long.moments, prefix=prefix, depth=LONG)
    if low is None or high is None or len(low) != len(high):
        return None
    stretches: list[Moment] = []
    nbytes = _copied_bytes(long.moments, prefix=prefix)
    for a, b in zip(low, high, strict=True):
        made = _stretched(a, b, prefix=prefix, depth=depth, nbytes=nbytes)
        if made is None:
            return None
        stretches += made
    stretches, order = _counted(stretches, held=short.moments[0].gradients is None)

    def line(a: int, b: int) -> int:
        return a + (depth - SHORT) * (b - a)

    slacks = [f.forward_backward_bytes - max(m.num_bytes for m in f.moments) for f in (short, long)]
    slack = max(slacks)
    fields = ("weights_bytes", "gradients_bytes", "resident_bytes", "ema_bytes")
    values = {name: line(getattr(short, name), getattr(long, name)) for name in fields}
    moments = joined(stretches, name="training", slack=slack, gradients=[sizes[name] for name in order])
    most = max(moment.num_bytes for moment in moments)
    return replace(long, **values, moments=moments, gradient_order=order, forward_backward_bytes=most)


def _sweeps(moments: Sequence[Moment], *, prefix: str, depth: int) -> list[_Sweep] | None:
    """Stretches by sweep; None where one does not pass each layer once, in order."""
    placed: list[tuple[int | None, _Event]] = []
    at: int | None = None
    for moment in moments:
        event, layer = moment.name, at
        if event != DIED:  # what goes does so with the layer that ran last
            layer, event = _place(event, prefix=prefix)
        placed.append((layer, (event, moment)))
        at = layer
    segments = [(layer, [event for _, event in run]) for layer, run in groupby(placed, key=lambda item: item[0])]
    found: list[_Sweep] = []
    for outside, run in groupby(segments, key=lambda segment: segment[0] is None):
        part = list(run)
        order = tuple(layer for layer, _ in part)
        if not outside and order not in (tuple(range(depth)), tuple(reversed(range(depth)))):
            return None
        found.append(_Sweep(order, dict(part)))
    return found


def _place(event: str, *, prefix: str) -> tuple[int | None, str]:
    """Layer of an event, and the event with what is left of the parameter's name; (None, event) outside of layers."""
    kind, _, name = event.partition(" ")
    if not name.startswith(prefix):
        return None, event
    layer, _, rest = name.removeprefix(prefix).partition(".")
    return int(layer), f"{kind} {rest}"


def _copied_bytes(moments: Sequence[Moment], *, prefix: str) -> dict[str, int]:
    """Bytes of each copy, by its name, or by the layer's part of it."""
    return {_place(f" {k}", prefix=prefix)[1][1:]: v for moment in moments for k, v in moment.copies.items()}


def _stretched(low: _Sweep, high: _Sweep, *, prefix: str, depth: int, nbytes: Mapping[str, int]) -> list[Moment] | None:
    """The stretches of one sweep over `depth` layers."""
    outside, down = low.order == (None,), low.order[0] == SHORT - 1
    if outside != (high.order == (None,)) or down != (high.order[0] == LONG - 1):
        return None
    layers: list[int | None] = [None] if outside else list(range(depth))
    made: list[Moment] = []
    for layer in reversed(layers) if down else layers:
        events = _events(low, high, layer=layer, depth=depth)
        regions = _regions(high, layer=layer, depth=depth, prefix=prefix)
        if events is None or regions is None:
            return None
        for (event, num_bytes), region in zip(events, regions, strict=True):
            kind, _, rest = event.partition(" ")
            name = event if layer is None or not rest else f"{kind} {prefix}{layer}.{rest}"
            copies = _copies(region, layer=layer, depth=depth, prefix=prefix, nbytes=nbytes)
            made.append(Moment(name=name, num_bytes=num_bytes, copies=copies))
    return made


def _events(low: _Sweep, high: _Sweep, *, layer: int | None, depth: int) -> list[tuple[str, int]] | None:
    """What ends each stretch of a layer of `depth`, and its bytes; None where those that were run are not on a line."""
    if layer is None or layer in (0, depth - 1):
        of_low, of_high = (None, None) if layer is None else (0, 0) if layer == 0 else (SHORT - 1, LONG - 1)
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
        found.append((event, a.num_bytes + (depth - SHORT) * deeper + steps * further))
    return found


_Region = dict[str, dict[str, bool]]  # part of the layers -> a layer's part of a name -> whether its copy is there


def _regions(high: _Sweep, *, layer: int | None, depth: int, prefix: str) -> list[_Region] | None:
    """Of which layers the copies are there in each stretch of a layer, told from the deeper run."""
    known = [None] if layer is None else [0] if layer == 0 else [LONG - 1] if layer == depth - 1 else [1, 2, 3]
    found: list[_Region] = []
    for events in zip(*(high.events[at] for at in known), strict=True):
        region: _Region = {}
        for at, (_, moment) in zip(known, events, strict=True):
            there = [_place(f" {name}", prefix=prefix) for name in moment.copies]
            names = {name[1:] for _, name in there}
            for name in names:
                for other in (None, *range(LONG)):
                    part = _part(other, of=at, depth=LONG)
                    # a name is of a layer, or it is not: the other entry is never asked for
                    if region.setdefault(part, {}).setdefault(name, (other, f" {name}") in there) != (
                        (other, f" {name}") in there
                    ):
                        return None
        found.append(region)
    return found


def _part(layer: int | None, *, of: int | None, depth: int) -> str:
    """Where a layer is, seen from another: the first and the last are apart, as they may differ from the others."""
    if layer is None or layer == of:
        return "outside" if layer is None else "self"
    if layer in (0, depth - 1):
        return "first" if layer == 0 else "last"
    return "between" if of is None else "below" if layer < of else "above"


def _copies(
    region: _Region, *, layer: int | None, depth: int, prefix: str, nbytes: Mapping[str, int]
) -> dict[str, int]:
    found = {name: nbytes[name] for name, there in region.get("outside", {}).items() if there}
    for other in range(depth):
        for name, there in region.get(_part(other, of=layer, depth=depth), {}).items():
            if there:
                found[f"{prefix}{other}.{name}"] = nbytes[name]
    return found


def _counted(stretches: Sequence[Moment], *, held: bool) -> tuple[list[Moment], tuple[str, ...]]:
    """The stretches with the gradients that are there in each, and the order in which they come."""
    made: list[Moment] = []
    order: list[str] = []
    count: int | None = None if held else 0
    for moment in stretches:
        made.append(replace(moment, gradients=count))
        kind, _, name = moment.name.partition(" ")
        if moment.name == DROPPED:
            count = 0
        elif f"{kind} " == ARRIVED and count is not None and name not in order:
            order.append(name)
            count = len(order)
    return made, tuple(order)
