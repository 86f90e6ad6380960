"""The choice by measurement: the recipe that measured best of those that fit, or a mixture where the table supports it.

Whole recipes are tried from the best measured one on, each planned under every limit of the budget. A mixture replaces
roles of the recipe that the table's entries were measured in. It is taken only if it is better than the best recipe
that fits beyond its own error, and beyond what the best of so many entries shows by chance.
"""

from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from math import sqrt
from statistics import NormalDist
from typing import TYPE_CHECKING

from baoc.core.catalogue import SPECS, WEIGHTS, select
from baoc.core.measured import Change, Family, MeasuredRecipe, added, at_rate, faded
from baoc.core.recipes import Recipe, keys_of
from baoc.core.statistics import LEVEL, student_quantile
from baoc.errors import BadInputError, InfeasibleBudgetError
from baoc.planning.allocators import NoFeasibleAllocation
from baoc.planning.allocators.exact import ExactAllocator
from baoc.planning.risk import entry_of
from baoc.planning.tied_blocks import joined
from baoc.types import (
    Basis,
    Block,
    Candidate,
    Limits,
    Plan,
    Risk,
    Role,
)

if TYPE_CHECKING:
    from baoc.planning.planner import Planner

MIXED = "mixed"
ADAMW = "adamw"
ROUNDED = "bf16_sr"  # weights
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


def choose(planner: "Planner", *, family: Family) -> Choice | None:
    """The measured choice of the planner's budget; None where no measured recipe fits.

    Where all that fits on the device measured worse than fp32 AdamW, states go to the host if that is allowed, as they
    stay the same there. At last weights are rounded at random, which was measured nowhere.
    """
    best = next(whole(planner, family=family), None)
    for more in ({"hosted": True}, {"weights": (ROUNDED,)}):
        if best is not None and not is_worse_than_adamw(best, family=family):
            break
        other = next(whole(planner, family=family, **more), None)
        if other is not None and (best is None or other.change.mean < best.change.mean):
            best = other
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


def ranked(planner: "Planner", *, family: Family) -> list[MeasuredRecipe]:
    """Measured recipes by mean + kappa sd."""
    return sorted(family.recipes, key=lambda one: (one.change.bound(planner.kappa), one.change.mean))


def is_worse_than_adamw(choice: Choice, *, family: Family) -> bool:
    """Whether a recipe measured worse than fp32 AdamW did; False where that was not measured."""
    adamw = next((one for one in family.recipes if one.name == ADAMW), None)
    return adamw is not None and choice.change.mean > adamw.change.mean


def formats(planner: "Planner") -> list[str]:
    """Formats of the weights that are offered, native first: others only where a recipe fits by them alone."""
    held = {spec.weights for spec in select(planner.settings.specs).values()}
    return sorted(held, key=list(WEIGHTS).index)


def whole(planner: "Planner", *, family: Family, weights: Sequence[str] = (), hosted: bool = False) -> Iterator[Choice]:
    """Measured recipes that fit, the best first; with the first of `weights` that lets one fit, by default of those
    that are offered. `hosted`: with their states on the host."""
    if hosted and not planner.places:
        return
    for one in ranked(planner, family=family):
        rate = faded(one.rate, num_params=planner.num_params, measured=family.num_params)
        recipe = at_rate(one.recipe, rate)
        recipe = streamed(recipe) if hosted else recipe
        made = fitting(planner, recipe, weights=weights or formats(planner))
        if made is not None:
            recipe, plan = made
            yield Choice(recipe=recipe, plan=plan, change=one.change, rate=rate, measured=one)


def streamed(recipe: Recipe) -> Recipe:
    """The recipe with the states of all roles but norms on the host, stepped on the device."""
    specs = {role: spec if role == Role.NORM else on_host(spec) for role, spec in recipe.specs.items()}
    return replace(recipe, specs=specs, fallback=tuple(map(on_host, recipe.fallback)))


def on_host(spec: str) -> str:
    named = f"{spec}@streamed"
    return named if named in SPECS else spec  # of no state there is nothing to place


def fitting(planner: "Planner", recipe: Recipe, *, weights: Sequence[str]) -> tuple[Recipe, Plan] | None:
    """The recipe with the first format of the weights that lets it fit, and its plan."""
    for name in weights:
        held = replace(recipe, weights=name)
        plan = recipe_plan(planner, held)
        if plan is not None:
            return held, plan
    return None


def useful_bytes(planner: "Planner", *, family: Family) -> int:
    """What the best measured recipe takes in the budget's own measure: from there on a budget does not bind."""
    for one in ranked(planner, family=family):
        sub = recipe_planner(planner, one.recipe)
        if sub is not None:
            return sub.taken([options[0] for options in sub.candidates(risk="prior", profile=None).values()])
    return 0


def recipe_planner(planner: "Planner", recipe: Recipe) -> "Planner | None":
    """The planner of a recipe on the same blocks; None where it tells parts that these do not, does not apply, or
    runs rows that are not offered."""
    if recipe.tells_parts and planner.settings.blocks_by != "layer_part":
        return None
    try:
        sub = planner.with_settings(replace(planner.settings, recipe=recipe, allocator="recipe"))
    except BadInputError:
        return None
    runs = {pick.spec for pick in sub.allocator.picks.values()}  # pyright: ignore[reportAttributeAccessIssue]
    return sub if runs <= set(planner.specs) else None


def recipe_plan(planner: "Planner", recipe: Recipe) -> Plan | None:
    """The plan of a recipe under the planner's budget; None where it does not fit."""
    sub = recipe_planner(planner, recipe)
    if sub is not None:
        with suppress(InfeasibleBudgetError):
            return sub.propose()
    return None


def mixture(planner: "Planner", *, family: Family) -> Choice | None:
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
    rate = faded(base.rate, num_params=planner.num_params, measured=family.num_params)
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
        options = joined(role, [pool[block.name] for block in held])
        candidates[role] = tuple(
            replace(c, risk=Risk(total=tables[role][c.spec].bound(kappa))) for c in options if c.spec in tables[role]
        )
    if not all(candidates.values()):
        return None
    try:
        return dict(ExactAllocator()(candidates, limits=limits).choices)
    except NoFeasibleAllocation:
        return None


# -- what is told of it -----------------------------------------------------------------------------------------------


def basis_of(choice: Choice, *, family: Family, plan: Plan, num_params: int) -> Basis:
    """What the choice rests on, as values and as a sentence."""
    one, recipe = choice.measured, choice.recipe
    share = plan.allocation.state_bytes / max(plan.state_bytes_adamw, 1)
    held = f"{recipe.name}: {share:.1%} of the state"
    if one is None:
        against, change = family.base or "", choice.change
        half = student_quantile(0.95, degrees=max(change.n - 1, 1)) * change.sd
        told = f"{recipe.description}; {change.mean:+.4g} +- {half:.2g} against {family.reference}, added up by role"
    else:
        told = f"{one.value:.4g} ({one.sd:.2g})"
        against, change = next(iter(one.against.items()), (family.reference, one.change))
        parts: list[str] = []
        for other, difference in one.against.items():
            bounds = student_quantile(0.95, degrees=max(difference.n - 1, 1)) * difference.sd
            parts.append(f"{other} {family.recipe(other).value:.4g}: {difference.mean:+.4g} +- {bounds:.2g}")
        told += f" against {', '.join(parts)}" if parts else ""
        half = student_quantile(0.95, degrees=max(change.n - 1, 1)) * change.sd
    where = f"n {change.n}, {family.unit}, measured at {family.size}, {family.horizon}"
    far = f"; not measured at {_count(num_params)}" if num_params > FAR * family.num_params else ""
    narrow = (
        f"; weights {WEIGHTS[recipe.weights].description}, which were not measured"
        if recipe.weights != "native"
        else ""
    )
    rate = f"; {choice.rate:.3g} times AdamW's learning rate" if choice.rate != 1 else ""
    worse = (
        "; every measured recipe that fits is worse than fp32 AdamW, which does not fit, and what risk=prior would "
        "choose was not measured: a larger budget or a race may do better"
        if is_worse_than_adamw(choice, family=family)
        else ""
    )
    return Basis(
        by="measured",
        text=f"{held}; {told}, {where}{far}{narrow}{rate}{worse}",
        recipe=recipe.name,
        family=family.name,
        reference=against,
        change=change.mean,
        half=half,
        n=change.n,
        num_params=family.num_params,
        steps=family.steps,
        lr=dict(recipe.lr),
        betas=dict(recipe.betas),
    )


def _count(number: int) -> str:
    """`7.6M`, `6.7B`."""
    for size, unit in ((1e9, "B"), (1e6, "M"), (1e3, "K")):
        if number >= size:
            return f"{number / size:.3g}{unit}"
    return str(number)
