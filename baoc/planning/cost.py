"""The cost of a spec on a block: exact state bytes, host traffic, and seconds from a measured table.

`state_bytes` is a promise: tests hold it to the live tensors of the optimizer, byte for byte, for every spec.
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
    """Bytes of one parameter in its block's slab: states and corrections, each aligned; none for an empty one."""
    assert spec.rule == rule.name, f"spec {spec.name} runs {spec.rule}, not {rule.name}"
    if not param.numel:
        return 0
    storage = STORAGES[spec.storage]
    sizes = [(decl, prod(decl.shape(param))) for decl in rule.states]
    parts = [n for decl, numel in sizes for n in CODECS[storage.codec(decl, param=param)].tensor_bytes(numel)]
    parts.append(WEIGHTS[spec.weights].correction_bytes * param.numel)
    return sum(map(aligned, parts))


def param_state_bytes(param: ParamInfo, *, spec: OptimizerSpec, rule: RuleInfo) -> int:
    """Bytes that `spec` keeps for one parameter, apart from what it keeps per block; none for an empty one."""
    counted = STEP_BYTES if rule.counts_steps and param.numel else 0
    return _slab_bytes(param, spec=spec, rule=rule) + counted


def slab_bytes(block: Block, *, spec: OptimizerSpec, rule: RuleInfo) -> int:
    """Bytes of the block's slab, which is what travels where states are streamed: steps and matching stay."""
    return sum(_slab_bytes(param, spec=spec, rule=rule) for param in block.params)


def match_bytes(block: Block, *, rule: RuleInfo) -> int:
    """State bytes that stay on the device even where states are streamed."""
    return MATCH_BYTES if rule.matched and block.numel else 0


def state_bytes(block: Block, *, spec: OptimizerSpec, rule: RuleInfo) -> int:
    """Every byte beyond weights and gradients that `spec` keeps for `block`, wherever it lies; exact."""
    params = sum(param_state_bytes(param, spec=spec, rule=rule) for param in block.params)
    return params + match_bytes(block, rule=rule)


def native_bytes(param: ParamInfo) -> int:
    """Bytes of a parameter in its own type, and of its gradient."""
    return param.numel * _DTYPE_BYTES.get(param.dtype, 4)


GROUPED_BYTES, GROUPS = 128 * MIB, 16


def grouped_bytes(gradients_bytes: int) -> int:
    """Bytes of released gradients that may wait on a GPU to be stepped with others: a 16th of all, 128 MiB at most.

    The host takes as long to step one block as to step many: with each block of ViT-L/16 stepped by itself, the host
    took longer for a step than the device did.
    """
    return min(GROUPED_BYTES, gradients_bytes // GROUPS)


def stepping_groups(
    order: Sequence[tuple[str, int]],
    *,
    num_gradients: Mapping[str, int],
    limit: int,
    joins: Callable[[str, str], bool],
) -> list[tuple[str, ...]]:
    """Groups of blocks that are stepped together.

    Gradients come in `order` (block, bytes); a block has `left` of them. `joins` says whether two blocks can be in one
    group. A group is consecutive blocks of at most `limit` bytes. At each point, the gradients held are at most the
    larger of `limit` and the peak up to there of stepping each block alone. The peak up to there, and not of all,
    because activations go as backward goes on: gradients at its end cost less than the same bytes at its beginning.
    """
    groups: list[tuple[str, ...]] = []
    waiting: list[str] = []
    missing, sizes = dict(num_gradients), dict.fromkeys(num_gradients, 0)
    held = waits = alone = 0
    most = limit
    for name, num_bytes in order:
        alone += num_bytes
        most = max(most, alone)
        if waiting and held + num_bytes > most:
            groups, waiting, held, waits = [*groups, tuple(waiting)], [], held - waits, 0
        held, missing[name], sizes[name] = held + num_bytes, missing[name] - 1, sizes[name] + num_bytes
        if missing[name]:
            continue
        alone -= sizes[name]
        if waiting and (waits + sizes[name] > limit or not joins(waiting[0], name)):
            groups, waiting, held, waits = [*groups, tuple(waiting)], [], held - waits, 0
        waiting, waits = [*waiting, name], waits + sizes[name]
    return [*groups, tuple(waiting)] if waiting else groups


def weight_bytes(block: Block, *, spec: OptimizerSpec) -> int:
    """Bytes of the block's parameters under `spec`, corrections apart; their gradients take as much again."""
    kept = WEIGHTS[spec.weights].param_bytes
    return sum(param.numel * kept if kept else native_bytes(param) for param in block.params)


def weight_savings(block: Block, *, spec: OptimizerSpec) -> dict[str, int]:
    """Bytes that the weights of `spec` take less than native ones, by parameter; its gradient takes as many less."""
    kept = WEIGHTS[spec.weights].param_bytes
    if kept is None:
        return {}
    less = {param.name: native_bytes(param) - param.numel * kept for param in block.params}
    return {name: nbytes for name, nbytes in less.items() if nbytes}


_LARGE = ParamInfo(name="large", shape=(4096, 4096), dtype="float32", role=Role.MLP)


def bytes_per_parameter(spec: OptimizerSpec, *, rule: RuleInfo) -> tuple[float, float]:
    """State and weight bytes per parameter of a large fp32 matrix, where what is kept per tensor does not show."""
    block = Block(name="large", params=(_LARGE,), role=Role.MLP)
    held = state_bytes(block, spec=spec, rule=rule), weight_bytes(block, spec=spec)
    return held[0] / _LARGE.numel, held[1] / _LARGE.numel


def adamw_state_bytes(blocks: Iterable[Block]) -> int:
    """State bytes of fp32 AdamW in our slabs: two padded moments and a step per tensor; the unit of state fractions.

    torch's own AdamW keeps the same without the padding, so a fraction of 1 admits fp32 AdamW everywhere.
    """
    moment = [aligned(4 * param.numel) for block in blocks for param in block.params if param.numel]
    return sum(2 * nbytes + STEP_BYTES for nbytes in moment)


def step_seconds(block: Block, *, spec: OptimizerSpec, latency: LatencyTable) -> float:
    """Seconds of the device that `block` adds to a step, by the line of its spec: per tensor + per element.

    The same for streamed states, whose copies are counted apart.
    """
    name = device_spec_name(spec.name)
    assert name in latency.fixed_s, f"{name} was not timed; the table has {', '.join(latency.fixed_s)}"
    tensors = sum(1 for param in block.params if param.numel)
    return latency.fixed_s[name] * tensors + latency.per_element_s[name] * block.numel


def whole_step_seconds(
    choices: Mapping[str, str], *, blocks: Iterable[Block], specs: Mapping[str, OptimizerSpec], latency: LatencyTable
) -> float:
    """Predicted seconds of a whole step with `choices` (spec names by block name), what passes the link apart; NaN
    where a spec was not timed."""
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
    """The cost of `spec` on `block`; without a latency table, seconds of the device play no part and are 0.

    `shared`: the device is the host itself, so that what is kept there counts in its memory all the same.
    """
    kept, matching = state_bytes(block, spec=spec, rule=rule), match_bytes(block, rule=rule)
    weights = weight_bytes(block, spec=spec)
    step_s = step_seconds(block, spec=spec, latency=latency) if latency is not None else 0.0
    if spec.placement == Placement.DEVICE:
        return Cost(state_bytes=kept, step_s=step_s, weight_bytes=weights)
    moved = slab_bytes(block, spec=spec, rule=rule)
    return Cost(
        state_bytes=matching,
        host_bytes=kept - matching,
        shared_bytes=kept - matching if shared else 0,
        streamed_bytes=moved,
        step_s=step_s,
        link_s=copy_seconds(moved, link=link),
        weight_bytes=weights,
    )
