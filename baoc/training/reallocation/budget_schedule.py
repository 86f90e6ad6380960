"""What the budget of a running job is now: a schedule, what a file asks for, and what was given up.

Pure: steps and sizes in, a Budget and its reason out. Who applies it is `callbacks.budget_control`.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import pairwise

from baoc.core.budgets import parse_budget, resolve_auto
from baoc.errors import BadInputError
from baoc.types import Budget


@dataclass(frozen=True, slots=True, kw_only=True)
class BudgetChange:
    """`budget` holds from optimizer step `step` on (steps done), or from the first batch of `batch` samples on."""

    budget: Budget
    step: int | None = None
    batch: int | None = None

    def __post_init__(self) -> None:
        if (self.step is None) == (self.batch is None):
            raise BadInputError(
                "an entry of budget.schedule needs either step (steps done) or batch (samples per step), as in "
                "{step: 200, budget: state_10}"
            )
        if (self.step or self.batch or 0) < 1:
            raise BadInputError(f"budget.schedule: step and batch are 1 or more, not {self.step or self.batch or 0}")

    @property
    def when(self) -> str:
        return f"step {self.step}" if self.step is not None else f"batch {self.batch}"


def check_order(schedule: Sequence[BudgetChange]) -> None:
    """Raises BadInputError where an entry does not come after those before it: the last one that has come counts, so it
    would take back what they say, or never be seen."""
    for key in ("step", "batch"):
        values = [value for change in schedule if (value := getattr(change, key)) is not None]
        for before, after in pairwise(values):
            if after <= before:
                raise BadInputError(
                    f"budget.schedule has {key} {after} after {key} {before}: list its entries in the order in which "
                    f"they come, each {key} once"
                )


class BudgetSchedule:
    """`wish` says which budget is to be in force. Of the schedule's entries the last one that has come counts; a text
    that `ask` was given takes its place until it is taken back by `ask("")`; `ceiling` is what progressive relaxation
    left, and is never passed again but by `ask`. `free_bytes` is what `auto` means, which would not limit anything
    without it; `largest_batch` the most samples that a step had.
    """

    def __init__(self, base: Budget, *, schedule: Sequence[BudgetChange] = ()):
        self.base = base
        self.schedule = tuple(schedule)
        self.free_bytes: int | None = None
        self.ceiling: Budget | None = None
        self._asked: Budget | None = None
        self.largest_batch = 0

    def ask(self, text: str) -> None:
        """A budget in any spelling; "" leaves it to the schedule again. Raises BadInputError, with nothing changed."""
        self._asked = parse_budget(text.strip()) if text.strip() else None

    def wish(self, *, step: int, batch: int) -> tuple[Budget, str]:
        """The budget after `step` steps with a coming step of `batch` samples, and where it comes from."""
        self.largest_batch = max(self.largest_batch, batch)
        budget, why = self._scheduled(step)
        if self._asked is not None:
            budget, why = self._meant(self._asked), "the budget file asks for it"
        elif self.ceiling is not None and _below(self.ceiling, budget):
            budget, why = self.ceiling, "blocks that calmed down gave it up"
        return budget, why

    def _scheduled(self, step: int) -> tuple[Budget, str]:
        budget, why = self.base, "the budget of the run"
        for change in self.schedule:
            came = step >= change.step if change.step is not None else self.largest_batch >= (change.batch or 0)
            if came:
                budget, why = change.budget, f"budget.schedule, {change.when}"
        return self._meant(budget), why

    def _meant(self, budget: Budget) -> Budget:
        """With `auto` resolved, and the run's limits on step time and host memory where it has none of its own."""
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
