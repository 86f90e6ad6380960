"""The plans that a race may try at a budget: recipes that fit, the allocator's plan, and controls.

A race runs these; nothing here trains. Each proposal is planned by a Planner of its own under the whole budget, so
bytes, seconds and host memory count as they do in a run.
"""

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, replace

import numpy as np

from baoc.core.catalogue import SPECS, WEIGHTS
from baoc.core.measured import Family, MeasuredRecipe, families, with_rate
from baoc.core.recipes import HIDDEN, RECIPES, Recipe, Tuning, tuning_of
from baoc.planning.measured import ADAMW, best_rate, plan_recipe, ranked_recipes, with_streamed_states
from baoc.planning.planner import Planner
from baoc.types import Block, Plan, Role

MAX_PROPOSALS = 14
MOST_MEASURED = 3  # recipes that are in the measured table and not in the catalogue
PERMUTED = "permuted"
_OUTER = (Role.EMBEDDING, Role.HEAD, Role.NORM)


@dataclass(frozen=True, slots=True, kw_only=True)
class Proposal:
    """One entrant at a budget.

    Args:
        name: of the recipe; `plan` of the allocator's plan, `permuted` of the control.
        plan: blocks, choices and bytes, within the budget.
        tuning: multiples of AdamW's learning rate, and betas, by rule and role.
        matching: updates are scaled to the RMS of AdamW's.
        uniform: one spec runs on all hidden matrices, so there is nothing to allocate.
        control: it is compared with, and never chosen.
        recipe: what it runs by role; None of plans by block.
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
    """The proposals within the planner's budget, at most `most`: recipes in order, then the plan and its permutation.

    A recipe that does not fit as it is comes with weights of fewer bytes or with its states on the host, where the
    planner is offered such.

    Args:
        planner: of the network and the budget; its settings' allocator and risk make the plan.
        recipes: those to try; by default the best measured ones that the catalogue lacks, and the catalogue's.
        seed: of the permutation.
        most: proposals at most. The plan and its permutation are among them wherever they exist.

    Raises:
        InfeasibleBudgetError: where nothing fits, as the planner's own plan says it.
    """
    own = replace(planner.settings, recipe=None)
    plain = planner if planner.settings.recipe is None else planner.with_settings(replace(own, allocator="exact"))
    plan = plain.propose()
    hidden = {plan.allocation.choices[block.name] for block in plan.blocks if block.role not in _OUTER}
    mixed = Proposal(name="plan", plan=plan, tuning=tuning_of(plan), uniform=len(hidden) <= 1)
    family = planner.family or families()["language"]  # it stands for kinds that have no nearest
    if recipes is None:
        made = _known(planner, family=family)
    else:
        made = [one for recipe in recipes if (one := _proposal(planner, recipe, family=family)) is not None]
    known = [dict(one.choices) for one in made if one.plan.blocks == mixed.plan.blocks]
    beside = [] if dict(mixed.choices) in known else [mixed]
    moved = permute_specs(mixed.plan.blocks, mixed.choices, seed=seed) if beside else None
    if moved is not None:
        plan = replace(
            mixed.plan, allocation=replace(mixed.plan.allocation, choices=moved, allocator=PERMUTED, gap=None)
        )
        beside.append(replace(mixed, name=PERMUTED, plan=plan, uniform=False, control=True))
    return [*made[: max(most - len(beside), 0)], *beside]


def _proposal(planner: Planner, recipe: Recipe, *, family: Family) -> Proposal | None:
    """A recipe that fits, at the multiple of the learning rate at which it measured best, as a plan by the table has it
    (1 where it was not measured): a race's own multiples come on top. None where it does not fit or apply."""
    fitting = next(_variants(planner, with_rate(recipe, best_rate(planner, recipe, family=family))), None)
    if fitting is None:
        return None
    recipe, plan = fitting
    wished = {recipe.preferred_spec(block)[1] for block in plan.blocks if block.role not in _OUTER}
    return Proposal(
        name=recipe.name,
        plan=plan,
        tuning=recipe.tuning,
        matching=recipe.matching,
        uniform=len(wished) <= 1,  # whatever runs where that does not apply, as on a depthwise kernel
        recipe=recipe,
    )


def _known(planner: Planner, *, family: Family) -> list[Proposal]:
    """Recipes in the order in which few are raced: of each rule on hidden matrices the best measured one that fits, on
    networks of a measured kind if it was not worse than fp32 AdamW; a few more measured ones; the catalogue's, those
    that were measured first. Of several that run the same on this network, as those that differ in the embedding alone
    where there is none, the first. What names roles that this network does not tell apart would run its fallback there,
    of which nothing was measured: it is left out."""
    measured: dict[object, MeasuredRecipe] = {}
    made: dict[object, Proposal] = {}
    for one in ranked_recipes(planner, family=family):
        recipe = RECIPES.get(one.name, one.recipe)
        proposal = _proposal(planner, recipe, family=family)
        if proposal is None or not all(map(recipe.names_spec_for, proposal.plan.blocks)):
            continue
        if (key := _what_runs(proposal)) not in made:
            measured[key], made[key] = one, proposal
    adamw = family.recipe(ADAMW).change.mean
    first: dict[str, object] = {}
    for key, one in measured.items():
        hidden = one.recipe.specs.get(HIDDEN) or one.recipe.specs["mlp_in"]  # of a mixture, the part that is largest
        if planner.extrapolates or one.change.mean <= adamw:
            first.setdefault(SPECS[hidden].rule, key)
    more = [key for key, one in measured.items() if one.name not in RECIPES and key not in first.values()]
    catalogue = [key for key, one in measured.items() if one.name in RECIPES]
    order = [*first.values(), *more[:MOST_MEASURED], *catalogue]
    tried = {one.name for one in family.recipes}
    for name, recipe in RECIPES.items():
        if name not in tried and (proposal := _proposal(planner, recipe, family=family)) is not None:
            key = _what_runs(proposal)
            made.setdefault(key, proposal)
            order.append(key)
    return [made[key] for key in dict.fromkeys(order)]


def _what_runs(proposal: Proposal) -> object:
    """Equal for entrants that differ in the learning rate at most, which a race finds for each."""
    tuning = proposal.tuning or Tuning()
    specs = [(block, proposal.choices[block.name]) for block in proposal.plan.blocks]
    tuned = [(block.name, spec, tuning.of(block, rule=SPECS[spec].rule)) for block, spec in specs]
    return proposal.matching, tuple((name, spec, None if of is None else of.betas) for name, spec, of in tuned)


def _variants(planner: Planner, recipe: Recipe) -> Iterator[tuple[Recipe, Plan]]:
    """The recipe as it is, with its states on the host, and with other weights, wherever that fits and is offered."""
    others = sorted({spec.weights for spec in planner.specs.values()} - {recipe.weights}, key=list(WEIGHTS).index)
    given = [recipe]
    if recipe.weights == "native":
        split = [replace(recipe, weights=weights) for weights in others if WEIGHTS[weights].correction_bytes]
        rounded = [replace(recipe, weights=weights) for weights in others if not WEIGHTS[weights].correction_bytes]
        hosted = [with_streamed_states(one) for one in (recipe, *split)] if planner.may_use_host else []
        given += [*split, *hosted, *rounded]
    for one in given:
        plan = plan_recipe(planner, one, covers=False)
        if plan is not None:
            yield one, plan


def permute_specs(blocks: Iterable[Block], choices: Mapping[str, str], *, seed: int = 0) -> dict[str, str] | None:
    """The choices with specs permuted among blocks of the same shapes, so bytes stay; None where that changes nothing.

    Blocks of one size may stand at different places, not in different roles of other shapes: a rule that cannot run
    on an embedding stays off it.
    """
    alike: dict[object, list[str]] = {}
    for block in blocks:
        key = (block.role in _OUTER, tuple(sorted(param.shape for param in block.params)))
        alike.setdefault(key, []).append(block.name)
    rng = np.random.default_rng(seed)
    moved = dict(choices)
    for names in alike.values():
        specs = [choices[name] for name in names]
        order = rng.permutation(len(names))
        moved.update({name: specs[at] for name, at in zip(names, order, strict=True)})
    return None if moved == dict(choices) else moved
