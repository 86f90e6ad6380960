"""Risk models: the predicted change of quality by a spec on a block, with its terms.

`measured` looks up measured changes against a named recipe; they may be below 0. `prior` and `statistics` predict a
loss against fp32 AdamW. Neither is shown to predict damage (docs/methods.md#risk): they are hypotheses whose weights
can be calibrated. What a spec gives up is derived from the tags of its rule, so a new rule needs no change here.
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

# Risk of each cut on all of a network's parameters at once, at dose 1 and sensitivity 1. Only the order is argued for,
# by single-block interventions and CPU runs: storage is nearly free; then come a lost momentum and a shared or factored
# v, then folding, then no v at all. Equal columns replace a little of v, equal singular values (Muon) most of it.
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
# Risk of weights formats, on the same scale. With an 8-bit correction weights keep 24 bits and only gradients are in
# bf16, which loses less than any 8-bit state. Without a correction every step is rounded to 8 bits. At random this
# adds noise of mean 0: placed between 8-bit states and a lost momentum. To nearest, small steps are lost for good
# (weights of .9 do not move at a learning rate of 1e-4), which is worse than losing v.
WEIGHTS_SEVERITY: dict[str, float] = {"split8": 0.001, "bf16_sr": 0.03, "bf16": 0.5}
ROUND_WEIGHTS = "round_weights"
# Sensitivity of a role to cuts in (m, v), relative to an mlp matrix: adaptivity matters most for the last layer and
# the norms (arXiv 2407.07972), and both matter more in attention (q and k) than in the mlp.
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
FIRST_LAYER = 1.5  # factor on the sensitivity: it was highest in single-block interventions on small Llamas
# Dose of sharing v along an axis, 1.25 for others. SlimAdam: fan-in suits embeddings and head, fan-out the mlp.
SHARE_DOSE: dict[tuple[Role, StateLayout], float] = {
    (Role.EMBEDDING, StateLayout.PER_ROW): 1.0,
    (Role.EMBEDDING, StateLayout.PER_COLUMN): 1.5,
    (Role.HEAD, StateLayout.PER_ROW): 1.0,
    (Role.HEAD, StateLayout.PER_COLUMN): 1.5,
    (Role.MLP, StateLayout.PER_ROW): 1.5,
    (Role.MLP, StateLayout.PER_COLUMN): 1.0,
}
# Share of coordinates whose m/sqrt(v) is off by more than .1, at each in-group spread std(log sqrt v) of SPREADS.
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
# Dose of a codec for a block whose spread is unknown; 1 is companding int8. With a known spread `quantization_dose`
# decides: .5 on digits (ViT, 40 and 120 steps, one seed), at which companding loses next to nothing.
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
class Cut:
    """A state or precision that a spec gives up against fp32 AdamW: the risk term and the tag it derives from."""

    term: str
    decl: StateDecl | None = None  # None: there is no such state at all
    codec: str | None = None  # set for quantize_m and quantize_v


def cuts(rule: RuleInfo, *, storage: StorageScheme, block: Block | None = None) -> tuple[Cut, ...]:
    """The cuts of `rule` in `storage`, derived from its tags; none for fp32 AdamW. `block`: its size decides which
    states are too small for the storage's codecs."""
    largest = max(block.params, key=lambda param: param.numel, default=None) if block is not None else None
    result: list[Cut] = []
    for kind in StateKind:
        decls = [decl for decl in rule.states if decl.kind is kind]
        cut = _layout_cut(decls, kind=kind, scaling=rule.scaling)
        if cut is not None:
            result.append(cut)
        for decl in decls:
            codec = storage.codec(decl, param=largest if decl.layout is StateLayout.FULL else None)
            if codec != "fp32":
                result.append(Cut(term=f"quantize_{kind}", decl=decl, codec=codec))
    return tuple(result)


def _layout_cut(decls: list[StateDecl], *, kind: StateKind, scaling: Scaling) -> Cut | None:
    by_layout = {decl.layout: decl for decl in decls}
    if StateLayout.FULL in by_layout:
        return None
    if StateLayout.FOLDED in by_layout:
        return Cut(term=f"fold_{kind}", decl=by_layout[StateLayout.FOLDED])
    if not decls and kind is StateKind.V and scaling is not Scaling.NONE:
        return Cut(term=f"{scaling}_v")
    if not decls or kind is StateKind.M:  # the mean of a signed gradient over a whole axis is next to nothing
        return Cut(term=f"drop_{kind}")
    return Cut(term="factor_v" if len(by_layout) > 1 else "share_v", decl=decls[0])


@dataclass(frozen=True, slots=True, kw_only=True)
class Case:
    """The arguments of a risk model: one spec on one block.

    Args:
        profile: None before gradients were sampled.
        weights: term -> its weight; 1 for absent ones.
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
    def cuts(self) -> tuple[Cut, ...]:
        return cuts(self.rule, storage=self.storage, block=self.block)

    @property
    def stats(self) -> GradientStats | None:
        return None if self.profile is None else self.profile.stats.get(self.block.name)


def _prior_terms(case: Case) -> dict[str, float]:
    return {cut.term: _prior_term(cut, block=case.block) * case.share for cut in case.cuts}


@dataclass(frozen=True, slots=True, kw_only=True)
class RiskModel:
    """Predicts the risk of one spec on one block. Called with the fields of a `Case`. `needs`: what it reads of a
    profile, nothing or {"stats"}. `terms`: function of a case -> unweighted terms."""

    name: str
    description: str
    needs: frozenset[str] = frozenset()
    terms: Callable[[Case], dict[str, float]] = _prior_terms

    def __call__(self, **fields: Any) -> Risk:
        return self.predict(Case(**fields))

    def predict(self, case: Case) -> Risk:
        unweighted = self.terms(case)
        if rounding := WEIGHTS_SEVERITY.get(case.spec.weights, 0.0):
            unweighted = {**unweighted, ROUND_WEIGHTS: rounding * case.share}
        terms = {term: case.weights.get(term, 1.0) * value for term, value in unweighted.items()}
        return Risk(total=fsum(terms.values()), terms=terms)


def _prior_term(cut: Cut, *, block: Block) -> float:
    """Severity x dose x sensitivity of the block's role, as if the block were the whole network."""
    for_m, for_v = SENSITIVITY[block.role]
    sensitivity = (for_m if cut.term.endswith("_m") else for_v) * (FIRST_LAYER if block.depth == 0 else 1.0)
    dose = 1.0
    if cut.codec is not None:
        dose = CODEC_DOSE[cut.codec]
    elif cut.decl is not None and cut.decl.layout is StateLayout.FOLDED:
        dose = 1.0 - 2.0**-cut.decl.level  # ||R||^2 / ||G||^2 of a gradient without structure
    elif cut.term == "share_v" and cut.decl is not None:
        dose = SHARE_DOSE.get((block.role, cut.decl.layout), 1.25)
    return SEVERITY[cut.term] * dose * sensitivity


def _statistics_terms(case: Case) -> dict[str, float]:
    """Severity x measured dose x the block's weight. A term whose statistic is NaN is that of the prior."""
    weight = block_weight(case.stats, share=case.share)
    terms: dict[str, float] = {}
    for cut in case.cuts:
        dose = measured_dose(cut, stats=case.stats) if case.stats is not None else nan
        term = SEVERITY[cut.term] * dose if isfinite(dose) else _prior_term(cut, block=case.block)
        terms[cut.term] = weight * term
    return terms


def block_weight(stats: GradientStats | None, *, share: float) -> float:
    """The block's share of the step's predicted loss decrease, or its `share` of parameters if that is unknown. It is
    at least a tenth of the latter: a block whose loss happened to rise in the profile still matters."""
    if stats is None or not isfinite(stats.descent_share):
        return share
    return max(stats.descent_share, 0.1 * share)


def measured_dose(cut: Cut, *, stats: GradientStats) -> float:
    """How much of what `cut` gives up the gradients have: 0 nothing, about 1 everything, NaN unknown."""
    layout = cut.decl.layout if cut.decl is not None else None
    if cut.codec is not None:
        return quantization_dose(cut.codec, spread=stats.spread)
    if cut.term == "drop_m":
        has_signal = 0.0 <= stats.noise < inf  # else the unbiased estimate of the signal is 0 or below: all is noise
        noise = stats.noise / (1.0 + stats.noise) if has_signal or isnan(stats.noise) else 1.0
        return max(0.0, 0.5 * (noise + 1.0 - stats.coherence))
    if cut.term == "drop_v":
        anisotropy = max(stats.anisotropy, 0.0)  # a profile from a file may have any value
        return anisotropy / (1.0 + anisotropy)
    if cut.term == "spectral_v":
        return nan  # there is no statistic for it
    if cut.term in ("share_v", "column_v"):
        snr = stats.snr_fan_in if layout is StateLayout.PER_ROW else stats.snr_fan_out
        # 1/SNR, bounded: for an SNR below 1, v varies more along the axis than its mean.
        return 1.0 / (1.0 + max(snr, 0.0))
    if cut.term == "factor_v":
        return stats.factor_residual
    assert cut.decl is not None and layout is StateLayout.FOLDED, f"no statistic tells of {cut.term}"
    return stats.fold_residual.get(f"fan_in:{cut.decl.level}", nan)


def quantization_dose(codec: str, *, spread: float) -> float:
    """Share of coordinates whose m/sqrt(v) is off by > .1 at this in-group spread; 1 is companding int8 at spread 1.
    Linear between the measured spreads and constant beyond them. At least twice that of bf16, which has more bits."""
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
    """Change of the final loss by a spec on a block: mean + kappa sd of its role's change, times the block's share.

    A spec that was not measured in its role is worse than every measured one, by its prior. Without a family's changes
    by role the risk is the prior.
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
            changes = [change for by_spec in self.family.roles.values() for change in by_spec.values()]
            worst = max(change.bound(self.kappa) for change in changes)
            return Risk(total=max(worst, 0.0) + prior.total, terms=prior.terms)
        share = block.numel / max(self.role_numel.get(next(recipe_keys(block)), block.numel), 1)
        return Risk(total=share * change.bound(self.kappa), terms={"change": share * change.mean})


def measured_change(block: Block, spec: str, *, family: Family) -> Change | None:
    """The change by `spec` in the role of a block, against the family's base; 0 if the base runs it there."""
    if family.base is not None and family.recipe(family.base).recipe.preferred_spec(block)[1] == spec:
        return Change(mean=0.0, sd=0.0, n=0)
    by_spec = [family.roles.get(key, {}) for key in recipe_keys(block) if key != FIRST]
    return next((changes[spec] for changes in by_spec if spec in changes), None)  # None: measured in none of its roles


def measured_risk(blocks: tuple[Block, ...], *, family: Family | None, kappa: float) -> MeasuredRisk:
    role_numel: dict[str, int] = {}
    for block in blocks:
        key = next(recipe_keys(block))
        role_numel[key] = role_numel.get(key, 0) + block.numel
    return MeasuredRisk(family=family, role_numel=role_numel, kappa=kappa)


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
