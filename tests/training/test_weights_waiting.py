"""Weights that a budget does not hold in full: they wait on the host, and nothing else of a run is different.

A stand-in for a card: weights in full are said to pass the cap, and those that come are told from those that wait by a
name of the CPU that no tensor has.
"""

import weakref
from dataclasses import replace
from pathlib import Path
from typing import Any

import lightning as L
import pytest
import torch
from torch import nn

from baoc import BaocStrategy
from baoc.core.budgets import parse_budget
from baoc.errors import InfeasibleBudgetError
from baoc.planning.planner import Planner
from baoc.profiling import memory
from baoc.profiling.footprint import PAGES_BYTES
from baoc.tasks.ema import EmaWeights
from baoc.training import arriving_weights as arrival
from baoc.training import lightning as strategy_module
from baoc.training.measure.probe import Probe
from baoc.training.session import Session
from tests.support.classifier import QUIET, Classifier, fit, loader, same
from tests.support.reduced_weights import SPECS, run, strategy

pytestmark = [
    pytest.mark.slow,  # they train and resume
    pytest.mark.filterwarnings("ignore:Checkpoint directory .* exists:UserWarning"),
]


class Card:
    """Whether weights in full pass its cap, and what they were at each look and when the optimizer was built."""

    small, crowded = True, False  # and whether states have no room beside them

    def __init__(self) -> None:
        self.seen: list[str] = []

    def note(self, module: nn.Module) -> None:
        self.seen.append(" ".join(sorted({str(param.dtype)[6:] for param in module.parameters()})))


@pytest.fixture
def card(monkeypatch: pytest.MonkeyPatch) -> Card:
    card = Card()
    look, start, looked_at = Probe.footprint, Session.start, []

    def footprint(probe: Probe, *args: Any, **kwargs: Any) -> Any:
        looked_at[:] = [probe.module]
        card.note(probe.module)
        return look(probe, *args, **kwargs)

    def starting(session: Session, groups: Any, *, defaults: Any, device: torch.device | None) -> Any:
        comes = card.small or card.crowded
        assert device == (torch.device("cpu") if comes else None)
        card.note(looked_at[0])
        return start(session, groups, defaults=defaults, device=torch.device("cpu:0") if comes else None)

    monkeypatch.setattr(strategy_module, "must_wait", lambda *_, **__: card.small)
    monkeypatch.setattr(strategy_module, "needs_room", lambda *_, **__: card.crowded)
    monkeypatch.setattr(Probe, "footprint", footprint)
    monkeypatch.setattr(Session, "start", starting)
    return card


class Tied(Classifier):
    """Two names of one weight, a buffer, and averages of the weights."""

    def __init__(self) -> None:
        super().__init__()
        self.net.insert(3, nn.Linear(32, 32))
        self.net.insert(4, nn.BatchNorm1d(32))
        self.again = nn.Linear(32, 32)
        self.again.weight = self.net[3].weight


def test_training_is_bit_for_bit_that_of_weights_that_came_in_full(card: Card) -> None:
    averaged = [EmaWeights(0.9), EmaWeights(0.9)]
    plan, other, third = strategy(*SPECS), strategy(*SPECS), strategy(*SPECS)
    waited = fit(plan, module=Tied(), steps=12, precision="bf16-mixed", callbacks=averaged[:1])
    assert card.seen == ["bfloat16 float32", "float32"]
    card.small = False
    whole = fit(other, module=Tied(), steps=12, precision="bf16-mixed", callbacks=averaged[1:])
    assert card.seen[2:] == ["float32", "float32"]
    card.crowded = True
    crowded = fit(third, module=Tied(), steps=12, precision="bf16-mixed")
    assert same(crowded, whole)
    assert plan.reallocator is not None and other.reallocator is not None
    assert plan.reallocator.optimizer.specs == other.reallocator.optimizer.specs
    assert any("+" in spec for spec in other.reallocator.optimizer.specs.values())
    assert same(waited, whole) and waited.again.weight is waited.net[3].weight
    assert all(torch.equal(a, b) for a, b in zip(waited.buffers(), whole.buffers(), strict=True))
    assert all(torch.equal(average, averaged[1].averages[name]) for name, average in averaged[0].averages.items())


@pytest.mark.parametrize("small", [False, True])
def test_a_run_goes_on_from_a_checkpoint_of_the_other_kind(card: Card, small: bool, tmp_path: Path) -> None:
    """As bitwise as one that never stopped and whose weights came in full."""
    card.small = small
    run(tmp_path, steps=8, resume=False)
    card.small = not small
    again, resumed = run(tmp_path, steps=16, resume=True)
    card.small = False
    whole, optimizer = run(tmp_path, steps=16, resume=False)
    assert resumed.specs == optimizer.specs
    for (name, a), b in zip(whole.named_parameters(), again.parameters(), strict=True):
        assert a.dtype is b.dtype and torch.equal(a, b), name
    for name, value in optimizer.export_weights().items():
        assert torch.equal(value, resumed.export_weights()[name]), name


def test_a_refused_plan_leaves_the_weights_whole(card: Card) -> None:
    module = Classifier()
    before = [param.detach().clone() for param in module.parameters()]
    plan = strategy(*SPECS)
    plan.budget = parse_budget("1kb")
    with pytest.raises(InfeasibleBudgetError, match=r"least feasible is .* \(\d+ bytes\)"):
        fit(plan, module=module, precision="bf16-mixed")
    assert card.seen == ["bfloat16 float32"]
    assert all(torch.equal(a, b) for a, b in zip(before, module.parameters(), strict=True))


@pytest.mark.parametrize("written", [False, True])
def test_a_second_fit_goes_on_from_what_the_weights_stand_for(card: Card, written: bool) -> None:
    """Bits that the first one kept beside them count, unless other numbers were loaded meanwhile."""
    card.small, plan, module = False, strategy(*SPECS), Tied()
    trainer = L.Trainer(strategy=plan, max_steps=12, precision="bf16-mixed", **QUIET)
    trainer.fit(module, loader())
    assert plan.reallocator is not None
    first, weights = plan.reallocator.optimizer, module.net[0].weight
    left = first.export_weights()["net.0.weight"]
    assert weights.dtype is torch.bfloat16 and not torch.allclose(weights.float(), left, rtol=1e-6, atol=0)
    if written:
        left = torch.ones_like(left)
        with torch.no_grad():
            weights.copy_(left)
    card.small = True
    trainer.fit(module, loader())  # of no steps: all were done
    second = plan.reallocator.optimizer
    assert second is not first and card.seen[2:] == ["bfloat16 float32", "float32"]
    assert torch.allclose(second.export_weights()["net.0.weight"], left, rtol=1e-6, atol=0)


class Validated(Classifier):
    """Notes the types of the weights that it is validated with."""

    def __init__(self) -> None:
        super().__init__()
        self.types: set[torch.dtype] = set()

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        self.types |= {param.dtype for param in self.parameters()}


def test_a_validation_alone_takes_in_16_bits_what_loses_nothing_by_it(monkeypatch: pytest.MonkeyPatch) -> None:
    """Split weights come from a checkpoint as bf16 numbers in a network of fp32; others are refused as before."""
    module, budget = Validated(), 2**20
    asked: list[int] = []

    def passes(module: nn.Module, **_: Any) -> bool:
        asked.append(arrival.weights_bytes(module))
        return asked[-1] > budget

    monkeypatch.setattr(strategy_module, "must_wait", passes)
    for param in [module.net[0].weight, module.net[3].weight]:
        param.data = param.bfloat16().float()
    whole = {name: param.detach().clone() for name, param in module.named_parameters()}

    def validate(precision: Any) -> None:
        trainer = L.Trainer(strategy=BaocStrategy("8gb"), precision=precision, **QUIET)
        trainer.validate(module, loader(), verbose=False)
        assert all(torch.equal(param, whole[name]) for name, param in module.named_parameters())
        assert {param.dtype for param in module.parameters()} == {torch.float32}

    validate("bf16-mixed")
    assert module.types == {torch.float32} and len(asked) == 1
    budget = asked[0] - 1
    validate("bf16-mixed")
    assert module.types == {torch.float32, torch.bfloat16}
    for precision, limit in (("32-true", budget), ("bf16-mixed", 1)):
        budget = limit
        with pytest.raises(InfeasibleBudgetError, match=r"weights as they are used take .* What would lower it"):
            validate(precision)
    assert all(torch.equal(param, whole[name]) for name, param in module.named_parameters())


def test_weights_wait_where_the_budget_does_not_hold_them(monkeypatch: pytest.MonkeyPatch) -> None:
    module = Classifier()
    weights = sum(value.nbytes for value in [*module.parameters(), *module.buffers()])
    for missing in (0, 1):
        budget = parse_budget(f"{weights + memory.LATE_MODULES_BYTES + PAGES_BYTES + 2**20 - missing}b")
        for device, waits in (("cuda:0", bool(missing)), ("cpu", False)):
            found = arrival.must_wait(module, device=torch.device(device), budget=budget, context_bytes=2**20)
            assert found is waits


def test_what_has_no_room_within_the_cap_comes_outside_of_it(monkeypatch: pytest.MonkeyPatch) -> None:
    """A refusal then names what would fit; on a card that is too small itself it names the weights."""
    module, calls, rooms = Classifier(), [], [0, 1]
    narrow = {"net.0.weight": module.net[0].weight}

    def to(self: nn.Module, device: torch.device) -> None:
        calls.append(str(module.net[0].weight.dtype)[6:])
        if len(calls) > len(rooms) or not rooms[len(calls) - 1]:
            raise torch.OutOfMemoryError("full")

    monkeypatch.setattr(nn.Module, "to", to)
    monkeypatch.setattr(memory, "uncap_device", lambda device: calls.append("uncapped"))
    monkeypatch.setattr(memory, "cap_device", lambda device, *, budget: calls.append("capped"))
    given = {"bf16_params": narrow, "device": torch.device("cpu"), "budget": parse_budget("1mb")}
    rooms[:] = [0, 0, 1]
    with arrival.on_device_as_bf16(module, **given):
        assert calls == ["bfloat16", "uncapped", "bfloat16", "capped"]
    assert module.net[0].weight.dtype is torch.float32
    calls.clear()
    rooms[:] = [0, 0, 0]
    refused = pytest.raises(InfeasibleBudgetError, match="the weights as they are used take")
    with refused, arrival.on_device_as_bf16(module, **given):
        raise AssertionError
    assert module.net[0].weight.dtype is torch.float32


def test_states_that_may_find_no_room_beside_whole_weights_send_them_to_the_host(card: Card) -> None:
    """They fit, and a look at a step with them too; but states come before they are narrowed."""
    plan = strategy(*SPECS)
    fit(plan, steps=2, precision="bf16-mixed")
    assert plan.reallocator is not None
    footprint, found = plan.reallocator.planner.footprint, plan.reallocator.plan
    assert footprint is not None
    footprint = replace(footprint, device="cuda:0")
    allocation = replace(found.allocation, saved_bytes=1)
    whole = footprint.weights_bytes + allocation.state_bytes + footprint.reserve_bytes + footprint.profile_bytes
    for memory_bytes, needed in ((whole, False), (whole - 1, True)):
        tight = replace(found, allocation=allocation, budget=parse_budget(f"{memory_bytes}b"))
        assert arrival.needs_room(tight, footprint=footprint) is needed
        assert not arrival.needs_room(replace(tight, allocation=found.allocation), footprint=footprint)


def test_what_a_refused_plan_held_is_gone_when_it_is_looked_again(card: Card, monkeypatch: pytest.MonkeyPatch) -> None:
    """On a card it would be in the peak of the second look, and its bytes counted once more."""
    card.small = False
    propose, look, held = Planner.propose, Probe.footprint, []

    def refusing(*args: Any, **kwargs: Any) -> Any:
        if held:
            return propose(*args, **kwargs)
        profiler = nn.Linear(1, 1)
        held.append(weakref.ref(profiler))
        raise InfeasibleBudgetError("too little", budget_bytes=1, least_feasible_bytes=2)

    def looking(*args: Any, **kwargs: Any) -> Any:
        assert all(reference() is None for reference in held)
        return look(*args, **kwargs)

    monkeypatch.setattr(Planner, "propose", refusing)
    monkeypatch.setattr(Probe, "footprint", looking)
    fit(strategy(*SPECS), steps=1, precision="bf16-mixed")
    assert len(held) == 1 and card.seen[:2] == ["float32", "bfloat16 float32"]
