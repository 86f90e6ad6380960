"""BlockwiseOptimizer with explicit specs under DistributedDataParallel: two processes end with equal weights."""

import time
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from baoc import parallel
from baoc.errors import BudgetBreachedError, TrainingFailedError
from baoc.optim import BlockwiseOptimizer
from baoc.parallel import ranks
from tests.support.ranks import group, in_processes
from tests.support.waiting import wait_until

NUM_STEPS = 4
SPECS = ("adamw", "adamw_int8", "adamw_int8+split8", "foam_l2_int8")


def network() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(64, 128), nn.ReLU(), nn.Linear(128, 8))


def train(rank: int, size: int, store: Path) -> dict[str, Any]:
    """One rank with its own data: the weights that each spec ends with."""
    with group(rank, size, store=store):
        found: dict[str, Any] = {spec: trained(rank, spec) for spec in SPECS}
        return {**found, "heard": heard(rank), "unheard": unheard(rank, store.with_name("raised"))}


def heard(rank: int) -> str:
    """What a rank raises that waits as long as the others take: they compile, or load."""
    if rank == 0:
        time.sleep(1.0)
    with mock.patch.object(parallel, "PEER_TIMEOUT_S", 0.2), pytest.raises(torch.OutOfMemoryError) as raised:
        ranks().run_or_raise_on_all(out_of_memory if rank else lambda: None)
    return str(raised.value)


def unheard(rank: int, raised_file: Path) -> str:
    """What a rank raises whose error the others never come to hear of, as they wait for a message in mid-step."""
    mine = ranks()
    if rank == 0:
        wait_until(raised_file.is_file, what="the other rank's error")
        return ""
    told = ""
    for make, kind in ((out_of_memory, BudgetBreachedError), (lambda: [][0], TrainingFailedError)):
        with mock.patch.object(parallel, "PEER_TIMEOUT_S", 0.2), pytest.raises(kind) as raised:
            mine.run_or_raise_on_all(make, has_collectives=True)
        told += f"{raised.value}. "
    raised_file.touch()
    return told


def out_of_memory() -> None:
    raise torch.OutOfMemoryError("CUDA out of memory")


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
    assert (first["heard"], second["heard"]) == ("CUDA out of memory", "CUDA out of memory")
    assert (first["unheard"], second["unheard"]) == (
        "",
        "rank 1 alone ran out of memory, in a step that the others are in the middle of (CUDA out of memory): lower "
        "micro_batch, or give a larger budget. rank 1 alone failed, in a step that the others are in the middle of "
        "(list index out of range). ",
    )
    start = network().state_dict()
    for spec in SPECS:
        assert first[spec].keys() == start.keys()
        for name, value in first[spec].items():
            assert torch.equal(value, second[spec][name]), f"{spec}: {name} differs between the ranks"
            assert not torch.allclose(value, start[name]), f"{spec}: {name} did not move"
