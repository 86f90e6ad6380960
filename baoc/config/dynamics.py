"""How the budget changes during training; written under `budget` in conf/, as in `budget.schedule`."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Annotated, Any

from baoc.config.validate import at_least
from baoc.core.budgets import parse_budget
from baoc.errors import BadInputError

KEYS = ("schedule",)


@dataclass(frozen=True, slots=True, kw_only=True)
class ScheduleEntry:
    """A `budget`, in any spelling, that applies from optimizer step `step` on."""

    budget: str | int | float
    step: Annotated[int, at_least(1, " steps")]

    def __post_init__(self) -> None:
        parse_budget(self.budget)


@dataclass(frozen=True, slots=True, kw_only=True)
class DynamicsConfig:
    """The keys under `budget` that change it during training."""

    schedule: tuple[ScheduleEntry, ...] = ()


def split_dynamics(budget: Any) -> tuple[Any, dict[str, Any]]:
    """Splits the node `budget` of conf/ into the budget and the values of its DynamicsConfig."""
    if not isinstance(budget, Mapping):
        return budget, {}
    dynamics = {key: budget[key] for key in KEYS if key in budget}
    if isinstance(dynamics.get("schedule"), list | tuple):
        dynamics["schedule"] = [_without_batch(entry) for entry in dynamics["schedule"]]
    return {key: value for key, value in budget.items() if key not in KEYS}, dynamics


def _without_batch(entry: Any) -> Any:
    """Drops the key `batch`, which entries of earlier versions have. Raises BadInputError if it is set."""
    if not isinstance(entry, Mapping):
        return entry
    if entry.get("batch") is not None:
        raise BadInputError(
            f"budget.schedule by batch (batch: {entry['batch']}) was removed: the batches of a run keep their size, so "
            "it never came. Give a step, as in {step: 200, budget: state_10}"
        )
    return {key: value for key, value in entry.items() if key != "batch"}
