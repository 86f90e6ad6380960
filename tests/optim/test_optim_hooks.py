"""Step hooks and profilers, for which a step is wrapped as torch wraps it, and only for them."""

import torch
from torch import nn
from torch.optim.optimizer import register_optimizer_step_post_hook, register_optimizer_step_pre_hook

from baoc.optim import BlockwiseOptimizer


def make() -> tuple[nn.Parameter, BlockwiseOptimizer]:
    param = nn.Parameter(torch.ones(3))
    param.grad = torch.ones(3)
    return param, BlockwiseOptimizer([("p", param)], "adamw", lr=0.1)


def test_hooks_of_this_optimizer_are_called_around_the_step_until_they_are_removed() -> None:
    param, optimizer = make()
    seen: list[tuple[str, float]] = []
    before = optimizer.register_step_pre_hook(lambda *_: seen.append(("before", float(param.detach()[0]))))
    after = optimizer.register_step_post_hook(lambda *_: seen.append(("after", float(param.detach()[0]))))
    optimizer.step()
    assert [what for what, _ in seen] == ["before", "after"] and seen[0][1] == 1.0 and seen[1][1] < 1.0
    before.remove()
    optimizer.step()
    assert [what for what, _ in seen] == ["before", "after", "after"]
    after.remove()
    optimizer.step()
    assert len(seen) == 3 and optimizer.state[param]["step"] == 3


def test_hooks_of_all_optimizers_are_called_too() -> None:
    param, optimizer = make()
    seen: list[str] = []
    handles = [
        register_optimizer_step_pre_hook(lambda *_: seen.append("before")),
        register_optimizer_step_post_hook(lambda *_: seen.append("after")),
    ]
    optimizer.step()
    for handle in handles:
        handle.remove()
    optimizer.step()
    assert seen == ["before", "after"] and optimizer.state[param]["step"] == 2


def test_subscribers_are_called_with_gradients_as_the_caller_has_them() -> None:
    _, optimizer = make()
    seen: list[bool] = []
    optimizer.after_step.append(lambda: seen.append(torch.is_grad_enabled()))
    optimizer.step()
    with torch.no_grad():
        optimizer.step()
    optimizer.register_step_post_hook(lambda *_: None)
    optimizer.step()
    assert seen == [True, False, True]


def test_a_pre_hook_may_give_the_closure() -> None:
    _, optimizer = make()
    optimizer.register_step_pre_hook(lambda *_: ((optimizer, lambda: 7.0), {}))
    assert optimizer.step() == 7.0


def test_a_profiler_finds_the_step_by_its_name() -> None:
    _, optimizer = make()
    optimizer.step()
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU], acc_events=True) as profile:
        optimizer.step()
    assert [e.name for e in profile.events()].count("Optimizer.step#BlockwiseOptimizer.step") == 1  # pyright: ignore


def test_a_step_needs_no_gradients_and_leaves_them_enabled() -> None:
    param, optimizer = make()
    optimizer.step()
    assert torch.is_grad_enabled() and param.requires_grad and param.is_leaf
    loss = optimizer.step(lambda: (param * 2).sum())
    assert loss.requires_grad
