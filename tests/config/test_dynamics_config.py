"""`budget.schedule` and `faults` as conf/ and the command line write them."""

from pathlib import Path

import pytest

from baoc.config.compose import compose
from baoc.config.dynamics import ScheduleEntry
from baoc.config.from_hydra import from_hydra, write_config
from baoc.config.schema import RunConfig
from baoc.errors import BadInputError
from tests.support.paths import read_config


def run_of(*overrides: str) -> RunConfig:
    return from_hydra(compose(list(overrides)))


def test_a_schedule_is_read_and_written_again(tmp_path: Path) -> None:
    given = "budget.schedule=[{step: 200, budget: state_10}, {step: 300, batch: null, budget: 6gb}]"
    run = run_of("budget=state_50", given, "faults.patience=3")
    assert run.budget.name == "state_50"
    assert run.dynamics.schedule == (ScheduleEntry(budget="state_10", step=200), ScheduleEntry(budget="6gb", step=300))
    write_config(run, path=tmp_path / "config.yaml")
    assert read_config(tmp_path / "config.yaml") == run


@pytest.mark.parametrize(
    ("override", "text"),
    [
        (
            "budget.schedule=[{step: 0, budget: 6gb}]",
            r"budget\.schedule\[0\]\.step=0 is not allowed: it must be 1 or more steps",
        ),
        ("budget.schedule=[{budget: 6gb}]", r"budget\.schedule\[0\]\.step is missing"),
        (
            "budget.schedule=[{batch: 2, budget: 6gb}]",
            r"by batch \(batch: 2\) was removed: the batches of a run keep their size, .* Give a step",
        ),
        ("budget.schedule=[{stp: 3, budget: 6gb}]", r"unknown key budget\.schedule\[0\]\.stp; did you mean"),
        ("budget.schedule=[{step: 3, budget: lots}]", "cannot read budget=lots"),
        ("budget.schedule=often", r"budget\.schedule=often is not allowed"),
        (
            "+budget.relaxation={from_step: 300}",
            r"budget\.relaxation was removed: .*: name steps and budgets in",
        ),
        ("+faults.nonfinite_loss=rewind", r"faults\.nonfinite_loss was removed: .*: set faults\.patience=1"),
        ("faults.patience=0", r"faults\.patience=0 is not allowed"),
    ],
)
def test_a_fault_is_named_where_it_is_written(override: str, text: str) -> None:
    with pytest.raises(BadInputError, match=text):
        run_of(override)
