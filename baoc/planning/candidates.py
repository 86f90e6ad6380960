"""Joins blocks and specs to candidates: which spec applies to a block, its cost and risk, and which are dominated.

Allocators see only these candidates.
"""

from collections.abc import Collection, Mapping, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from baoc.core.catalogue import STORAGES, WEIGHT_DTYPES, device_spec_name
from baoc.errors import BadInputError
from baoc.planning.cost import cost
from baoc.planning.risk import RiskModel
from baoc.planning.transfer import STORED_RATES
from baoc.types import (
    Block,
    Candidate,
    LatencyTable,
    LinkRates,
    OptimizerSpec,
    ParamInfo,
    Profile,
    Risk,
    Role,
    RuleInfo,
    Scaling,
    StateKind,
    StateLayout,
)

CandidateSets = dict[str, tuple[Candidate, ...]]
_COLUMNS = ("state_bytes", "weight_bytes", "saved_bytes", "host_bytes", "transfer_bytes", "link_s", "step_s")


def why_inapplicable(
    block: Block, *, spec: OptimizerSpec, rule: RuleInfo, keep_fp32_roles: Collection[Role | str] = ()
) -> str | None:
    """Why a plan may not run `spec` on `block`, as a clause for messages; None if it may."""
    if block.role in keep_fp32_roles and (spec.storage != "fp32" or spec.weights != "native"):
        return f"{block.role} blocks keep fp32 storage and native weights (catalogue.keep_fp32_roles)"
    return why_unsteppable(block, spec=spec, rule=rule) or _fold_reason(block, rule=rule)


def why_unsteppable(block: Block, *, spec: OptimizerSpec, rule: RuleInfo) -> str | None:
    """Why an optimizer cannot run `spec` on `block`, as a clause for messages; None if it can."""
    if rule.hidden_only and block.role in (Role.EMBEDDING, Role.HEAD):
        return f"{rule.name} is for hidden matrices, not for the {block.role}"
    if spec.weights != "native":
        for param in block.params:
            if param.dtype not in WEIGHT_DTYPES:
                return f"{spec.weights} weights are made of {' or '.join(WEIGHT_DTYPES)}, {param.name} is {param.dtype}"
    if why := why_unshardable(block, spec=spec, rule=rule):
        return why
    if rule.needs_matrix:
        for param in block.params:
            if param.matrix_shape is None:
                return f"{rule.name} needs matrices, {param.name} has shape {param.shape}"
            if rule.scaling is Scaling.SPECTRAL and param.is_stack:
                return (
                    f"{rule.name} steps one matrix, {param.name} of shape {param.shape} is a stack, such as of experts"
                )
    return None


def is_stand_in(spec: OptimizerSpec, *, rule: RuleInfo) -> bool:
    """Whether a role that keeps fp32 may run `spec` rather than lose its momentum: 8-bit momentum, native weights."""
    has_momentum = any(state.kind is StateKind.M and state.layout is StateLayout.FULL for state in rule.states)
    return has_momentum and spec.storage.startswith("int8") and spec.weights == "native"


def why_unshardable(block: Block, *, spec: OptimizerSpec, rule: RuleInfo) -> str | None:
    """Why `spec` cannot step the sharded parameters of `block`, as a clause for messages; None if it can.

    A shard has complete rows of a matrix, so rules that work by element or along rows need nothing else. Rules that
    work along columns add their sums over ranks, and Muon gathers its matrices.
    """
    sharded = [param for param in block.params if param.whole is not None]
    if not sharded:
        return None
    name = sharded[0].name
    not_bf16 = [param for param in sharded if param.dtype != "bfloat16"]
    if spec.weights != "native" and not_bf16:
        return (
            f"that makes {not_bf16[0].name} bfloat16, and fully_shard has it already as {not_bf16[0].dtype}. Cast the "
            "module to bfloat16 before fully_shard, or choose a spec that keeps weights as they are"
        )
    gathers = rule.scaling is Scaling.SPECTRAL
    if gathers and len(sharded) < len(block.params):
        return f"fully_shard cuts {name} and not all of the block's matrices. Make those blocks of their own"
    if transposed := [param.name for param in sharded if shards_cut_rows(rule, param=param)]:
        return (
            f"{transposed[0]} is stored (fan_in, fan_out), so that fully_shard cuts along the rows that {rule.name} "
            "works on. Rules by element can, such as adamw and lion, and muon"
        )
    return None


def shards_cut_rows(rule: RuleInfo, *, param: ParamInfo) -> bool:
    """Whether fully_shard cuts the rows that the rule works along, as the tensor is stored transposed."""
    return param.transposed and rule.needs_matrix and rule.scaling is not Scaling.SPECTRAL


def sums_columns(rule: RuleInfo) -> bool:
    """Whether a step needs sums along columns, so that a shard needs those of other ranks."""
    return rule.scaling is Scaling.COLUMN or any(s.layout is StateLayout.PER_COLUMN for s in rule.states)


def _fold_reason(block: Block, *, rule: RuleInfo) -> str | None:
    """Why the rule cannot fold states of `block`, as a clause for messages; None if it can. A fold longer than its axis
    would average over padding, and would take no fewer bytes than a shorter one."""
    for decl in rule.states:
        if decl.layout is not StateLayout.FOLDED:
            continue
        for param in block.params:
            if param.matrix_shape is None:
                return f"{rule.name} folds matrices, {param.name} has shape {param.shape}"
            length = param.matrix_shape[1]
            if 2**decl.level > length:
                return f"{rule.name} folds {2**decl.level} neighbours along fan_in, {param.name} has {length}"
    return None


def build_candidates(
    blocks: Sequence[Block],
    *,
    specs: Mapping[str, OptimizerSpec],
    rules: Mapping[str, RuleInfo],
    risk: RiskModel,
    profile: Profile | None = None,
    weights: Mapping[str, float] | None = None,
    latency: LatencyTable | None = None,
    link: LinkRates = STORED_RATES,
    shared: bool = False,
    keep_fp32_roles: Collection[Role | str] = (),
    stand_ins: bool = False,
    only: Mapping[str, str] | None = None,
) -> CandidateSets:
    """Every applicable candidate of every block, dominated ones too, by bytes ascending, then risk and seconds.

    Args:
        shared: The device is the host, so states on the host count in its memory.
        keep_fp32_roles: Roles whose blocks may only run specs of fp32 storage and native weights.
        stand_ins: These roles may also run 8-bit momentum.
        only: Block -> the one spec that it may run, for blocks without a choice.

    Raises:
        BadInputError: No spec may run on a block.
    """
    total = max(sum(block.numel for block in blocks), 1)
    result: CandidateSets = {}
    first_of_kind: dict[Block, str] = {}  # layers repeat: what was computed for a block serves all of its kind
    for block in blocks:
        same = first_of_kind.setdefault(_kind(block), block.name) if profile is None and not only else block.name
        if same != block.name:
            result[block.name] = tuple(replace(candidate, block=block.name) for candidate in result[same])
            continue
        reasons = {
            spec.name: why_inapplicable(
                block,
                spec=spec,
                rule=rules[spec.rule],
                keep_fp32_roles=() if stand_ins and is_stand_in(spec, rule=rules[spec.rule]) else keep_fp32_roles,
            )
            for spec in specs.values()
        }
        risks: dict[str, Risk] = {}  # by the spec's name on the device: placement does not change a step
        candidates: list[Candidate] = []
        for spec in specs.values():
            if reasons[spec.name] is not None or (only or {}).get(block.name, spec.name) != spec.name:
                continue
            name, rule = device_spec_name(spec.name), rules[spec.rule]
            if name not in risks:
                risks[name] = risk(
                    block=block,
                    spec=spec,
                    rule=rule,
                    storage=STORAGES[spec.storage],
                    profile=profile,
                    weights=weights or {},
                    share=max(block.numel, 1) / total,  # an empty tensor still prefers AdamW
                )
            spec_cost = cost(block, spec=spec, rule=rule, latency=latency, link=link, shared=shared)
            candidates.append(
                Candidate(block=block.name, spec=spec.name, cost=spec_cost, risk=risks[name], role=block.role)
            )
        if not candidates:
            why = "; ".join(f"{spec}: {reason}" for spec, reason in reasons.items()) or "no spec was selected"
            raise BadInputError(
                f"no optimizer spec may run on block {block.name!r} ({why}): add one that runs anywhere to "
                "catalogue.specs, for example adamw"
            )
        result[block.name] = tuple(sorted(candidates, key=_by_bytes))
    return result


def _kind(block: Block) -> Block:
    """The block without what tells it from others of the same role, shapes and dtypes; the first layer stays apart."""
    params = (replace(param, name="", depth=None, aliases=()) for param in block.params)
    return replace(block, name="", params=tuple(params), depth=0 if block.depth == 0 else None)


def _by_bytes(candidate: Candidate) -> tuple[float, float, float, float]:
    cost = candidate.cost
    return (cost.charged_bytes, candidate.risk.total, cost.step_s, cost.transfer_bytes)


def _objectives(candidate: Candidate, *, with_time: bool) -> tuple[float, ...]:
    """The values of a candidate of which less is better."""
    cost = candidate.cost
    host = (cost.transfer_bytes, cost.host_bytes, cost.link_s)
    return (cost.charged_bytes, candidate.risk.total, *host, cost.step_s if with_time else 0.0)


def undominated(candidates: Mapping[str, Sequence[Candidate]], *, with_time: bool = True) -> CandidateSets:
    """The candidates of each block that no other one beats or equals in all objectives. Of equals the first stays.
    Objectives are charged bytes, risk, seconds (`with_time`), and bytes and seconds of the host and its link."""
    cache: dict[bytes, list[int]] = {}
    return {name: _frontier(options, with_time=with_time, cache=cache) for name, options in candidates.items()}


def _frontier(
    candidates: Sequence[Candidate], *, with_time: bool, cache: dict[bytes, list[int]]
) -> tuple[Candidate, ...]:
    """The undominated candidates. `cache`: objectives -> indices of these, as most layers have equal candidates."""
    ordered = sorted(candidates, key=_by_bytes)
    if not with_time and not any(candidate.cost.transfer_bytes for candidate in ordered):
        return _falling_risk(ordered)
    values = np.array([_objectives(candidate, with_time=with_time) for candidate in ordered])
    key = values.tobytes()
    if key not in cache:
        # [a, b]: a is nowhere worse than b
        no_worse: NDArray[np.bool_] = np.ones((len(ordered), len(ordered)), dtype=bool)
        for column in values.T:
            no_worse &= column[:, None] <= column
        # Only earlier candidates can dominate; one that is dominated itself has a dominator that does, too.
        cache[key] = np.flatnonzero(~np.triu(no_worse, k=1).any(axis=0)).tolist()
    return tuple(ordered[index] for index in cache[key])


def _falling_risk(ordered: Sequence[Candidate]) -> tuple[Candidate, ...]:
    """Of candidates by ascending bytes, those with less risk than all before them."""
    result: list[Candidate] = []
    for candidate in ordered:
        if not result or candidate.risk.total < result[-1].risk.total:
            result.append(candidate)
    return tuple(result)


def candidate_rows(candidates: Mapping[str, Sequence[Candidate]]) -> list[dict[str, Any]]:
    """The rows of candidates.csv, one per candidate, with risk terms in columns `risk/<term>`."""
    rows: list[dict[str, Any]] = []
    terms = sorted({term for options in candidates.values() for c in options for term in c.risk.terms})
    for options in candidates.values():
        undominated_specs = {candidate.spec for candidate in _frontier(options, with_time=True, cache={})}
        for candidate in options:
            row: dict[str, Any] = {
                "block": candidate.block,
                "role": candidate.role.value,
                "spec": candidate.spec,
                **{column: getattr(candidate.cost, column) for column in _COLUMNS},
                "risk": candidate.risk.total,
                "dominated": candidate.spec not in undominated_specs,
            }
            rows.append(row | {f"risk/{term}": candidate.risk.terms.get(term, 0.0) for term in terms})
    return rows
