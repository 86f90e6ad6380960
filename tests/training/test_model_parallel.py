"""fully_shard in Lightning, by its own ModelParallelStrategy over BlockwiseOptimizer and by BaocFSDPStrategy: two
processes clip, save and resume bit for bit."""

import tempfile
from functools import partial
from pathlib import Path
from typing import Any

import lightning as L
import torch
from lightning.fabric.plugins.environments.lightning import LightningEnvironment
from lightning.pytorch.strategies import ModelParallelStrategy
from torch import Tensor, nn
from torch.distributed.fsdp import fully_shard
from torch.utils.data import DataLoader, TensorDataset

from baoc import BaocFSDPStrategy
from baoc.errors import BadInputError
from baoc.optim import BlockwiseOptimizer
from tests.support.ranks import as_launched, group, in_processes


class Sharded(L.LightningModule):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.net = nn.Sequential(nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 4))

    def configure_model(self) -> None:
        mesh = self.device_mesh
        assert mesh is not None
        for layer in self.net:
            fully_shard(layer, mesh=mesh["data_parallel"])
        fully_shard(self.net, mesh=mesh["data_parallel"])

    def training_step(self, batch: list[Tensor], batch_idx: int) -> Tensor:
        return self.net(batch[0]).square().mean()

    def configure_optimizers(self) -> BlockwiseOptimizer:
        specs = {name: "adamw_int8" if param.ndim > 1 else "lion" for name, param in self.named_parameters()}
        return BlockwiseOptimizer(self, specs, lr=1e-2)


class Planned(Sharded):
    """What BaocFSDPStrategy makes a plan for."""

    def configure_optimizers(self) -> Any:
        return torch.optim.AdamW(self.parameters(), lr=1e-2)


class Left(Planned):
    """Has a parameter that nobody cuts."""

    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.ones(4))


class Cut(Planned):
    """Is cut by the strategy."""

    def configure_model(self) -> None:
        pass


def fitted(
    size: int,
    *,
    steps: int,
    save: Path | None = None,
    load: Path | None = None,
    module: L.LightningModule | None = None,
) -> dict[str, Tensor]:
    """The weights after `steps` on batches that are all alike, as a plain loader starts anew in a resume."""
    by_lightning = ModelParallelStrategy(data_parallel_size=size, tensor_parallel_size=1)
    trainer = L.Trainer(
        strategy=by_lightning if module is None else BaocFSDPStrategy("state_50", verbose=False),
        accelerator="cpu",
        devices=size,
        plugins=[LightningEnvironment()],
        max_steps=steps,
        gradient_clip_val=0.5,
        logger=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        enable_checkpointing=False,
    )
    module = module or Sharded()
    trainer.fit(
        module, DataLoader(TensorDataset(torch.linspace(-1, 1, 64).repeat(64, 1)), batch_size=8), ckpt_path=load
    )
    if save is not None:
        trainer.save_checkpoint(save)
    optimizer = trainer.optimizers[0]
    assert isinstance(optimizer, BlockwiseOptimizer)
    return optimizer.export_weights()


def work(rank: int, size: int, store: Path, *, folder: Path) -> dict[str, Any]:
    with as_launched(rank, size), group(rank, size, store=store):
        whole = fitted(size, steps=4)
        fitted(size, steps=2, save=folder / "half.ckpt")
        found: dict[str, Any] = {"whole": whole, "resumed": fitted(size, steps=4, load=folder / "half.ckpt")}
        for name, make in {"own": Planned, "ours": Cut}.items():
            file = folder / f"{name}.ckpt"
            found[name] = fitted(size, steps=4, module=make())
            fitted(size, steps=2, save=file, module=make())
            found[f"{name}, resumed"] = fitted(size, steps=4, load=file, module=make())
        try:
            fitted(size, steps=1, module=Left())
        except BadInputError as error:
            found["left"] = str(error)
        return found


def test_lightning_shards_clips_saves_and_resumes() -> None:
    with tempfile.TemporaryDirectory() as folder:
        first, second = in_processes(partial(work, folder=Path(folder)))
    start = Sharded().state_dict()
    for name, value in first["whole"].items():
        assert not torch.equal(value, start[name])
        for each in (first, second):
            assert torch.equal(each["whole"][name], value) and torch.equal(each["resumed"][name], value)
            for cut in ("own", "ours"):
                assert torch.equal(each[cut][name], first["own"][name])
                assert not torch.equal(each[cut][name], start[name])
                assert torch.equal(each[f"{cut}, resumed"][name], each[cut][name])
    assert "scale" in first["left"] and first["left"] == second["left"]
