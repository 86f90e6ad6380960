"""Joins blocks and specs into candidates: what may run where, what it costs, what it risks, and what is dominated.

Allocators see nothing but the candidates made here.
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
    StorageScheme,
)

CandidateSets = dict[str, tuple[Candidate, ...]]
_COLUMNS = (
    *("state_bytes", "weight_bytes", "saved_bytes", "host_bytes", "transfer_bytes"),
    *("link_s", "step_s"),
)


def why_inapplicable(
    block: Block, *, spec: OptimizerSpec, rule: RuleInfo, keep_fp32_roles: Collection[Role | str] = ()
) -> str | None:
    """None if `spec` may run on `block`, else the reason why not, as a clause to be shown."""
    if rule.hidden_only and block.role in (Role.EMBEDDING, Role.HEAD):
        return f"{rule.name} is for hidden matrices, not for the {block.role}"
    if block.role in keep_fp32_roles and (spec.storage != "fp32" or spec.weights != "native"):
        return f"{block.role} blocks keep fp32 storage and native weights (catalogue.keep_fp32_roles)"
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
    return _fold_reason(block, rule=rule)


def is_stand_in(spec: OptimizerSpec, *, rule: RuleInfo) -> bool:
    """Whether a role that keeps fp32 may run `spec` before it loses its momentum: the same states in 8 bits."""
    whole = any(state.kind is StateKind.M and state.layout is StateLayout.FULL for state in rule.states)
    return whole and spec.storage.startswith("int8") and spec.weights == "native"


def why_unshardable(block: Block, *, spec: OptimizerSpec, rule: RuleInfo) -> str | None:
    """Why this cannot step what fully_shard cuts, as a clause to be shown; None where it can, or does not have to.

    A rank has whole rows of a matrix, so rules that work element by element or along rows go by themselves. Rules that
    work along columns add sums up over ranks, and Muon's matrices are gathered.
    """
    cut = [param for param in block.params if param.whole is not None]
    if not cut:
        return None
    name = cut[0].name
    wide = [param for param in cut if param.dtype != "bfloat16"]
    if spec.weights != "native" and wide:
        return (
            f"that makes {wide[0].name} bfloat16, and fully_shard has it already as {wide[0].dtype}. Cast the module "
            "to bfloat16 before fully_shard, or choose a spec that keeps weights as they are"
        )
    spectral = rule.scaling is Scaling.SPECTRAL  # whose matrices are gathered
    if spectral and len(cut) < len(block.params):
        return f"fully_shard cuts {name} and not all of the block's matrices. Make those blocks of their own"
    if turned := [param.name for param in cut if shards_cut_rows(rule, param=param)]:
        return (
            f"{turned[0]} is stored (fan_in, fan_out), so that fully_shard cuts along the rows that {rule.name} works "
            "on. Rules by element can, such as adamw and lion, and muon"
        )
    return None


def shards_cut_rows(rule: RuleInfo, *, param: ParamInfo) -> bool:
    """Whether fully_shard cuts the rows that the rule works along, as the tensor is stored the other way."""
    return param.transposed and rule.needs_matrix and rule.scaling is not Scaling.SPECTRAL


def sums_columns(rule: RuleInfo) -> bool:
    """Whether a step of some rows takes sums over all of them."""
    return rule.scaling is Scaling.COLUMN or any(s.layout is StateLayout.PER_COLUMN for s in rule.states)


def _fold_reason(block: Block, *, rule: RuleInfo) -> str | None:
    """A fold longer than its axis would average over padding: scaled down by it, and no cheaper than a shorter one."""
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
    storages: Mapping[str, StorageScheme] = STORAGES,
    profile: Profile | None = None,
    weights: Mapping[str, float] | None = None,
    latency: LatencyTable | None = None,
    link: LinkRates = STORED_RATES,
    shared: bool = False,
    keep_fp32_roles: Collection[Role | str] = (),
    stand_ins: bool = False,
    only: Mapping[str, str] | None = None,
) -> CandidateSets:
    """Every applicable candidate of every block, dominated ones too, by bytes ascending (then risk, seconds, row).

    `shared`: the device is the host, whose memory counts as its own. `stand_ins`: roles that keep fp32 may have
    momentum in 8 bits, too. `only`: block -> the one spec that it may run, of blocks that have no choice. Raises
    BadInputError for a block on which no spec may run.
    """
    total = max(sum(block.numel for block in blocks), 1)
    found: CandidateSets = {}
    of_kind: dict[Block, str] = {}  # layers repeat: what was computed for a block serves all of its kind
    for block in blocks:
        same = of_kind.setdefault(_kind(block), block.name) if profile is None and not only else block.name
        if same != block.name:
            found[block.name] = tuple(replace(candidate, block=block.name) for candidate in found[same])
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
        risks: dict[str, Risk] = {}  # by the row's name on the device: a step is the same wherever its states are kept
        made: list[Candidate] = []
        for spec in specs.values():
            if reasons[spec.name] is not None or (only or {}).get(block.name, spec.name) != spec.name:
                continue
            name, rule = device_spec_name(spec.name), rules[spec.rule]
            if name not in risks:
                risks[name] = risk(
                    block=block,
                    spec=spec,
                    rule=rule,
                    storage=storages[spec.storage],
                    profile=profile,
                    weights=weights or {},
                    share=max(block.numel, 1) / total,  # an empty tensor still prefers AdamW
                )
            spent = cost(block, spec=spec, rule=rule, latency=latency, link=link, shared=shared)
            made.append(Candidate(block=block.name, spec=spec.name, cost=spent, risk=risks[name], role=block.role))
        if not made:
            why = "; ".join(f"{spec}: {reason}" for spec, reason in reasons.items()) or "no spec was selected"
            raise BadInputError(
                f"no optimizer spec may run on block {block.name!r} ({why}): add one that runs anywhere to "
                "catalogue.specs, for example adamw"
            )
        found[block.name] = tuple(sorted(made, key=_by_bytes))
    return found


def _kind(block: Block) -> Block:
    """The block without what tells it from others of the same role, shapes and dtypes; the first layer stays apart."""
    params = (replace(param, name="", depth=None, aliases=()) for param in block.params)
    return replace(block, name="", params=tuple(params), depth=0 if block.depth == 0 else None)


def _by_bytes(candidate: Candidate) -> tuple[float, float, float, float]:
    spent = candidate.cost
    return (spent.charged_bytes, candidate.risk.total, spent.step_s, spent.transfer_bytes)


def _taken(candidate: Candidate, *, with_time: bool) -> tuple[float, ...]:
    """Everything of which less is better."""
    spent = candidate.cost
    beside = (spent.transfer_bytes, spent.host_bytes, spent.link_s)
    return (spent.charged_bytes, candidate.risk.total, *beside, spent.step_s if with_time else 0.0)


def undominated(candidates: Mapping[str, Sequence[Candidate]], *, with_time: bool = True) -> CandidateSets:
    """Per block the candidates that no other beats or equals in charged bytes, risk, (`with_time`) seconds, and in what
    they take of the host and of the link to it. Of equals the first stays.
    """
    known: dict[bytes, list[int]] = {}
    return {name: _frontier(options, with_time=with_time, known=known) for name, options in candidates.items()}


def _frontier(
    candidates: Sequence[Candidate], *, with_time: bool, known: dict[bytes, list[int]]
) -> tuple[Candidate, ...]:
    """The undominated candidates; `known` caches answers, as layers are mostly alike."""
    ordered = sorted(candidates, key=_by_bytes)
    if not with_time and not any(candidate.cost.transfer_bytes for candidate in ordered):
        return _falling(ordered)
    values = np.array([_taken(candidate, with_time=with_time) for candidate in ordered])
    key = values.tobytes()
    if key in known:
        return tuple(ordered[index] for index in known[key])
    better: NDArray[np.bool_] = np.ones(
        (len(ordered), len(ordered)), dtype=bool
    )  # [one, other]: one is nowhere worse than the other
    for column in values.T:
        better &= column[:, None] <= column
    earlier = np.triu(better, k=1)  # only those count: what beats one of them beats this one, too
    known[key] = np.flatnonzero(~earlier.any(axis=0)).tolist()
    return tuple(ordered[index] for index in known[key])


def _falling(ordered: Sequence[Candidate]) -> tuple[Candidate, ...]:
    """Of candidates by bytes, those with less risk than all before: the undominated ones if nothing else counts."""
    kept: list[Candidate] = []
    for candidate in ordered:
        if not kept or candidate.risk.total < kept[-1].risk.total:
            kept.append(candidate)
    return tuple(kept)


def candidate_rows(candidates: Mapping[str, Sequence[Candidate]]) -> list[dict[str, Any]]:
    """One flat row per candidate for candidates.csv, with its risk terms in columns `risk/<term>`."""
    rows: list[dict[str, Any]] = []
    terms = sorted({term for options in candidates.values() for c in options for term in c.risk.terms})
    for options in candidates.values():
        kept = {candidate.spec for candidate in _frontier(options, with_time=True, known={})}
        for candidate in options:
            row: dict[str, Any] = {
                "block": candidate.block,
                "role": candidate.role.value,
                "spec": candidate.spec,
                **{column: getattr(candidate.cost, column) for column in _COLUMNS},
                "risk": candidate.risk.total,
                "dominated": candidate.spec not in kept,
            }
            rows.append(row | {f"risk/{term}": candidate.risk.terms.get(term, 0.0) for term in terms})
    return rows
