"""Times an optimizer step per spec, and a training step with torch's fused AdamW, to which step_time is a ratio."""

from collections.abc import Callable, Collection, Iterable, Sequence
from dataclasses import replace
from pathlib import Path

import torch

from baoc.core.catalogue import device_specs
from baoc.core.rule_tags import RULE_INFOS
from baoc.optim import BlockwiseOptimizer
from baoc.optim.backends import proxy_backend
from baoc.optim.backends.fused import is_bandwidth_bound
from baoc.planning.cost import bytes_per_parameter
from baoc.planning.transfer import hidden_seconds
from baoc.profiling.latency import MakeStep, measure_latency, read_timings, timing_key
from baoc.profiling.link import measure_link
from baoc.types import LatencyTable, OptimizerSpec

FUSED = "torch fused AdamW"  # key of its timing; names of specs have no spaces
FUSED_BYTES = 28  # moved per element: weight, gradient and two states read, all but the gradient written
_COLUMNS = 256  # of the matrices that are stepped


def time_specs(
    specs: Sequence[OptimizerSpec],
    *,
    device: torch.device,
    num_elements: int,
    num_tensors: int = 1,
    rest_s: float = 0.0,
    upkeep_bytes: int = 0,
    needed: Collection[str],
    max_s: float = 5.0,
    cache_dir: Path | None = None,
    previous: LatencyTable | None = None,
) -> LatencyTable:
    """The latency table of `specs` on `device`.

    Args:
        num_elements, num_tensors: of the network's trainable parameters.
        rest_s: seconds of a training step without the optimizer's. The reference step takes these and fused AdamW's.
        upkeep_bytes: moved per element and step beside the optimizer (averages of the weights).
        needed: names of specs to time. Others are timed if `cache_dir` has their timing already; the rest is assumed
            to move as many bytes per second as fused AdamW.
        max_s: about the most seconds for all timings, without compilation.
        previous: a table whose rest of a step and reference are kept.
    """

    def make_fused(numel: int, tensors: int) -> Callable[[], None]:
        optimizer = torch.optim.AdamW(_parameters(numel, tensors, device), fused=device.type in ("cpu", "cuda"))
        return lambda: optimizer.step()

    steps: dict[str, MakeStep] = {FUSED: make_fused}
    cached = read_timings(cache_dir, key=timing_key(device))
    specs = device_specs(specs)
    for spec in specs:
        if spec.name in needed or spec.name in cached:
            steps[spec.name] = _step_maker(spec, device=device, num_elements=num_elements)
    table = measure_latency(steps, device=device, max_s=max_s, cache_dir=cache_dir)
    fixed, slope = dict(table.fixed_s), dict(table.per_element_s)
    tensor_s, element_s = fixed.pop(FUSED), slope.pop(FUSED)
    assumed = [spec for spec in specs if spec.name not in fixed]
    for spec in assumed:
        fixed[spec.name], slope[spec.name] = tensor_s, element_s * bytes_moved_per_element(spec) / FUSED_BYTES
    base_s = rest_s + element_s * num_elements * upkeep_bytes / FUSED_BYTES
    fused_s = table.step_s + tensor_s * num_tensors + element_s * num_elements
    return replace(
        table,
        fixed_s=fixed,
        per_element_s=slope,
        base_step_s=base_s if previous is None else previous.base_step_s,
        reference_step_s=base_s + fused_s if previous is None else previous.reference_step_s,
        assumed=tuple(spec.name for spec in assumed),
    )


def specs_timed_first(specs: Iterable[OptimizerSpec], *, device: torch.device) -> set[str]:
    """Names of the specs whose seconds must be measured. On a GPU, specs that are bound by bandwidth need not be: their
    seconds follow from the bytes that they move, and compiling each would take seconds."""
    return {spec.name for spec in device_specs(specs) if device.type != "cuda" or not is_bandwidth_bound(spec)}


def with_link_rates(table: LatencyTable, *, device: torch.device, accumulation: int, hides: bool) -> LatencyTable:
    """The table with the measured rates of the link (on CUDA), and the seconds of backward that overlap with copies.

    `hides`: whether blocks may be stepped in the last backward of a step, as nothing changes their gradients after it.
    """
    link = measure_link(device) if device.type == "cuda" else None
    hidden_s = hidden_seconds(table.base_step_s, accumulation=accumulation) if hides else 0.0
    return replace(table, link=link, hidden_s=hidden_s)


def bytes_moved_per_element(spec: OptimizerSpec) -> float:
    """Bytes per element of a step of `spec`: weight, gradient and state read, weight and state written."""
    state, weight = bytes_per_parameter(spec, rule=RULE_INFOS[spec.rule])
    return 2 * (state + weight) + weight


def _parameters(numel: int, tensors: int, device: torch.device) -> list[torch.nn.Parameter]:
    """`tensors` parameters of about `numel` elements each, with gradients."""
    params: list[torch.nn.Parameter] = []
    for _ in range(tensors):
        param = torch.nn.Parameter(torch.full((max(numel // _COLUMNS, 1), _COLUMNS), 0.02, device=device))
        param.grad = torch.linspace(-1e-3, 1e-3, param.numel(), device=device).view_as(param)
        params.append(param)
    return params


def _step_maker(spec: OptimizerSpec, *, device: torch.device, num_elements: int) -> MakeStep:
    def make(numel: int, tensors: int) -> Callable[[], None]:
        backend = proxy_backend(spec, device=device, numel=num_elements)
        optimizer = BlockwiseOptimizer(_parameters(numel, tensors, device), spec, backend=backend)
        return lambda: optimizer.step()

    return make
