"""Compiled layers are traced once for all, kept or recomputed, by batch size; evaluation is eager."""

from collections.abc import Iterator

import pytest
import torch
from torch import nn

from baoc.models import switches
from baoc.models.switches import count_recomputed_layers, set_compiled, set_recomputed, start_compiler
from tests.support.layered import Layer, Net, gradients

pytestmark = pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf")  # torch's own look


@pytest.fixture
def graphs(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[int]]:
    """The nodes of each graph that is traced; it runs as torch would run it."""
    traced: list[int] = []

    def backend(graph: torch.fx.GraphModule, _: object) -> object:
        traced.append(len(graph.graph.nodes))
        return graph.forward

    monkeypatch.setattr(switches, "inductor_kernels", backend)
    monkeypatch.setattr(switches, "compiled_layers", {})
    yield traced
    torch.compiler.reset()


def test_all_layers_share_what_is_compiled_and_gradients_keep_their_bits(graphs: list[int]):
    torch.manual_seed(0)
    net, inputs = Net(), {size: torch.randn(size, 3) for size in (5, 7, 9)}
    expected = {size: gradients(net, batch) for size, batch in inputs.items()}
    assert set_compiled(net) == 4 and not graphs
    for count in (0, 2, 1):
        set_recomputed(net, count, name="net")
        assert count_recomputed_layers(net) == count
        for size, batch in inputs.items():
            found = gradients(net, batch)
            assert all(torch.equal(a, b) for a, b in zip(found, expected[size], strict=True))
        assert len(graphs) == 3 * (2 if count else 1), "kept ones, and recomputed ones, by size"
    set_compiled(net, False)
    assert [type(layer) is Layer for layer in net.layers] == [False, True, True, True], "one is recomputed still"


def test_evaluation_runs_layers_as_they_are_and_types_of_weights_are_compiled_apart(graphs: list[int]):
    net, inputs = Net(), torch.randn(6, 3)
    set_compiled(net)
    net.eval()(inputs)
    assert not graphs
    net.train()
    for layer in net.layers[:2]:  # pyright: ignore[reportIndexIssue]
        layer.to(torch.bfloat16)
    with torch.autocast("cpu", torch.bfloat16):
        net(inputs)
    assert len(graphs) == 2


def test_a_network_without_layers_is_compiled_as_a_whole(graphs: list[int]):
    net = nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 2))
    assert set_compiled(net) == 1
    gradients(net, torch.randn(6, 3))
    assert len(graphs) == 1 and set_compiled(net, False) == 1 and type(net) is nn.Sequential


def test_processes_that_compile_kernels_start_by_what_torch_starts_them_with(monkeypatch: pytest.MonkeyPatch):
    """A backend that is a function does not start them: the first graph's kernels would be compiled one by one."""
    from torch._inductor import async_compile

    started: list[bool] = []
    monkeypatch.setattr(async_compile, "maybe_warm_pool", lambda: started.append(True))
    start_compiler()
    assert started == [True]
