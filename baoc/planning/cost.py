"""The cost of a spec on a block: exact state bytes, bytes over the link, and seconds by a measured table.

Tests hold `state_bytes` to the live tensors of the optimizer, byte for byte, for every spec.
"""

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from math import prod

from baoc.core.catalogue import CODECS, STORAGES, WEIGHTS, device_spec_name
from baoc.planning.transfer import STORED_RATES, copy_seconds
from baoc.types import Block, Cost, LatencyTable, LinkRates, OptimizerSpec, ParamInfo, Placement, Role, RuleInfo
from baoc.units import MIB

STEP_BYTES = 4  # the fp32 step count of a tensor, as torch keeps it
MATCH_BYTES = 8  # target and own update RMS of a block, fp32 each
ALIGN_BYTES = 16  # every state tensor begins at a multiple of this in its block's slab, for wide loads
_DTYPE_BYTES = {"float64": 8, "float32": 4, "bfloat16": 2, "float16": 2}


def aligned(nbytes: int) -> int:
    """Bytes that a state tensor of `nbytes` takes in a slab."""
    return -(-nbytes // ALIGN_BYTES) * ALIGN_BYTES


def _slab_bytes(param: ParamInfo, *, spec: OptimizerSpec, rule: RuleInfo) -> int:
    """Bytes of one parameter in its block's slab: states and corrections, each aligned; 0 for an empty parameter."""
    assert spec.rule == rule.name, f"spec {spec.name} runs {spec.rule}, not {rule.name}"
    if not param.numel:
        return 0
    storage = STORAGES[spec.storage]
    sizes = [(decl, prod(decl.shape(param))) for decl in rule.states]
    parts = [n for decl, numel in sizes for n in CODECS[storage.codec(decl, param=param)].tensor_bytes(numel)]
    parts.append(WEIGHTS[spec.weights].correction_bytes * param.numel)
    return sum(map(aligned, parts))


def param_state_bytes(param: ParamInfo, *, spec: OptimizerSpec, rule: RuleInfo) -> int:
    """State bytes of one parameter, without those per block (`match_bytes`); 0 for an empty parameter."""
    step_bytes = STEP_BYTES if rule.counts_steps and param.numel else 0
    return _slab_bytes(param, spec=spec, rule=rule) + step_bytes


def slab_bytes(block: Block, *, spec: OptimizerSpec, rule: RuleInfo) -> int:
    """Bytes of the block's slab, which streaming copies; step counts and update RMS are not in it."""
    return sum(_slab_bytes(param, spec=spec, rule=rule) for param in block.params)


def match_bytes(block: Block, *, rule: RuleInfo) -> int:
    """Bytes of the block's update RMS, which stay on the device even if states are streamed."""
    return MATCH_BYTES if rule.matched and block.numel else 0


def state_bytes(block: Block, *, spec: OptimizerSpec, rule: RuleInfo) -> int:
    """Every byte beyond weights and gradients that `spec` keeps for `block`, on device and host; exact."""
    params = sum(param_state_bytes(param, spec=spec, rule=rule) for param in block.params)
    return params + match_bytes(block, rule=rule)


def native_bytes(param: ParamInfo) -> int:
    """Bytes of a parameter in its own type; its gradient takes as many."""
    return param.numel * _DTYPE_BYTES.get(param.dtype, 4)


# Most bytes of released gradients that wait, and the least number of groups that all of them would make
MAX_GROUPED_BYTES, MIN_GROUPS = 128 * MIB, 16


def grouped_bytes(gradients_bytes: int) -> int:
    """Bytes of gradients that may wait on a GPU for their blocks to be stepped together, under gradient release.

    A 16th of all gradients, 128 MiB at most. Stepping one block takes the host as long as stepping many: with each
    block of ViT-L/16 stepped by itself, a step took longer on the host than on the device.
    """
    return min(MAX_GROUPED_BYTES, gradients_bytes // MIN_GROUPS)


def stepping_groups(
    order: Sequence[tuple[str, int]], *, num_gradients: Mapping[str, int], limit: int, joins: Callable[[str, str], bool]
) -> list[tuple[str, ...]]:
    """Groups of consecutive blocks that are stepped together, under gradient release.

    Args:
        order: (block, bytes) of each gradient, as backward computes them.
        num_gradients: Block -> number of its gradients.
        limit: Bytes of gradients that a group may have.
        joins: Whether two blocks can be in one group.

    Live gradients never exceed the larger of `limit` and the peak so far of stepping each block alone. It is the peak
    so far, not the peak of the whole pass, because activations are freed as backward proceeds: gradients at its end
    cost less than the same bytes at its beginning.
    """
    groups: list[tuple[str, ...]] = []
    waiting: list[str] = []
    num_missing, block_bytes = dict(num_gradients), dict.fromkeys(num_gradients, 0)
    live_bytes = waiting_bytes = alone_bytes = 0
    max_bytes = limit
    for name, num_bytes in order:
        alone_bytes += num_bytes
        max_bytes = max(max_bytes, alone_bytes)
        if waiting and live_bytes + num_bytes > max_bytes:
            groups.append(tuple(waiting))
            waiting, live_bytes, waiting_bytes = [], live_bytes - waiting_bytes, 0
        live_bytes += num_bytes
        num_missing[name] -= 1
        block_bytes[name] += num_bytes
        if num_missing[name]:
            continue
        alone_bytes -= block_bytes[name]
        if waiting and (waiting_bytes + block_bytes[name] > limit or not joins(waiting[0], name)):
            groups.append(tuple(waiting))
            waiting, live_bytes, waiting_bytes = [], live_bytes - waiting_bytes, 0
        waiting.append(name)
        waiting_bytes += block_bytes[name]
    return [*groups, tuple(waiting)] if waiting else groups


def weight_bytes(block: Block, *, spec: OptimizerSpec) -> int:
    """Bytes of the block's parameters under `spec`, without corrections; gradients take as much again."""
    param_bytes = WEIGHTS[spec.weights].param_bytes
    return sum(param.numel * param_bytes if param_bytes else native_bytes(param) for param in block.params)


def weight_savings(block: Block, *, spec: OptimizerSpec) -> dict[str, int]:
    """Parameter name -> bytes that its weights under `spec` save against native ones; its gradient saves as many."""
    param_bytes = WEIGHTS[spec.weights].param_bytes
    if param_bytes is None:
        return {}
    savings = {param.name: native_bytes(param) - param.numel * param_bytes for param in block.params}
    return {name: nbytes for name, nbytes in savings.items() if nbytes}


_MATRIX = ParamInfo(name="large", shape=(4096, 4096), dtype="float32", role=Role.MLP)
_LARGE = Block(name="large", params=(_MATRIX,), role=Role.MLP)


def bytes_per_parameter(spec: OptimizerSpec, *, rule: RuleInfo) -> tuple[float, float]:
    """(state bytes, weight bytes) per element of a large fp32 matrix, in which bytes per tensor are negligible."""
    state, weights = state_bytes(_LARGE, spec=spec, rule=rule), weight_bytes(_LARGE, spec=spec)
    return state / _LARGE.numel, weights / _LARGE.numel


def adamw_state_bytes(blocks: Iterable[Block]) -> int:
    """State bytes of fp32 AdamW, the unit of state fractions: two aligned moments and a step count per tensor. torch's
    AdamW keeps the same without alignment, so a fraction of 1 admits fp32 AdamW everywhere."""
    moment_bytes = [aligned(4 * param.numel) for block in blocks for param in block.params if param.numel]
    return sum(2 * nbytes + STEP_BYTES for nbytes in moment_bytes)


def step_seconds(block: Block, *, spec: OptimizerSpec, latency: LatencyTable) -> float:
    """Seconds of the device that `block` adds to a step: those per tensor and those per element of its spec. Streaming
    changes nothing here; its copies are counted apart (`Cost.link_s`)."""
    name = device_spec_name(spec.name)
    assert name in latency.fixed_s, f"{name} was not timed; the table has {', '.join(latency.fixed_s)}"
    tensors = sum(1 for param in block.params if param.numel)
    return latency.fixed_s[name] * tensors + latency.per_element_s[name] * block.numel


def whole_step_seconds(
    choices: Mapping[str, str], *, blocks: Iterable[Block], specs: Mapping[str, OptimizerSpec], latency: LatencyTable
) -> float:
    """Predicted seconds of a whole step with `choices` (block name -> spec), without waits for the link. NaN if a spec
    was not timed."""
    seconds = latency.base_step_s + latency.step_s
    for block in blocks:
        if device_spec_name(choices[block.name]) not in latency.fixed_s:
            return math.nan
        seconds += step_seconds(block, spec=specs[choices[block.name]], latency=latency)
    return seconds


def cost(
    block: Block,
    *,
    spec: OptimizerSpec,
    rule: RuleInfo,
    latency: LatencyTable | None = None,
    link: LinkRates = STORED_RATES,
    shared: bool = False,
) -> Cost:
    """The cost of `spec` on `block`. Seconds of the device are 0 without a latency table. `shared`: the device is the
    host, so states on the host count in its memory."""
    state, matching = state_bytes(block, spec=spec, rule=rule), match_bytes(block, rule=rule)
    weights = weight_bytes(block, spec=spec)
    step_s = step_seconds(block, spec=spec, latency=latency) if latency is not None else 0.0
    if spec.placement == Placement.DEVICE:
        return Cost(state_bytes=state, step_s=step_s, weight_bytes=weights)
    moved = slab_bytes(block, spec=spec, rule=rule)
    return Cost(
        state_bytes=matching,
        host_bytes=state - matching,
        shared_bytes=state - matching if shared else 0,
        streamed_bytes=moved,
        step_s=step_s,
        link_s=copy_seconds(moved, link=link),
        weight_bytes=weights,
    )
