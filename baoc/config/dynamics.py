"""How the budget changes during training; written under `budget` in conf/, as in `budget.schedule`."""

from collections.abc import Mapping
from dataclasses import dataclass, field, fields
from typing import Annotated, Any

from baoc.config.validate import Allowed, at_least, require
from baoc.core.budgets import parse_budget

KEYS = ("schedule", "relaxation")


@dataclass(frozen=True, slots=True, kw_only=True)
class ScheduleEntry:
    """A `budget` (any spelling) that holds from step `step` on, or from the first step with `batch` samples on."""

    budget: str | int | float
    step: Annotated[int, at_least(1, " steps")] | None = None
    batch: Annotated[int, at_least(1, " samples")] | None = None

    def __post_init__(self) -> None:
        parse_budget(self.budget)
        allowed = "entries with either step or batch, as in {step: 200, budget: state_10}"
        given = {"step": self.step, "batch": self.batch}
        require((self.step is None) != (self.batch is None), "budget.schedule", given, allowed)


@dataclass(frozen=True, slots=True, kw_only=True)
class RelaxationConfig:
    """Late in training, blocks with calm statistics give up state; see `baoc.planning.reallocation.relaxation`."""

    from_step: Annotated[int, at_least(1, " steps")] | None = None
    every: Annotated[int, at_least(1, " steps")] = 100
    calm: Annotated[float, Allowed("a share above 0", gt=0)] = 0.5
    max_risk: Annotated[float, Allowed("a share above 0", gt=0)] = 0.1

    def due(self, step: int) -> bool:
        return self.from_step is not None and step >= self.from_step and (step - self.from_step) % self.every == 0


@dataclass(frozen=True, slots=True, kw_only=True)
class DynamicsConfig:
    """The keys under `budget` that change it during training."""

    schedule: tuple[ScheduleEntry, ...] = ()
    relaxation: RelaxationConfig = field(default_factory=RelaxationConfig)


def gather_dynamics(budget: Any) -> tuple[Any, dict[str, Any]]:
    """Splits `budget` of conf/ into the budget and its DynamicsConfig; entries of a schedule get the keys they omit."""
    if not isinstance(budget, Mapping):
        return budget, {}
    found = {key: budget[key] for key in KEYS if key in budget}
    named = [item.name for item in fields(ScheduleEntry)]
    if isinstance(found.get("schedule"), list | tuple):
        found["schedule"] = [
            {**dict.fromkeys(named[1:]), **entry} if isinstance(entry, Mapping) else entry
            for entry in found["schedule"]
        ]
    return {key: value for key, value in budget.items() if key not in KEYS}, found
