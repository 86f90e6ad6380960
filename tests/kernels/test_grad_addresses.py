"""Reading many gradients' addresses in one call agrees with Python, and is not used where it would not."""

import gc

import pytest
import torch
from torch import Tensor, nn

from baoc.kernels.cpp import build, grad_addresses
from baoc.kernels.cpp.grad_addresses import GradAddresses

NUM = 50


def read_by_python(params: list[nn.Parameter]) -> list[int]:
    return [-1 if param.grad is None else param.grad.data_ptr() for param in params]


def make() -> tuple[list[nn.Parameter], GradAddresses]:
    params = [nn.Parameter(torch.zeros(7)) for _ in range(NUM)]
    reader = grad_addresses.grad_addresses(params)
    assert reader is not None, "there is a compiler here"
    return params, reader


def test_gradients_come_move_and_go() -> None:
    params, reader = make()
    kept: list[Tensor] = []
    for step in range(6):
        for index, param in enumerate(params):
            if param.grad is not None and index % 3 == step % 3:
                kept.append(param.grad)
                param.grad = None
            elif index % 2 == step % 2:
                param.grad = torch.ones(7)
        assert reader.read() and reader.addresses.tolist() == read_by_python(params)
    params[0].grad = None
    torch.stack([(param * 2).sum() for param in params]).sum().backward()
    assert reader.read() and reader.addresses.tolist() == read_by_python(params) and -1 not in reader.addresses
    params[1].grad.data = torch.zeros(7)  # pyright: ignore[reportOptionalMemberAccess]
    assert reader.read() and reader.addresses.tolist() == read_by_python(params)


def test_the_implementation_of_a_parameter_may_be_swapped() -> None:
    """As module.to does on request: what a parameter was then belongs to another tensor, and goes with it."""
    params, reader = make()
    other = nn.Parameter(torch.zeros(7))
    other.grad = torch.ones(7)
    torch.utils.swap_tensors(params[4], other)
    del other
    gc.collect()
    assert reader.read() and reader.addresses.tolist() == read_by_python(params)
    assert reader.addresses[4] != -1


def test_a_gradient_without_an_address_is_said(capfd: pytest.CaptureFixture[str]) -> None:
    params, reader = make()
    params[2].grad = torch.ones(7).to_sparse()
    assert not reader.read()
    params[2].grad = None
    assert reader.read() and set(reader.addresses) == {-1}


def test_without_a_compiler_there_is_none(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    def refuse(*args: object, **kwargs: object) -> None:
        raise build.Unavailable("no compiler today")

    monkeypatch.setattr(build, "compiled", refuse)
    grad_addresses.torch_calls.cache_clear()
    try:
        with caplog.at_level("INFO"):
            assert grad_addresses.grad_addresses([nn.Parameter(torch.zeros(3))]) is None
        assert "addresses of gradients are read one by one" in caplog.text and "no compiler today" in caplog.text
    finally:
        grad_addresses.torch_calls.cache_clear()


def test_what_sees_something_else_is_not_used(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(grad_addresses.GradAddresses, "read", lambda self: True)  # it claims to have read, and has not
    grad_addresses.torch_calls.cache_clear()
    try:
        assert grad_addresses.grad_addresses([nn.Parameter(torch.zeros(3))]) is None
    finally:
        grad_addresses.torch_calls.cache_clear()
