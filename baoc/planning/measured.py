"""`risk=measured`: chooses the best measured recipe that fits the budget, and states its evidence.

Recipes are tried from the best measured one on, each planned under every limit of the budget. A mixture is the family's
base recipe with another spec in one role. It is taken only if it is better than the best fitting recipe beyond the
error of both, and beyond what the best of so many mixtures would show by chance.
"""

from collections.abc import Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from math import sqrt
from statistics import NormalDist

from baoc.core.catalogue import SPECS, STREAMED, WEIGHTS, select
from baoc.core.measured import Change, Family, MeasuredRecipe, faded_rate, with_rate
from baoc.core.recipes import FIRST, RECIPE_KEYS, Recipe, recipe_keys
from baoc.core.statistics import DEFAULT_LEVEL
from baoc.errors import BadInputError, InfeasibleBudgetError
from baoc.planning.allocators.recipe import pick_spec
from baoc.planning.budgeted import BudgetedBlocks
from baoc.planning.risk import measured_change
from baoc.types import Basis, Block, Plan, Role

MIXED = "mixed"
ADAMW = "adamw"
STOCHASTIC_BF16 = "bf16_sr"  # a weights format
# Share of the loss that stochastic rounding may cost at most, by experiments/results/product_runs.csv, in which it is
# not distinguishable from native weights.
ROUNDING_COST = 0.02
PRETRAINED_ARGUMENT = "pretrained=True"  # has the effect of risk=prior in Python calls
NEAR, FAR = 2.0, 10.0  # times the measured size: beyond, the distance is told; further, that nothing was measured


# -- the choice -------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True, kw_only=True)
class RecipeChoice:
    """A recipe or a mixture that fits, with its plan and its measured change of the final loss. `rate`: multiple of
    AdamW's learning rate, for all rules. `measured`: the table's row; None for a mixture."""

    recipe: Recipe
    plan: Plan
    change: Change
    rate: float
    measured: MeasuredRecipe | None = None


def choose_recipe(planner: BudgetedBlocks, *, family: Family) -> RecipeChoice | None:
    """The best measured recipe or mixture within the planner's budget; None if none fits.

    If every recipe that fits on the device measured worse than fp32 AdamW, recipes with states on the host are tried,
    where plans may use it. bf16 weights with stochastic rounding are taken if the recipe that they let fit gains more
    than they may cost. On a network of a kind that was not measured, only recipes that measured better than fp32 AdamW
    in the nearest family are taken, and no mixture.
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
    """Factor on the standard deviation for picking the best of all mixtures, by Bonferroni's correction. Each was
    measured at two rates, so the best of them looks better than it is."""
    num_measured = 2 * sum(len(by_spec) for by_spec in family.roles.values())
    return NormalDist().inv_cdf(1 - (1 - DEFAULT_LEVEL) / max(num_measured, 1)) / NormalDist().inv_cdf(DEFAULT_LEVEL)


def is_worse_than_adamw(choice: RecipeChoice | MeasuredRecipe, *, family: Family) -> bool:
    """Whether a recipe measured worse than fp32 AdamW, on shared seeds where there are such; False if the family has
    no measured AdamW."""
    row = choice.measured if isinstance(choice, RecipeChoice) else choice
    if row is not None and ADAMW in row.changes_against:
        return row.changes_against[ADAMW].mean > 0
    adamw = next((row for row in family.recipes if row.name == ADAMW), None)
    return adamw is not None and choice.change.mean > adamw.change.mean


def fitting_recipes(
    planner: BudgetedBlocks, *, family: Family, weights: Sequence[str] = (), hosted: bool = False
) -> Iterator[RecipeChoice]:
    """Yields measured recipes that fit, the best first, each with the first format of `weights` that lets it fit.
    `weights` defaults to the formats of the settings' specs, native first. `hosted`: with states on the host."""
    if hosted and not planner.may_use_host:
        return
    offered = {spec.weights for spec in select(planner.settings.specs).values()}
    weights = weights or sorted(offered, key=list(WEIGHTS).index)
    for measured in family.ranked(planner.kappa):
        rate = rate_for_network(planner, measured.rate, family=family)
        recipe = at_measured_rates(planner, measured.recipe, rate=rate, family=family)
        recipe = with_streamed_states(recipe) if hosted else recipe
        for name in weights:
            variant = replace(recipe, weights=name)
            plan = plan_recipe(planner, variant)
            if plan is not None:
                yield RecipeChoice(recipe=variant, plan=plan, change=measured.change, rate=rate, measured=measured)
                break


def rate_for_network(planner: BudgetedBlocks, rate: float, *, family: Family) -> float:
    """A measured multiple of the learning rate, faded to the size of this network. A multiple of the nearest family
    raises no rate outside of run.py, where weights may be pretrained."""
    rate = faded_rate(rate, num_params=planner.num_params, measured=family.num_params)
    return min(rate, 1.0) if planner.extrapolates and not planner.settings.from_conf else rate


def at_measured_rates(planner: BudgetedBlocks, recipe: Recipe, *, rate: float, family: Family) -> Recipe:
    """A measured recipe at `rate`, with its roles' multiples faded to the size of this network."""
    of_roles = {key: rate_for_network(planner, lr, family=family) for key, lr in recipe.lr.items()}
    return with_rate(replace(recipe, lr=of_roles), rate)


def best_rate(planner: BudgetedBlocks, recipe: Recipe, *, family: Family) -> float | None:
    """The multiple of the learning rate at which a recipe measured best; None if it was not measured, or has multiples
    of rules or roles of its own."""
    ran = recipe.specs, recipe.betas, recipe.lr
    same = (row.rate for row in family.recipes if (row.recipe.specs, row.recipe.betas, row.recipe.lr) == ran)
    rate = next(same, None)
    return None if rate is None else rate_for_network(planner, rate, family=family)


def with_streamed_states(recipe: Recipe) -> Recipe:
    """The recipe with states on the host for all roles but norms."""
    specs = {role: spec if role == Role.NORM else streamed_spec_name(spec) for role, spec in recipe.specs.items()}
    return replace(recipe, specs=specs, fallback=tuple(map(streamed_spec_name, recipe.fallback)))


def streamed_spec_name(spec: str) -> str:
    """The name of the spec with its states on the host; `spec` itself if it has no states."""
    streamed = f"{spec}{STREAMED}"
    return streamed if streamed in SPECS else spec


def most_useful_bytes(planner: BudgetedBlocks, *, family: Family) -> int:
    """Bytes of the best measured recipe in the budget's measure: a larger budget does not bind."""
    for measured in family.ranked(planner.kappa):
        nested = recipe_planner(planner, measured.recipe)
        if nested is not None:
            pool = nested.candidates(risk="prior", profile=None)
            return nested.budget_bytes_of([options[0] for options in pool.values()])
    return 0


def least_recipe_bytes(planner: BudgetedBlocks) -> int | None:
    """Bytes, in the budget's measure, of the smallest recipe that `choose_recipe` may take; None if there is none.

    Mixtures and recipes with states on the host are left out, and may take slightly less.
    """
    family = planner.family
    if family is None or not planner.has_choice:
        return None
    weights = {spec.weights for spec in select(planner.settings.specs).values()}
    measured = [row for row in family.recipes if applies_to_blocks(row.recipe, planner=planner)]
    if planner.extrapolates:
        measured = [row for row in measured if not is_worse_than_adamw(row, family=family)]
    else:
        weights.add(STOCHASTIC_BF16)
    sizes = [
        recipe_budget_bytes(replace(row.recipe, weights=name), planner=planner) for row in measured for name in weights
    ]
    return min((size for size in sizes if size is not None), default=None)


def recipe_budget_bytes(recipe: Recipe, *, planner: BudgetedBlocks) -> int | None:
    """Bytes of a recipe in the budget's measure; None if one of its specs is no candidate of its block."""
    candidates = planner.candidates_by_spec(risk="measured", profile=None)
    picked = [candidates[block.name].get(pick_spec(block, recipe=recipe).spec) for block in planner.blocks]
    chosen = [candidate for candidate in picked if candidate is not None]
    return planner.budget_bytes_of(chosen) if len(chosen) == len(picked) else None


def applies_to_blocks(recipe: Recipe, *, planner: BudgetedBlocks) -> bool:
    """Whether the recipe names a spec for each block, and blocks tell every part that it names. It would cut blocks of
    "auto" anew."""
    cuts = recipe.needs_part_blocks and planner.settings.blocks_by == "auto"
    tells = not cuts and not recipe.untold_parts(planner.blocks)
    return tells and all(map(recipe.names_spec_for, planner.blocks))


def recipe_planner(planner: BudgetedBlocks, recipe: Recipe, *, covers: bool = True) -> BudgetedBlocks | None:
    """A nested planner that runs `recipe` on the same blocks; None if it runs specs that `planner` lacks. `covers`:
    None also if the recipe names parts that blocks do not tell, or if a block would run its fallback."""
    if covers and not applies_to_blocks(recipe, planner=planner):
        return None
    try:
        nested = planner.with_settings(replace(planner.settings, recipe=recipe, allocator="recipe"))
    except BadInputError:
        return None
    used = {pick.spec for pick in nested.allocator.picks.values()}  # pyright: ignore[reportAttributeAccessIssue]
    if not used <= set(planner.specs):
        return None
    # A recipe has fallbacks that no block here runs; the footprint may lack the temporaries of their steps.
    nested.specs = {name: spec for name, spec in nested.specs.items() if name in planner.specs}
    nested.offered_specs = {name: spec for name, spec in nested.offered_specs.items() if name in planner.specs}
    return nested


def plan_recipe(planner: BudgetedBlocks, recipe: Recipe, *, covers: bool = True) -> Plan | None:
    """The plan of a recipe under the planner's budget; None if it does not fit or apply (see `recipe_planner`)."""
    memory = planner.budget.memory_bytes
    allowed = memory if memory is not None else planner.limits().state_bytes
    # With `covers` the nested planner has the same blocks, so that a recipe is known not to fit without one.
    if covers and allowed is not None and (recipe_budget_bytes(recipe, planner=planner) or 0) > allowed:
        return None
    nested = recipe_planner(planner, recipe, covers=covers)
    if nested is not None:
        with suppress(InfeasibleBudgetError, BadInputError):
            return nested.propose()
    return None


def best_mixture(planner: BudgetedBlocks, *, family: Family, than: RecipeChoice | None) -> RecipeChoice | None:
    """The family's base recipe with another spec in one role, of least mean + kappa sd within the budget.

    None if it is not better than the recipe `than` beyond the error of both and `selection_penalty`. Only one role is
    replaced, as changes of several roles are not shown to add up.
    """
    if family.base is None or not family.roles:
        return None
    base = family.recipe(family.base)
    pool = planner.candidates_by_spec(risk="measured", profile=None)
    base_choices = {block.name: base.recipe.preferred_spec(block)[1] for block in planner.blocks}
    blocks_of_role: dict[str, list[Block]] = {}
    for block in planner.blocks:
        blocks_of_role.setdefault(next(key for key in recipe_keys(block) if key != FIRST), []).append(block)
    entries = [
        (change, role, spec)
        for role, blocks in blocks_of_role.items()
        for spec in pool[blocks[0].name]
        if all(spec in pool[block.name] for block in blocks)
        and (change := measured_change(blocks[0], spec, family=family)) is not None
        and change.n
    ]
    limit = planner.limits().state_bytes
    rate = rate_for_network(planner, base.rate, family=family)
    for change, role, spec in sorted(entries, key=lambda entry: entry[0].bound(planner.kappa)):
        choices = base_choices | {block.name: spec for block in blocks_of_role[role]}
        chosen = [pool[block][name] for block, name in choices.items() if name in pool[block]]
        if len(chosen) < len(choices) or (limit is not None and sum(c.cost.charged_bytes for c in chosen) > limit):
            continue
        # Changes of a role are against the base recipe, changes of recipes against the reference.
        against_reference = replace(
            change,
            mean=change.mean + base.change.mean,
            sd=sqrt(change.sd**2 + base.change.sd**2),
            carried=change.carried or base.change.carried,
        )
        if than is not None:
            sd = sqrt(against_reference.sd**2 + than.change.sd**2)
            margin = planner.kappa * selection_penalty(family) * sd
            if against_reference.mean - than.change.mean + margin >= 0:
                continue
        recipe = replace(
            base.recipe,
            name=MIXED,
            description=f"{base.name} with {spec} in {role}",
            specs={**base.recipe.specs, role: spec},
        )
        multiple = rate_for_network(planner, change.multiple, family=family)
        recipe = with_rate(recipe, rate, by_role={role: multiple} if multiple != 1 else {})
        plan = plan_recipe(planner, recipe)
        if plan is not None:
            return RecipeChoice(recipe=recipe, plan=plan, change=against_reference, rate=rate)
    return None


# -- the text ---------------------------------------------------------------------------------------------------------


def basis_of(choice: RecipeChoice, *, family: Family, plan: Plan, planner: BudgetedBlocks) -> Basis:
    """The basis of the choice, as values and as a sentence."""
    measured = choice.measured
    if measured is None:
        reference, change = family.base or "", choice.change
    else:
        reference, change = next(iter(measured.changes_against.items()), (family.reference, measured.change))
    hosted = plan.allocation.host_bytes
    share = (plan.allocation.state_bytes + hosted) / max(plan.state_bytes_adamw, 1)
    state = f"{choice.recipe.name}: {share:.1%} of the state{', most of it on the host' if hosted else ''}"
    if planner.extrapolates and measured is not None:
        evidence = _extrapolation(choice, measured=measured, num_seeds=change.n, family=family, planner=planner)
    else:
        evidence = _evidence(choice, num_seeds=change.n, family=family, planner=planner)
    return Basis(
        by="measured",
        text=f"{state}; {evidence}",
        recipe=choice.recipe.name,
        family=family.name,
        reference=reference,
        change=change.mean,
        half=change.half,
        n=change.n,
        num_params=family.num_params,
        steps=family.steps,
        lr=dict(choice.recipe.lr),
        betas=dict(choice.recipe.betas),
    )


def _evidence(choice: RecipeChoice, *, num_seeds: int, family: Family, planner: BudgetedBlocks) -> str:
    """The measurements of a choice on a network of a measured kind."""
    recipe, measured, num_params = choice.recipe, choice.measured, planner.num_params
    if measured is None:
        text = f"{recipe.description}; {choice.change} against {family.reference}, by role"
    else:
        text = f"{_value_text(measured)} ({measured.sd:.2g})"
        others = [
            f"{name} {_value_text(family.recipe(name))}: {difference}"
            for name, difference in measured.changes_against.items()
        ]
        text += f" against {', '.join(others)}" if others else ""
    text += f", n {num_seeds}, {family.unit}, {_where(choice.change, family=family, num_params=num_params)}"
    if recipe.weights != "native":
        text += f"; weights {_format_text(recipe.weights, family=family)}"
    text += _rate_text(choice, planner=planner)
    if is_worse_than_adamw(choice, family=family):
        text += (
            "; every measured recipe that fits is worse than fp32 AdamW, which does not fit, and what risk=prior would "
            "choose was not measured: a larger budget or a race may do better"
        )
    return text


def _value_text(measured: MeasuredRecipe) -> str:
    return f"{'about ' if measured.change.carried else ''}{measured.value:.4g}"


def _where(change: Change, *, family: Family, num_params: int) -> str:
    """The size at which a change was measured, and how far a network of `num_params` is from it."""
    size = f"{change.carried}, carried over to {family.size}" if change.carried else family.size
    text = f"measured at {size}, {family.horizon}"
    ratio = num_params / family.num_params
    if not 1 / NEAR <= ratio <= NEAR:
        network = "not measured at" if ratio > FAR else "this network has"
        times = f"{ratio:,.0f}" if ratio >= 10 else f"{ratio:.2g}"
        text += f"; {network} {num_params:,} parameters, {times} times the {family.num_params:,} there"
    return text


def _extrapolation(
    choice: RecipeChoice, *, measured: MeasuredRecipe, num_seeds: int, family: Family, planner: BudgetedBlocks
) -> str:
    """The measurements of a choice in the nearest family, for a network of a kind that was not measured."""
    family_rate = told_rate(faded_rate(measured.rate, num_params=planner.num_params, measured=family.num_params))
    if told_rate(choice.rate) < family_rate:
        rate_text = "; the learning rate stays as given, as weights may be pretrained "
        rate_text += f"(there it was {family_rate:g} times AdamW's)"
    else:
        rate_text = _rate_text(choice, planner=planner)
    advice = "race=auto checks it" if planner.settings.from_conf else f"{PRETRAINED_ARGUMENT} plans without it"
    return (
        f"an extrapolation from transformers for {family.name}, as nothing was measured of this kind of network; there "
        f"it was the best that fits, with {_value_text(measured)} against fp32 AdamW's "
        f"{_value_text(family.recipe(ADAMW))} {family.unit}, n {num_seeds}, "
        f"{_where(choice.change, family=family, num_params=planner.num_params)}{rate_text}; {advice}"
    )


def _rate_text(choice: RecipeChoice, *, planner: BudgetedBlocks) -> str:
    rate, lrs = told_rate(choice.rate), choice.recipe.lr
    roles = {key: told_rate(choice.rate * lr) for key, lr in lrs.items() if key in RECIPE_KEYS}
    others = "".join(f", {of_role:g} times on {role}" for role, of_role in roles.items() if of_role != rate)
    text = f"; {rate:g} times AdamW's learning rate{others}" if rate != 1 or others else ""
    if max(rate, *roles.values(), 0.0) > 1:
        setting = "risk=prior" if planner.settings.from_conf else PRETRAINED_ARGUMENT
        text += f", as in training from scratch: for pretrained weights {setting}"
    return text


def told_rate(rate: float) -> float:
    """A multiple of the learning rate as texts tell it; what is told as 1 is told as no change."""
    return float(f"{rate:.3g}")


def _format_text(name: str, *, family: Family) -> str:
    change, text = family.weights.get(name), WEIGHTS[name].description
    if change is None:
        return f"{text}, which were not measured for {family.name}"
    changed = f"{change.mean:+.2g} +- {change.half:.2g}"
    return f"{text}, which under 8-bit Muon changed {changed} against fp32 ones, n {change.n}"
