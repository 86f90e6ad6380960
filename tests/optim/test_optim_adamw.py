"""Uniform AdamW is torch's, bit for bit, however it is grouped, scheduled, laid out or interrupted."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.optim.lr_scheduler import LambdaLR, LRScheduler, OneCycleLR, ReduceLROnPlateau, SequentialLR

from baoc.optim import BeforeStep, BlockwiseOptimizer
from tests.support.optimizing import SHAPES, Gradients, assert_same, build, make_params, run_alike


def torch_adamw(groups: list[dict[str, Any]], **settings: Any) -> torch.optim.AdamW:
    return torch.optim.AdamW(groups, foreach=False, fused=False, **settings)


def pair(*, shapes: dict[str, tuple[int, ...]] = SHAPES, **settings: Any) -> tuple[dict[str, Tensor], ...]:
    return make_params(shapes), make_params(shapes)


def assert_same_states(ours: BlockwiseOptimizer, theirs: torch.optim.AdamW) -> None:
    for mine, own in zip(ours.param_groups, theirs.param_groups, strict=True):
        for p, q in zip(mine["params"], own["params"], strict=True):
            if theirs.state[q] and q.numel():  # an empty parameter has no state here
                assert torch.equal(ours.state[p]["m"], theirs.state[q]["exp_avg"])
                assert torch.equal(ours.state[p]["v"], theirs.state[q]["exp_avg_sq"])
                assert torch.equal(ours.state[p]["step"], theirs.state[q]["step"])


@pytest.mark.parametrize("weight_decay", [0.0, 0.1])
def test_bitwise_over_many_steps(weight_decay: float) -> None:
    a, b = pair()
    ours = build(a, lr=3e-3, weight_decay=weight_decay)
    theirs = torch_adamw([{"params": list(b.values())}], lr=3e-3, weight_decay=weight_decay)
    gradients = Gradients(a)
    run_alike((ours, theirs), (a, b), gradients=gradients, steps=200)
    assert_same(a, b)
    assert_same_states(ours, theirs)


def test_bitwise_with_groups_and_steps_without_gradient() -> None:
    a, b = pair()
    names = list(a)

    def groups(params: dict[str, Tensor], *, named: bool) -> list[dict[str, Any]]:
        def pick(part: list[str]) -> list[Any]:
            return [(n, params[n]) if named else params[n] for n in part]

        return [
            {"params": pick(names[:4]), "lr": 1e-2, "betas": (0.8, 0.95)},
            {"params": pick(names[4:7]), "weight_decay": 0.0, "eps": 1e-6},
            {"params": pick(names[7:])},
        ]

    ours = BlockwiseOptimizer(groups(a, named=True), lr=1e-3, weight_decay=0.05)
    theirs = torch_adamw(groups(b, named=False), lr=1e-3, weight_decay=0.05)
    gradients = Gradients(a)
    for step in range(60):
        gradients.give(a, b)
        for index, name in enumerate(names):
            if (step + index) % 4 == 0 or (index == 1 and step < 30):
                a[name].grad = b[name].grad = None
        ours.step()
        theirs.step()
    assert_same(a, b)
    assert_same_states(ours, theirs)


class ToModelLayout:
    """Parameters whose memory is not in the order of their dimensions."""

    @staticmethod
    def transposed() -> Tensor:
        return nn.Parameter(torch.randn(13, 40, generator=torch.Generator().manual_seed(0)).t())

    @staticmethod
    def channels_last() -> Tensor:
        weight = torch.randn(6, 5, 3, 3, generator=torch.Generator().manual_seed(0))
        return nn.Parameter(weight.contiguous(memory_format=torch.channels_last))


@pytest.mark.parametrize("make", [ToModelLayout.transposed, ToModelLayout.channels_last])
@pytest.mark.parametrize("other_strides", [False, True])
def test_bitwise_on_other_layouts(make: Callable[[], Tensor], other_strides: bool) -> None:
    a, b, twin = make(), make(), nn.Parameter(make().detach().clone(memory_format=torch.contiguous_format))
    assert not a.is_contiguous() and twin.is_contiguous()
    strides, pointer = a.stride(), a.data_ptr()
    ours, theirs = BlockwiseOptimizer([("w", a)], lr=1e-2), torch_adamw([{"params": [b]}], lr=1e-2)
    contiguous = BlockwiseOptimizer([("w", twin)], lr=1e-2)
    generator = torch.Generator().manual_seed(1)
    for _ in range(20):
        grad = torch.randn(a.shape, generator=generator)
        if not other_strides:
            grad = torch.empty_strided(a.shape, strides).copy_(grad)
        for p in (a, b, twin):
            p.grad = grad.clone()
        for optimizer in (ours, theirs, contiguous):
            optimizer.step()
    assert torch.equal(a, b)
    torch.testing.assert_close(a, twin, rtol=1e-6, atol=1e-7)
    assert a.stride() == strides and a.data_ptr() == pointer
    assert ours.state[a]["m"].stride() == strides


Make = Callable[[torch.optim.Optimizer], LRScheduler | ReduceLROnPlateau]
SCHEDULERS: dict[str, Make] = {
    "LambdaLR": lambda o: LambdaLR(o, lambda step: 1 / (1 + step)),
    "OneCycleLR": lambda o: OneCycleLR(o, max_lr=1e-2, total_steps=50),  # writes betas too
    "ReduceLROnPlateau": lambda o: ReduceLROnPlateau(o, patience=2),
    "SequentialLR": lambda o: SequentialLR(
        o, [LambdaLR(o, lambda s: (s + 1) / 10), LambdaLR(o, lambda s: 0.9**s)], milestones=[10]
    ),
}


@pytest.mark.parametrize("name", SCHEDULERS)
def test_schedulers_act_as_on_torch(name: str) -> None:
    a, b = pair()
    ours, theirs = build(a), torch_adamw([{"params": list(b.values())}])
    schedulers = [SCHEDULERS[name](optimizer) for optimizer in (ours, theirs)]
    gradients = Gradients(a)
    rates = set()
    for _ in range(30):
        gradients.give(a, b)
        for optimizer, scheduler in zip((ours, theirs), schedulers, strict=True):
            optimizer.step()
            scheduler.step(1.0) if isinstance(scheduler, ReduceLROnPlateau) else scheduler.step()
        rates.add(ours.param_groups[0]["lr"])
    assert len(rates) > 2
    assert ours.param_groups[0]["lr"] == theirs.param_groups[0]["lr"]
    assert tuple(ours.param_groups[0]["betas"]) == tuple(theirs.param_groups[0]["betas"])
    assert_same(a, b)


@pytest.mark.parametrize("spec", ["adamw", "adamw_int8", "sign", "lion", "rmsprop_bf16"])
def test_a_learning_rate_that_is_set_reaches_every_block(spec: str) -> None:
    params = make_params(SHAPES)
    optimizer = build(params, spec, weight_decay=0.5)
    optimizer.param_groups[0]["lr"] = 0.0
    before = {name: p.detach().clone() for name, p in params.items()}
    Gradients(params).give(params)
    optimizer.step()
    assert_same({n: p.detach() for n, p in params.items()}, before)
    optimizer.param_groups[0]["lr"] = torch.tensor(0.1)  # torch allows tensors too
    Gradients(params).give(params)
    optimizer.step()
    assert all(not torch.equal(p.detach(), before[n]) for n, p in params.items() if p.numel())


def test_a_scheduler_goes_on_when_the_optimizer_under_it_is_replaced() -> None:
    params = make_params({"w": (4, 8)})
    old = torch_adamw([{"params": list(params.values())}], lr=0.1)
    scheduler = LambdaLR(old, lambda step: 1 / (1 + step))
    old.step()
    scheduler.step()
    new = BlockwiseOptimizer([{**old.param_groups[0], "params": list(params.items())}], "adamw")
    scheduler.optimizer = new
    for step in range(2, 5):
        Gradients(params).give(params)
        new.step()
        scheduler.step()
        assert new.param_groups[0]["lr"] == pytest.approx(0.1 / (1 + step))


def test_a_closure_runs_once_with_gradients_enabled() -> None:
    a, b = pair(shapes={"w": (5, 8)})
    ours, theirs = build(a), torch_adamw([{"params": list(b.values())}])
    target, calls = torch.randn(5, 8), []

    def closure_of(params: dict[str, Tensor], optimizer: torch.optim.Optimizer) -> Callable[[], Tensor]:
        def closure() -> Tensor:
            calls.append(torch.is_grad_enabled())
            optimizer.zero_grad()
            loss = (params["w"] - target).square().sum()
            loss.backward()
            return loss

        return closure

    with torch.no_grad():
        losses = [float(o.step(closure_of(p, o))) for p, o in ((a, ours), (b, theirs))]
    assert losses[0] == losses[1] and calls == [True, True]
    assert_same(a, b)


def test_the_observer_sees_final_gradients_once_per_step_that_is_taken() -> None:
    params = make_params({"w": (4, 8)})
    optimizer, seen = build(params, nonfinite="skip_step"), []
    before = params["w"].detach().clone()

    def observe() -> None:
        grad = params["w"].grad
        assert grad is not None
        seen.append((float(grad.sum()), torch.equal(params["w"].detach(), before)))

    def closure() -> None:
        params["w"].grad = torch.ones(4, 8)

    optimizer.before_step.append(BeforeStep(call=observe))
    optimizer.step(closure)
    assert seen == [(32.0, True)]
    params["w"].grad = torch.full((4, 8), torch.nan)
    optimizer.step()
    assert len(seen) == 1


def test_learning_rate_monitors_find_betas() -> None:
    optimizer = build(make_params({"w": (4, 8)}), betas=(0.8, 0.99))
    assert "betas" in optimizer.defaults and optimizer.param_groups[0]["betas"][0] == 0.8
