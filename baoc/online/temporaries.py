"""What an optimizer step holds beyond its state while it works on one tensor, per spec: part of the predicted peak."""

import math
import warnings
from collections.abc import Iterable

import torch

from baoc.optim import BlockwiseOptimizer
from baoc.optim.backends import stand_in
from baoc.profiling import step_temporary_bytes
from baoc.profiling.footprint import StepProbe
from baoc.types import OptimizerSpec

_ROWS, _COLUMNS = 256, 256


def step_temporaries(specs: Iterable[OptimizerSpec], *, params: Iterable[torch.Tensor]) -> dict[str, int]:
    """Spec -> bytes for the largest of `params`, measured on 65,536 elements: temporaries grow with the tensor.

    Steps go through tensors one by one, so the largest one decides; how many elements there are together says who
    steps them. Rounded up, as the peak may not be above what is predicted.
    """
    params = list(params)
    largest = max(params, key=lambda param: param.numel())
    device, numel = largest.device, sum(param.numel() for param in params)
    scale = largest.numel() / (_ROWS * _COLUMNS)
    found = {}
    for spec in specs:
        backend = stand_in(spec, device=device, numel=numel)
        probe = _probe(spec, device=device, dtype=largest.dtype, backend=backend)
        found[spec.name] = math.ceil(scale * step_temporary_bytes(probe, device=device))
    return found


def _probe(spec: OptimizerSpec, *, device: torch.device, dtype: torch.dtype, backend: str) -> StepProbe:
    def make():
        param = torch.nn.Parameter(torch.ones(_ROWS, _COLUMNS, device=device, dtype=dtype))
        param.grad = torch.linspace(-1, 1, param.numel(), device=device).view_as(param).to(dtype)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # that 16-bit weights stall is said of the user's blocks, not of this one
            optimizer = BlockwiseOptimizer([param], spec, backend=backend)
        return lambda: optimizer.step()

    return make
