"""The fused backend of a process whose parameters are on two devices, the second of which is pretended here."""

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from baoc.kernels.triton.engine import Engine
from baoc.optim import BlockwiseOptimizer
from baoc.optim.backends import fused
from baoc.optim.shards import Shard
from tests.support.interpreting import interpreted
from tests.support.optimizing import Gradients, build, make_params, run_steps

FIRST, SECOND = torch.device("cpu", 0), torch.device("cpu")
SPECS = {"a": "lion_int8", "b": "lion_int8", "c": "sign", "d": "adamw_int8"}


class OnFirst(nn.Parameter):
    @property
    def device(self) -> torch.device:
        return FIRST


def make(*, of_first: str) -> tuple[dict[str, Tensor], BlockwiseOptimizer]:
    """Named parameters, those `of_first` on another device than the others, and their optimizer."""
    params = make_params({"a": (9, 37), "b": (40,), "c": (4, 65), "d": (3, 5, 7)})
    params |= {name: OnFirst(params[name].detach()) for name in of_first}
    return params, build(params, SPECS, backend="fused")


@interpreted
def test_each_device_has_an_engine_and_steps_as_one_does() -> None:
    (params, optimizer), (expected, alone) = make(of_first="ad"), make(of_first="")
    for each, of in ((params, optimizer), (expected, alone)):
        run_steps(of, each, gradients=Gradients(each), steps=3)
    stepped: dict[torch.device, set[int]] = {}
    for backend in optimizer.registry.backends:
        assert isinstance(backend, fused.FusedBackend) and backend.engine is not None
        stepped[backend.engine.device] = {id(param) for param in backend.engine.gradients.params}
    assert stepped == {device: {id(params[n]) for n in names} for device, names in ((FIRST, "ad"), (SECOND, "bc"))}
    assert all(torch.equal(param, expected[name]) for name, param in params.items())


@interpreted
def test_without_memory_for_the_second_engine_nothing_is_stepped(monkeypatch: pytest.MonkeyPatch) -> None:
    params, optimizer = make(of_first="ad")
    before = {name: param.detach().clone() for name, param in params.items()}

    def engine_of(tables: Any, **given: bool) -> Engine:
        if tables[0].device == SECOND:
            raise torch.OutOfMemoryError("CUDA out of memory")
        return Engine(tables, **given)

    monkeypatch.setattr(fused, "Engine", engine_of)
    with pytest.raises(torch.OutOfMemoryError):
        run_steps(optimizer, params, gradients=Gradients(params), steps=1)
    assert all(torch.equal(param, before[name]) for name, param in params.items()) and optimizer.num_steps == 0


@interpreted
@pytest.mark.parametrize("of_first", ["", "ad"])
def test_the_device_of_a_sharded_parameter_alone_adds_up_over_ranks(of_first: str) -> None:
    params, optimizer = make(of_first=of_first)
    reduced: list[Tensor] = []
    group: Any = SimpleNamespace(size=2, rank=0, all_reduce_=reduced.append)
    blocks = list(optimizer.registry.live.values())
    blocks[0].slots[0].shard = Shard(param=params["a"], group=group, offset=0)
    Gradients(params).give(params)
    backends = fused.FusedBackend.for_blocks(blocks, state=optimizer.registry.state)
    assert len(backends) == 1 + bool(of_first)
    for phase in (1, 2):
        for backend in backends:
            backend(optimizer.inputs({}, options=optimizer.options(), phase=phase))
    assert len(reduced) == 3, "two of the first step, which measures, and one of the second"
