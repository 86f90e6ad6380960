"""Looking at many gradients in one call sees what Python sees, and gives way where it cannot work."""

import gc

import pytest
import torch
from torch import Tensor, nn

from baoc.kernels.cpp import build, looks
from baoc.kernels.cpp.looks import Look, look_at

NUM = 50


def seen_by_python(params: list[nn.Parameter]) -> list[int]:
    return [-1 if param.grad is None else param.grad.data_ptr() for param in params]


def make() -> tuple[list[nn.Parameter], Look]:
    params = [nn.Parameter(torch.zeros(7)) for _ in range(NUM)]
    look = look_at(params)
    assert look is not None, "there is a compiler here"
    return params, look


def test_gradients_come_move_and_go() -> None:
    params, look = make()
    kept: list[Tensor] = []
    for step in range(6):
        for index, param in enumerate(params):
            if param.grad is not None and index % 3 == step % 3:
                kept.append(param.grad)
                param.grad = None
            elif index % 2 == step % 2:
                param.grad = torch.ones(7)
        assert look.all_seen() and look.seen.tolist() == seen_by_python(params)
    params[0].grad = None
    sum((param * 2).sum() for param in params).backward()
    assert look.all_seen() and look.seen.tolist() == seen_by_python(params) and -1 not in look.seen
    params[1].grad.data = torch.zeros(7)  # pyright: ignore[reportOptionalMemberAccess]
    assert look.all_seen() and look.seen.tolist() == seen_by_python(params)


def test_the_implementation_of_a_parameter_may_be_swapped() -> None:
    """As module.to does on request: what a parameter was then belongs to another tensor, and goes with it."""
    params, look = make()
    other = nn.Parameter(torch.zeros(7))
    other.grad = torch.ones(7)
    torch.utils.swap_tensors(params[4], other)
    del other
    gc.collect()
    assert look.all_seen() and look.seen.tolist() == seen_by_python(params)
    assert look.seen[4] != -1


def test_a_gradient_without_an_address_is_said(capfd: pytest.CaptureFixture[str]) -> None:
    params, look = make()
    params[2].grad = torch.ones(7).to_sparse()
    assert not look.all_seen()
    params[2].grad = None
    assert look.all_seen() and set(look.seen) == {-1}


def test_without_a_compiler_there_is_none(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    def refuse(*args: object, **kwargs: object) -> None:
        raise build.Unavailable("no compiler today")

    monkeypatch.setattr(build, "compiled", refuse)
    looks.found_calls.cache_clear()
    try:
        with caplog.at_level("INFO"):
            assert look_at([nn.Parameter(torch.zeros(3))]) is None
        assert "gradients are looked at one by one" in caplog.text and "no compiler today" in caplog.text
    finally:
        looks.found_calls.cache_clear()


def test_what_sees_something_else_is_not_used(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(looks.Look, "all_seen", lambda self: True)  # it says so, and has not looked
    looks.found_calls.cache_clear()
    try:
        assert look_at([nn.Parameter(torch.zeros(3))]) is None
    finally:
        looks.found_calls.cache_clear()
