"""Two processes on gloo: what would train wrongly in silence is refused with a sentence, and the rest trains right."""

from collections.abc import Callable, Iterator
from copy import deepcopy
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.autograd.graph import get_gradient_edge
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FullyShardedDataParallel, fully_shard
from torch.distributed.tensor import Shard
from torch.nn.functional import mse_loss
from torch.nn.parallel import DistributedDataParallel

from baoc import BaocOptimizer, BaocStrategy
from baoc.errors import BadInputError
from baoc.optim import BlockwiseOptimizer
from tests.support.ranks import group, in_processes

CAST = "adamw_int8+split8"


def net() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 4))


def sharded(size: int) -> nn.Module:
    module = net()
    fully_shard(module, mesh=init_device_mesh("cpu", (size,)))
    return module


def cut_by_columns() -> nn.Module:
    module = net()
    fully_shard(module, shard_placement_fn=lambda param: Shard(param.ndim - 1))
    return module


def flat(**settings: Any) -> nn.Module:
    return FullyShardedDataParallel(net(), device_id=torch.device("cpu"), **settings)


def migrated(before: str, after: str) -> None:
    module = net()
    optimizer = BlockwiseOptimizer(module, before)
    wrapped = DistributedDataParallel(module)
    kept = module.get_parameter("0.weight").detach().clone()
    try:
        optimizer.migrate({"2.bias": before.replace("adamw", "lion"), "0.weight": after})
    finally:
        assert torch.equal(kept, module.get_parameter("0.weight")) and optimizer.specs["2.bias"] == before
        del wrapped


def wrapped_after_it_was_built() -> None:
    module = net()
    optimizer = BlockwiseOptimizer(module)
    kept = FullyShardedDataParallel(module, device_id=torch.device("cpu"), use_orig_params=True)
    kept(torch.ones(2, 64)).sum().backward()
    optimizer.step()


def stepped(module: nn.Module, optimizer: torch.optim.Optimizer, *, rank: int, steps: int = 4) -> list[Tensor]:
    generator = torch.Generator().manual_seed(10 + rank)
    for _ in range(steps):
        optimizer.zero_grad()
        with torch.autocast("cpu", torch.bfloat16):
            mse_loss(module(torch.randn(8, 64, generator=generator)), torch.ones(8, 4)).backward()
        optimizer.step()
    return [param.detach().clone() for param in module.parameters()]


def zero() -> torch.optim.Optimizer:
    from torch.distributed.optim import ZeroRedundancyOptimizer  # warns of torch.jit

    return ZeroRedundancyOptimizer(net().parameters(), BlockwiseOptimizer, specs="adamw")


CASES: dict[str, tuple[Callable[[], object], str]] = {
    "cut along another dimension": (
        lambda: BlockwiseOptimizer(cut_by_columns()),
        r"^0.weight is a DTensor of placements S\(1\): what is stepped in parts is what fully_shard cuts along its f",
    ),
    "cast of what is sharded": (
        lambda: BlockwiseOptimizer(sharded(2), CAST),
        "^block 0.weight cannot run adamw_int8.split8: that makes 0.weight bfloat16, and fully_shard has it already as",
    ),
    "sharded, memory": (
        lambda: BaocOptimizer(sharded(2), budget="1mb"),
        "^budget 1mb was given for a module that fully_shard cuts, where a step has to be measured before training",
    ),
    "sharded, copied": (lambda: deepcopy(BlockwiseOptimizer(sharded(2))), "^an optimizer of parameters that fully_sh"),
    "fsdp1": (lambda: BlockwiseOptimizer(flat()), "is a flat part of FullyShardedDataParallel.* use fully_shard"),
    "fsdp1, original parameters": (
        lambda: BlockwiseOptimizer(flat(use_orig_params=True).parameters()),
        "^param0 is a flat part of FullyShardedDataParallel",
    ),
    "fsdp1, late": (wrapped_after_it_was_built, "^0.weight is a flat part of FullyShardedDataParallel"),
    "zero": (
        zero,
        "builds BlockwiseOptimizer of a part .* Build BlockwiseOptimizer itself, with a spec of fewer bytes",
    ),
    "cast of a wrapped module": (
        lambda: BlockwiseOptimizer(DistributedDataParallel(net()), CAST),
        r"^block 0.weight cannot take adamw_int8\+split8 now: that makes 0.weight bfloat16, and DistributedDataPar",
    ),
    "cast of its parameters": (
        lambda: (wrapped := DistributedDataParallel(net()), BlockwiseOptimizer(wrapped.parameters(), CAST)),
        "^block param0 cannot take .* Build the optimizer before DistributedDataParallel",
    ),
    "cast of the module in it": (
        lambda: (module := net(), DistributedDataParallel(module), BlockwiseOptimizer(module, "adamw+bf16_sr")),
        r"^block 0.weight cannot take adamw\+bf16_sr now",
    ),
    "a move to 16 bits": (lambda: migrated("adamw", CAST), "^block 0.weight cannot take .* makes 0.weight bfloat16"),
    "a move from 16 bits": (lambda: migrated(CAST, "adamw"), "^block 0.weight cannot take .* makes 0.weight float32"),
    "strategy": (BaocStrategy, r"^BaocStrategy was built in rank \d of 2 processes \(torch.distributed\)"),
    "release": (lambda: BlockwiseOptimizer(net(), release=True), r"^gradient release was asked for in rank \d of 2"),
    "last_backward": (
        lambda: BlockwiseOptimizer(net(), "adamw@streamed").last_backward().__enter__(),
        r"^optimizer.last_backward\(\) was entered in rank \d of 2",
    ),
}


LATE = "a plan that was made before there was a group"
CASES[LATE] = (
    lambda: None,
    r"^a plan that BAOC made in a process alone is stepped in rank \d of 2 .* would decide anew by its own clock",
)


def refusals(late: Callable[[], object]) -> dict[str, str]:
    told = {}
    for name, (enter, _) in CASES.items():
        try:
            told[name] = f"was taken: {late() if name == LATE else enter()}"
        except BadInputError as error:
            told[name] = str(error)
    return told


def training(rank: int) -> dict[str, Any]:
    """What is right: an optimizer that is built before the wrapper, and moves that keep the type of weights."""
    found: dict[str, Any] = {}
    for spec in ("adamw", CAST):
        module = net()
        optimizer = BlockwiseOptimizer(module, spec)
        wrapped = DistributedDataParallel(module)
        stepped(wrapped, optimizer, rank=rank)
        optimizer.migrate({"0.weight": spec.replace("adamw", "lion")})
        found[spec] = stepped(wrapped, optimizer, rank=rank)
        module = net()
        found[f"{spec} alone"] = stepped(module, BlockwiseOptimizer(module, spec), rank=rank)
    found["names"] = list(BlockwiseOptimizer(DistributedDataParallel(net())).specs)
    return found


def work(rank: int, size: int, store: Path) -> tuple[dict[str, str], dict[str, Any]]:
    module = net()
    optimizer = BaocOptimizer(module, budget="state_25")
    stepped(module, optimizer, rank=rank, steps=1)
    with group(rank, size, store=store):
        return refusals(lambda: stepped(module, optimizer, rank=rank, steps=1)), training(rank)


@pytest.fixture(scope="module")
def found() -> list[tuple[dict[str, str], dict[str, Any]]]:
    return in_processes(work)


@pytest.mark.slow
@pytest.mark.parametrize("case", CASES)
def test_what_two_processes_would_do_wrong_is_refused(case: str, found: list[tuple[dict[str, str], Any]]) -> None:
    for told, _ in found:
        with pytest.raises(BadInputError, match=CASES[case][1]):
            raise BadInputError(told[case])


@pytest.mark.slow
def test_an_optimizer_that_is_built_before_the_wrapper_casts_as_it_likes(found: list[tuple[Any, Any]]) -> None:
    (_, first), (_, second) = found
    for spec in ("adamw", CAST):
        assert all(map(torch.equal, first[spec], second[spec]))
        assert not all(map(torch.equal, first[f"{spec} alone"], second[f"{spec} alone"])), "their data differ"
    assert first["names"] == [name for name, _ in net().named_parameters()]


@pytest.fixture
def alone(tmp_path: Path) -> Iterator[None]:
    """A group of this process alone."""
    with group(0, 1, store=tmp_path / "store"):
        yield


@pytest.mark.usefixtures("alone")
def test_a_process_alone_in_its_group_trains() -> None:
    module = net()
    optimizer = BaocOptimizer(DistributedDataParallel(module), budget="state_25")
    stepped(module, optimizer, rank=0, steps=1)
    bare = BaocOptimizer(net(), budget="state_25")
    bare.load_state_dict(optimizer.state_dict())
    assert bare.specs == optimizer.specs


# -- hooks of others, in one process --------------------------------------------------------------------------------


@pytest.mark.parametrize("register", ["register_hook", "register_prehook"])
def test_hooks_that_a_cast_would_lose_are_told(register: str) -> None:
    module = net()
    node = get_gradient_edge(module.get_parameter("2.weight")).node
    handle = getattr(node, register)(lambda *_: None)
    with pytest.raises(BadInputError, match=r"makes 2.weight bfloat16, and the 1 hook\(s\) on its AccumulateGrad node"):
        BlockwiseOptimizer(module, CAST)
    optimizer = BlockwiseOptimizer(module, "adamw_int8")
    with pytest.raises(BadInputError, match=r"^block 2.weight cannot take adamw_int8\+split8 now"):
        optimizer.migrate({"0.weight": CAST, "2.weight": CAST})
    assert module.get_parameter("0.weight").dtype is torch.float32, "nothing changes"
    optimizer.migrate({"0.weight": CAST})
    handle.remove()
    optimizer.migrate({"2.weight": CAST})
    del node


def test_a_graph_that_is_alive_and_hooks_that_stay_are_no_reason() -> None:
    module, seen = net(), []
    weight = module.get_parameter("0.weight")
    weight.register_hook(lambda grad: seen.append("tensor"))
    weight.register_post_accumulate_grad_hook(lambda param: seen.append("after"))
    loss = module(torch.ones(2, 64)).sum()
    loss.backward()
    optimizer = BlockwiseOptimizer(module, CAST)
    assert weight.dtype is torch.bfloat16 and loss.grad_fn is not None
    seen.clear()
    stepped(module, optimizer, rank=0, steps=1)
    assert seen == ["tensor", "after"]
