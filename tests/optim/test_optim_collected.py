"""Checkpoints that torch.distributed.checkpoint collects and puts back, as Lightning and Accelerate have it do."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.distributed import checkpoint as dcp
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_optimizer_state_dict,
    set_optimizer_state_dict,
)

from baoc import BaocOptimizer
from baoc.errors import CheckpointError
from baoc.optim import BlockwiseOptimizer
from tests.support.optimizing import through_file

pytestmark = pytest.mark.filterwarnings("ignore:torch.distributed is")
GIVEN: dict[str, Callable[[nn.Module], Any]] = {
    "module": lambda module: module,
    "wrapped": lambda module: nn.DataParallel(module),
    "plain": lambda module: list(module.parameters()),
    "groups": lambda module: groups(module),
    "one block": lambda module: {"params": list(module.named_parameters())},
}


def net() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 4))


def groups(module: nn.Module, *, turned: bool = False) -> list[dict[str, Any]]:
    matrices = [(name, param) for name, param in module.named_parameters() if param.ndim > 1]
    vectors = [(name, param) for name, param in module.named_parameters() if param.ndim == 1]
    return [{"params": matrices[::-1] if turned else matrices, "weight_decay": 0.1}, {"params": vectors, "lr": 3e-3}]


def train(module: nn.Module, optimizer: torch.optim.Optimizer, *, seed: int) -> None:
    generator = torch.Generator().manual_seed(seed)
    for _ in range(3):
        optimizer.zero_grad()
        with torch.autocast("cpu", torch.bfloat16):
            module(torch.randn(8, 64, generator=generator)).square().mean().backward()
        optimizer.step()


def go_on_alike(module: nn.Module, optimizer: Any, other: nn.Module, resumed: Any) -> None:
    train(module, optimizer, seed=2)
    train(other, resumed, seed=2)
    assert all(map(torch.equal, module.parameters(), other.parameters()))
    assert resumed.state_dict()["num_steps"] == optimizer.state_dict()["num_steps"]
    assert [group.keys() for group in resumed.param_groups] == [group.keys() for group in optimizer.param_groups]
    assert [group["lr"] for group in resumed.param_groups] == [group["lr"] for group in optimizer.param_groups]


@pytest.mark.parametrize("given", GIVEN)
@pytest.mark.parametrize("spec", ["adamw", "adamw_int8+split8", "adamw_int8@streamed", "lion_int8", "sign"])
def test_what_is_collected_goes_on_bit_for_bit(spec: str, given: str) -> None:
    module, other = net(), net()
    optimizer = BlockwiseOptimizer(GIVEN[given](module), spec, lr=2e-3)
    train(module, optimizer, seed=1)
    collected = through_file(get_optimizer_state_dict(module, optimizer))
    resumed = BlockwiseOptimizer(GIVEN[given](other), spec)
    other.load_state_dict(module.state_dict())
    set_optimizer_state_dict(other, resumed, collected)
    go_on_alike(module, optimizer, other, resumed)


@pytest.mark.parametrize("spec", ["adamw", "adamw_int8+split8", "lion_int8"])
def test_a_folder_is_read_into_what_is_there(spec: str, tmp_path: Path) -> None:
    """In place: the states that are filled are the live ones, under another order of parameters."""
    module, other = net(), net()
    optimizer = BlockwiseOptimizer(groups(module), spec, lr=2e-3)
    train(module, optimizer, seed=1)
    dcp.save({"optimizer": get_optimizer_state_dict(module, optimizer)}, checkpoint_id=tmp_path)
    resumed = BlockwiseOptimizer(groups(other, turned=True), spec)
    other.load_state_dict(module.state_dict())
    there = get_optimizer_state_dict(other, resumed)
    dcp.load({"optimizer": there}, checkpoint_id=tmp_path)
    set_optimizer_state_dict(other, resumed, there)
    go_on_alike(module, optimizer, other, resumed)


def test_live_states_that_another_rule_left_are_converted_before_they_go() -> None:
    """`signum` keeps what `lion` does, in tensors of the same shape."""
    module = net()
    optimizer = BlockwiseOptimizer(module, "lion")
    train(module, optimizer, seed=1)
    saved = optimizer.state_dict()
    other = net()
    resumed = BlockwiseOptimizer(other, "signum")
    there = resumed.state_dict()
    for index, state in saved["state"].items():
        there["state"][index]["m"].copy_(state["m"])
    resumed.load_state_dict({**saved, "state": there["state"]})
    fresh = BlockwiseOptimizer(net(), "signum")
    fresh.load_state_dict(saved)
    for param, twin in zip(resumed.registry.names, fresh.registry.names, strict=True):
        assert torch.equal(resumed.state[param]["m"], fresh.state[twin]["m"]) and fresh.state[twin]["m"].any()


def test_another_plan_takes_what_is_collected() -> None:
    module, other = net(), net()
    optimizer = BlockwiseOptimizer(module, "adamw_int8")
    train(module, optimizer, seed=1)
    resumed = BaocOptimizer(other, budget="state_25")
    other.load_state_dict(module.state_dict())
    set_optimizer_state_dict(other, resumed, through_file(get_optimizer_state_dict(module, optimizer)))
    assert resumed.load_report is not None and {move.source for move in resumed.load_report.moves} == {"adamw_int8"}
    assert resumed.state_dict()["num_steps"] == 3


def test_adamw_is_collected_and_taken_over() -> None:
    module, other = net(), net()
    theirs = torch.optim.AdamW(module.parameters(), lr=2e-3)
    train(module, theirs, seed=1)
    resumed = BlockwiseOptimizer(other, "adamw")
    other.load_state_dict(module.state_dict())
    set_optimizer_state_dict(other, resumed, get_optimizer_state_dict(module, theirs))
    assert resumed.state_dict()["num_steps"] == 3 and resumed.param_groups[0]["lr"] == 2e-3
    for param, twin in zip(module.parameters(), other.parameters(), strict=True):
        assert torch.equal(theirs.state[param]["exp_avg_sq"], resumed.state[twin]["v"])


@pytest.mark.parametrize("spec", ["adamw", "sign", "adamw_int8@streamed"])
def test_what_is_flattened_is_refused(spec: str) -> None:
    module, other = net(), net()
    options = StateDictOptions(flatten_optimizer_state_dict=True)
    optimizer, resumed = BlockwiseOptimizer(module, spec), BlockwiseOptimizer(other, spec)
    train(module, optimizer, seed=1)
    collected = get_optimizer_state_dict(module, optimizer, options=options)
    with pytest.raises(CheckpointError, match=r"flatten_optimizer_state_dict=True drops\. Save it without, or"):
        set_optimizer_state_dict(other, resumed, collected, options=options)
