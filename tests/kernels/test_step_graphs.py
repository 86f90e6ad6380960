"""Which steps are launched, captured and replayed. torch's graphs need a GPU, so a graph here is a list of launches."""

import gc
import logging
from collections.abc import Callable
from contextlib import nullcontext
from typing import Any

import pytest
import torch

from baoc.core.catalogue import SPECS
from baoc.kernels.triton import engine as graphs
from baoc.kernels.triton.engine import Graphs
from baoc.optim import GradientRelease
from baoc.profiling.proxy_blocks import ProxyBlocks
from tests.support.interpreting import interpreted
from tests.support.optimizing import Gradients, build, make_params
from tests.support.releasing import backward


class Graph:
    def __init__(self) -> None:
        self.replays = 0

    def replay(self) -> None:
        self.replays += 1


def nothing() -> None: ...


def make(*, failing: int = 0) -> tuple[Graphs, list[Graph]]:
    """`failing`: how many captures fail first."""
    made, left = [], [failing]

    class FakeCuda(Graphs):
        def capture(self, launch: Callable[[], None]) -> Any:
            launch()
            if left[0]:
                left[0] -= 1
                self.give_up(RuntimeError("operation not permitted"))
                return None
            made.append(Graph())
            return made[-1]

    return FakeCuda(torch.device("cuda"), on=True), made


def test_a_step_is_launched_once_then_captured_and_replayed() -> None:
    runner, made = make()
    launches = []
    for _ in range(9):
        runner.run("variant", lambda: launches.append(1))
    assert len(launches) == 2 and [graph.replays for graph in made] == [8]
    runner.run("another", lambda: launches.append(1))
    assert len(made) == 1 and len(launches) == 3


def test_a_capture_that_fails_is_tried_again_and_then_given_up(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.WARNING):
        runner, made = make(failing=1)
        for _ in range(3):
            runner.run("variant", nothing)
        assert runner.on and len(made) == 1 and made[0].replays == 1
        assert "could not be captured in a CUDA graph and is tried again: operation not permitted" in caplog.text
        runner, _ = make(failing=3)
        for _ in range(4):
            runner.run("variant", nothing)
        assert not runner.on and "is launched plainly from now on" in caplog.text


def test_a_capture_without_room_for_the_generators_numbers_is_not_begun(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    begun: list[str] = []

    class FakeGraph:
        def capture_begin(self, **_: object) -> None:
            begun.append("begun")

        def capture_end(self) -> None:
            begun.append("ended")

    class FakeStream:
        def __init__(self, *_: object) -> None: ...
        def wait_stream(self, *_: object) -> None: ...

    def full(*_: object, **__: object) -> torch.Tensor:
        begun.append("allocated")
        if len(begun) == 1:
            raise torch.OutOfMemoryError("CUDA out of memory")
        return torch.zeros(1)

    for name, fake in {"CUDAGraph": FakeGraph, "Stream": FakeStream, "current_stream": FakeStream}.items():
        monkeypatch.setattr(torch.cuda, name, fake)
    monkeypatch.setattr(torch.cuda, "stream", lambda _: nullcontext())
    monkeypatch.setattr(torch, "empty", full)
    runner = Graphs(torch.device("cuda"), on=True)
    assert runner.capture(nothing) is None and begun == ["allocated"]
    assert "is tried again: CUDA out of memory" in caplog.text
    assert runner.capture(nothing) is not None and begun[1:] == ["allocated", "allocated", "begun", "ended"]


def test_only_so_many_graphs_are_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(graphs, "MOST_GRAPHS", 2)
    runner, made = make()
    for key in ("a", "b", "c") * 3:
        runner.run(key, nothing)
    assert len(made) == 2


def test_nothing_is_collected_during_a_capture_and_the_collector_is_as_before_after_it() -> None:
    assert gc.isenabled()
    with graphs.nothing_collected():
        assert not gc.isenabled()
    assert gc.isenabled()
    with pytest.raises(RuntimeError, match="in between"), graphs.nothing_collected():
        raise RuntimeError("in between")
    assert gc.isenabled()
    gc.disable()
    try:
        with graphs.nothing_collected():
            pass
        assert not gc.isenabled()
    finally:
        gc.enable()


def step_twice(how: str) -> None:
    if how.startswith("proxy"):
        blocks = [[torch.nn.Parameter(torch.ones(4, 8))] for _ in range(2)]
        ProxyBlocks(blocks, specs=[SPECS["adamw"]] * 2, release=GradientRelease() if "released" in how else None)
        return
    params = make_params({"a": (4, 8), "b": (8, 4)})
    spec = "adamw@streamed" if how == "hosted" else "adamw"
    optimizer = build(params, spec, backend="fused", release=how == "released")
    for _ in range(2):
        backward(params, Gradients(params).next())
        optimizer.step()
        optimizer.zero_grad()


@interpreted
@pytest.mark.parametrize("how", ["kept", "released", "hosted", "proxy", "proxy released"])
def test_whole_steps_alone_are_captured(how: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """In backward and beside a network that is being measured, memory may be short."""
    asked: list[bool] = []
    init = Graphs.__init__
    monkeypatch.setattr(Graphs, "__init__", lambda self, *a, on: asked.append(on) or init(self, *a, on=on))
    monkeypatch.setattr("baoc.profiling.proxy_blocks.proxy_backend", lambda *_, **__: "fused")
    step_twice(how)
    assert asked and set(asked) == {how == "kept"}
