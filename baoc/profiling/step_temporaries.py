"""Temporary memory of an optimizer step beyond its state, per spec: part of the predicted peak."""

import math
import warnings
from collections.abc import Iterable
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
from baoc.profiling.footprint import StepProbe, step_temporary_bytes
from baoc.types import OptimizerSpec, Scaling
from baoc.types.network import matrix_shape

_SMALL = 256, 256


def step_temporaries(specs: Iterable[OptimizerSpec], *, params: Iterable[torch.Tensor]) -> dict[str, int]:
    """Spec -> bytes for the largest of `params`, measured on 65,536 elements: temporaries grow with the tensor.
    Products of a matrix with its transpose do not: rules that need them are stepped in the shapes that there are, on
    meta tensors.

    Steps go through tensors one by one, so the largest one decides; how many elements there are together says who
    steps them. Rounded up, as the peak may not be above what is predicted. On a GPU nothing is measured there, as that
    would compile every kernel of the catalogue before a plan is made: kernels work in place, with buffers that count as
    tables do, or say how much room they take, and what has none is stepped by the same operators on the CPU. Streamed
    states are stepped as those on the device are.
    """
    given, params = list(specs), list(params)
    found = _of_rows(device_specs(given), params=[local_shard(param) for param in params])
    if any(is_sharded(param) for param in params):
        summing = [spec for spec in device_specs(given) if sums_columns(RULE_INFOS[spec.rule])]
        found |= _measured(summing, params=[local_shard(param) for param in params], backend=EagerBackend.name)
        exchanged = exchanged_temporary_bytes(params)
        found |= {
            spec.name: exchanged for spec in device_specs(given) if RULE_INFOS[spec.rule].scaling is Scaling.SPECTRAL
        }
    return {spec.name: found[device_spec_name(spec.name)] for spec in given}


def _of_rows(specs: list[OptimizerSpec], *, params: list[torch.Tensor]) -> dict[str, int]:
    by_kernel = [param for param in params if param.device.type == "cuda" and available(param.device) and fits(param)]
    if len(by_kernel) == len(params):
        eager = [spec for spec in specs if not has_kernel(spec)]
        fused = {spec.name: temporary_bytes(spec, params=params) for spec in specs if has_kernel(spec)}
        return fused | _measured(eager, params=params)
    return _measured(specs, params=params)


def _measured(
    specs: Iterable[OptimizerSpec], *, params: list[torch.Tensor], backend: str | None = None
) -> dict[str, int]:
    """`backend`: what steps them; None asks for the one that steps the large ones."""
    largest = max(params, key=lambda param: param.numel())
    numel = sum(param.numel() for param in params)
    moved = largest.device.type == "cuda"
    device = torch.device("cpu") if moved else largest.device
    scale, shapes = largest.numel() / math.prod(_SMALL), _largest_shapes(params)
    found, threads = {}, torch.get_num_threads()
    torch.set_num_threads(1)  # others wait for each other longer than so little takes
    try:
        for spec in specs:
            by = backend or (EagerBackend.name if moved else proxy_backend(spec, device=device, numel=numel))
            if RULE_INFOS[spec.rule].scaling is Scaling.SPECTRAL:
                meta = torch.device("meta")
                found[spec.name] = max(bytes_of_a_step(spec, meta, largest.dtype, by, shape) for shape in shapes)
            else:
                found[spec.name] = math.ceil(scale * bytes_of_a_step(spec, device, largest.dtype, by, _SMALL))
    finally:
        torch.set_num_threads(threads)
    return found


def _largest_shapes(params: Iterable[torch.Tensor]) -> list[tuple[int, ...]]:
    """Those of matrices beside which no other has as many elements and as long a shorter side."""
    sides = {tuple(p.shape): min(matrix) for p in params if (matrix := matrix_shape(p.shape)) is not None}
    found: list[tuple[int, ...]] = []
    for shape in sorted(sides, key=lambda shape: (-math.prod(shape), -sides[shape])):
        if not found or sides[shape] > sides[found[-1]]:
            found.append(shape)
    return found or [_SMALL]


@lru_cache(maxsize=1024)
def bytes_of_a_step(
    spec: OptimizerSpec, device: torch.device, dtype: torch.dtype, backend: str, shape: tuple[int, ...]
) -> int:
    """Bytes of a step on a parameter of `shape`, which nothing changes while a process lives."""
    return step_temporary_bytes(_probe(spec, shape, device=device, dtype=dtype, backend=backend), device=device)


def _probe(
    spec: OptimizerSpec, shape: tuple[int, ...], *, device: torch.device, dtype: torch.dtype, backend: str
) -> StepProbe:
    def make():
        param = torch.nn.Parameter(torch.ones(*shape, device=device, dtype=dtype))
        param.grad = torch.linspace(-1, 1, param.numel(), device=device).view_as(param).to(dtype)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # that 16-bit weights stall is said of the user's blocks, not of this one
            optimizer = BlockwiseOptimizer([param], spec, backend=backend)
        return lambda: optimizer.step()

    return make
