"""Host placement as a user runs it: on a CPU as it would be on a GPU, and planned for a card that is not here."""

import json
from dataclasses import replace
from pathlib import Path

import pytest

from baoc.config.schema import CatalogueConfig, ModelConfig, ReallocationConfig
from baoc.core.budgets import parse_budget
from tests.support.plan_runs import asked
from tests.support.plan_runs import plan as planned
from tests.support.training_runs import config, run

pytestmark = pytest.mark.slow
GIB = 2**30
SHORT = {"reallocation": ReallocationConfig(mode="off"), "trainer": config().trainer}


def told(folder: Path) -> dict:
    return json.loads((folder / "allocation.json").read_text())


def test_streamed_states_are_in_the_peak_of_a_cpu(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    catalogue = CatalogueConfig(specs=("adamw@streamed", "adamw_int8@streamed"), keep_fp32_roles=())
    result = run(tmp_path / "run", budget=parse_budget("64mb"), catalogue=catalogue, **SHORT)
    plan = told(tmp_path / "run")
    assert all(spec.endswith("@streamed") for spec in plan["choices"].values())
    assert result.state_bytes == result.state_bytes_predicted == plan["state_bytes"] == 0
    assert plan["pinned_bytes"] >= plan["host_bytes"] >= 8 * result.num_params and plan["staging_bytes"] > 0
    assert 0.97 * result.peak_bytes_predicted <= result.peak_bytes <= result.peak_bytes_predicted
    out = " ".join(capsys.readouterr().out.split())
    assert "the device is the CPU, whose memory is the host's: placement there saves nothing" in out
    assert "on the host" in out and "h: on the host" in out


def test_host_memory_makes_room_on_a_card(tmp_path: Path):
    """What the device lacks goes to the host, and less risk is taken, though staging takes 144 MiB of the device."""
    base = {"model": ModelConfig(name="vit", size="base"), "batch_size": 4, "micro_batch": 4}
    without = planned(tmp_path / "without", asked("1.8gb", **base))
    budget = parse_budget({"memory": "1.8gb", "host_memory": "8gb"})
    on_host = planned(tmp_path / "on_host", replace(asked("1.8gb", **base), budget=budget))
    assert on_host["peak_bytes"] <= 1.8 * GIB and 0 < on_host["host_bytes"] <= 8 * GIB
    assert on_host["risk"] < without["risk"] and without["host_bytes"] == 0
    assert told(tmp_path / "on_host")["link_s"] > 0
