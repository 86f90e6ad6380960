"""Reallocation during training: when to think again (triggers) and how to move (reallocator)."""

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
