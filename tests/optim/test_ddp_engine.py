"""BlockwiseOptimizer with explicit specs under DistributedDataParallel: two processes end with equal weights."""

from pathlib import Path

import pytest
import torch
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from baoc.optim import BlockwiseOptimizer
from tests.support.ranks import group, in_processes

NUM_STEPS = 4
SPECS = ("adamw", "adamw_int8", "adamw_int8+split8", "foam_l2_int8")


def network() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(64, 128), nn.ReLU(), nn.Linear(128, 8))


def train(rank: int, size: int, store: Path) -> dict[str, dict[str, Tensor]]:
    """One rank with its own data: the weights that each spec ends with."""
    with group(rank, size, store=store):
        return {spec: trained(rank, spec) for spec in SPECS}


def trained(rank: int, spec: str) -> dict[str, Tensor]:
    model = network()
    specs = {name: spec if param.ndim > 1 else "adamw" for name, param in model.named_parameters()}
    optimizer = BlockwiseOptimizer(model, specs, lr=1e-2, backend="eager")
    wrapped = DistributedDataParallel(model)
    torch.manual_seed(1 + rank)
    for _ in range(NUM_STEPS):
        optimizer.zero_grad()
        with torch.autocast("cpu", dtype=torch.bfloat16):
            loss = wrapped(torch.randn(16, 64)).square().mean()
        loss.backward()
        optimizer.step()
    return optimizer.export_weights()


@pytest.mark.slow
def test_ranks_end_with_equal_weights_that_moved():
    first, second = in_processes(train)
    start = network().state_dict()
    for spec in SPECS:
        assert first[spec].keys() == start.keys()
        for name, value in first[spec].items():
            assert torch.equal(value, second[spec][name]), f"{spec}: {name} differs between the ranks"
            assert not torch.allclose(value, start[name]), f"{spec}: {name} did not move"
