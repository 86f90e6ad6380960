"""BaocOptimizer in loops that know nothing of budgets."""

import copy
import gc
import weakref
from collections.abc import Callable
from dataclasses import replace
from threading import Thread
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import _get_current_dispatch_mode

from baoc import BaocOptimizer
from baoc.config.schema import ReallocationConfig
from baoc.errors import BadInputError, InfeasibleBudgetError
from baoc.parallel import SINGLE_PROCESS, Ranks
from baoc.planning.planner import PlannerSettings
from baoc.profiling.tracker import MemoryTracker, PeakMeter
from baoc.training import plain_loop
from baoc.training.plain_loop import name_parameters
from baoc.training.session import SessionSettings
from baoc.types import Footprint
from tests.support.plain_loops import train

cross_entropy = nn.functional.cross_entropy


def make() -> tuple[nn.Sequential, Callable[[], Tensor]]:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(16, 64), nn.LayerNorm(64), nn.ReLU(), nn.Linear(64, 8))
    x = torch.randn(128, 16)
    y = x[:, :8].argmax(1)
    return model, lambda: cross_entropy(model(x), y)


def settings(**planner: object) -> SessionSettings:
    return SessionSettings(
        planner=PlannerSettings(**planner),  # pyright: ignore[reportArgumentType]
        reallocation=ReallocationConfig(mode="once", warmup_steps=6),
    )


def test_without_a_binding_budget_it_is_adamw_bit_for_bit():
    model, loss = make()
    train(torch.optim.AdamW(model.parameters(), lr=1e-2, foreach=False, fused=False), loss, steps=20)
    ours, our_loss = make()
    optimizer = BaocOptimizer(ours, budget="8gb", lr=1e-2, probe=lambda: our_loss().backward())
    train(optimizer, our_loss, steps=20)
    assert all(torch.equal(p, q) for p, q in zip(model.parameters(), ours.parameters(), strict=True))
    assert not optimizer.plan.binding


@pytest.mark.parametrize("budget", ["state_25", 0.25, {"state_fraction": 0.25}])
def test_a_state_budget_holds_and_learns(budget):
    model, loss = make()
    optimizer = BaocOptimizer(model, budget=budget, lr=1e-2, settings=settings(risk="statistics"))
    before = loss().item()
    train(optimizer, loss, steps=60)
    assert optimizer.state_bytes() <= 0.25 * optimizer.plan.state_bytes_adamw
    assert optimizer.state_bytes() == optimizer.plan.allocation.state_bytes
    assert loss().item() < 0.5 * before
    assert optimizer.reallocator.last_decision == 6


@pytest.mark.parametrize("probed", [True, False])
def test_the_step_s_own_temporaries_are_in_the_predicted_peak(probed: bool):
    """A large table with small activations: the peak of training is in the optimizer's step."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Embedding(4000, 64), nn.Linear(64, 8))
    x, y = torch.arange(8), torch.arange(8)

    def loss() -> Tensor:
        return cross_entropy(model(x), y)

    optimizer = BaocOptimizer(
        model,
        budget="64mb",
        probe=(lambda: loss().backward()) if probed else None,
        settings=SessionSettings(
            planner=PlannerSettings(specs=("adamw_int8",), keep_fp32_roles=()),
            reallocation=ReallocationConfig(mode="off"),
        ),
    )
    train(optimizer, loss, steps=2)
    with PeakMeter(torch.device("cpu"), model, list(optimizer.state.values())) as meter:
        train(optimizer, loss, steps=2)
    predicted = optimizer.plan.peak_bytes
    assert meter.peak_bytes <= predicted
    footprint = optimizer.reallocator.planner.footprint
    assert footprint is not None and footprint.step_temporary_bytes["adamw_int8"] > footprint.gradients_bytes
    if probed:  # without a probe the first step's own peak, temporaries included, stands for forward and backward
        assert predicted <= 1.05 * meter.peak_bytes


def test_no_step_of_a_long_loop_passes_the_least_budget():
    torch.manual_seed(0)
    model, x = nn.Sequential(nn.Linear(16, 4), nn.Unflatten(1, (4, 1))), torch.randn(8, 16)
    model.register_buffer("large", torch.zeros(300, 300))  # so that no look before training is the peak

    def loss() -> Tensor:
        return model(x).square().mean()

    with pytest.raises(InfeasibleBudgetError) as refused:
        BaocOptimizer(model, budget=64, probe=loss, verbose=False)
    optimizer = BaocOptimizer(model, budget=refused.value.least_feasible_bytes, probe=loss, verbose=False)
    with PeakMeter(torch.device("cpu"), model, x, list(optimizer.state.values())) as meter:
        train(optimizer, loss, steps=200)
    assert meter.peak_bytes <= refused.value.least_feasible_bytes


def test_without_a_probe_the_first_step_measures_itself():
    model, loss = make()
    optimizer = BaocOptimizer(model, budget="300mb", lr=1e-2)
    assert optimizer.state_bytes() == 6 * 4, "a count of steps for each tensor is all it keeps until then"
    train(optimizer, loss, steps=1)
    assert set(optimizer.specs.values()) == {"adamw"}
    assert optimizer.plan.budget.name == "300mb" and not optimizer.plan.binding


@pytest.mark.slow
@pytest.mark.parametrize(
    ("budgets", "probed"),
    [
        (("9mb", "9mb"), True),
        (("1gb", "1024mb"), False),
        (("auto", "auto"), False),
        (("9mb", "state_25"), False),
        (("9mb", "state_25"), True),
    ],
)
def test_two_optimizers_under_memory_budgets_are_told_that_each_plans_alone(budgets: Any, probed: bool, caplog: Any):
    """Of a WGAN, whose critic steps twice before the other's first backward: no window sees both."""
    nets = [nn.Sequential(nn.Linear(16, 8), nn.Linear(8, 16)) for _ in range(2)]
    x, made = torch.ones(2, 16), list[BaocOptimizer]()
    for net, budget in zip(nets, budgets, strict=True):
        probe = (lambda net=net: net(x).sum()) if probed else None
        made.append(BaocOptimizer(net, budget=budget, verbose=False, probe=probe))
    limited = budgets[1] != "state_25"
    assert caplog.text.count("another BaocOptimizer has a memory budget on this cpu too") == limited
    for one, net in ((made[0], nets[0]), (made[0], nets[0]), (made[1], nets[1])):
        net(x).sum().backward()
        one.step()
        assert ("not judged, because" in one.summary()) is limited
    assert [one.budget_met for one in made] == ([None, None] if limited else [None if probed else True, True])
    copy.deepcopy((nets, made))
    made[0].narrator.first_step_bytes = 2**50
    assert made[0].budget_met is False, "what passes the budget alone does so beside another"


def test_an_optimizer_in_another_thread_for_the_same_network_or_that_is_gone_is_not_warned_of(caplog: Any):
    net = nn.Linear(4, 4)
    first = BaocOptimizer(net, budget="9mb", verbose=False)
    thread = Thread(target=BaocOptimizer, args=(nn.Linear(4, 4),), kwargs={"budget": "9mb", "verbose": False})
    thread.start()
    thread.join()
    again = BaocOptimizer(net, budget="9mb", verbose=False)
    del first, again
    last = BaocOptimizer(nn.Linear(4, 4), budget="9mb", verbose=False)
    assert not caplog.text and last.narrator.alone


@pytest.mark.slow
@pytest.mark.parametrize("release", [False, True])
def test_a_first_step_without_a_backward_tells_nothing_and_the_next_one_is_measured(release: bool):
    peaks = []
    for empty in (0, 2):
        model, loss = make()
        optimizer = BaocOptimizer(model, budget="300mb", release=release, verbose=False)
        for _ in range(empty):
            optimizer.step()
        train(optimizer, loss, steps=1)
        assert set(optimizer.specs.values()) == {"adamw"}
        peaks.append((optimizer.narrator.peak_bytes, optimizer.plan.peak_bytes))
    assert peaks[0] == peaks[1]


@pytest.mark.parametrize("release", [False, True])
def test_a_first_step_that_never_comes_is_measured_no_longer_than_the_optimizer_lives(release: bool):
    """Without waiting for Python's collector, and though somebody entered a mode of his own after it."""
    assert _get_current_dispatch_mode() is None
    gc.disable()
    try:
        optimizer = BaocOptimizer(make()[0], budget="300mb", lr=1e-2, release=release)
        assert _get_current_dispatch_mode() is not None
        with MemoryTracker() as above:
            del optimizer
            assert _get_current_dispatch_mode() is above
        assert _get_current_dispatch_mode() is None
    finally:
        gc.enable()
    weight = torch.zeros(3)
    weight.add_(1)
    assert weight._version == 1


@pytest.mark.slow
@pytest.mark.parametrize("steps", [0, 2])
def test_a_module_that_keeps_its_optimizer_is_collected_with_it(steps: int):
    model, loss = make()
    optimizer = BaocOptimizer(model, budget="300mb", verbose=False)
    model.register_forward_hook(lambda *_, kept=optimizer: None)
    train(optimizer, loss, steps=steps)
    gone = weakref.ref(model), weakref.ref(optimizer)
    del model, loss, optimizer
    gc.collect()
    assert [each() for each in gone] == [None, None]


class BesideALargerRank(Ranks):
    """The first of two ranks, of which the other holds `more` bytes."""

    more = 40_000

    def all_reduce_max(self, *numbers: float) -> tuple[float, ...]:
        return tuple(number + self.more for number in numbers)

    def all_gather(self, value: Any) -> list[Any]:
        if not isinstance(value, Footprint):
            return [value, value]
        return [value, replace(value, forward_backward_bytes=value.forward_backward_bytes + self.more)]


@pytest.mark.slow
def test_a_resumed_allocation_goes_on_only_where_every_rank_has_seen_it_fit(monkeypatch: pytest.MonkeyPatch):
    def built(budget: int) -> tuple[BaocOptimizer, Callable[[], Tensor]]:
        torch.manual_seed(0)
        model, x = nn.Sequential(nn.Linear(96, 96), nn.LayerNorm(96)), torch.randn(1024, 96)
        return BaocOptimizer(model, budget=budget, verbose=False), lambda: model(x).square().mean()

    def resumed(budget: int, *, ranks: Ranks) -> BaocOptimizer:
        optimizer, loss = built(budget)
        train(optimizer, loss, steps=2)
        saved = copy.deepcopy(optimizer.state_dict())
        with monkeypatch.context() as patched:
            patched.setattr(plain_loop, "ranks", lambda: ranks)
            optimizer, loss = built(budget)
        optimizer.load_state_dict(saved)
        train(optimizer, loss, steps=1)
        return optimizer

    budget = resumed(10_000_000, ranks=SINGLE_PROCESS).plan.peak_bytes + 1000
    alone, beside = resumed(budget, ranks=SINGLE_PROCESS), resumed(budget, ranks=BesideALargerRank())
    assert set(alone.specs.values()) == {"adamw"}
    assert beside.plan.peak_bytes <= budget and set(beside.specs.values()) != {"adamw"}


def test_statistics_from_before_a_decision_are_said_to_be_left_out_after_it():
    model, loss = make()
    optimizer = BaocOptimizer(model, budget="state_25", settings=settings(), verbose=False)
    train(optimizer, loss, steps=3)
    before = copy.deepcopy(optimizer.state_dict())
    train(optimizer, loss, steps=6)
    told: list[str] = []
    optimizer.reallocator.listeners.append(lambda event, *_: told.append(event.why))
    optimizer.load_state_dict(before)
    assert "statistics of gradients are left out, as this optimizer has decided already" in told[0]


def test_a_refused_state_budget_is_not_tried_as_bytes_of_memory(monkeypatch: pytest.MonkeyPatch):
    """A stand-in for a GPU, whose refusals of memory are planned for."""
    caps: list[object] = []
    monkeypatch.setattr("baoc.training.session.needs_confirmation", lambda *_, **__: True)
    monkeypatch.setattr("baoc.training.session.cap_device", lambda _, *, budget: caps.append(budget.memory_bytes))
    model, loss = make()
    with pytest.raises(InfeasibleBudgetError, match=r"optimizer state .*budget=state_100"):
        BaocOptimizer(
            model, budget="state_1", probe=lambda: loss().backward(), verbose=False, settings=settings(specs=("adamw",))
        )
    assert not caps


def test_an_impossible_budget_is_told_at_once_with_a_probe_and_by_the_first_step_without():
    model, loss = make()
    with pytest.raises(InfeasibleBudgetError, match=r"budget 1kb cannot be met.*least feasible"):
        BaocOptimizer(model, budget="1kb", probe=lambda: loss().backward())
    optimizer = BaocOptimizer(model, budget="1kb")
    loss().backward()
    with pytest.raises(InfeasibleBudgetError, match=r"budget 1kb cannot be met.*least feasible"):
        optimizer.step()
    assert "budget 1kb: no plan was made that meets it" in optimizer.summary()


def test_a_skipped_step_counts_for_what_decides_by_steps():
    net = nn.Linear(8, 8)
    skipping = SessionSettings(nonfinite="skip_step")
    optimizer = BaocOptimizer(net, budget="state_50", verbose=False, settings=skipping)
    for param in net.parameters():
        param.grad = torch.full_like(param, torch.nan)
    optimizer.step()
    assert (optimizer.num_skipped_steps, optimizer.num_steps, optimizer.reallocator.step) == (1, 0, 1)


def test_step_with_a_closure_runs_it_once_with_gradients():
    model, loss = make()
    optimizer = BaocOptimizer(model, budget="state_50", lr=1e-2)
    calls = []

    def closure() -> Tensor:
        optimizer.zero_grad()
        value = loss()
        value.backward()
        calls.append(torch.is_grad_enabled())
        return value

    with torch.no_grad():
        assert isinstance(optimizer.step(closure), Tensor)
    assert calls == [True]


def test_groups_schedulers_and_names():
    model, loss = make()
    groups = [
        {"params": [p for p in model.parameters() if p.ndim > 1], "weight_decay": 0.1},
        {"params": [p for p in model.parameters() if p.ndim <= 1], "weight_decay": 0.0, "lr": 5e-3},
    ]
    optimizer = BaocOptimizer(groups, budget="state_25", lr=1e-2)
    scheduler = torch.optim.lr_scheduler.OneCycleLR(optimizer, max_lr=[1e-2, 5e-3], total_steps=10)
    for _ in range(5):
        train(optimizer, loss, steps=1)
        scheduler.step()
    assert [g["weight_decay"] for g in optimizer.param_groups] == [0.1, 0.0]
    assert optimizer.param_groups[0]["betas"][0] != 0.9
    named, _ = name_parameters(model.parameters())
    assert list(named) == ["param0", "param1", "param2", "param3", "param4", "param5"]
    with pytest.raises(BadInputError, match="no trainable parameter was given"):
        name_parameters([])


@pytest.mark.parametrize("stop", [3, 6, 9])
def test_saved_and_loaded_it_goes_on_bit_for_bit(tmp_path, stop):
    def start() -> tuple[nn.Module, BaocOptimizer, Callable[[], Tensor]]:
        model, loss = make()
        return model, BaocOptimizer(model, budget="state_25", lr=1e-2, settings=settings(risk="statistics")), loss

    whole, optimizer, loss = start()
    train(optimizer, loss, steps=12)
    first, optimizer, loss = start()
    train(optimizer, loss, steps=stop)
    torch.save({"model": first.state_dict(), "optimizer": optimizer.state_dict()}, tmp_path / "x.pt")
    second, optimizer, loss = start()
    saved = torch.load(tmp_path / "x.pt", weights_only=True)
    second.load_state_dict(saved["model"])
    optimizer.load_state_dict(saved["optimizer"])
    train(optimizer, loss, steps=12 - stop)
    assert all(torch.equal(p, q) for p, q in zip(whole.parameters(), second.parameters(), strict=True))


@pytest.mark.slow
def test_a_compiled_model_has_the_names_of_its_network_and_shares_checkpoints_with_it():
    """torch.compile puts `_orig_mod.` before each name: the plan and its profile would be of other blocks."""
    model, loss = make()
    compiled = torch.compile(model, backend="eager")
    assert isinstance(compiled, nn.Module)
    optimizer = BaocOptimizer(compiled, budget="8gb", settings=settings(), probe=lambda: loss().backward())
    train(optimizer, loss, steps=8)
    plain, plain_loss = make()
    plain.load_state_dict(model.state_dict())
    other = BaocOptimizer(plain, budget="8gb", settings=settings(), probe=lambda: plain_loss().backward())
    assert list(other.specs) == list(optimizer.specs)
    other.load_state_dict(optimizer.state_dict())
    train(optimizer, loss, steps=3)
    train(other, plain_loss, steps=3)
    assert all(torch.equal(p, q) for p, q in zip(model.parameters(), plain.parameters(), strict=True))
