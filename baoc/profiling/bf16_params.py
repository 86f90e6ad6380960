"""Probes with bf16 weights, for plans in which native (fp32) weights do not fit.

Every Footprint describes native weights, and a plan subtracts the savings of its bf16 weights from it. So `as_native`
converts a footprint that was measured with bf16 weights; subtracting the same savings again gives back exactly what was
measured.
"""

from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from itertools import accumulate

import torch
from torch import Tensor, nn

from baoc.profiling.memory import cap_suspended, clear_cache
from baoc.types import Footprint, PeakInterval

BF16 = torch.bfloat16


def bf16_savings(params: Mapping[str, Tensor]) -> dict[str, int]:
    """Name -> bytes that a parameter saves in bf16, without parameters that save nothing."""
    savings = {name: param.numel() * (param.element_size() - BF16.itemsize) for name, param in params.items()}
    return {name: nbytes for name, nbytes in savings.items() if nbytes > 0}


@contextmanager
def cast_to_bf16(
    params: Mapping[str, Tensor], *, device: torch.device | None = None, module: nn.Module | None = None
) -> Iterator[None]:
    """Inside, `params` have bf16 values, and their exact values stay in CPU memory; on exit these are restored.

    Rounded weights serve to measure bytes and seconds, not losses. Gradients are None on entry and on exit. Exact
    values are restored to their device even beyond an allocation cap that was set meanwhile.

    Args:
        params: the parameters to cast, by name.
        device: where the bf16 values of parameters in CPU memory go; their exact values stay on the CPU.
        module: if its `params` are on one CUDA device, all of it is moved to the CPU and back. The addresses that the
            allocator chooses then do not depend on what ran before: one page more or less changes the least budget.
    """
    exact: dict[str, tuple[Tensor, torch.Size, tuple[int, ...]]] = {}
    on_cpu: list[str] = []
    home = single_cuda_device(params.values())
    reloaded = module if home is not None else None
    try:
        for name, param in params.items():
            param.grad = None
            native = param.detach()
            exact[name] = native.cpu() if native.device.type != "cpu" else native, native.shape, native.stride()
            rounded = native.to(BF16, memory_format=torch.preserve_format)
            if device is not None:
                on_cpu += [name] if native.device.type == "cpu" else []
                rounded = rounded.to(device)
            param.data = rounded if reloaded is None else rounded.cpu()
            del native, rounded  # otherwise the last of them would stay on the device during the measurement
        if reloaded is not None:
            _reload(reloaded, first=params.values(), home=home)
        yield
    finally:
        for name in exact:
            params[name].grad = None
        for name in on_cpu:
            params[name].data = exact.pop(name)[0]
        restore = partial(_restore_exact, params, exact)
        if reloaded is not None:
            reloaded.cpu()
            restore()
            restore = partial(_reload, reloaded, home=home)
        try:
            restore()
        except torch.OutOfMemoryError:  # the cap is lower now than when the exact values were there
            target = home or torch.device("cpu")
            clear_cache(target)
            with cap_suspended(target):
                restore()


def single_cuda_device(params: Iterable[Tensor]) -> torch.device | None:
    """The CUDA device of all `params`; None if they are on other or several devices."""
    devices = {param.device for param in params}
    return next((device for device in devices if len(devices) == 1 and device.type == "cuda"), None)


def _reload(module: nn.Module, *, first: Iterable[Tensor] = (), home: torch.device | None) -> None:
    """Moves `module` to the CPU and back, `first` before the rest: the order in which training loads CPU weights."""
    assert home is not None
    module.cpu()
    clear_cache(home)
    for param in first:
        param.data = param.detach().to(home)
    module.to(home)


def _restore_exact(
    params: Mapping[str, Tensor], exact: Mapping[str, tuple[Tensor, torch.Size, tuple[int, ...]]]
) -> None:
    for name, (values, shape, stride) in exact.items():
        param = params[name]
        if param.dtype != values.dtype:
            native = torch.empty_strided(shape, stride, dtype=values.dtype, device=param.device)
            param.data = native.copy_(values)


def as_native(footprint: Footprint, *, savings: Mapping[str, int]) -> Footprint:
    """Converts a footprint measured with bf16 weights to native weights: an upper bound for allocations that mix both.

    Each interval of the step gains the savings of the weights, the savings of the gradients alive in it, and the bf16
    copies that autocast would make of native weights. Copies are assumed to live all the time. The largest gradient is
    added once more, as it exists next to the accumulated one; with gradient release, the gradients that wait for the
    rest of their block are added. `savings`: bytes by parameter, from `bf16_savings`.
    """
    if not savings:
        return footprint
    released = footprint.released
    saved, largest = sum(savings.values()), max(savings, key=lambda name: savings[name])
    waiting = footprint.gradients_bytes if released else savings[largest]
    copies = {**savings, largest: savings[largest] + waiting}
    of_first_gradients = [0, *accumulate(savings.get(name, 0) for name in footprint.gradient_order)]

    def as_native_interval(interval: PeakInterval) -> PeakInterval:
        of_gradients = saved if interval.gradients is None else of_first_gradients[interval.gradients]
        num_bytes = interval.num_bytes + saved + of_gradients + sum(copies.values())
        return replace(interval, num_bytes=num_bytes, copies={**interval.copies, **copies})

    measured = footprint.intervals
    if not measured:
        measured = (PeakInterval(name="training", num_bytes=footprint.forward_backward_bytes),)
        if footprint.validation_bytes:
            measured = (*measured, PeakInterval(name="validation", num_bytes=footprint.validation_bytes))
    intervals = tuple(map(as_native_interval, measured))
    return replace(
        footprint,
        weights_bytes=footprint.weights_bytes + saved,
        gradients_bytes=footprint.gradients_bytes + (waiting if released else saved),
        forward_backward_bytes=max(interval.num_bytes for interval in intervals if interval.name != "validation"),
        validation_bytes=max(
            (interval.num_bytes for interval in intervals if interval.name == "validation"), default=0
        ),
        resident_bytes=footprint.resident_bytes + (saved if released else 2 * saved),
        settled_bytes=footprint.settled_bytes + saved if released else 0,
        intervals=intervals,
    )
