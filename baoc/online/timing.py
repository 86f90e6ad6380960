"""Times an optimizer step per spec, and a whole step with torch's fused AdamW, to which step_time is a ratio."""

from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path

import torch

from baoc.catalogue import device_rows
from baoc.optim import BlockwiseOptimizer
from baoc.optim.backends import stand_in
from baoc.profiling import measure_latency
from baoc.types import LatencyTable, OptimizerSpec

_FUSED = "torch fused AdamW"  # no spec's name, as it holds spaces
_COLUMNS = 256


def time_specs(
    specs: Sequence[OptimizerSpec],
    *,
    device: torch.device,
    num_elements: int,
    base_step: Callable[[], None] | None = None,
    accumulation: int = 1,
    max_s: float = 5.0,
    cache_dir: Path | None = None,
) -> LatencyTable:
    """The latency table of `specs` on `device` in at most about `max_s` seconds.

    `base_step` runs forward and backward of one micro-batch; the reference step is `accumulation` of them and torch's
    fused AdamW on `num_elements` elements, by its own line.
    """
    rows = device_rows(specs)
    makers = {spec.name: _maker(spec, device=device, num_elements=num_elements) for spec in rows}
    makers[_FUSED] = lambda numel: _fused(numel, device=device)
    table = measure_latency(makers, device=device, base_step=base_step, max_s=max_s, cache_dir=cache_dir)
    fixed, slope = dict(table.fixed_s), dict(table.per_element_s)
    fused_s = fixed.pop(_FUSED) + slope.pop(_FUSED) * num_elements
    base_s = table.base_step_s * accumulation
    return replace(table, fixed_s=fixed, per_element_s=slope, base_step_s=base_s, reference_step_s=base_s + fused_s)


def _parameter(numel: int, device: torch.device) -> torch.nn.Parameter:
    param = torch.nn.Parameter(torch.full((max(numel // _COLUMNS, 1), _COLUMNS), 0.02, device=device))
    param.grad = torch.linspace(-1e-3, 1e-3, param.numel(), device=device).view_as(param)
    return param


def _maker(spec: OptimizerSpec, *, device: torch.device, num_elements: int) -> Callable[[int], Callable[[], None]]:
    def make(numel: int) -> Callable[[], None]:
        backend = stand_in(spec, device=device, numel=num_elements)
        optimizer = BlockwiseOptimizer([_parameter(numel, device)], spec, backend=backend)
        return lambda: optimizer.step()

    return make


def _fused(numel: int, *, device: torch.device) -> Callable[[], None]:
    optimizer = torch.optim.AdamW([_parameter(numel, device)], fused=device.type in ("cpu", "cuda"))
    return lambda: optimizer.step()
