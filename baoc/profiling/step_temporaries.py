"""Temporary memory of an optimizer step beyond its state, per spec: part of the predicted peak."""

import math
import warnings
from collections.abc import Callable, Iterable
from functools import lru_cache

import torch

from baoc.core.catalogue import device_spec_name, device_specs
from baoc.core.rule_tags import RULE_INFOS
from baoc.kernels import available, fits
from baoc.optim import BlockwiseOptimizer
from baoc.optim.backends import proxy_backend
from baoc.optim.backends.eager import EagerBackend
from baoc.optim.backends.fused import exchanged_temporary_bytes, has_kernel, temporary_bytes
from baoc.optim.shards import is_sharded, local_shard
from baoc.planning.candidates import sums_columns
from baoc.profiling.footprint import step_temporary_bytes
from baoc.types import OptimizerSpec, Scaling
from baoc.types.network import matrix_shape

_PROXY_SHAPE = 256, 256  # of the matrix that is stepped in place of the largest one


def step_temporaries(specs: Iterable[OptimizerSpec], *, params: Iterable[torch.Tensor]) -> dict[str, int]:
    """Spec name -> temporary bytes of its step on the largest of `params`: tensors are stepped one after the other.

    Most specs are measured on a tensor of 65,536 elements, and the bytes scaled up to the largest tensor. Rules that
    multiply a matrix with its transpose need bytes that do not grow with the number of elements; they are measured on
    meta tensors in the shapes of the network. The number of elements of all `params` decides which backend steps them.

    On a GPU nothing is measured, as this would compile every kernel of the catalogue before a plan is made. Fused
    kernels know their temporaries; specs without a kernel run the same operators on the CPU. Streamed states need the
    same temporaries as states on the device.
    """
    requested, params = list(specs), list(params)
    local_params = [local_shard(param) for param in params]
    on_device = device_specs(requested)
    fused: list[OptimizerSpec] = []
    if all(p.device.type == "cuda" and available(p.device) and fits(p) for p in local_params):
        fused = [spec for spec in on_device if has_kernel(spec)]
    temporaries = {spec.name: temporary_bytes(spec, params=local_params) for spec in fused}
    temporaries |= _measure([spec for spec in on_device if spec.name not in temporaries], params=local_params)
    if any(is_sharded(param) for param in params):
        summing = [spec for spec in on_device if sums_columns(RULE_INFOS[spec.rule])]
        temporaries |= _measure(summing, params=local_params, backend=EagerBackend.name)
        exchanged = exchanged_temporary_bytes(params)
        spectral = [spec for spec in on_device if RULE_INFOS[spec.rule].scaling is Scaling.SPECTRAL]
        temporaries |= {spec.name: exchanged for spec in spectral}
    return {spec.name: temporaries[device_spec_name(spec.name)] for spec in requested}


def _measure(
    specs: Iterable[OptimizerSpec], *, params: list[torch.Tensor], backend: str | None = None
) -> dict[str, int]:
    """Spec name -> temporary bytes, by steps on the CPU or on meta. `backend`: None is the one that suits `params`."""
    largest = max(params, key=lambda param: param.numel())
    numel = sum(param.numel() for param in params)
    on_cuda = largest.device.type == "cuda"
    device = torch.device("cpu") if on_cuda else largest.device
    scale, shapes = largest.numel() / math.prod(_PROXY_SHAPE), _largest_shapes(params)
    temporaries, num_threads = {}, torch.get_num_threads()
    torch.set_num_threads(1)  # on a busy machine threads wait for each other longer than such a step takes
    try:
        for spec in specs:
            name = backend or (EagerBackend.name if on_cuda else proxy_backend(spec, device=device, numel=numel))
            if RULE_INFOS[spec.rule].scaling is Scaling.SPECTRAL:
                meta = torch.device("meta")
                by_shape = [measured_temporary_bytes(spec, meta, largest.dtype, name, shape) for shape in shapes]
                temporaries[spec.name] = max(by_shape)
            else:
                nbytes = measured_temporary_bytes(spec, device, largest.dtype, name, _PROXY_SHAPE)
                temporaries[spec.name] = math.ceil(scale * nbytes)  # up, as a prediction is an upper bound
    finally:
        torch.set_num_threads(num_threads)
    return temporaries


def _largest_shapes(params: Iterable[torch.Tensor]) -> list[tuple[int, ...]]:
    """Shapes of the matrices for which no other has at least as many elements and as long a shorter side."""
    sides = {tuple(p.shape): min(matrix) for p in params if (matrix := matrix_shape(p.shape)) is not None}
    largest: list[tuple[int, ...]] = []
    for shape in sorted(sides, key=lambda shape: (-math.prod(shape), -sides[shape])):
        if not largest or sides[shape] > sides[largest[-1]]:
            largest.append(shape)
    return largest or [_PROXY_SHAPE]


@lru_cache(maxsize=1024)
def measured_temporary_bytes(
    spec: OptimizerSpec, device: torch.device, dtype: torch.dtype, backend: str, shape: tuple[int, ...]
) -> int:
    """Temporary bytes of a step of `spec` on a parameter of `shape`."""

    def make() -> Callable[[], None]:
        param = torch.nn.Parameter(torch.ones(*shape, device=device, dtype=dtype))
        param.grad = torch.linspace(-1, 1, param.numel(), device=device).view_as(param).to(dtype)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # the warning that 16-bit weights stall is for the user's blocks
            optimizer = BlockwiseOptimizer([param], spec, backend=backend)
        return lambda: optimizer.step()

    return step_temporary_bytes(make, device=device)
