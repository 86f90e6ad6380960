"""The plans that a race may try at a budget: recipes that fit, the allocator's plan, and a control.

Nothing here trains. Each proposal is planned by its own Planner under all limits of the budget, so bytes, seconds and
host memory count as they do in a run.
"""

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, replace

import numpy as np

from baoc.core.catalogue import SPECS, WEIGHTS
from baoc.core.measured import Family, MeasuredRecipe, families
from baoc.core.recipes import HIDDEN, OUTER_ROLES, RECIPES, Recipe, Tuning, tuning_of
from baoc.planning.measured import at_measured_rates, best_rate, is_worse_than_adamw, plan_recipe, with_streamed_states
from baoc.planning.planner import Planner
from baoc.types import Block, Plan

MAX_PROPOSALS = 14
MAX_UNPUBLISHED = 3  # recipes of the measured table that are not in RECIPES
PERMUTED = "permuted"


@dataclass(frozen=True, slots=True, kw_only=True)
class Proposal:
    """One entrant of a race at a budget.

    Args:
        name: of the recipe; "plan" for the allocator's plan, "permuted" for the control.
        plan: its blocks, choices and bytes, within the budget.
        tuning: multiples of AdamW's learning rate, and betas, by rule and role.
        matching: updates are scaled to the RMS of AdamW's.
        uniform: one spec runs on all hidden matrices, so there is nothing to allocate.
        control: others are compared with it, and it is never chosen.
        recipe: None for plans by block.
    """

    name: str
    plan: Plan
    tuning: Tuning | None = None
    matching: bool = True
    uniform: bool = False
    control: bool = False
    recipe: Recipe | None = None

    @property
    def choices(self) -> Mapping[str, str]:
        """Block -> spec."""
        return self.plan.allocation.choices

    @property
    def state_bytes(self) -> int:
        return self.plan.allocation.state_bytes


def proposals(
    planner: Planner, *, recipes: Iterable[Recipe] | None = None, seed: int = 0, most: int = MAX_PROPOSALS
) -> list[Proposal]:
    """The proposals within the planner's budget: recipes in order, then the plan and its permutation.

    A recipe that does not fit is tried with weights of fewer bytes and with its states on the host, if the planner has
    such specs.

    Args:
        planner: Of the network and the budget, without a recipe. Its allocator and risk make the plan.
        recipes: Recipes to try; by default measured ones and those of RECIPES.
        seed: Of the permutation.
        most: Number of proposals at most. The plan and its permutation are always among them.

    Raises:
        InfeasibleBudgetError: The planner's own plan does not fit.
    """
    plan = planner.propose()
    hidden = {plan.allocation.choices[block.name] for block in plan.blocks if block.role not in OUTER_ROLES}
    mixed = Proposal(name="plan", plan=plan, tuning=tuning_of(plan), uniform=len(hidden) <= 1)
    family = planner.family or families()["language"][0]  # for kinds of networks without a nearest family
    if recipes is None:
        entrants = _default_proposals(planner, family=family)
    else:
        planned = (_proposal(planner, recipe, family=family) for recipe in recipes)
        entrants = [proposal for proposal in planned if proposal is not None]
    choices = [dict(entrant.choices) for entrant in entrants if entrant.plan.blocks == mixed.plan.blocks]
    by_block = [] if dict(mixed.choices) in choices else [mixed]
    permuted = permute_specs(mixed.plan.blocks, mixed.choices, seed=seed) if by_block else None
    if permuted is not None:
        allocation = replace(mixed.plan.allocation, choices=permuted, allocator=PERMUTED, gap=None)
        plan = replace(mixed.plan, allocation=allocation)
        by_block.append(replace(mixed, name=PERMUTED, plan=plan, uniform=False, control=True))
    return [*entrants[: max(most - len(by_block), 0)], *by_block]


def _proposal(planner: Planner, recipe: Recipe, *, family: Family) -> Proposal | None:
    """A recipe that fits, at the multiple of the learning rate at which it measured best (1 if it was not measured).
    The race's own multiples are multiplied with it. None if the recipe does not fit or apply."""
    rate = best_rate(planner, recipe, family=family)
    recipe = recipe if rate is None else at_measured_rates(planner, recipe, rate=rate, family=family)
    fitting = next(_variants(planner, recipe), None)
    if fitting is None:
        return None
    recipe, plan = fitting
    hidden = {recipe.preferred_spec(block)[1] for block in plan.blocks if block.role not in OUTER_ROLES}
    return Proposal(
        name=recipe.name,
        plan=plan,
        tuning=recipe.tuning,
        matching=recipe.matching,
        uniform=len(hidden) <= 1,  # by the recipe, not by fallbacks such as those of depthwise kernels
        recipe=recipe,
    )


def _default_proposals(planner: Planner, *, family: Family) -> list[Proposal]:
    """Proposals of measured and published recipes, in the order in which they are raced if only a few are.

    First, for each rule on hidden matrices, the best measured recipe that fits; on networks of a measured kind only if
    it was not worse than fp32 AdamW. Then a few other measured ones, then measured ones of RECIPES, then the rest of
    RECIPES. Of recipes that run the same on this network, only the first. A measured recipe by which some block would
    run a fallback, or that names parts that blocks do not tell, is left out, as that was not measured.
    """
    measured: dict[object, MeasuredRecipe] = {}
    by_key: dict[object, Proposal] = {}
    for row in family.ranked(planner.kappa):
        recipe = RECIPES.get(row.name, row.recipe)
        proposal = _proposal(planner, recipe, family=family)
        blocks = proposal.plan.blocks if proposal is not None else ()
        if proposal is None or recipe.untold_parts(blocks) or not all(map(recipe.names_spec_for, blocks)):
            continue
        if (key := _what_runs(proposal)) not in by_key:
            measured[key], by_key[key] = row, proposal
    best_of_rule: dict[str, object] = {}
    for key, row in measured.items():
        hidden = row.recipe.specs.get(HIDDEN) or row.recipe.specs["mlp_in"]  # the largest part of a mixture
        if planner.extrapolates or not is_worse_than_adamw(row, family=family):
            best_of_rule.setdefault(SPECS[hidden].rule, key)
    first = list(best_of_rule.values())
    unpublished = [key for key, row in measured.items() if row.name not in RECIPES and key not in first]
    published = [key for key, row in measured.items() if row.name in RECIPES]
    order = [*first, *unpublished[:MAX_UNPUBLISHED], *published]
    measured_names = {row.name for row in family.recipes}
    for name, recipe in RECIPES.items():
        if name not in measured_names and (proposal := _proposal(planner, recipe, family=family)) is not None:
            key = _what_runs(proposal)
            by_key.setdefault(key, proposal)
            order.append(key)
    return [by_key[key] for key in dict.fromkeys(order)]


def _what_runs(proposal: Proposal) -> object:
    """A key that is equal for proposals that differ in the learning rate at most, which a race finds for each."""
    tuning = proposal.tuning or Tuning()
    specs = [(block, proposal.choices[block.name]) for block in proposal.plan.blocks]
    tuned = [(block.name, spec, tuning.of(block, rule=SPECS[spec].rule)) for block, spec in specs]
    return proposal.matching, tuple((name, spec, None if own is None else own.betas) for name, spec, own in tuned)


def _variants(planner: Planner, recipe: Recipe) -> Iterator[tuple[Recipe, Plan]]:
    """Yields the recipe, then with other weights and with states on the host, each with its plan if it fits."""
    others = sorted({spec.weights for spec in planner.specs.values()} - {recipe.weights}, key=list(WEIGHTS).index)
    variants = [recipe]
    if recipe.weights == "native":
        split = [replace(recipe, weights=weights) for weights in others if WEIGHTS[weights].correction_bytes]
        rounded = [replace(recipe, weights=weights) for weights in others if not WEIGHTS[weights].correction_bytes]
        hosted = list(map(with_streamed_states, (recipe, *split))) if planner.may_use_host else []
        variants += [*split, *hosted, *rounded]
    for variant in variants:
        plan = plan_recipe(planner, variant, covers=False)
        if plan is not None:
            yield variant, plan


def permute_specs(blocks: Iterable[Block], choices: Mapping[str, str], *, seed: int = 0) -> dict[str, str] | None:
    """The choices with specs permuted among blocks of the same shapes, so bytes stay; None if nothing changes. Outer
    roles (embedding, head, norm) and hidden ones are permuted apart, as rules such as Muon run on one of them only."""
    groups: dict[object, list[str]] = {}
    for block in blocks:
        key = (block.role in OUTER_ROLES, tuple(sorted(param.shape for param in block.params)))
        groups.setdefault(key, []).append(block.name)
    rng = np.random.default_rng(seed)
    permuted = dict(choices)
    for names in groups.values():
        specs = [choices[name] for name in names]
        order = rng.permutation(len(names))
        permuted.update({name: specs[index] for name, index in zip(names, order, strict=True)})
    return None if permuted == dict(choices) else permuted
