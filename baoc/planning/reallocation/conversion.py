"""Going on from a checkpoint of another budget, catalogue or cut into blocks: what of it still counts."""

from collections.abc import Mapping

from baoc.core.catalogue import device_spec_name
from baoc.planning.planner import Planner
from baoc.types import Budget, Plan, Profile

AUTO = "auto"


def has_all_blocks(profile: Profile | None, *, planner: Planner) -> bool:
    """Whether a saved profile has every block of today's planner."""
    return profile is not None and all(block.name in profile.stats for block in planner.blocks)


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
    """The plan to go on with, and what to say of it: the saved allocation where nothing changed, else a new one.

    A budget that changed is planned for anew even where the saved allocation would meet it, as it may allow more.
    `auto` is what was free when each run started, so it counts as unchanged. A budget that is `awaited` is planned for
    after the first step, which then runs the saved allocation. `saved` is the budget of the checkpoint, None where it
    is not known.
    """
    risk = planner.risk_of_saved(risk_model, profile=profile)
    here = deferred or planner.budget
    changed = saved is not None and saved != here and not saved.name == here.name == AUTO
    notes = [f"the budget was {saved.name}, is {planner.budget.name}"] if saved is not None and changed else []
    if changed and deferred is None:
        plan = planner.propose(risk=risk, profile=profile)
    else:
        plan = planner.resume_plan(choices, risk=risk, profile=profile, gap=gap)
    if deferred is not None and dict(plan.allocation.choices) != dict(choices):
        plan = planner.least_state_plan()
    names = {block.name for block in planner.blocks}
    lacking = sorted({spec for spec in choices.values() if spec not in planner.specs})
    if set(choices) != names:
        notes.append(f"parameters were cut into {len(choices)} blocks, are into {len(names)}")
    moved = [b for b in names & set(choices) if choices[b] != plan.allocation.choices[b]]
    elsewhere = [b for b in moved if device_spec_name(choices[b]) == device_spec_name(plan.allocation.choices[b])]
    if elsewhere:
        first = min(elsewhere)
        notes.append(
            f"{len(elsewhere)} blocks keep the same states in another place, such as {first}: {choices[first]} -> "
            f"{plan.allocation.choices[first]}"
        )
    if lacking:
        notes.append(f"the catalogue no longer has {', '.join(lacking)}")
    if not notes and dict(plan.allocation.choices) != dict(choices):
        notes.append(f"the saved allocation does not meet budget {planner.budget.name} here")
    return plan, notes
