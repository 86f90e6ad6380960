"""Specs of late parameters, which come after the plan was made: staged unfreezing, add_param_group, lazy heads.

They are planned separately, within what the budget leaves. The allocation of the other parameters stays.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

from baoc.errors import InfeasibleBudgetError
from baoc.planning.planner import Planner, PlannerSettings
from baoc.types import Budget, ParamInfo, Plan
from baoc.units import format_bytes

FP32_BYTES = 4  # per element of a gradient
ADAMW_BYTES = 8  # of state per element under fp32 AdamW


@dataclass(frozen=True, slots=True, kw_only=True)
class LatePlan:
    specs: Mapping[str, str]  # parameter name -> spec
    state_bytes: int
    added_bytes: int  # state and gradients


def plan_late(
    infos: Sequence[ParamInfo],
    *,
    plan: Plan,
    settings: PlannerSettings,
    saved: Mapping[str, str],
    least: bool = False,
    share: float | None = None,
) -> LatePlan:
    """Chooses the specs of late parameters: those of a checkpoint (`saved`) if they fit, else new ones.

    Their state is limited to a share of their AdamW state: `share` if it is given, else the budget's state fraction, or
    what a memory budget leaves beside the predicted peak and their gradients. `least`: as little state as possible,
    while a memory budget waits for the first step to be measured. Raises InfeasibleBudgetError if no spec is within
    the limit.
    """
    budget = plan.budget
    adamw_bytes = ADAMW_BYTES * sum(info.numel for info in infos)
    gradients = FP32_BYTES * sum(info.numel for info in infos)
    if share is None and budget.memory_bytes is None:
        share = budget.state_fraction
    elif share is None and budget.memory_bytes is not None:
        room = budget.memory_bytes - plan.peak_bytes - gradients
        if room < 0:
            raise InfeasibleBudgetError(
                f"{_named(infos)} came after the plan was made, and budget {budget.name} has no room for "
                f"{'them' if len(infos) > 1 else 'it'}: gradients of {format_bytes(gradients)} beside a peak of "
                f"{format_bytes(plan.peak_bytes)} are {format_bytes(-room)} too many. Unfreeze fewer, "
                f"give a larger budget, or have all of them trainable from the start, so that they are planned for",
                budget_bytes=budget.memory_bytes,
                least_feasible_bytes=budget.memory_bytes - room,
            )
        share = min(1.0, room / adamw_bytes)
    planner = Planner(
        infos, budget=Budget(name=budget.name, state_fraction=share), settings=replace(settings, patterns=())
    )
    saved_choices = {block.name: saved.get(block.params[0].name, "") for block in planner.blocks}
    try:
        if all(saved_choices.values()):
            late_plan = planner.resume_plan(saved_choices, risk=settings.risk, profile=None)
        else:
            late_plan = planner.least_state_plan() if least else planner.propose()
    except InfeasibleBudgetError as error:
        raise InfeasibleBudgetError(
            f"{_named(infos)} came after the plan was made, and no spec of the catalogue has them within "
            f"{format_bytes(int((share or 1) * adamw_bytes))} of state, which budget {budget.name} leaves: "
            f"{str(error).splitlines()[0]}",
            budget_bytes=error.budget_bytes,
            least_feasible_bytes=error.least_feasible_bytes,
            advice=error.advice,
        ) from error
    choices = late_plan.allocation.choices
    specs = {param.name: choices[block.name] for block in late_plan.blocks for param in block.params}
    state_bytes = late_plan.allocation.state_bytes
    return LatePlan(specs=specs, state_bytes=state_bytes, added_bytes=state_bytes + gradients)


def _named(infos: Sequence[ParamInfo]) -> str:
    first = infos[0].name
    return first if len(infos) == 1 else f"{len(infos)} parameters ({first}, ...)"
