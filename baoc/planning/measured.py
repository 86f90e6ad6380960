"""The choice by measurement: the recipe that measured best of those that fit, or a mixture where the table supports it.

Whole recipes are tried from the best measured one on, each planned under every limit of the budget. A mixture replaces
roles of the recipe that the table's entries were measured in. It is taken only if it is better than the best recipe
that fits beyond its own error, and beyond what the best of so many entries shows by chance.
"""

from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, fields, replace
from math import sqrt
from statistics import NormalDist

from baoc.core.catalogue import SPECS, WEIGHTS, select
from baoc.core.measured import Change, Family, MeasuredRecipe, added, at_rate, faded
from baoc.core.recipes import Recipe, keys_of
from baoc.core.statistics import LEVEL
from baoc.errors import BadInputError, InfeasibleBudgetError
from baoc.planning.allocators import NoFeasibleAllocation
from baoc.planning.allocators.exact import EXACT
from baoc.planning.budgeted import BudgetedBlocks
from baoc.planning.risk import entry_of
from baoc.types import (
    Basis,
    Block,
    Candidate,
    Cost,
    Limits,
    Plan,
    Risk,
    Role,
)

MIXED = "mixed"
ADAMW = "adamw"
ROUNDED = "bf16_sr"  # weights
# Of the loss: what rounding may cost at most by experiments/results/product_runs.csv (not told from native there).
ROUNDING_COST = 0.02
PRIOR = "pretrained=True"  # what risk=prior is where settings are Python values
FAR = 10.0  # times the measured size, from which on a plan says that nothing was measured there


# -- the choice -------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True, kw_only=True)
class Choice:
    """A recipe that fits, and the change that was measured of it, or is added up of a mixture's entries.

    `rate`: multiple of AdamW's learning rate, for all rules alike.
    """

    recipe: Recipe
    plan: Plan
    change: Change
    rate: float
    measured: MeasuredRecipe | None = None


def choose(planner: BudgetedBlocks, *, family: Family) -> Choice | None:
    """The measured choice of the planner's budget; None where no measured recipe fits.

    Where all that fits on the device measured worse than fp32 AdamW, states go to the host if that is allowed, as they
    stay the same there. Weights are rounded at random where that gains more than it may cost. On a network of a kind
    that nobody measured it is the best recipe of the nearest family, if that was better than fp32 AdamW.
    """
    best = next(whole(planner, family=family), None)
    if planner.extrapolates:
        return None if best is None or is_worse_than_adamw(best, family=family) else best
    if best is None or is_worse_than_adamw(best, family=family):
        best = next(whole(planner, family=family, hosted=True), best)
    rounded = next(whole(planner, family=family, weights=(ROUNDED,)), None)
    if rounded is not None and rounded.measured is not None:
        cost = ROUNDING_COST * rounded.measured.value
        if best is None or rounded.change.mean + cost < best.change.mean:
            best = rounded
    mixed = mixture(planner, family=family)
    if mixed is None:
        return best
    if best is None:
        return mixed
    difference = mixed.change.mean - best.change.mean
    sd = sqrt(mixed.change.sd**2 + best.change.sd**2)
    return mixed if difference + planner.kappa * picked_of(family) * sd < 0 else best


def picked_of(family: Family) -> float:
    """How many times more standard deviations the best of all entries has to be better by than one that was named
    before: each was measured at two rates, so that the best looks better than it is (Bonferroni)."""
    tried = 2 * sum(len(held) for held in family.roles.values())
    return NormalDist().inv_cdf(1 - (1 - LEVEL) / max(tried, 1)) / NormalDist().inv_cdf(LEVEL)


def ranked(planner: BudgetedBlocks, *, family: Family) -> list[MeasuredRecipe]:
    """Measured recipes by mean + kappa sd."""
    return sorted(family.recipes, key=lambda one: (one.change.bound(planner.kappa), one.change.mean))


def is_worse_than_adamw(choice: Choice, *, family: Family) -> bool:
    """Whether a recipe measured worse than fp32 AdamW did; False where that was not measured."""
    adamw = next((one for one in family.recipes if one.name == ADAMW), None)
    return adamw is not None and choice.change.mean > adamw.change.mean


def whole(
    planner: BudgetedBlocks, *, family: Family, weights: Sequence[str] = (), hosted: bool = False
) -> Iterator[Choice]:
    """Measured recipes that fit, the best first; with the first of `weights` that lets one fit, by default of those
    that are offered, native first. `hosted`: with their states on the host."""
    if hosted and not planner.places:
        return
    offered = {spec.weights for spec in select(planner.settings.specs).values()}
    weights = weights or sorted(offered, key=list(WEIGHTS).index)
    for one in ranked(planner, family=family):
        rate = rate_here(planner, one.rate, family=family)
        recipe = at_rate(one.recipe, rate)
        recipe = streamed(recipe) if hosted else recipe
        made = fitting(planner, recipe, weights=weights)
        if made is not None:
            recipe, plan = made
            yield Choice(recipe=recipe, plan=plan, change=one.change, rate=rate, measured=one)


def rate_here(planner: BudgetedBlocks, rate: float, *, family: Family) -> float:
    """What a measured multiple of the learning rate is on this network. Outside run.py, where weights may be
    pretrained, a guess from the nearest family raises no rate."""
    rate = faded(rate, num_params=planner.num_params, measured=family.num_params)
    return min(rate, 1.0) if planner.extrapolates and not planner.settings.from_conf else rate


def best_rate(planner: BudgetedBlocks, recipe: Recipe, *, family: Family) -> float:
    """The multiple of the learning rate at which a recipe measured best; 1 where it was not measured."""
    runs = (recipe.specs, recipe.betas)
    rate = next((one.rate for one in family.recipes if (one.recipe.specs, one.recipe.betas) == runs), 1.0)
    return rate_here(planner, rate, family=family)


def streamed(recipe: Recipe) -> Recipe:
    """The recipe with the states of all roles but norms on the host, stepped on the device."""
    specs = {role: spec if role == Role.NORM else on_host(spec) for role, spec in recipe.specs.items()}
    return replace(recipe, specs=specs, fallback=tuple(map(on_host, recipe.fallback)))


def on_host(spec: str) -> str:
    named = f"{spec}@streamed"
    return named if named in SPECS else spec  # of no state there is nothing to place


def fitting(planner: BudgetedBlocks, recipe: Recipe, *, weights: Sequence[str]) -> tuple[Recipe, Plan] | None:
    """The recipe with the first format of the weights that lets it fit, and its plan."""
    for name in weights:
        held = replace(recipe, weights=name)
        plan = recipe_plan(planner, held)
        if plan is not None:
            return held, plan
    return None


def useful_bytes(planner: BudgetedBlocks, *, family: Family) -> int:
    """Bytes of the best measured recipe in the budget's own measure: from there on a budget does not bind."""
    for one in ranked(planner, family=family):
        sub = recipe_planner(planner, one.recipe)
        if sub is not None:
            return sub.taken([options[0] for options in sub.candidates(risk="prior", profile=None).values()])
    return 0


def recipe_planner(planner: BudgetedBlocks, recipe: Recipe) -> BudgetedBlocks | None:
    """The planner of a recipe on the same blocks; None where it tells parts that these do not, leaves some to its
    fallback, does not apply, or runs rows that are not offered."""
    if recipe.tells_parts and planner.settings.blocks_by != "layer_part":
        return None
    if not all(map(recipe.covers, planner.blocks)):
        return None
    try:
        sub = planner.with_settings(replace(planner.settings, recipe=recipe, allocator="recipe"))
    except BadInputError:
        return None
    return with_offered_rows(sub, planner=planner)


def with_offered_rows(sub: BudgetedBlocks, *, planner: BudgetedBlocks) -> BudgetedBlocks | None:
    """The planner of a recipe without the rows that `planner` is not offered, of whose steps the footprint may not
    know; None where a block runs one. A recipe brings fallbacks that no block here runs."""
    runs = {pick.spec for pick in sub.allocator.picks.values()}  # pyright: ignore[reportAttributeAccessIssue]
    if not runs <= set(planner.specs):
        return None
    sub.specs, sub.offered = (
        {name: spec for name, spec in of.items() if name in planner.specs} for of in (sub.specs, sub.offered)
    )
    return sub


def recipe_plan(planner: BudgetedBlocks, recipe: Recipe) -> Plan | None:
    """The plan of a recipe under the planner's budget; None where it does not fit."""
    sub = recipe_planner(planner, recipe)
    if sub is not None:
        with suppress(InfeasibleBudgetError):
            return sub.propose()
    return None


def mixture(planner: BudgetedBlocks, *, family: Family) -> Choice | None:
    """The base with some roles replaced, of least mean + kappa sd under the budget; None where the table has no better.

    One role may run whatever was measured in it. Several are changed only by specs whose entries are shown to add up.
    """
    if family.base is None or not family.roles:
        return None
    base = family.recipe(family.base)
    blocks: dict[str, list[Block]] = {}
    for block in planner.blocks:
        blocks.setdefault(next(key for key in keys_of(block) if key != "first"), []).append(block)
    pool = planner.candidates(risk="measured", profile=None)
    tables: dict[str, dict[str, Change]] = {}
    for role, held in blocks.items():
        specs = {spec for block in held for spec in {c.spec for c in pool[block.name]}}
        known = {spec: change for spec in specs if (change := entry_of(held[0], spec, family=family)) is not None}
        tables[role] = known
    found: list[tuple[Change, dict[str, str]]] = []
    limits = planner.limits()
    addable = {role: {s: c for s, c in held.items() if c.n == 0 or family.may_add(s)} for role, held in tables.items()}
    single = [
        {role: held if role == only else {s: c for s, c in held.items() if c.n == 0} for role, held in tables.items()}
        for only in tables
    ]
    for allowed in (addable, *single):
        picked = _allocate(pool, blocks=blocks, tables=allowed, limits=limits, kappa=planner.kappa)
        if picked is not None:
            entries = [allowed[role][spec] for role, spec in picked.items() if allowed[role][spec].n]
            if entries:
                found.append((added(entries), picked))
    shift = base.change  # entries are against the base, recipes against the reference
    rate = rate_here(planner, base.rate, family=family)
    for change, picked in sorted(found, key=lambda one: one[0].bound(planner.kappa)):
        lr = {role: tables[role][spec].multiple for role, spec in picked.items() if tables[role][spec].multiple != 1}
        replaced = {role: spec for role, spec in picked.items() if tables[role][spec].n}
        recipe = replace(
            base.recipe,
            name=MIXED,
            description=f"{base.name} with {', '.join(f'{spec} in {role}' for role, spec in replaced.items())}",
            specs={**base.recipe.specs, **picked},
        )
        recipe = at_rate(recipe, rate, by_role=lr)
        plan = recipe_plan(planner, recipe)
        if plan is not None:
            whole_change = replace(change, mean=change.mean + shift.mean, sd=sqrt(change.sd**2 + shift.sd**2))
            return Choice(recipe=recipe, plan=plan, change=whole_change, rate=rate)
    return None


def _allocate(
    pool: Mapping[str, tuple[Candidate, ...]],
    *,
    blocks: Mapping[str, list[Block]],
    tables: Mapping[str, Mapping[str, Change]],
    limits: Limits,
    kappa: float,
) -> dict[str, str] | None:
    """Role -> spec of least risk within the limits; None where a role has nothing to run or nothing fits."""
    candidates: dict[str, tuple[Candidate, ...]] = {}
    for role, held in blocks.items():
        options = _joined(role, [pool[block.name] for block in held])
        candidates[role] = tuple(
            replace(c, risk=Risk(total=tables[role][c.spec].bound(kappa))) for c in options if c.spec in tables[role]
        )
    if not all(candidates.values()):
        return None
    try:
        return dict(EXACT(candidates, limits=limits).choices)
    except NoFeasibleAllocation:
        return None


def _joined(role: str, options: Sequence[Sequence[Candidate]]) -> tuple[Candidate, ...]:
    """The specs that every block of a role may run, with costs added up, cheapest first. Their risk is the role's own
    entry, which replaces that of the candidates."""
    by_spec = [{c.spec: c for c in block} for block in options]
    shared = [spec for spec in by_spec[0] if all(spec in block for block in by_spec[1:])]
    joined = []
    for spec in shared:
        costs = [block[spec].cost for block in by_spec]
        cost = Cost(**{item.name: sum(getattr(part, item.name) for part in costs) for item in fields(Cost)})
        joined.append(replace(by_spec[0][spec], block=role, cost=cost))
    return tuple(sorted(joined, key=lambda c: c.cost.charged_bytes))


# -- what is told of it -----------------------------------------------------------------------------------------------


def basis_of(choice: Choice, *, family: Family, plan: Plan, planner: BudgetedBlocks) -> Basis:
    """The basis of the choice, as values and as a sentence."""
    one, recipe, num_params = choice.measured, choice.recipe, planner.num_params
    in_run = planner.settings.from_conf
    hosted = plan.allocation.host_bytes
    share = (plan.allocation.state_bytes + hosted) / max(plan.state_bytes_adamw, 1)
    held = f"{recipe.name}: {share:.1%} of the state{', most of it on the host' if hosted else ''}"
    if one is None:
        against, change = family.base or "", choice.change
        told = f"{recipe.description}; {change} against {family.reference}, added up by role"
    else:
        told = f"{one.value:.4g} ({one.sd:.2g})"
        against, change = next(iter(one.against.items()), (family.reference, one.change))
        parts = [f"{other} {family.recipe(other).value:.4g}: {difference}" for other, difference in one.against.items()]
        told += f" against {', '.join(parts)}" if parts else ""
    where = f"n {change.n}, {family.unit}, measured at {family.size}, {family.horizon}"
    far = f"; not measured at {num_params:,} parameters" if num_params > FAR * family.num_params else ""
    narrow = "" if recipe.weights == "native" else f"; weights {_format_told(recipe.weights, family=family)}"
    rate = f"; {choice.rate:.3g} times AdamW's learning rate" if choice.rate != 1 else ""
    if choice.rate > 1:
        rate += f", as in training from scratch: for pretrained weights {'risk=prior' if in_run else PRIOR}"
    worse = (
        "; every measured recipe that fits is worse than fp32 AdamW, which does not fit, and what risk=prior would "
        "choose was not measured: a larger budget or a race may do better"
        if is_worse_than_adamw(choice, family=family)
        else ""
    )
    text = f"{held}; {told}, {where}{far}{narrow}{rate}{worse}"
    if planner.extrapolates and one is not None:
        theirs = faded(one.rate, num_params=num_params, measured=family.num_params)
        kept = "; the learning rate stays as given, as weights may be pretrained "
        kept += f"(there it was {theirs:.3g} times AdamW's)"
        text = (
            f"{held}; an extrapolation from transformers for {family.name}, as nothing was measured of this kind "
            f"of network; there it was the best that fits, with {one.value:.4g} against fp32 AdamW's "
            f"{family.recipe(ADAMW).value:.4g} {family.unit}, n {change.n}{kept if choice.rate < theirs else rate}"
            + ("; race=auto checks it" if in_run else f"; {PRIOR} plans without it")
        )
    return Basis(
        by="measured",
        text=text,
        recipe=recipe.name,
        family=family.name,
        reference=against,
        change=change.mean,
        half=change.half,
        n=change.n,
        num_params=family.num_params,
        steps=family.steps,
        lr=dict(recipe.lr),
        betas=dict(recipe.betas),
    )


def _format_told(name: str, *, family: Family) -> str:
    known, told = family.weights.get(name), WEIGHTS[name].description
    if known is None:
        return f"{told}, which were not measured for {family.name}"
    changed = f"{known.mean:+.2g} +- {known.half:.2g}"
    return f"{told}, which under 8-bit Muon changed {changed} against fp32 ones, n {known.n}"
