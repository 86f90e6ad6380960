"""Reallocation during training. To read it in one sitting: `triggers` (when to think again), `reallocator` (propose,
judge, move, tell), `moving` (what a move costs, in risk and in bytes), `optim.migrate` (what becomes of a state).

`dial` says which budget is in force and `relaxation` what calm blocks give up; `converting` is for resumed runs;
`assemble`, `timing` and `temporaries` build the first plan.
"""

from baoc.online.assemble import SessionSettings, assemble
from baoc.online.dial import BudgetChange, BudgetDial
from baoc.online.reallocator import Reallocator
from baoc.online.relaxation import RelaxationSettings
from baoc.online.temporaries import step_temporaries
from baoc.online.timing import soon_timed, time_specs, with_link
from baoc.online.triggers import TRIGGERS, ReallocationSettings

__all__ = [
    "TRIGGERS",
    "BudgetChange",
    "BudgetDial",
    "ReallocationSettings",
    "Reallocator",
    "RelaxationSettings",
    "SessionSettings",
    "assemble",
    "soon_timed",
    "step_temporaries",
    "time_specs",
    "with_link",
]
