"""A checkpoint of each kind is read by the others: one device, DDP and fully_shard, in Trainers and in loops, as files
and as folders of torch.distributed.checkpoint. What follows is bit for bit what would have."""

import logging
import tempfile
from functools import partial
from itertools import product
from pathlib import Path
from typing import Any

import lightning as L
import pytest
import torch
from lightning.fabric.plugins.environments.lightning import LightningEnvironment
from lightning.pytorch.strategies import ModelParallelStrategy
from torch import Tensor, nn
from torch import distributed as dist
from torch.distributed.checkpoint.format_utils import dcp_to_torch_save
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_model_state_dict,
    get_optimizer_state_dict,
    set_model_state_dict,
    set_optimizer_state_dict,
)
from torch.distributed.checkpoint.state_dict_loader import load
from torch.distributed.checkpoint.state_dict_saver import save
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, TensorDataset

from baoc import BaocDDPStrategy, BaocFSDPStrategy, BaocOptimizer, BaocStrategy
from baoc.optim import BlockwiseOptimizer
from baoc.tasks.ema import EmaWeights
from tests.support.ranks import as_launched, group, in_processes

pytestmark = pytest.mark.slow

BATCH = torch.linspace(-1, 1, 64).repeat(8, 1)  # all batches are alike, whatever rank they are of
BUDGET, HALF, WHOLE = "state_50", 2, 4
STRATEGIES = {"one device": BaocStrategy, "DDP": BaocDDPStrategy, "fsdp": BaocFSDPStrategy}
LIGHTNING = ("Lightning's file", "Lightning's folder")
TRAINERS = (*STRATEGIES, *LIGHTNING)
LOOPS = ("loop", "loop of DDP", "loop of fsdp", "loop of fsdp, folder")
ALONE = ("one device", "loop")
FULL = StateDictOptions(full_state_dict=True, cpu_offload=True)


class Plain(L.LightningModule):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.net = nn.Sequential(nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 4))

    def training_step(self, batch: list[Tensor], batch_idx: int) -> Tensor:
        return self.net(batch[0]).square().mean()

    def configure_optimizers(self) -> Any:
        return torch.optim.AdamW(self.parameters(), lr=1e-2)


class Sharded(Plain):
    """With the plan's specs, cut by itself for Lightning's own strategy."""

    def configure_model(self) -> None:
        assert self.device_mesh is not None
        for part in (*self.net, self.net):
            fully_shard(part, mesh=self.device_mesh["data_parallel"])

    def configure_optimizers(self) -> Any:
        planned = BaocOptimizer(Plain(), budget=BUDGET, verbose=False)
        specs = {param.name: planned.specs[block.name] for block in planned.blocks for param in block.params}
        return BlockwiseOptimizer(self, specs, lr=1e-2)


def by_trainer(kind: str, size: int, *, steps: int, read: Path | None, write: Path | None) -> dict[str, Tensor]:
    if kind in STRATEGIES:
        module, strategy = Plain(), STRATEGIES[kind](BUDGET, verbose=False)
    else:
        given: dict[str, Any] = {"data_parallel_size": size, "tensor_parallel_size": 1}
        strategy = ModelParallelStrategy(**given, save_distributed_checkpoint="folder" in kind)
        module = Sharded()
    average = EmaWeights(0.5)
    trainer = L.Trainer(
        strategy=strategy,
        accelerator="cpu",
        devices=1 if kind in ALONE else size,
        plugins=[LightningEnvironment()],
        callbacks=[average] if kind in STRATEGIES else [],
        max_steps=steps,
        logger=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        enable_checkpointing=False,
    )
    trainer.fit(module, DataLoader(TensorDataset(BATCH.repeat(8, 1)), batch_size=8), ckpt_path=read)
    if write is not None:
        trainer.save_checkpoint(write)
    optimizer: Any = trainer.optimizers[0]
    averages = {f"average of {name}": value for name, value in average.unsharded().items() if value is not None}
    return {**optimizer.export_weights(), **averages}


def by_loop(kind: str, *, steps: int, read: Path | None, write: Path | None) -> dict[str, Tensor]:
    module = Plain()
    if "fsdp" in kind:
        for part in (*module.net, module.net):
            fully_shard(part)
    optimizer = BaocOptimizer(module, budget=BUDGET, lr=1e-2, verbose=False)
    net = DistributedDataParallel(module.net, gradient_as_bucket_view=True) if "DDP" in kind else module.net
    if read is not None and "folder" in kind:
        state = {"model": get_model_state_dict(module), "optimizer": get_optimizer_state_dict(module, optimizer)}
        load(state, checkpoint_id=read)
        set_model_state_dict(module, state["model"])
        set_optimizer_state_dict(module, optimizer, optim_state_dict=state["optimizer"])
    elif read is not None:
        given = torch.load(read, weights_only=True)
        of_trainer = "state_dict" in given
        set_model_state_dict(module, given["state_dict" if of_trainer else "model"], options=FULL)
        optimizer.load_state_dict(given["optimizer_states"][0] if of_trainer else given["optimizer"])
    for _ in range(0 if read is None else HALF, steps):
        net(BATCH).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
    if write is not None and "fsdp" in kind:
        how = None if "folder" in kind else FULL
        state = {
            "model": get_model_state_dict(module, options=how),
            "optimizer": get_optimizer_state_dict(module, optimizer, options=how),
        }
        if "folder" in kind:
            save(state, checkpoint_id=write)
        elif dist.get_rank() == 0:
            torch.save(state, write)
    elif write is not None and (kind in ALONE or dist.get_rank() == 0):
        torch.save({"model": module.state_dict(), "optimizer": optimizer.state_dict()}, write)
    return optimizer.export_weights()


def ran(kind: str, size: int, *, steps: int, read: Path | None = None, write: Path | None = None) -> dict[str, Tensor]:
    how = {"steps": steps, "read": read, "write": write}
    return by_trainer(kind, size, **how) if kind in TRAINERS else by_loop(kind, **how)


def file_of(writer: str, reader: str, folder: Path) -> Path:
    """What the reader takes: a loop that does not read folders takes the file that torch makes of one."""
    folders = writer == LOOPS[-1] and reader != LOOPS[-1]
    return folder / (f"{writer}, as a file" if folders else writer)


def pairs() -> list[tuple[str, str]]:
    """Writer and reader. A Trainer reads what Trainers write, Lightning's own strategy its own, and a loop that reads a
    folder takes that of a loop; other loops read all, but for Trainers' folders."""
    found = [*product(TRAINERS, STRATEGIES), *product(LIGHTNING, LIGHTNING), (LOOPS[-1], LOOPS[-1])]
    return [*found, *product((*STRATEGIES, LIGHTNING[0], *LOOPS), LOOPS[:-1])]


def work(rank: int, size: int, store: Path, *, folder: Path) -> dict[tuple[str, str], Any]:
    logging.disable(logging.WARNING)
    found: dict[tuple[str, str], Any] = {}

    def read(kinds: Any) -> None:
        for kind in kinds:
            whole = ran(kind, size, steps=WHOLE)
            for writer in (writer for writer, reader in pairs() if reader == kind):
                after = ran(kind, size, steps=WHOLE, read=file_of(writer, kind, folder))
                known = {name for name in after if "average" not in name or writer in STRATEGIES}
                found[writer, kind] = [name for name in known if not torch.equal(after[name], whole[name])]

    if rank == 0:
        for kind in ALONE:
            ran(kind, 1, steps=HALF, write=folder / kind)
    with as_launched(rank, size), group(rank, size, store=store):
        several = [kind for kind in (*TRAINERS, *LOOPS) if kind not in ALONE]
        for kind in several:
            ran(kind, size, steps=HALF, write=folder / kind)
        if rank == 0:
            dcp_to_torch_save(folder / LOOPS[-1], folder / f"{LOOPS[-1]}, as a file")
        dist.barrier()
        read(several)
    if rank == 0:
        read(ALONE)
    return found


def test_a_checkpoint_of_each_kind_is_read_by_the_others() -> None:
    with tempfile.TemporaryDirectory() as folder:
        found = in_processes(partial(work, folder=Path(folder)))
    assert found[0].keys() == set(pairs())
    for each in found:
        assert not {pair: names for pair, names in each.items() if names}
