"""The budget of a run at each step: by schedule, or by the request of a file.

`BudgetSchedule` maps a step to a Budget and its reason. `callbacks.budget_control` applies it.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import pairwise

from baoc.core.budgets import parse_budget, resolve_auto
from baoc.errors import BadInputError
from baoc.types import Budget


@dataclass(frozen=True, slots=True, kw_only=True)
class BudgetChange:
    """`budget` is in force after `step` optimizer steps."""

    budget: Budget
    step: int


def check_order(changes: Sequence[BudgetChange]) -> None:
    """Raises BadInputError if steps do not increase: an entry would then undo another or never act."""
    for before, after in pairwise(change.step for change in changes):
        if after <= before:
            raise BadInputError(
                f"budget.schedule has step {after} after step {before}: list its entries in the order in which they "
                "come, each step once"
            )


class BudgetSchedule:
    """The budget in force at each step. It is that of the last of `changes` that has begun, else `base`. A budget of
    `request` replaces it until `request("")`. `free_bytes` is the limit of `auto`, which is no limit without it."""

    def __init__(self, base: Budget, *, changes: Sequence[BudgetChange] = ()):
        self.base = base
        self.changes = tuple(changes)
        self.free_bytes: int | None = None
        self._requested: Budget | None = None

    def request(self, text: str) -> None:
        """Asks for a budget in any spelling; "" returns to the schedule. Raises BadInputError, with nothing changed."""
        self._requested = parse_budget(text.strip()) if text.strip() else None

    def budget_at(self, step: int) -> tuple[Budget, str]:
        """The budget after `step` steps, and the reason for it."""
        if self._requested is not None:
            return self._resolved(self._requested), "the budget file asks for it"
        budget, why = self.base, "the budget of the run"
        for change in self.changes:
            if step >= change.step:
                budget, why = change.budget, f"budget.schedule, step {change.step}"
        return self._resolved(budget), why

    def _resolved(self, budget: Budget) -> Budget:
        """`budget` with `auto` resolved, and with the run's limits of step time and host memory if it has none."""
        budget = budget if self.free_bytes is None else resolve_auto(budget, free_bytes=self.free_bytes)
        host_memory_bytes = budget.host_memory_bytes or self.base.host_memory_bytes
        step_time = budget.step_time or self.base.step_time
        return replace(budget, step_time=step_time, host_memory_bytes=host_memory_bytes)
