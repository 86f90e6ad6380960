"""Memory through a reallocation."""

from typing import Any

import pytest
import torch
from torch import nn

from baoc.config.schema import ReallocationConfig
from baoc.core.budgets import parse_budget
from baoc.core.catalogue import SPECS
from baoc.errors import InfeasibleBudgetError
from baoc.planning.planner import PlannerSettings
from baoc.profiling import describe
from baoc.profiling.tracker import MemoryTracker
from baoc.training import reallocator
from baoc.training.session import Session, SessionSettings
from baoc.types import Footprint

pytestmark = pytest.mark.slow

WIDTH, LAYERS = 96, 6
WEIGHTS = 4 * LAYERS * (WIDTH * WIDTH + WIDTH)


def session(budget: int | str) -> tuple[nn.Module, Any]:
    """A chain of layers between two steps: weights, gradients and full AdamW states are there, activations are not."""
    torch.manual_seed(0)
    net = nn.Sequential(*(nn.Linear(WIDTH, WIDTH) for _ in range(LAYERS)))
    footprint = Footprint(
        device="cpu",
        micro_batch=1,
        weights_bytes=WEIGHTS,
        gradients_bytes=WEIGHTS,
        forward_backward_bytes=2 * WEIGHTS,
        validation_bytes=0,
        resident_bytes=2 * WEIGHTS,
        step_temporary_bytes=dict.fromkeys(SPECS, 0),
    )
    defaults = {"lr": 1e-3, "betas": (0.9, 0.999), "eps": 1e-8, "weight_decay": 0.0}
    planned = Session(
        describe(net),
        params=dict(net.named_parameters()),
        betas=defaults["betas"],
        device=torch.device("cpu"),
        budget=parse_budget(budget),
        settings=SessionSettings(
            planner=PlannerSettings(keep_fp32_roles=()), reallocation=ReallocationConfig(mode="off"), backend="eager"
        ),
    )
    planned.assume(footprint)
    made = planned.start([{"params": list(net.named_parameters())}], defaults=defaults)
    for _ in range(3):
        made.optimizer.zero_grad()
        net(torch.randn(4, WIDTH)).square().sum().backward()
        made.optimizer.step()
    return net, made


@pytest.mark.parametrize("room", [3.0, 1.0])
@pytest.mark.parametrize("target", [0.6, 0.3, 0.1])
def test_memory_stays_below_the_budget_during_the_move(room: float, target: float) -> None:
    """`room`: of a copy of the weights, left between what is held and the budget; with little, gradients go first."""
    net, made = session(4 * WEIGHTS + int(room * WEIGHTS))
    held = 4 * WEIGHTS
    budget = parse_budget(2 * WEIGHTS + int(target * 2 * WEIGHTS) + 4096)
    tracker = MemoryTracker(device="cpu")
    tracker.count_existing(net, made.optimizer.state)
    tracker.reset_peak()
    assert tracker.peak_bytes >= held
    with tracker:
        made.rebudget(budget, why="test")
    assert made.optimizer.state_bytes() <= target * 2 * WEIGHTS + 4096
    assert tracker.peak_bytes <= 4 * WEIGHTS + int(room * WEIGHTS)
    way = WEIGHTS if all(param.grad is None for param in net.parameters()) else 0
    assert (way > 0) == (room < 2), "gradients stay where there is room"


def test_a_move_that_does_not_fit_is_refused_and_changes_nothing() -> None:
    net, made = session(4 * WEIGHTS + 4096)
    net.zero_grad()
    made.planner.footprint = made.planner.footprint.__class__(
        **{**{f: getattr(made.planner.footprint, f) for f in made.planner.footprint.__slots__}, "gradients_bytes": 0}
    )
    specs, budget = dict(made.optimizer.specs), made.planner.budget
    with pytest.raises(InfeasibleBudgetError, match=r"would hold, but moving to it would hold .* for a moment, of"):
        made.rebudget(parse_budget(3 * WEIGHTS), why="test")
    assert made.optimizer.specs == specs and made.planner.budget == budget


def test_the_prediction_of_a_move_is_never_below_what_is_measured(monkeypatch: pytest.MonkeyPatch) -> None:
    """Down and up again, through every conversion that these budgets ask for."""
    net, made = session("unlimited")
    real, predicted = reallocator.migration_peak, []

    def move_peak(*args: Any, **kwargs: Any) -> Any:
        predicted.append(real(*args, **kwargs))
        return predicted[-1]

    monkeypatch.setattr(reallocator, "migration_peak", move_peak)
    for share in (0.5, 0.27, 0.1, 0.02, 0.3, 1.0):
        tracker = MemoryTracker(device="cpu")
        tracker.count_existing(net, made.optimizer.state)
        tracker.reset_peak()
        with tracker:
            made.rebudget(parse_budget(share), why="test")
        assert tracker.peak_bytes <= predicted[-1].peak_bytes, share
        made.optimizer.zero_grad()
        net(torch.randn(4, WIDTH)).square().sum().backward()
        made.optimizer.step()


def test_a_budget_that_keeps_all_specs_is_no_reallocation() -> None:
    _, made = session("unlimited")
    counts = []
    for budget in ("state_25", {"name": "again", "state_fraction": 0.25}, "unlimited"):
        before = dict(made.optimizer.specs)
        moves = made.rebudget(parse_budget(budget), why="test").moves
        assert bool(moves) == (before != made.optimizer.specs)
        counts.append((bool(moves), made.num_accepted))
    assert counts == [(True, 1), (False, 1), (True, 2)]
