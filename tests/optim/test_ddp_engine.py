"""BlockwiseOptimizer with explicit specs under DistributedDataParallel: two processes end with equal weights."""

from pathlib import Path

import torch
from torch import distributed, multiprocessing, nn
from torch.nn.parallel import DistributedDataParallel

from baoc.optim import BlockwiseOptimizer

NUM_RANKS, NUM_STEPS = 2, 4
SPECS = ("adamw", "adamw_int8", "adamw_int8+split8", "foam_l2_int8")


def network() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(64, 128), nn.ReLU(), nn.Linear(128, 8))


def train(rank: int, folder: str) -> None:
    """One rank: its own data; the weights that each spec ends with are left in `folder`."""
    torch.set_num_threads(1)
    rendezvous = f"file://{folder}/rendezvous"
    distributed.init_process_group("gloo", init_method=rendezvous, rank=rank, world_size=NUM_RANKS)
    weights = {}
    for spec in SPECS:
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
        weights[spec] = optimizer.export_weights()
    torch.save(weights, f"{folder}/{rank}.pt")
    distributed.destroy_process_group()


def test_ranks_end_with_equal_weights_that_moved(tmp_path: Path):
    multiprocessing.spawn(train, args=(str(tmp_path),), nprocs=NUM_RANKS)
    first, second = (torch.load(tmp_path / f"{rank}.pt", weights_only=True) for rank in range(NUM_RANKS))
    start = network().state_dict()
    for spec in SPECS:
        assert first[spec].keys() == start.keys()
        for name, value in first[spec].items():
            assert torch.equal(value, second[spec][name]), f"{spec}: {name} differs between the ranks"
            assert not torch.allclose(value, start[name]), f"{spec}: {name} did not move"
