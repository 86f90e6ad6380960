"""A tiny Lightning module and data for tests: a linear model with dropout, and a loader that can stop and go on."""

from collections.abc import Iterator
from typing import Any

import lightning as L
import torch
from torch import Tensor, nn


class TinyModule(L.LightningModule):
    """Dropout and two linear layers under AdamW; logs train/loss and val/loss."""

    def __init__(self, *, dropout: float = 0.5):
        super().__init__()
        self.net = nn.Sequential(nn.Linear(8, 16), nn.Dropout(dropout), nn.Linear(16, 1))

    def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        loss = self.net(batch).square().mean()
        self.log("train/loss", loss)
        return loss

    def validation_step(self, batch: Tensor, batch_idx: int) -> None:
        self.log("val/loss", self.net(batch).square().mean())

    def configure_optimizers(self) -> Any:
        optimizer = torch.optim.AdamW(self.parameters(), lr=1e-2)
        schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 1 / (1 + step))
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": schedule, "interval": "step"}}


class TinyBatches:
    """Batches of a fixed random matrix, in order: for validation."""

    def __init__(self, *, num_batches: int = 2, batch_size: int = 4):
        self.num_batches = num_batches
        self.data = torch.randn(num_batches * batch_size, 8, generator=torch.Generator().manual_seed(1))

    def __len__(self) -> int:
        return self.num_batches

    def __iter__(self) -> Iterator[Tensor]:
        yield from self.data.chunk(self.num_batches)


class TinyLoader(TinyBatches):
    """The same in an order that depends on the epoch; can go on in the middle of one."""

    def __init__(self, *, num_batches: int = 6, batch_size: int = 4):
        super().__init__(num_batches=num_batches, batch_size=batch_size)
        self.epoch = self.start = self.position = 0

    def __iter__(self) -> Iterator[Tensor]:
        order = torch.randperm(self.num_batches, generator=torch.Generator().manual_seed(self.epoch))
        chunks = self.data.chunk(self.num_batches)
        for position in range(self.start, self.num_batches):
            self.position = position + 1
            yield chunks[order[position]]

    @property
    def sampler(self) -> "TinyLoader":
        """Where Lightning looks for `set_epoch`."""
        return self

    def set_epoch(self, epoch: int) -> None:
        if epoch != self.epoch:
            self.epoch, self.start, self.position = epoch, 0, 0

    def state_dict(self) -> dict[str, int]:
        return {"epoch": self.epoch, "position": self.position}

    def load_state_dict(self, state: dict[str, int]) -> None:
        self.epoch, self.start, self.position = state["epoch"], state["position"], state["position"]


def tiny_trainer(**options: Any) -> L.Trainer:
    """A silent CPU trainer that writes nothing unless asked to."""
    defaults: dict[str, Any] = {
        "accelerator": "cpu",
        "max_steps": 8,
        "logger": False,
        "enable_checkpointing": False,
        "enable_progress_bar": False,
        "enable_model_summary": False,
        "log_every_n_steps": 1,
        "num_sanity_val_steps": 0,
    }
    return L.Trainer(**(defaults | options))
