"""Predicted change of quality by a spec on a block: three models, replaceable by name, terms kept.

`measured` looks changes up that were measured, against a recipe that is named; they may be below 0. The others predict
a loss against fp32 AdamW, and none of them is shown to predict damage (docs/methods.md#risk): each is a hypothesis, and
its weights can be calibrated. What a spec gives up is read off the tags of its rule's states, so a new rule needs no
change here.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from math import fsum, inf, isfinite, isnan, nan
from typing import Any

import numpy as np

from baoc.core.catalogue import base_name
from baoc.core.measured import KAPPA, Change, Family
from baoc.core.recipes import FIRST, recipe_keys
from baoc.types import (
    Block,
    GradientStats,
    OptimizerSpec,
    Profile,
    Risk,
    Role,
    RuleInfo,
    Scaling,
    StateDecl,
    StateKind,
    StateLayout,
    StorageScheme,
)

# Risk of each loss on all of a network's parameters at once, at dose 1 and sensitivity 1: only their order is argued
# for (single-block interventions and CPU runs): storage is nearly free, then one of momentum, shared or factored
# v, then folding, then no v at all. Equal columns stand in for v a little, equal singular values (Muon) for most of it.
SEVERITY: dict[str, float] = {
    "quantize_m": 0.005,
    "quantize_v": 0.01,
    "drop_m": 0.08,
    "share_v": 0.05,
    "factor_v": 0.04,
    "fold_m": 0.12,
    "fold_v": 0.16,
    "spectral_v": 0.06,
    "column_v": 0.2,
    "drop_v": 0.25,
}
# Of weights kept in fewer bits than fp32, on the same scale. With a correction the master keeps 24 or all of its 32
# bits and only gradients are summed in bf16, less than any 8-bit state loses. Without one every step is rounded to 8
# bits: at random it is right on average and adds noise, put between 8-bit states and losing momentum; to nearest, small
# steps are lost for good (weights of 0.9 stand still at a learning rate of 1e-4), which is worse than losing v.
WEIGHTS_SEVERITY: dict[str, float] = {"split8": 0.001, "bf16_sr": 0.03, "bf16": 0.5}
ROUND_WEIGHTS = "round_weights"
# How many times more than an mlp matrix a role suffers from a loss in (m, v): adaptivity matters most for the last
# layer and the norms (arXiv 2407.07972), both matter more in attention (q and k) than in the mlp.
SENSITIVITY: dict[Role, tuple[float, float]] = {
    Role.HEAD: (1.5, 4.0),
    Role.NORM: (1.5, 4.0),
    Role.EMBEDDING: (1.5, 2.5),
    Role.ATTENTION: (1.75, 1.5),
    Role.MODULATION: (1.5, 1.5),
    Role.OTHER: (1.5, 1.5),
    Role.CONV: (1.0, 1.0),
    Role.MLP: (1.0, 1.0),
}
FIRST_LAYER = 1.5  # it stood out in single-block interventions on small Llamas
# Dose of sharing v along an axis; 1.25 where not said. SlimAdam: fan-in suits embeddings and head, fan-out the mlp.
SHARE_DOSE: dict[tuple[Role, StateLayout], float] = {
    (Role.EMBEDDING, StateLayout.PER_ROW): 1.0,
    (Role.EMBEDDING, StateLayout.PER_COLUMN): 1.5,
    (Role.HEAD, StateLayout.PER_ROW): 1.0,
    (Role.HEAD, StateLayout.PER_COLUMN): 1.5,
    (Role.MLP, StateLayout.PER_ROW): 1.5,
    (Role.MLP, StateLayout.PER_COLUMN): 1.0,
}
# Share of coordinates whose m/sqrt(v) is off by more than .1, by in-group spread std(log sqrt v).
SPREADS = (0.5, 1.0, 1.5, 2.0)
COMPANDED_ERROR = (0.0001, 0.037, 0.206, 0.39)
ROOT_ERROR = (0.0, 0.0006, 0.006, 0.024)
CODEC_ERROR: dict[str, tuple[float, ...]] = {
    "softsign8": COMPANDED_ERROR,
    "sqrt8": COMPANDED_ERROR,
    "root8m": ROOT_ERROR,
    "root8v": ROOT_ERROR,
    "root4": (0.49, 0.62, 0.73, 0.79),  # with v in fp32
    "lattice4": (0.076, 0.26, 0.44, 0.48),  # with m in fp32
}
# Dose of a codec where nothing was measured; 1 is companding int8. `quantization_dose` decides per block once a spread
# is known; it was near .5 on digits (ViT, 40 and 120 steps, one seed), where companding loses next to nothing.
CODEC_DOSE: dict[str, float] = {
    "fp32": 0.0,
    "bf16": 0.05,
    "softsign8": 1.0,
    "sqrt8": 1.0,
    "root8m": 1.0,
    "root8v": 1.0,
    "root4": 13.0,  # at a spread of .5
    "lattice4": 2.0,
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Loss:
    """A state or precision that a spec gives up against fp32 AdamW: the risk term and the tag it derives from."""

    term: str
    decl: StateDecl | None = None  # None: there is no such state at all
    codec: str | None = None  # set for quantize_m and quantize_v


def losses(rule: RuleInfo, *, storage: StorageScheme, block: Block | None = None) -> tuple[Loss, ...]:
    """The losses of `rule` in `storage`, derived from its tags; none for fp32 AdamW.

    `block` tells which states are too small for the storage, and so are not coded.
    """
    largest = max(block.params, key=lambda param: param.numel, default=None) if block is not None else None
    found: list[Loss] = []
    for kind in StateKind:
        decls = [decl for decl in rule.states if decl.kind is kind]
        loss = _layout_loss(decls, kind=kind, scaling=rule.scaling)
        if loss is not None:
            found.append(loss)
        for decl in decls:
            codec = storage.codec(decl, param=largest if decl.layout is StateLayout.FULL else None)
            if codec != "fp32":
                found.append(Loss(term=f"quantize_{kind}", decl=decl, codec=codec))
    return tuple(found)


def _layout_loss(decls: list[StateDecl], *, kind: StateKind, scaling: Scaling) -> Loss | None:
    by_layout = {decl.layout: decl for decl in decls}
    if StateLayout.FULL in by_layout:
        return None
    if StateLayout.FOLDED in by_layout:
        return Loss(term=f"fold_{kind}", decl=by_layout[StateLayout.FOLDED])
    if not decls and kind is StateKind.V and scaling is not Scaling.NONE:
        return Loss(term=f"{scaling}_v")
    if not decls or kind is StateKind.M:  # the mean of a signed gradient over a whole axis is next to nothing
        return Loss(term=f"drop_{kind}")
    return Loss(term="factor_v" if len(by_layout) > 1 else "share_v", decl=decls[0])


@dataclass(frozen=True, slots=True, kw_only=True)
class Case:
    """One spec on one block, and what is known of it.

    Args:
        profile: None where nothing was measured.
        weights: of terms by name; 1 where absent.
        share: the block's share of the network's parameters.
    """

    block: Block
    spec: OptimizerSpec
    rule: RuleInfo
    storage: StorageScheme
    profile: Profile | None
    weights: Mapping[str, float]
    share: float = 1.0

    @property
    def losses(self) -> tuple[Loss, ...]:
        return losses(self.rule, storage=self.storage, block=self.block)

    @property
    def stats(self) -> GradientStats | None:
        return None if self.profile is None else self.profile.stats.get(self.block.name)


def _prior_terms(case: Case) -> dict[str, float]:
    return {loss.term: _prior_term(loss, block=case.block) * case.share for loss in case.losses}


@dataclass(frozen=True, slots=True, kw_only=True)
class RiskModel:
    """Predicts the risk of one spec on one block, terms weighted and kept. Called with the fields of a `Case`.

    `needs` names what a profile must hold for it: nothing or {"stats"}. `terms` are unweighted.
    """

    name: str
    description: str
    needs: frozenset[str] = frozenset()
    terms: Callable[[Case], dict[str, float]] = _prior_terms

    def __call__(self, **known: Any) -> Risk:
        return self.predict(Case(**known))

    def predict(self, case: Case) -> Risk:
        found = self.terms(case)
        if rounding := WEIGHTS_SEVERITY.get(case.spec.weights, 0.0):
            found = {**found, ROUND_WEIGHTS: rounding * case.share}
        terms = {term: case.weights.get(term, 1.0) * value for term, value in found.items()}
        return Risk(total=fsum(terms.values()), terms=terms)


def _prior_term(loss: Loss, *, block: Block) -> float:
    """Severity x dose x sensitivity of the block's role, for a block that is the whole network."""
    for_m, for_v = SENSITIVITY[block.role]
    sensitivity = (for_m if loss.term.endswith("_m") else for_v) * (FIRST_LAYER if block.depth == 0 else 1.0)
    dose = 1.0
    if loss.codec is not None:
        dose = CODEC_DOSE[loss.codec]
    elif loss.decl is not None and loss.decl.layout is StateLayout.FOLDED:
        dose = 1.0 - 2.0**-loss.decl.level  # ||R||^2 / ||G||^2 of a gradient without structure
    elif loss.term == "share_v" and loss.decl is not None:
        dose = SHARE_DOSE.get((block.role, loss.decl.layout), 1.25)
    return SEVERITY[loss.term] * dose * sensitivity


def _statistics_terms(case: Case) -> dict[str, float]:
    """Severity x measured dose x the block's weight; a statistic that is NaN leaves its term to the prior."""
    weight = block_weight(case.stats, share=case.share)
    terms: dict[str, float] = {}
    for loss in case.losses:
        dose = measured_dose(loss, stats=case.stats) if case.stats is not None else nan
        term = SEVERITY[loss.term] * dose if isfinite(dose) else _prior_term(loss, block=case.block)
        terms[loss.term] = weight * term
    return terms


def block_weight(stats: GradientStats | None, *, share: float) -> float:
    """The block's share of the step's predicted loss decrease; its share of parameters where that is not known.

    At least a tenth of the latter: a block that happened to go uphill while it was profiled is not free to ruin.
    """
    if stats is None or not isfinite(stats.descent_share):
        return share
    return max(stats.descent_share, 0.1 * share)


def measured_dose(loss: Loss, *, stats: GradientStats) -> float:
    """Share of the structure given up by `loss` that the gradients show: 0 none, about 1 all, NaN unknown."""
    layout = loss.decl.layout if loss.decl is not None else None
    if loss.codec is not None:
        return quantization_dose(loss.codec, spread=stats.spread)
    if loss.term == "drop_m":
        known = 0.0 <= stats.noise < inf  # else the unbiased signal came out at 0 or below: nothing but noise
        noise = stats.noise / (1.0 + stats.noise) if known or isnan(stats.noise) else 1.0
        return max(0.0, 0.5 * (noise + 1.0 - stats.coherence))
    if loss.term == "drop_v":
        anisotropy = max(stats.anisotropy, 0.0)  # a profile that was read may hold anything
        return anisotropy / (1.0 + anisotropy)
    if loss.term == "spectral_v":
        return nan  # no statistic tells
    if loss.term in ("share_v", "column_v"):
        snr = stats.snr_fan_in if layout is StateLayout.PER_ROW else stats.snr_fan_out
        # 1/SNR, bounded: where SNR < 1, v varies more along the axis than it is large.
        return 1.0 / (1.0 + max(snr, 0.0))
    if loss.term == "factor_v":
        return stats.factor_residual
    assert loss.decl is not None and layout is StateLayout.FOLDED, f"no statistic tells of {loss.term}"
    return stats.fold_residual.get(f"fan_in:{loss.decl.level}", nan)


def quantization_dose(codec: str, *, spread: float) -> float:
    """Share of coordinates whose m/sqrt(v) is off by > .1 at that in-group spread, 1 for companding int8 at spread 1.

    Interpolated between measured points and level beyond them; never below twice what bf16 loses, which has more bits.
    """
    if not isfinite(spread):
        return nan
    if codec == "bf16":
        return CODEC_DOSE[codec]
    dose = float(np.interp(spread, SPREADS, CODEC_ERROR[codec])) / COMPANDED_ERROR[1]
    return max(dose, 2 * CODEC_DOSE["bf16"])


PRIOR = RiskModel(
    name="prior",
    description="by role: what is given up, how much the role needs it, the block's share of the parameters",
)


@dataclass(frozen=True, slots=True, kw_only=True)
class MeasuredRisk(RiskModel):
    """Change of the final loss by a spec on a block: mean + kappa sd of its role's entry, by the block's share of it.

    What was not measured counts as worse than everything that was, by its prior; without entries the prior is all.
    """

    name: str = "measured"
    description: str = "by measured changes of the final loss, of whole recipes and of rules by role, else as prior"
    family: Family | None = None
    role_numel: Mapping[str, int] = field(default_factory=dict[str, int])
    kappa: float = KAPPA

    def predict(self, case: Case) -> Risk:
        block, prior = case.block, PRIOR.predict(replace(case, profile=None, weights={}))
        if self.family is None or not self.family.roles:
            return prior
        change = measured_change(block, base_name(case.spec.name), family=self.family)
        if change is None:
            worst = max(one.bound(self.kappa) for held in self.family.roles.values() for one in held.values())
            return Risk(total=max(worst, 0.0) + prior.total, terms=prior.terms)
        part = block.numel / max(self.role_numel.get(next(recipe_keys(block)), block.numel), 1)
        return Risk(total=part * change.bound(self.kappa), terms={"change": part * change.mean})


def measured_change(block: Block, spec: str, *, family: Family) -> Change | None:
    """The change by `spec` in the role of a block, against the family's base; 0 where that runs it, too."""
    if family.base is not None and family.recipe(family.base).recipe.preferred_spec(block)[1] == spec:
        return Change(mean=0.0, sd=0.0, n=0)
    return family.change_for([key for key in recipe_keys(block) if key != FIRST], spec)


def measured_risk(blocks: tuple[Block, ...], *, family: Family | None, kappa: float) -> MeasuredRisk:
    sizes: dict[str, int] = {}
    for block in blocks:
        key = next(recipe_keys(block))
        sizes[key] = sizes.get(key, 0) + block.numel
    return MeasuredRisk(family=family, role_numel=sizes, kappa=kappa)


RISKS: dict[str, RiskModel] = {
    risk.name: risk
    for risk in (
        MeasuredRisk(),
        PRIOR,
        RiskModel(
            name="statistics",  # our reconstruction of BAOC's risk, whose formulas are unpublished
            description="by gradient statistics: coherence, noise, anisotropy, SNR by axis, fold residual, spread",
            needs=frozenset({"stats"}),
            terms=_statistics_terms,
        ),
    )
}
