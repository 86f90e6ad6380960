"""Every field of a budget means the same through BaocStrategy and BaocOptimizer, whatever the device has room for."""

import logging
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from baoc import BaocOptimizer, BaocStrategy
from baoc.errors import BadInputError, InfeasibleBudgetError
from baoc.planning.planner import PlannerSettings
from baoc.profiling import memory
from baoc.training.measure.caller_probe import CallerProbe
from baoc.training.reallocation import ReallocationSettings
from baoc.training.session import SessionSettings
from tests.support.classifier import Classifier, fit, loader
from tests.support.sessions import session

pytestmark = pytest.mark.filterwarnings(
    "ignore:.*does not have many workers.*", "ignore:.*smaller than the logging interval.*"
)
SETTINGS = SessionSettings(
    planner=PlannerSettings(specs=("adamw", "adamw_int8", "lion", "sign"), keep_fp32_roles=()),
    reallocation=ReallocationSettings(mode="off"),
)


def by_strategy(budget: Any) -> Any:
    strategy = BaocStrategy(budget, settings=SETTINGS)
    fit(strategy, steps=1)
    assert strategy.reallocator is not None
    return strategy.reallocator.plan


def loss_of(module: Classifier) -> Callable[[], Tensor]:
    x, y = next(iter(loader()))
    return lambda: nn.functional.cross_entropy(module.net(x), y)


def by_optimizer(budget: Any, *, probed: bool = True) -> Any:
    module = Classifier()
    loss = loss_of(module)
    groups: Any = [
        {"params": [(n, p) for n, p in module.named_parameters() if p.ndim > 1], "weight_decay": 0.1},
        {"params": [(n, p) for n, p in module.named_parameters() if p.ndim <= 1], "weight_decay": 0.0},
    ]
    optimizer = BaocOptimizer(groups, budget=budget, settings=SETTINGS, probe=loss if probed else None)
    optimizer.zero_grad()
    loss().backward()
    optimizer.step()
    return optimizer.plan


@pytest.mark.parametrize(
    "budget",
    [
        "unlimited",
        "8gb",
        2**33,
        str(2**33),
        "state_50",
        0.25,
        {"memory": "8gb", "step_time": 1000.0},
        {"state_fraction": 0.25, "step_time": 1000.0},
        {"state_fraction": 0.25, "host_memory": "64mb"},
        {"memory": "8gb", "host_memory": "64mb"},
    ],
    ids=str,
)
def test_both_doors_choose_alike(budget: Any) -> None:
    ours, theirs = by_optimizer(budget), by_strategy(budget)
    assert set(ours.allocation.choices.values()) == set(theirs.allocation.choices.values())
    assert ours.allocation.state_bytes == theirs.allocation.state_bytes
    assert (ours.budget, ours.binding) == (theirs.budget, theirs.binding)


@pytest.mark.parametrize(
    "budget", [{"memory": "8gb", "step_time": 1e-6}, {"step_time": 1e-6}, {"state_fraction": 1e-9}]
)
def test_what_neither_can_meet_both_refuse_alike(budget: Any) -> None:
    errors = []
    for door in (by_optimizer, by_strategy):
        with pytest.raises(InfeasibleBudgetError) as caught:
            door(budget)
        errors.append(caught.value)
    ours, theirs = errors
    if "step_time" not in budget:
        assert ours.least_feasible_bytes == theirs.least_feasible_bytes
    assert (ours.least_step_s is None) is (theirs.least_step_s is None) is ("step_time" not in budget)


def test_a_limit_on_time_without_a_probe_names_it() -> None:
    with pytest.raises(BadInputError, match=r"budget.step_time=1.2 needs seconds .*: give probe="):
        BaocOptimizer(nn.Linear(2, 2), budget={"step_time": 1.2})


def test_host_memory_is_offered_without_a_probe_too() -> None:
    budget = {"memory": "8gb", "host_memory": "64mb"}
    module = Classifier()
    optimizer = BaocOptimizer(module, budget=budget, settings=SETTINGS)
    assert any(spec.endswith("@streamed") for spec in optimizer.reallocator.planner.specs)
    loss_of(module)().backward()
    optimizer.step()
    assert optimizer.plan.budget.host_memory_bytes == 64 * 2**20


@pytest.mark.parametrize("released", [False, True])
@pytest.mark.parametrize("budget", ["8gb", {"memory": "8gb", "step_time": 1000.0}])
def test_a_probe_may_run_backward_and_return_the_loss(budget: Any, released: bool) -> None:
    found = []
    for kind in ("loss", "backward", "both"):
        module = Classifier()
        loss = loss_of(module)

        def probe(kind: str = kind, loss: Callable[[], Tensor] = loss) -> Tensor | None:
            value = loss()
            if kind != "loss":
                value.backward()
            return None if kind == "backward" else value

        optimizer = BaocOptimizer(module, budget=budget, settings=SETTINGS, probe=probe, release=released)
        assert all(param.grad is None for param in module.parameters())
        found.append(optimizer.plan.peak_bytes)
    assert found[1] == found[2]


@pytest.mark.parametrize("budget", ["8gb", "1kb"])
def test_a_probe_without_room_within_the_cap_is_run_outside(budget: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """A stand-in for CUDA's cap: it trains or is refused by number, and the cap is back either way."""
    calls: list[str] = []
    look = CallerProbe.footprint

    def footprint(probe: CallerProbe, **given: Any) -> Any:
        if calls[-1] == "cap":
            raise torch.OutOfMemoryError("CUDA out of memory")
        return look(probe, **given)

    for module in ("baoc.training.plain_loop", "baoc.profiling.memory"):
        monkeypatch.setattr(f"{module}.cap_device", lambda device, *, budget: calls.append("cap"))
    monkeypatch.setattr(memory, "uncap_device", lambda device: calls.append("uncap"))
    monkeypatch.setattr(CallerProbe, "footprint", footprint)
    if budget == "8gb":
        by_optimizer(budget)
    else:
        with pytest.raises(InfeasibleBudgetError, match="least feasible is"):
            by_optimizer(budget)
    assert calls == ["cap", "uncap", "cap"]


@pytest.mark.parametrize("budget", ["8gb", "1kb"])
def test_a_first_step_without_a_probe_is_outside_of_the_cap(budget: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """It cannot run out of memory by the budget then: what it took is held against the budget after it."""
    calls: list[str] = []
    for module in ("baoc.training.plain_loop", "baoc.profiling.memory"):
        monkeypatch.setattr(f"{module}.cap_device", lambda device, *, budget: calls.append("cap"))
    monkeypatch.setattr(memory, "uncap_device", lambda device: calls.append("uncap"))
    module = Classifier()
    optimizer = BaocOptimizer(module, budget=budget, settings=SETTINGS)
    loss_of(module)().backward()
    assert calls == ["uncap"]
    if budget == "8gb":
        optimizer.step()
    else:
        with pytest.raises(InfeasibleBudgetError, match="least feasible is"):
            optimizer.step()
    assert calls == ["uncap", "cap"]


@pytest.mark.parametrize(("dtype", "told"), [(torch.float64, True), (torch.float32, False)])
def test_float64_weights_are_told_of(dtype: torch.dtype, told: bool, caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.WARNING):
        session("8gb", dtype=dtype)
    assert ("2 of 2 parameters are float64" in caplog.text) is told
