"""`risk=measured`: chooses the recipe that measured best of those that fit the budget, and says what that rests on.

Whole recipes are tried from the best measured one on, each planned under every limit of the budget. A mixture replaces
one role of the recipe that the table's entries were measured in. It is taken only if it is better than the best recipe
that fits beyond its own error, and beyond what the best of so many entries shows by chance.
"""

from collections.abc import Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from math import sqrt
from statistics import NormalDist

from baoc.core.catalogue import SPECS, WEIGHTS, select
from baoc.core.measured import Change, Family, MeasuredRecipe, faded_rate, with_rate
from baoc.core.recipes import Recipe, recipe_keys
from baoc.core.statistics import DEFAULT_LEVEL
from baoc.errors import BadInputError, InfeasibleBudgetError
from baoc.planning.budgeted import BudgetedBlocks
from baoc.planning.risk import measured_change
from baoc.types import Basis, Block, Plan, Role

MIXED = "mixed"
ADAMW = "adamw"
STOCHASTIC_BF16 = "bf16_sr"  # weights
# Of the loss: what rounding may cost at most by experiments/results/product_runs.csv (not told from native there).
ROUNDING_COST = 0.02
PRETRAINED_ARGUMENT = "pretrained=True"  # what risk=prior is where settings are Python values
FAR = 10.0  # times the measured size, from which on a plan says that nothing was measured there


# -- the choice -------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True, kw_only=True)
class RecipeChoice:
    """A recipe that fits, and the change that was measured of it, or of a mixture's entry.

    `rate`: multiple of AdamW's learning rate, for all rules alike.
    """

    recipe: Recipe
    plan: Plan
    change: Change
    rate: float
    measured: MeasuredRecipe | None = None


def choose_recipe(planner: BudgetedBlocks, *, family: Family) -> RecipeChoice | None:
    """The measured choice of the planner's budget; None where no measured recipe fits.

    Where all that fits on the device measured worse than fp32 AdamW, states go to the host if that is allowed, as they
    stay the same there. Weights are rounded at random where that gains more than it may cost. On a network of a kind
    that nobody measured it is the best recipe of the nearest family, if that was better than fp32 AdamW.
    """
    best = next(fitting_recipes(planner, family=family), None)
    if planner.extrapolates:
        return None if best is None or is_worse_than_adamw(best, family=family) else best
    if best is None or is_worse_than_adamw(best, family=family):
        best = next(fitting_recipes(planner, family=family, hosted=True), best)
    rounded = next(fitting_recipes(planner, family=family, weights=(STOCHASTIC_BF16,)), None)
    if rounded is not None and rounded.measured is not None:
        cost = ROUNDING_COST * rounded.measured.value
        if best is None or rounded.change.mean + cost < best.change.mean:
            best = rounded
    return best_mixture(planner, family=family, than=best) or best


def selection_penalty(family: Family) -> float:
    """How many times more standard deviations the best of all entries has to be better by than one that was named
    before: each was measured at two rates, so that the best looks better than it is (Bonferroni)."""
    tried = 2 * sum(len(held) for held in family.roles.values())
    return NormalDist().inv_cdf(1 - (1 - DEFAULT_LEVEL) / max(tried, 1)) / NormalDist().inv_cdf(DEFAULT_LEVEL)


def ranked_recipes(planner: BudgetedBlocks, *, family: Family) -> list[MeasuredRecipe]:
    """Measured recipes by mean + kappa sd."""
    return sorted(family.recipes, key=lambda one: (one.change.bound(planner.kappa), one.change.mean))


def is_worse_than_adamw(choice: RecipeChoice, *, family: Family) -> bool:
    """Whether a recipe measured worse than fp32 AdamW did; False where that was not measured."""
    adamw = next((one for one in family.recipes if one.name == ADAMW), None)
    return adamw is not None and choice.change.mean > adamw.change.mean


def fitting_recipes(
    planner: BudgetedBlocks, *, family: Family, weights: Sequence[str] = (), hosted: bool = False
) -> Iterator[RecipeChoice]:
    """Measured recipes that fit, the best first; with the first of `weights` that lets one fit, by default of those
    that are offered, native first. `hosted`: with their states on the host."""
    if hosted and not planner.may_use_host:
        return
    offered = {spec.weights for spec in select(planner.settings.specs).values()}
    weights = weights or sorted(offered, key=list(WEIGHTS).index)
    for one in ranked_recipes(planner, family=family):
        rate = rate_for_network(planner, one.rate, family=family)
        recipe = with_rate(one.recipe, rate)
        recipe = with_streamed_states(recipe) if hosted else recipe
        for name in weights:
            held = replace(recipe, weights=name)
            plan = plan_recipe(planner, held)
            if plan is not None:
                yield RecipeChoice(recipe=held, plan=plan, change=one.change, rate=rate, measured=one)
                break


def rate_for_network(planner: BudgetedBlocks, rate: float, *, family: Family) -> float:
    """What a measured multiple of the learning rate is on this network. Outside run.py, where weights may be
    pretrained, a guess from the nearest family raises no rate."""
    rate = faded_rate(rate, num_params=planner.num_params, measured=family.num_params)
    return min(rate, 1.0) if planner.extrapolates and not planner.settings.from_conf else rate


def best_rate(planner: BudgetedBlocks, recipe: Recipe, *, family: Family) -> float:
    """The multiple of the learning rate at which a recipe measured best; 1 where it was not measured."""
    runs = (recipe.specs, recipe.betas)
    rate = next((one.rate for one in family.recipes if (one.recipe.specs, one.recipe.betas) == runs), 1.0)
    return rate_for_network(planner, rate, family=family)


def with_streamed_states(recipe: Recipe) -> Recipe:
    """The recipe with the states of all roles but norms on the host, stepped on the device."""
    specs = {role: spec if role == Role.NORM else streamed_spec_name(spec) for role, spec in recipe.specs.items()}
    return replace(recipe, specs=specs, fallback=tuple(map(streamed_spec_name, recipe.fallback)))


def streamed_spec_name(spec: str) -> str:
    named = f"{spec}@streamed"
    return named if named in SPECS else spec  # of no state there is nothing to place


def most_useful_bytes(planner: BudgetedBlocks, *, family: Family) -> int:
    """Bytes of the best measured recipe in the budget's own measure: from there on a budget does not bind."""
    for one in ranked_recipes(planner, family=family):
        sub = recipe_planner(planner, one.recipe)
        if sub is not None:
            return sub.budget_bytes_of([options[0] for options in sub.candidates(risk="prior", profile=None).values()])
    return 0


def recipe_planner(planner: BudgetedBlocks, recipe: Recipe, *, covers: bool = True) -> BudgetedBlocks | None:
    """The planner of a recipe on the same blocks, offered what `planner` is; None where it does not apply, or runs rows
    that are not offered. `covers`: nor where it tells parts that these blocks do not, or leaves some to its fallback.
    """
    if covers and recipe.needs_part_blocks and planner.settings.blocks_by != "layer_part":
        return None
    if covers and not all(map(recipe.names_spec_for, planner.blocks)):
        return None
    try:
        sub = planner.with_settings(replace(planner.settings, recipe=recipe, allocator="recipe"))
    except BadInputError:
        return None
    runs = {pick.spec for pick in sub.allocator.picks.values()}  # pyright: ignore[reportAttributeAccessIssue]
    if not runs <= set(planner.specs):
        return None
    # A recipe brings fallbacks that no block here runs; of their steps the footprint may not know.
    sub.specs, sub.offered_specs = (
        {name: spec for name, spec in of.items() if name in planner.specs} for of in (sub.specs, sub.offered_specs)
    )
    return sub


def plan_recipe(planner: BudgetedBlocks, recipe: Recipe, *, covers: bool = True) -> Plan | None:
    """The plan of a recipe under the planner's budget; None where it does not fit or apply (see `recipe_planner`)."""
    sub = recipe_planner(planner, recipe, covers=covers)
    if sub is not None:
        with suppress(InfeasibleBudgetError, BadInputError):
            return sub.propose()
    return None


def best_mixture(planner: BudgetedBlocks, *, family: Family, than: RecipeChoice | None) -> RecipeChoice | None:
    """The base with one role replaced, of least mean + kappa sd under the budget; None where that is not better than
    the recipe `than` beyond its error, and beyond what the best of so many entries shows by chance.

    One role alone, as no spec's changes by role are shown to add up (`rules` of the table).
    """
    if family.base is None or not family.roles:
        return None
    base = family.recipe(family.base)
    pool = {
        block: {c.spec: c for c in options}
        for block, options in planner.candidates(risk="measured", profile=None).items()
    }
    runs = {block.name: base.recipe.preferred_spec(block)[1] for block in planner.blocks}
    blocks: dict[str, list[Block]] = {}
    for block in planner.blocks:
        blocks.setdefault(next(key for key in recipe_keys(block) if key != "first"), []).append(block)
    entries = [
        (change, role, spec)
        for role, held in blocks.items()
        for spec in pool[held[0].name]
        if all(spec in pool[block.name] for block in held)
        and (change := measured_change(held[0], spec, family=family)) is not None
        and change.n
    ]
    room = planner.limits().state_bytes
    rate = rate_for_network(planner, base.rate, family=family)
    for change, role, spec in sorted(entries, key=lambda entry: entry[0].bound(planner.kappa)):
        choices = {**runs, **{block.name: spec for block in blocks[role]}}
        chosen = [pool[block][runs_it] for block, runs_it in choices.items() if runs_it in pool[block]]
        if len(chosen) < len(choices) or (room is not None and sum(c.cost.charged_bytes for c in chosen) > room):
            continue
        # Entries are against the base, recipes against the reference.
        shifted = replace(change, mean=change.mean + base.change.mean, sd=sqrt(change.sd**2 + base.change.sd**2))
        if than is not None:
            doubt = planner.kappa * selection_penalty(family) * sqrt(shifted.sd**2 + than.change.sd**2)
            if shifted.mean - than.change.mean + doubt >= 0:
                continue
        recipe = replace(
            base.recipe,
            name=MIXED,
            description=f"{base.name} with {spec} in {role}",
            specs={**base.recipe.specs, role: spec},
        )
        recipe = with_rate(recipe, rate, by_role={role: change.multiple} if change.multiple != 1 else {})
        plan = plan_recipe(planner, recipe)
        if plan is not None:
            return RecipeChoice(recipe=recipe, plan=plan, change=shifted, rate=rate)
    return None


# -- what is told of it -----------------------------------------------------------------------------------------------


def basis_of(choice: RecipeChoice, *, family: Family, plan: Plan, planner: BudgetedBlocks) -> Basis:
    """The basis of the choice, as values and as a sentence."""
    one, recipe, num_params = choice.measured, choice.recipe, planner.num_params
    in_run = planner.settings.from_conf
    hosted = plan.allocation.host_bytes
    share = (plan.allocation.state_bytes + hosted) / max(plan.state_bytes_adamw, 1)
    held = f"{recipe.name}: {share:.1%} of the state{', most of it on the host' if hosted else ''}"
    if one is None:
        against, change = family.base or "", choice.change
        told = f"{recipe.description}; {change} against {family.reference}, by role"
    else:
        told = f"{one.value:.4g} ({one.sd:.2g})"
        against, change = next(iter(one.changes_against.items()), (family.reference, one.change))
        parts = [
            f"{other} {family.recipe(other).value:.4g}: {difference}"
            for other, difference in one.changes_against.items()
        ]
        told += f" against {', '.join(parts)}" if parts else ""
    where = f"n {change.n}, {family.unit}, measured at {family.size}, {family.horizon}"
    far = f"; not measured at {num_params:,} parameters" if num_params > FAR * family.num_params else ""
    narrow = "" if recipe.weights == "native" else f"; weights {_format_told(recipe.weights, family=family)}"
    rate = f"; {choice.rate:.3g} times AdamW's learning rate" if choice.rate != 1 else ""
    if choice.rate > 1:
        rate += (
            f", as in training from scratch: for pretrained weights {'risk=prior' if in_run else PRETRAINED_ARGUMENT}"
        )
    worse = (
        "; every measured recipe that fits is worse than fp32 AdamW, which does not fit, and what risk=prior would "
        "choose was not measured: a larger budget or a race may do better"
        if is_worse_than_adamw(choice, family=family)
        else ""
    )
    text = f"{held}; {told}, {where}{far}{narrow}{rate}{worse}"
    if planner.extrapolates and one is not None:
        theirs = faded_rate(one.rate, num_params=num_params, measured=family.num_params)
        kept = "; the learning rate stays as given, as weights may be pretrained "
        kept += f"(there it was {theirs:.3g} times AdamW's)"
        text = (
            f"{held}; an extrapolation from transformers for {family.name}, as nothing was measured of this kind "
            f"of network; there it was the best that fits, with {one.value:.4g} against fp32 AdamW's "
            f"{family.recipe(ADAMW).value:.4g} {family.unit}, n {change.n}{kept if choice.rate < theirs else rate}"
            + ("; race=auto checks it" if in_run else f"; {PRETRAINED_ARGUMENT} plans without it")
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
