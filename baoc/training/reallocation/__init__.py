"""Reallocation during training: `triggers` (when to plan again), `reallocator` (propose, judge, move, report),
`move_cost` (what a move costs in risk and in bytes), and `optim.migrate` (what becomes of a state).

`budget_schedule` says which budget is in force, `relaxation` which calm blocks give up state, `conversion` what counts
of a checkpoint made under another plan.
"""

from baoc.training.reallocation.budget_schedule import BudgetChange, BudgetSchedule
from baoc.training.reallocation.reallocator import Reallocator
from baoc.training.reallocation.relaxation import RelaxationSettings
from baoc.training.reallocation.triggers import TRIGGERS, ReallocationSettings

__all__ = [
    "TRIGGERS",
    "BudgetChange",
    "BudgetSchedule",
    "ReallocationSettings",
    "Reallocator",
    "RelaxationSettings",
]
