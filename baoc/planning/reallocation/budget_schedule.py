"""The budget that a running job should have at each step: by schedule, by a file's request, or after relaxation.

Pure: it maps steps and sizes to a Budget and its reason. `training.budget_control` applies it.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import pairwise

from baoc.core.budgets import parse_budget, resolve_auto
from baoc.errors import BadInputError
from baoc.types import Budget


@dataclass(frozen=True, slots=True, kw_only=True)
class BudgetChange:
    """`budget` holds once `step` optimizer steps are done, or from the first batch of `batch` samples on; give one."""

    budget: Budget
    step: int | None = None
    batch: int | None = None

    @property
    def when(self) -> str:
        return f"step {self.step}" if self.step is not None else f"batch {self.batch}"


def check_order(changes: Sequence[BudgetChange]) -> None:
    """Raises BadInputError where steps or batches do not increase: an entry would undo another or never act."""
    for key in ("step", "batch"):
        values = [value for change in changes if (value := getattr(change, key)) is not None]
        for before, after in pairwise(values):
            if after <= before:
                raise BadInputError(
                    f"budget.schedule has {key} {after} after {key} {before}: list its entries in the order in which "
                    f"they come, each {key} once"
                )


class BudgetSchedule:
    """`budget_at` says which budget should be in force.

    The last of `changes` that has begun counts. A budget given to `request` replaces it until `request("")`. `ceiling`
    is what progressive relaxation left; only `request` may exceed it. `free_bytes` is the meaning of `auto`, which
    limits nothing without it. `largest_batch` is the most samples that a step has had.
    """

    def __init__(self, base: Budget, *, changes: Sequence[BudgetChange] = ()):
        self.base = base
        self.changes = tuple(changes)
        self.free_bytes: int | None = None
        self.ceiling: Budget | None = None
        self._requested: Budget | None = None
        self.largest_batch = 0

    def request(self, text: str) -> None:
        """Asks for a budget in any spelling; "" returns to the schedule. Raises BadInputError, with nothing changed."""
        self._requested = parse_budget(text.strip()) if text.strip() else None

    def budget_at(self, *, step: int, batch: int) -> tuple[Budget, str]:
        """The budget after `step` steps, where the coming step has `batch` samples, and the reason for it."""
        self.largest_batch = max(self.largest_batch, batch)
        budget, why = self._scheduled(step)
        if self._requested is not None:
            budget, why = self._resolved(self._requested), "the budget file asks for it"
        elif self.ceiling is not None and _below(self.ceiling, budget):
            budget, why = self.ceiling, "blocks that calmed down gave it up"
        return budget, why

    def _scheduled(self, step: int) -> tuple[Budget, str]:
        budget, why = self.base, "the budget of the run"
        for change in self.changes:
            came = step >= change.step if change.step is not None else self.largest_batch >= (change.batch or 0)
            if came:
                budget, why = change.budget, f"budget.schedule, {change.when}"
        return self._resolved(budget), why

    def _resolved(self, budget: Budget) -> Budget:
        """`budget` with `auto` resolved, and the run's limits of step time and host memory where it has none."""
        budget = budget if self.free_bytes is None else resolve_auto(budget, free_bytes=self.free_bytes)
        host_memory_bytes = budget.host_memory_bytes or self.base.host_memory_bytes
        step_time = budget.step_time or self.base.step_time
        return replace(budget, step_time=step_time, host_memory_bytes=host_memory_bytes)


def _below(one: Budget, other: Budget) -> bool:
    if one.memory_bytes is not None and other.memory_bytes is not None:
        return one.memory_bytes < other.memory_bytes
    if one.state_fraction is not None and other.state_fraction is not None:
        return one.state_fraction < other.state_fraction
    return other.kind == "none"
