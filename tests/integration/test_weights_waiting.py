"""Weights that a budget does not hold in full: they wait on the host, and nothing else of a run is different.

A stand-in for a card: weights in full are said to pass the cap, and those that come are told from those that wait by a
name of the CPU that no tensor has.
"""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import lightning as L
import pytest
import torch
from lightning.pytorch.strategies import SingleDeviceStrategy
from torch import nn
from torch.utils.data import DataLoader

from baoc import BaocStrategy
from baoc.budgets import parse_budget
from baoc.errors import InfeasibleBudgetError
from baoc.online import assemble
from baoc.profiling import device as device_module
from baoc.strategy import arrival
from baoc.strategy import strategy as strategy_module
from baoc.strategy.probe import Probe
from baoc.tasks.ema import EmaWeights
from tests.integration.test_strategy import QUIET, Classifier, fit, loader, same
from tests.integration.test_weights_run import SPECS, run, strategy

pytestmark = pytest.mark.filterwarnings(
    "ignore:.*does not have many workers.*",
    "ignore:.*smaller than the logging interval.*",
    "ignore:Checkpoint directory .* exists and is not empty",
)


@pytest.fixture
def waits(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """What the weights were at each look and when the optimizer was built."""
    seen: list[str] = []
    look, arrive = Probe.footprint, BaocStrategy._arrive

    def kinds(module: nn.Module) -> str:
        return " ".join(sorted({str(param.dtype)[6:] for param in module.parameters()}))

    def footprint(probe: Probe, *args: Any, **kwargs: Any) -> Any:
        seen.append(kinds(probe.module))
        return look(probe, *args, **kwargs)

    def coming(strategy: BaocStrategy, *args: Any, **kwargs: Any) -> torch.device:
        assert arrive(strategy, *args, **kwargs) == strategy.root_device
        assert strategy.lightning_module is not None
        seen.append(kinds(strategy.lightning_module))
        return torch.device("cpu:0")

    monkeypatch.setattr(strategy_module, "must_wait", lambda *_, **__: True)
    monkeypatch.setattr(Probe, "footprint", footprint)
    monkeypatch.setattr(BaocStrategy, "_arrive", coming)
    return seen


class Tied(Classifier):
    """Two names of one weight, a buffer, and averages of the weights."""

    def __init__(self) -> None:
        super().__init__()
        self.net.insert(3, nn.Linear(32, 32))
        self.net.insert(4, nn.BatchNorm1d(32))
        self.again = nn.Linear(32, 32)
        self.again.weight = self.net[3].weight


def test_training_is_bit_for_bit_that_of_weights_that_came_in_full(waits: list[str], monkeypatch: Any) -> None:
    averaged = [EmaWeights(0.9), EmaWeights(0.9)]
    plan = strategy(*SPECS)
    waited = fit(plan, module=Tied(), steps=12, precision="bf16-mixed", callbacks=averaged[:1])
    assert waits == ["bfloat16 float32", "float32"]
    with monkeypatch.context() as context:
        context.undo()
        other = strategy(*SPECS)
        whole = fit(other, module=Tied(), steps=12, precision="bf16-mixed", callbacks=averaged[1:])
    assert plan.reallocator is not None and other.reallocator is not None
    assert plan.reallocator.optimizer.specs == other.reallocator.optimizer.specs
    assert any("+" in spec for spec in other.reallocator.optimizer.specs.values())
    assert same(waited, whole) and waited.again.weight is waited.net[3].weight
    assert all(torch.equal(a, b) for a, b in zip(waited.buffers(), whole.buffers(), strict=True))
    assert all(torch.equal(average, averaged[1].averages[name]) for name, average in averaged[0].averages.items())


@pytest.mark.parametrize("first", ["whole", "waiting"])
def test_a_run_goes_on_from_a_checkpoint_of_the_other_kind(
    waits: list[str], first: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """And so does a run that never stopped."""

    def ran(kind: str, *, steps: int, resume: bool) -> Any:
        with monkeypatch.context() as context:
            if kind == "whole":
                context.undo()
            return run(tmp_path, steps=steps, resume=resume)

    ran(first, steps=8, resume=False)
    again, resumed = ran("waiting" if first == "whole" else "whole", steps=16, resume=True)
    whole, optimizer = ran("whole", steps=16, resume=False)
    assert resumed.specs == optimizer.specs
    for (name, a), b in zip(whole.named_parameters(), again.parameters(), strict=True):
        assert a.dtype is b.dtype and torch.equal(a, b), name
    for name, value in optimizer.export_weights().items():
        assert torch.equal(value, resumed.export_weights()[name]), name


def test_a_refused_plan_leaves_the_weights_whole(waits: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    module = Classifier()
    before = [param.detach().clone() for param in module.parameters()]
    plan = strategy(*SPECS)
    plan.budget = parse_budget("1kb")
    with pytest.raises(InfeasibleBudgetError, match=r"least feasible is .* \(\d+ bytes\)"):
        fit(plan, module=module, precision="bf16-mixed")
    assert waits == ["bfloat16 float32"]
    assert all(torch.equal(a, b) for a, b in zip(before, module.parameters(), strict=True))
