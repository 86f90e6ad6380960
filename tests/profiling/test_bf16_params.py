"""A probe with weights of 16 bits: it leaves them as they were, and savings of a plan give back what it measured."""

from contextlib import nullcontext
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from baoc.core.blocks import partition
from baoc.planning.planner import PlannerSettings
from baoc.profiling import bf16_params, describe, probe_footprint
from baoc.profiling.bf16_params import as_native, bf16_savings, cast_to_bf16
from baoc.training.session import all_specs_use_bf16_weights, params_that_may_be_bf16
from baoc.types import Footprint


def network() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(256, 512), nn.LayerNorm(512), nn.GELU(), nn.Linear(512, 512), nn.Linear(512, 10))


def matrices(net: nn.Module) -> dict[str, Tensor]:
    return {name: param for name, param in net.named_parameters() if name in ("0.weight", "3.weight")}


def probed(net: nn.Module, *, released: bool = False, accumulation: int = 1) -> Footprint:
    batch = torch.ones(4, 256)

    def micro_batch() -> Tensor:
        with torch.autocast("cpu", dtype=torch.bfloat16):
            return net(batch).float().square().mean()

    def validation() -> None:
        micro_batch()

    return probe_footprint(
        net,
        run_micro_batch=micro_batch,
        run_validation_batch=validation,
        accumulation=accumulation,
        released_blocks=[[param] for param in net.parameters()] if released else (),
    )


def test_weights_are_bf16_inside_and_as_before_afterwards():
    net = network()
    turned = net[3].weight.data = net[3].weight.data.t().contiguous().t()
    before = {name: param.detach().clone() for name, param in net.named_parameters()}
    with pytest.raises(KeyError), cast_to_bf16(matrices(net)):
        assert {p.dtype for p in matrices(net).values()} == {torch.bfloat16}
        assert net[1].weight.dtype is torch.float32 and net[3].weight.stride() == turned.stride()
        net[0].weight.grad = torch.ones_like(net[0].weight)
        raise KeyError  # a trial that runs out of memory
    assert all(torch.equal(param, before[name]) for name, param in net.named_parameters())
    assert net[3].weight.stride() == turned.stride() and net[0].weight.grad is None


def test_weights_come_back_where_the_cap_has_no_room_for_them(monkeypatch: pytest.MonkeyPatch):
    """A refusal that left half of a network in 16 bits would be worse than a cap that is passed by what was there."""
    net = network()
    before = {name: param.detach().clone() for name, param in net.named_parameters()}
    empty, asked, caps = torch.empty_strided, [], []

    def full(*args: Any, **kwargs: Any) -> Tensor:
        asked.append(args)
        if len(asked) == 2:
            raise torch.OutOfMemoryError("over the cap")
        return empty(*args, **kwargs)

    monkeypatch.setattr(bf16_params, "cap_suspended", lambda device: nullcontext(caps.append(device)))
    with cast_to_bf16(matrices(net)):
        monkeypatch.setattr(torch, "empty_strided", full)
    assert len(asked) == 3 and caps == [torch.device("cpu")], "the first weight was back already"
    assert all(torch.equal(param, before[name]) for name, param in net.named_parameters())


def test_all_of_a_module_comes_anew_so_that_pages_are_those_of_one_that_waited(monkeypatch: pytest.MonkeyPatch):
    net, order, fails = network(), [], [False, False, True]
    turned = net[3].weight.data = net[3].weight.data.t().contiguous().t()
    before = {name: param.detach().clone() for name, param in net.named_parameters()}
    to = nn.Module.to

    def moved(module: nn.Module, home: torch.device) -> nn.Module:
        order.append([str(param.dtype)[6:] for param in net.parameters()])
        if fails.pop():
            raise torch.OutOfMemoryError("over the cap")
        return to(module, home)

    monkeypatch.setattr(bf16_params, "single_cuda_device", lambda _: torch.device("cpu"))
    monkeypatch.setattr(nn.Module, "to", moved)
    monkeypatch.setattr(bf16_params, "cap_suspended", lambda device: nullcontext(order.append(["cap_suspended"])))
    with pytest.raises(torch.OutOfMemoryError), cast_to_bf16(matrices(net), module=net):
        raise AssertionError("the look has no room")
    assert set(order[0]) == {"bfloat16", "float32"} and set(order[1]) == {"float32"}
    fails[:] = [False, True, False]
    with cast_to_bf16(matrices(net), module=net):
        assert {p.dtype for p in matrices(net).values()} == {torch.bfloat16}
    assert order[-2] == ["cap_suspended"], "whole ones that were there before may pass the cap"
    assert all(torch.equal(param, before[name]) for name, param in net.named_parameters())
    assert net[3].weight.stride() == turned.stride()


@pytest.mark.parametrize(("released", "accumulation"), [(False, 1), (False, 2), (True, 1)])
def test_savings_give_back_what_was_measured(released: bool, accumulation: int):
    net = network()
    native = probed(net, released=released, accumulation=accumulation)
    less = bf16_savings(matrices(net))
    assert less == {"0.weight": 2 * 256 * 512, "3.weight": 2 * 512 * 512}
    with cast_to_bf16(matrices(net)):
        found = probed(net, released=released, accumulation=accumulation)
    told = as_native(found, savings=less)
    for state_bytes in (0, 10_000):
        assert told.peak_bytes(state_bytes=state_bytes, saved=less) == found.peak_bytes(state_bytes=state_bytes)
        assert told.peak_bytes(state_bytes=state_bytes) >= native.peak_bytes(state_bytes=state_bytes)
    assert told.weights_bytes == native.weights_bytes and told.gradients_bytes >= native.gradients_bytes
    assert released or told.resident_bytes == native.resident_bytes
    assert told.settled_bytes == native.settled_bytes
    assert found.peak_bytes(state_bytes=0) < native.peak_bytes(state_bytes=0)


@pytest.mark.parametrize(
    ("changes", "names"),
    [
        ({"specs": ("*", "*+split8")}, {"0.weight", "3.weight"}),
        ({"specs": ("*", "*+split8"), "keep_fp32_roles": ()}, None),
        ({"specs": ("*",)}, set()),
        ({"specs": ("*", "*+split8"), "allocator": "uniform_adamw"}, set()),
    ],
    ids=["roles", "all", "native", "uniform"],
)
def test_only_what_a_plan_may_keep_so_is_narrowed(changes: dict[str, Any], names: set[str] | None):
    net = network()
    params = dict(net.named_parameters())
    found = params_that_may_be_bf16(
        partition(describe(net), by="tensor"), params=params, planner=PlannerSettings(**changes)
    )
    assert found.keys() == (params.keys() if names is None else names)


@pytest.mark.parametrize(
    ("specs", "allocator", "found"),
    [
        (("adamw_int8+split8", "sign+split8"), "exact", True),
        (("*", "*+split8"), "exact", False),
        (("*", "*+split8"), "uniform_adamw", False),
    ],
)
def test_where_no_plan_keeps_weights_in_full_they_are_looked_at_narrowed(
    specs: tuple[str, ...], allocator: str, found: bool
):
    assert all_specs_use_bf16_weights(PlannerSettings(specs=specs, allocator=allocator)) is found
