"""A probe with weights of 16 bits where a plan may keep such: what does not fit in full is looked at as it is run.

Footprints are of native weights, from which an allocation's savings are then taken off; so what a probe with 16 bits
found is told as native, and the same savings give back exactly what was measured.
"""

from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from itertools import accumulate

import torch
from torch import Tensor, nn

from baoc.profiling.device import clear_cache, lifted
from baoc.types import Footprint, Moment

NARROW = torch.bfloat16


def narrowed_bytes(params: Mapping[str, Tensor]) -> dict[str, int]:
    """Bytes that each of `params` has less in 16 bits, by name, those that have none left out."""
    less = {name: param.numel() * (param.element_size() - NARROW.itemsize) for name, param in params.items()}
    return {name: nbytes for name, nbytes in less.items() if nbytes > 0}


@contextmanager
def narrowed(
    params: Mapping[str, Tensor], *, device: torch.device | None = None, module: nn.Module | None = None
) -> Iterator[None]:
    """Inside, `params` hold bf16, their exact numbers waiting on the host; afterwards all is as before, gradients None.

    Numbers that are looked at inside are those of the rounded weights: good for bytes and seconds, not for losses.
    Those that wait on the host anyway come to `device`, where they are never in full. Where a cap that came meanwhile
    has no room for whole ones that were on a device, they pass it: they were there before. All of a `module` on CUDA
    comes anew then, as it comes from a host: where the allocator has put what does not depend on what went before, for
    a page more or less is another least budget.
    """
    exact: dict[str, tuple[Tensor, torch.Size, tuple[int, ...]]] = {}
    waited: list[str] = []  # on the host
    home = card_of(params.values())
    anew = module if home is not None else None
    try:
        for name, param in params.items():
            param.grad = None
            whole = param.detach()
            exact[name] = whole.cpu() if whole.device.type != "cpu" else whole, whole.shape, whole.stride()
            near = whole.to(NARROW, memory_format=torch.preserve_format)
            if device is not None:
                waited += [name] if whole.device.type == "cpu" else []
                near = near.to(device)
            param.data = near if anew is None else near.cpu()
            del whole, near  # else the last of them stay on the device beside what is looked at
        if anew is not None:
            _come_anew(anew, first=params.values(), home=home)
        yield
    finally:
        for name in exact:
            params[name].grad = None
        for name in waited:
            params[name].data = exact.pop(name)[0]
        back = partial(_put_back, params, exact)
        if anew is not None:
            anew.cpu()
            back()
            back = partial(_come_anew, anew, home=home)
        try:
            back()
        except torch.OutOfMemoryError:
            there = home or torch.device("cpu")
            clear_cache(there)
            with lifted(there):
                back()


def card_of(params: Iterable[Tensor]) -> torch.device | None:
    """The one CUDA device that has all of them."""
    homes = {param.device for param in params}
    return next((home for home in homes if len(homes) == 1 and home.type == "cuda"), None)


def _come_anew(module: nn.Module, *, first: Iterable[Tensor] = (), home: torch.device | None) -> None:
    """All of it, `first` before the rest: the order in which `visiting` brings those that waited."""
    assert home is not None
    module.cpu()
    clear_cache(home)
    for param in first:
        param.data = param.detach().to(home)
    module.to(home)


def _put_back(params: Mapping[str, Tensor], exact: Mapping[str, tuple[Tensor, torch.Size, tuple[int, ...]]]) -> None:
    for name, (values, shape, stride) in exact.items():
        param = params[name]
        if param.dtype != values.dtype:
            whole = torch.empty_strided(shape, stride, dtype=values.dtype, device=param.device)
            param.data = whole.copy_(values)


def as_native(found: Footprint, *, less: Mapping[str, int]) -> Footprint:
    """`found` with narrowed weights as the footprint of native ones: weights, gradients and, as autocast would make
    them, copies come to each moment. `less`: as `narrowed_bytes` says.

    For allocations that keep more weights native it is to be an upper bound: copies are taken to live all the time, and
    one more gradient beside them, which is on its way to where it is added (or waits for the rest of its block, where
    gradients are released).
    """
    if not less:
        return found
    saved, largest = sum(less.values()), max(less, key=lambda name: less[name])
    waiting = found.gradients_bytes if found.released else less[largest]
    copies = {**less, largest: less[largest] + waiting}
    before = [0, *accumulate(less.get(name, 0) for name in found.gradient_order)]
    whole = Moment(name="training", num_bytes=found.forward_backward_bytes)
    validation = Moment(name="validation", num_bytes=found.validation_bytes)

    def raised(moment: Moment) -> Moment:
        gradients = saved if moment.gradients is None else before[moment.gradients]
        more = saved + gradients + sum(copies.values())
        return replace(moment, num_bytes=moment.num_bytes + more, copies={**moment.copies, **copies})

    moments = tuple(map(raised, found.moments or (whole, *([validation] if found.validation_bytes else []))))
    return replace(
        found,
        weights_bytes=found.weights_bytes + saved,
        gradients_bytes=found.gradients_bytes + (waiting if found.released else saved),
        forward_backward_bytes=max(moment.num_bytes for moment in moments if moment.name != "validation"),
        validation_bytes=max((moment.num_bytes for moment in moments if moment.name == "validation"), default=0),
        resident_bytes=found.resident_bytes + (saved if found.released else 2 * saved),
        moments=moments,
    )
