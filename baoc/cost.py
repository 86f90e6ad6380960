"""What a spec costs on a block: exact state bytes, host traffic, and seconds from a measured table.

`state_bytes` is a promise: tests hold it to the live tensors of the optimizer, byte for byte, for every spec.
"""

from collections.abc import Iterable
from math import prod

from baoc.catalogue import CODECS, STORAGES
from baoc.types import Block, Cost, LatencyTable, OptimizerSpec, ParamInfo, RuleInfo

STEP_BYTES = 4  # the fp32 step count of a tensor, as torch keeps it
MATCH_BYTES = 8  # target and own update RMS of a block, fp32 each


def param_state_bytes(param: ParamInfo, *, spec: OptimizerSpec, rule: RuleInfo) -> int:
    """Bytes that `spec` keeps for one parameter, apart from what it keeps per block; none for an empty one."""
    assert spec.rule == rule.name, f"spec {spec.name} runs {spec.rule}, not {rule.name}"
    if not param.numel:
        return 0
    storage = STORAGES[spec.storage]
    states = sum(CODECS[storage.codec(decl)].nbytes(prod(decl.shape(param))) for decl in rule.states)
    return states + (STEP_BYTES if rule.counts_steps else 0)


def state_bytes(block: Block, *, spec: OptimizerSpec, rule: RuleInfo) -> int:
    """Every byte beyond weights and gradients that `spec` keeps for `block`; exact."""
    params = sum(param_state_bytes(param, spec=spec, rule=rule) for param in block.params)
    return params + (MATCH_BYTES if rule.matched and block.numel else 0)


def adamw_state_bytes(blocks: Iterable[Block]) -> int:
    """What torch's fp32 AdamW would keep: 8 bytes per element and its step per tensor."""
    return sum(8 * param.numel + STEP_BYTES for block in blocks for param in block.params)


def step_seconds(block: Block, *, spec: OptimizerSpec, latency: LatencyTable) -> float:
    """Seconds of the optimizer step on `block`, by the measured line fixed + per element."""
    assert spec.name in latency.fixed_s, f"{spec.name} was not timed; the table has {', '.join(latency.fixed_s)}"
    return latency.fixed_s[spec.name] + latency.per_element_s[spec.name] * block.numel


def cost(block: Block, *, spec: OptimizerSpec, rule: RuleInfo, latency: LatencyTable | None = None) -> Cost:
    """The cost of `spec` on `block`; without a latency table, seconds play no part and are 0."""
    held = state_bytes(block, spec=spec, rule=rule)
    return Cost(
        state_bytes=held,
        transfer_bytes=2 * held if spec.placement == "host" else 0,  # in and out once per step
        step_s=step_seconds(block, spec=spec, latency=latency) if latency is not None else 0.0,
    )
