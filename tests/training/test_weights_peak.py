"""The peak of runs with weights of 16 bits: predicted from a probe with fp32 weights, never below the measured one."""

from dataclasses import replace
from pathlib import Path

import pytest

from baoc.config.schema import CatalogueConfig
from baoc.core.budgets import parse_budget
from baoc.errors import InfeasibleBudgetError
from baoc.training import run as training
from tests.support.training_runs import config

pytestmark = pytest.mark.slow


@pytest.mark.parametrize("micro_batch", [8, 32])
def test_the_predicted_peak_is_an_upper_bound_and_near(tmp_path: Path, micro_batch: int):
    """At the least budget every block that may has split weights; with accumulation gradients are there throughout."""
    catalogue = CatalogueConfig(specs=("adamw", "adamw_int8+split8"))
    precise = replace(config().trainer, precision="bf16-mixed", max_steps=4)
    options = {"catalogue": catalogue, "trainer": precise, "micro_batch": micro_batch}
    with pytest.raises(InfeasibleBudgetError) as caught:
        (tmp_path / "day" / "none").mkdir(parents=True)
        training.run(config(**options, budget=parse_budget("1mb")), run_dir=tmp_path / "day" / "none", command="")
    budget = parse_budget(caught.value.least_feasible_bytes)
    (tmp_path / "day" / "least").mkdir()
    result = training.run(config(**options, budget=budget), run_dir=tmp_path / "day" / "least", command="")
    assert result is not None and result.budget_met and result.binding
    assert 0.96 * result.peak_bytes_predicted <= result.peak_bytes <= result.peak_bytes_predicted
