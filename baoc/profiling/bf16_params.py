"""Probes of a network whose weights are kept in bf16, for plans in which fp32 weights do not fit.

Every Footprint describes native (fp32) weights, and a plan subtracts the savings of its bf16 weights from it. A probe
that ran with bf16 weights is therefore converted to native by `as_native`; subtracting the same savings again gives
back exactly what was measured.
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
    """Bytes that each of `params` saves in bf16, by name; parameters that save nothing are left out."""
    savings = {name: param.numel() * (param.element_size() - BF16.itemsize) for name, param in params.items()}
    return {name: nbytes for name, nbytes in savings.items() if nbytes > 0}


@contextmanager
def cast_to_bf16(
    params: Mapping[str, Tensor], *, device: torch.device | None = None, module: nn.Module | None = None
) -> Iterator[None]:
    """Inside, `params` hold bf16 values while their exact values wait in CPU memory; on exit these are restored.

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
        except torch.OutOfMemoryError:
            there = home or torch.device("cpu")
            clear_cache(there)
            with cap_suspended(there):
                restore()


def single_cuda_device(params: Iterable[Tensor]) -> torch.device | None:
    """The CUDA device that holds all of `params`; None if they are elsewhere or spread out."""
    homes = {param.device for param in params}
    return next((home for home in homes if len(homes) == 1 and home.type == "cuda"), None)


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


def as_native(found: Footprint, *, savings: Mapping[str, int]) -> Footprint:
    """Converts a footprint measured with bf16 weights to native weights: an upper bound for allocations that mix both.

    Each interval of the step gains the savings of the weights and of the gradients alive in it, and the bf16 copies
    that autocast would make of native weights. The copies are taken to live all the time. The largest
    gradient is added once more, as it exists beside the accumulated one; with gradient release, the gradients that wait
    for the rest of their block. `savings`: bytes by parameter, from `bf16_savings`.
    """
    if not savings:
        return found
    saved, largest = sum(savings.values()), max(savings, key=lambda name: savings[name])
    waiting = found.gradients_bytes if found.released else savings[largest]
    copies = {**savings, largest: savings[largest] + waiting}
    before = [0, *accumulate(savings.get(name, 0) for name in found.gradient_order)]
    whole = PeakInterval(name="training", num_bytes=found.forward_backward_bytes)
    validation = PeakInterval(name="validation", num_bytes=found.validation_bytes)

    def raised(interval: PeakInterval) -> PeakInterval:
        gradients = saved if interval.gradients is None else before[interval.gradients]
        more = saved + gradients + sum(copies.values())
        return replace(interval, num_bytes=interval.num_bytes + more, copies={**interval.copies, **copies})

    intervals = tuple(map(raised, found.intervals or (whole, *([validation] if found.validation_bytes else []))))
    return replace(
        found,
        weights_bytes=found.weights_bytes + saved,
        gradients_bytes=found.gradients_bytes + (waiting if found.released else saved),
        forward_backward_bytes=max(interval.num_bytes for interval in intervals if interval.name != "validation"),
        validation_bytes=max(
            (interval.num_bytes for interval in intervals if interval.name == "validation"), default=0
        ),
        resident_bytes=found.resident_bytes + (saved if found.released else 2 * saved),
        settled_bytes=found.settled_bytes + saved if found.released else 0,
        intervals=intervals,
    )
