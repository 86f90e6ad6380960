"""A small Lightning classifier, its data, and one call that fits it under a strategy."""

from typing import Any

import lightning as L
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

QUIET = {
    "logger": False,
    "enable_checkpointing": False,
    "enable_progress_bar": False,
    "enable_model_summary": False,
    "accelerator": "cpu",
    "devices": 1,
}


class Classifier(L.LightningModule):
    """Two linear layers and a norm; decay and no-decay groups, a step-wise schedule."""

    def __init__(self, *, make: Any = None):
        super().__init__()
        torch.manual_seed(7)
        self.net = nn.Sequential(nn.Linear(16, 32), nn.LayerNorm(32), nn.GELU(), nn.Linear(32, 4))
        self.make = make

    def training_step(self, batch: list[Tensor], batch_idx: int) -> Tensor:
        loss = nn.functional.cross_entropy(self.net(batch[0]), batch[1])
        self.log("train/loss", loss)
        return loss

    def configure_optimizers(self) -> Any:
        if self.make is not None:
            return self.make(self)
        decayed = [p for p in self.parameters() if p.ndim > 1]
        others = [p for p in self.parameters() if p.ndim <= 1]
        groups = [{"params": decayed, "weight_decay": 0.1}, {"params": others, "weight_decay": 0.0, "lr": 3e-3}]
        optimizer = torch.optim.AdamW(groups, lr=1e-2, foreach=False, fused=False)
        schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 1 / (1 + step))
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": schedule, "interval": "step"}}


def loader(*, batch_size: int = 8, num: int = 64) -> DataLoader:
    rng = torch.Generator().manual_seed(3)
    x = torch.randn(num, 16, generator=rng)
    return DataLoader(TensorDataset(x, x[:, :4].argmax(1)), batch_size=batch_size)


def fit(
    strategy: Any, *, module: Classifier | None = None, steps: int = 8, data: Any = None, **arguments: Any
) -> Classifier:
    module = module or Classifier()
    trainer = L.Trainer(strategy=strategy, max_steps=steps, **{**QUIET, **arguments})
    trainer.fit(module, data if data is not None else loader())
    return module


def same(a: nn.Module, b: nn.Module) -> bool:
    return all(torch.equal(p, q) for p, q in zip(a.parameters(), b.parameters(), strict=True))
