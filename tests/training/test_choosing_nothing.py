"""Settings that choose no spec beside a recipe or an allocator of one spec are told, once, at Python's doors."""

import pytest

from baoc.planning.budgeted import PlannerSettings
from baoc.training.session import SessionSettings, with_recipe


@pytest.mark.parametrize(
    ("recipe", "planner", "objective", "told"),
    [
        ("muon8_lean", PlannerSettings(), "", []),
        ("muon8_lean", PlannerSettings(risk="statistics"), "", ["risk=statistics: prices the plan"]),
        ("muon8_lean", PlannerSettings(specs=("adamw",)), "", ["specs: without effect, as recipe=muon8_lean"]),
        ("muon8_lean", PlannerSettings(), "balanced", ["objective=balanced: chooses how a batch is run and no spec"]),
        (None, PlannerSettings(risk="statistics"), "balanced", []),
        (None, PlannerSettings(allocator="uniform_lion"), "", []),
        (
            None,
            PlannerSettings(allocator="uniform_lion", risk="statistics"),
            "throughput",
            ["risk=statistics: prices the plan", "objective=throughput: chooses how a batch is run and no spec"],
        ),
        (None, PlannerSettings(allocator="uniform_lion", risk="statistics", from_conf=True), "", []),
    ],
)
def test_what_chooses_no_spec_is_told(
    recipe: str | None, planner: PlannerSettings, objective: str, told: list[str], caplog: pytest.LogCaptureFixture
) -> None:
    with_recipe(SessionSettings(planner=planner), recipe=recipe, objective=objective)
    assert len(caplog.messages) == len(told)
    for message, start in zip(caplog.messages, told, strict=True):
        assert message.startswith(start) and message.endswith("says what every block runs")
