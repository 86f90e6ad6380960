"""Where a catalogue that was left open offers weights of 16 bits, and what is measured for that on a GPU."""

from dataclasses import replace

import pytest
import torch
from torch import nn

from baoc.core.budgets import parse_budget
from baoc.core.catalogue import SPECS
from baoc.optim.backends.fused import has_kernel
from baoc.planning.planner import Planner, PlannerSettings
from baoc.profiling import describe
from baoc.training.lightning import widened
from baoc.training.session import Session, SessionSettings, bf16_weight_specs
from baoc.types import Budget
from tests.support.planners import footprint
from tests.support.sessions import session


@pytest.mark.parametrize(
    ("device", "budget", "precision", "specs", "wider"),
    [
        ("cuda", "8gb", "bf16-mixed", ("*",), True),
        ("cuda", "8gb", "bf16-true", ("*",), True),
        ("cuda", "8gb", "32-true", ("*",), False),  # layers would get inputs of another type
        ("cuda", "state_25", "bf16-mixed", ("*",), False),  # weights are no optimizer state
        ("cpu", "8gb", "bf16-mixed", ("*",), False),
        ("cuda", "8gb", "bf16-mixed", ("adamw*",), False),  # what was chosen stays
    ],
)
def test_split_weights_are_offered_where_a_memory_budget_on_cuda_can_use_them(
    device: str, budget: str, precision: str, specs: tuple[str, ...], wider: bool
):
    settings = SessionSettings(planner=PlannerSettings(specs=specs))
    found = widened(settings, device=device, budget=parse_budget(budget), precision=precision)
    assert found.planner.specs == (("*", "*+split8") if wider else specs)


def test_specs_with_a_kernel_are_told_without_compiling_any():
    assert has_kernel(SPECS["adamw_int8+split8"]) and has_kernel(SPECS["lion"]) and has_kernel(SPECS["foam_l2"])
    assert has_kernel(SPECS["muon_int8"])


def test_a_context_that_has_grown_is_counted_and_lowers_the_cap(monkeypatch: pytest.MonkeyPatch):
    """Kernels load while steps are rehearsed; a run at its least budget would else hold them beyond it."""
    caps: list[Budget] = []
    monkeypatch.setattr("baoc.training.session.cap_device", lambda device, budget: caps.append(budget))
    monkeypatch.setattr("baoc.training.session.context_bytes", lambda device: 100)
    run = session("8gb")
    run.context_bytes = 0
    before = replace(footprint(8), context_bytes=60)
    assert run.with_context(before).context_bytes == run.context_bytes == 100 and caps == [run.budget]
    assert run.with_context(replace(before, context_bytes=110)).context_bytes == 110 and len(caps) == 2
    assert run.with_context(replace(before, context_bytes=110)).context_bytes == 110 and len(caps) == 2


def test_every_row_that_a_plan_may_run_has_its_temporaries(monkeypatch: pytest.MonkeyPatch):
    """On an H200 rows of rounded weights had none: Muon's 226 MiB passed the budget in the first step."""
    settings = SessionSettings(planner=PlannerSettings(risk="measured", family="language"))
    budget = parse_budget("8gb")
    settings = widened(settings, device="cuda", budget=budget, precision="bf16-mixed")
    net = nn.Linear(64, 64)
    given = {"params": dict(net.named_parameters()), "betas": (0.9, 0.999), "device": torch.device("cpu")}
    run = Session(describe(net), budget=budget, settings=settings, **given)
    monkeypatch.setattr(
        "baoc.training.session.step_temporaries", lambda specs, params: dict.fromkeys(s.name for s in specs)
    )
    known = run.complete(footprint(8))
    planner = Planner(run.infos, budget=budget, settings=settings.planner, footprint=known)
    assert "muon_int8+bf16_sr" in planner.specs and set(planner.specs) == set(known.step_temporary_bytes)
    assert {spec.name for spec in bf16_weight_specs(settings.planner)} >= {"muon_int8+bf16_sr", "muon_int8+split8"}
