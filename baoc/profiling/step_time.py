"""Times an optimizer step per spec, and a whole step with torch's fused AdamW, to which step_time is a ratio."""

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

FUSED = "torch fused AdamW"  # no spec's name, as it holds spaces
FUSED_BYTES = 28  # that it moves per element: weight, gradient and two states read, all but the gradient written
_COLUMNS = 256


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
    """The latency table of `specs` on `device` in at most about `max_s` seconds, compiling apart.

    `rest_s`: of a step, all but the optimizer's part; the reference step has the same, and torch's fused AdamW on
    `num_elements` elements in `num_tensors` tensors, by its own line. `upkeep_bytes`: what a step moves per element
    beside both (averages of the weights), taken to be as fast by the byte as fused AdamW.

    With a `previous` table, the rest of a step and the reference are taken from it.

    Timed are the specs that are `needed` (names), and those that `cache_dir` knows already; the others are assumed to
    be as fast by the byte as fused AdamW.
    """

    def make_fused(numel: int, tensors: int) -> Callable[[], None]:
        optimizer = torch.optim.AdamW(_parameters(numel, tensors, device), fused=device.type in ("cpu", "cuda"))
        return lambda: optimizer.step()

    steps: dict[str, MakeStep] = {FUSED: make_fused}
    known = read_timings(cache_dir, key=timing_key(device))
    specs = device_specs(specs)
    for spec in specs:
        if spec.name in needed or spec.name in known:
            steps[spec.name] = _maker(spec, device=device, num_elements=num_elements)
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
    """Names of the specs to be timed at once: on a GPU those whose seconds bytes do not tell, for others have to be
    compiled first, which takes seconds for each."""
    return {spec.name for spec in device_specs(specs) if device.type != "cuda" or not is_bandwidth_bound(spec)}


def with_link_rates(table: LatencyTable, *, device: torch.device, accumulation: int, hides: bool) -> LatencyTable:
    """The table with the rates of the link, measured where there is one, and the seconds of backward that hide it.

    `hides`: blocks may be stepped in the last backward of a step, as nothing changes their gradients after it.
    """
    link = measure_link(device) if device.type == "cuda" else None
    hidden_s = hidden_seconds(table.base_step_s, accumulation=accumulation) if hides else 0.0
    return replace(table, link=link, hidden_s=hidden_s)


def bytes_moved_per_element(spec: OptimizerSpec) -> float:
    """Bytes per element of a step of `spec`: weight, gradient and state read, weight and state written."""
    state, weight = bytes_per_parameter(spec, rule=RULE_INFOS[spec.rule])
    return 2 * (state + weight) + weight


def _parameters(numel: int, tensors: int, device: torch.device) -> list[torch.nn.Parameter]:
    made = []
    for _ in range(tensors):
        param = torch.nn.Parameter(torch.full((max(numel // _COLUMNS, 1), _COLUMNS), 0.02, device=device))
        param.grad = torch.linspace(-1e-3, 1e-3, param.numel(), device=device).view_as(param)
        made.append(param)
    return made


def _maker(spec: OptimizerSpec, *, device: torch.device, num_elements: int) -> MakeStep:
    def make(numel: int, tensors: int) -> Callable[[], None]:
        backend = proxy_backend(spec, device=device, numel=num_elements)
        optimizer = BlockwiseOptimizer(_parameters(numel, tensors, device), spec, backend=backend)
        return lambda: optimizer.step()

    return make
