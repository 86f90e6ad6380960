"""Resumes from a checkpoint of another budget, catalogue or partition into blocks: the plan, and notes for the user."""

from collections.abc import Iterable, Mapping

from baoc.core.catalogue import device_spec_name
from baoc.errors import BadInputError, InfeasibleBudgetError
from baoc.planning.budgeted import MEASURED
from baoc.planning.planner import Planner
from baoc.types import Block, Budget, Plan, Profile, Role

AUTO = "auto"


def choices_by_part(choices: Mapping[str, str], *, blocks: Iterable[Block]) -> dict[str, str]:
    """A checkpoint's choices for `blocks` that were cut by part since: a part runs its block's spec. Unchanged if the
    checkpoint has other blocks than these."""
    before = {
        block.name: block.name if block.name in choices or block.part is None else block.name.rpartition(".")[0]
        for block in blocks
    }
    same = set(before.values()) == set(choices)
    return {name: choices[whole] for name, whole in before.items()} if same else dict(choices)


def choices_with_head(
    choices: Mapping[str, str], *, members: Mapping[str, Iterable[str]], planner: Planner, risk: str, plan: Plan | None
) -> tuple[dict[str, str], list[str]]:
    """A checkpoint's choices for blocks whose head was not known as one before, and notes for the user. What the head
    may not run, as Muon, `plan` replaces, else the embedding's spec. Unchanged if other blocks differ as well.

    `members`: block -> parameter names, of the checkpoint.
    """
    owner = {param: block for block, params in members.items() for param in params}
    adapted, notes = dict(choices), list[str]()
    for head in planner.blocks:
        moved = [param.name for param in head.params if owner.get(param.name, head.name) != head.name]
        if head.name.rpartition(".")[2] != Role.HEAD or not moved or owner[moved[0]] not in choices:
            continue
        old = choices[owner[moved[0]]]
        spec = adapted.get(head.name, old)
        if spec not in {candidate.spec for candidate in planner.candidates(risk=risk, profile=None)[head.name]}:
            spec = plan.allocation.choices[head.name] if plan is not None else choices.get("embedding", spec)
        adapted[head.name] = spec
        names = {block.name for block in planner.blocks}
        adapted = {name: s for name, s in adapted.items() if name in names or name not in map(owner.get, moved)}
        told = ", ".join(name.removesuffix(".weight") for name in moved)
        notes.append(f"{told} is now the head" + (f", which runs {spec}, not {old}" if spec != old else ""))
    adapted = choices_by_part(adapted, blocks=planner.blocks)
    if not notes or set(adapted) != {block.name for block in planner.blocks}:
        return choices_by_part(choices, blocks=planner.blocks), []
    return adapted, notes


def restore_plan(
    planner: Planner,
    choices: Mapping[str, str],
    *,
    saved: Budget | None,
    risk_model: str,
    gap: float | None,
    profile: Profile | None,
    deferred: Budget | None = None,
) -> tuple[Plan, list[str]]:
    """The plan to resume with, and notes for the user: the saved allocation if nothing changed, else a new one.

    For a changed budget there is a new plan even if the saved allocation meets it, as the budget may allow more. Not so
    where the saved one had room for what measures best: another version then chose, and a run keeps to its choice.
    `auto` counts as unchanged, though other memory may be free now.

    Args:
        planner: Of the resumed run.
        choices: Block -> spec, of the checkpoint.
        saved: Budget of the checkpoint; None if it is unknown.
        risk_model: Of the checkpoint.
        gap: Of the saved allocation.
        profile: Of the checkpoint; None if there is none.
        deferred: Budget that is planned for after the first step, which runs the saved allocation.
    """
    risk = planner.risk_of_saved(risk_model, profile=profile)
    budget = deferred or planner.budget
    changed = saved is not None and saved != budget and not saved.name == budget.name == AUTO
    notes = [f"the budget was {_told(saved)}, is {_told(planner.budget)}"] if saved is not None and changed else []
    if saved is not None and changed and deferred is None and (risk != MEASURED or binds(saved, planner=planner)):
        plan = planner.propose(risk=risk, profile=profile)
    else:
        plan = planner.resume_plan(choices, risk=risk, profile=profile, gap=gap)
    if deferred is not None and dict(plan.allocation.choices) != dict(choices):
        plan = planner.least_state_plan()
    names = {block.name for block in planner.blocks}
    missing_specs = sorted({spec for spec in choices.values() if spec not in planner.specs})
    if set(choices) != names:
        notes.append(f"parameters were cut into {len(choices)} blocks, are into {len(names)}")
    changed_blocks = [b for b in names & set(choices) if choices[b] != plan.allocation.choices[b]]
    new_places = [
        b for b in changed_blocks if device_spec_name(choices[b]) == device_spec_name(plan.allocation.choices[b])
    ]
    if new_places:
        first = min(new_places)
        notes.append(
            f"{len(new_places)} blocks keep the same states in another place, such as {first}: {choices[first]} -> "
            f"{plan.allocation.choices[first]}"
        )
    if planner.settings.recipe is not None and changed_blocks:
        notes.append(f"recipe={planner.settings.recipe.name} is what was asked for")
    elif missing_specs:
        notes.append(f"the catalogue no longer has {', '.join(missing_specs)}")
    if not notes and dict(plan.allocation.choices) != dict(choices):
        notes.append(f"the saved allocation does not meet budget {planner.budget.name} here")
    return plan, notes


def binds(budget: Budget, *, planner: Planner) -> bool:
    """Whether the budget allows less than what measured best takes; True where it cannot be planned for."""
    if budget.memory_bytes is not None and planner.footprint is None:
        return True
    try:
        return planner.with_budget(budget).propose(risk=MEASURED).binding
    except (BadInputError, InfeasibleBudgetError):
        return True


def _told(budget: Budget) -> str:
    """Its name and the limits that no name spells."""
    beside = {"step_time": budget.step_time, "host_memory": budget.host_memory_bytes}
    return " ".join([budget.name, *(f"{key}={value:.10g}" for key, value in beside.items() if value is not None)])
