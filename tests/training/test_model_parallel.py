"""fully_shard in Lightning, by its own ModelParallelStrategy over BlockwiseOptimizer and by BaocFSDPStrategy: two
processes clip and end alike. Checkpoints are in test_checkpoint_kinds.py."""

from pathlib import Path
from typing import Any

import lightning as L
import pytest
import torch
from lightning.fabric.plugins.environments.lightning import LightningEnvironment
from lightning.pytorch.strategies import ModelParallelStrategy
from torch import Tensor, nn
from torch.distributed.fsdp import fully_shard
from torch.utils.data import DataLoader, TensorDataset

from baoc import BaocFSDPStrategy
from baoc.callbacks.memory import MemoryMonitor
from baoc.errors import BadInputError
from baoc.optim import BlockwiseOptimizer
from tests.support.ranks import as_launched, group, in_processes

pytestmark = pytest.mark.slow  # two ranks are started


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


class Deep(Cut):
    """Has layers that are cut one by one."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        layers = [nn.Sequential(nn.Linear(64, 256), nn.ReLU(), nn.Linear(256, 64)) for _ in range(6)]
        self.net = nn.Sequential(*layers)


def fitted(
    size: int,
    *,
    steps: int,
    module: L.LightningModule | None = None,
    strategy: BaocFSDPStrategy | None = None,
    memory: MemoryMonitor | None = None,
) -> dict[str, Tensor]:
    """The weights after `steps` on batches that are all alike."""
    by_lightning = ModelParallelStrategy(data_parallel_size=size, tensor_parallel_size=1)
    ours = strategy or BaocFSDPStrategy("state_50", verbose=False)
    trainer = L.Trainer(
        strategy=by_lightning if module is None else ours,
        callbacks=[memory] if memory is not None else [],
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
    trainer.fit(module, DataLoader(TensorDataset(torch.linspace(-1, 1, 64).repeat(64, 1)), batch_size=8))
    optimizer = trainer.optimizers[0]
    assert isinstance(optimizer, BlockwiseOptimizer)
    return optimizer.export_weights()


def gathered(size: int, *, budget: str, again: Any = "auto", module: Any = Deep) -> dict[str, Any]:
    strategy, memory = BaocFSDPStrategy(budget, reshard_after_forward=again, verbose=False), MemoryMonitor()
    weights = fitted(size, steps=3, module=module(), strategy=strategy, memory=memory)
    assert strategy.plan is not None
    peaks = strategy.plan.peak_bytes, memory.peak_bytes
    return {"weights": weights, "told": strategy.layers_summary, "peaks": peaks}


def work(rank: int, size: int, store: Path) -> dict[str, Any]:
    with as_launched(rank, size), group(rank, size, store=store):
        found: dict[str, Any] = {"lightning": fitted(size, steps=4)}
        found |= {name: fitted(size, steps=4, module=make()) for name, make in {"own": Planned, "ours": Cut}.items()}
        given = {
            "kept": ("8mb", "auto"),
            "asked": ("8mb", True),
            "again": ("1.7mb", "auto"),
            "without": ("state_99", "auto"),
        }
        found |= {name: gathered(size, budget=budget, again=again) for name, (budget, again) in given.items()}
        for name, make, again in (("left", Left, "auto"), ("own choice", Planned, False)):
            try:
                gathered(size, budget="8mb", again=again, module=make)
            except BadInputError as error:
                found[name] = str(error)
        return found


@pytest.fixture(scope="module")
def found() -> list[dict[str, Any]]:
    return in_processes(work)


def test_layers_stay_gathered_where_a_budget_of_memory_holds_as_good_a_plan(found: list[dict[str, Any]]) -> None:
    for each in found:
        assert "gathered once" in each["kept"]["told"] and each["asked"]["told"] == ""
        assert "again in backward" in each["again"]["told"] and "again in backward" in each["without"]["told"]
        assert all(map(torch.equal, each["kept"]["weights"].values(), each["asked"]["weights"].values()))
        predicted, held = each["kept"]["peaks"]
        assert 0.98 * predicted < held <= predicted and predicted > 1.2 * each["asked"]["peaks"][0]
        assert (
            "reshard_after_forward=False was given" in each["own choice"] and "fully_shard itself" in each["own choice"]
        )


def test_lightning_shards_and_clips(found: list[dict[str, Any]]) -> None:
    start = Sharded().state_dict()
    for each in found:
        for name, value in start.items():
            for kind in ("lightning", "own"):
                assert torch.equal(each[kind][name], found[0][kind][name]) and not torch.equal(each[kind][name], value)
            assert torch.equal(each["ours"][name], found[0]["own"][name])
        assert "scale" in each["left"] and each["left"] == found[0]["left"]
