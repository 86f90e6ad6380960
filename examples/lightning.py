"""A LightningModule of your own inside a budget: `python examples/lightning.py state_25`. Two lines are BAOC's."""

import os
import sys

if os.path.realpath(sys.path[0]) == os.path.dirname(os.path.realpath(__file__)):
    del sys.path[0]  # scripts beside this one have the names of libraries
import lightning as L
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

from baoc import BaocStrategy  # line 1


class Autoencoder(L.LightningModule):
    def __init__(self):
        super().__init__()
        self.encoder = nn.Sequential(nn.Linear(64, 128), nn.GELU(), nn.Linear(128, 8))
        self.decoder = nn.Sequential(nn.Linear(8, 128), nn.GELU(), nn.Linear(128, 64))

    def training_step(self, batch: list[Tensor], batch_idx: int) -> Tensor:
        loss = (self.decoder(self.encoder(batch[0])) - batch[0]).square().mean()
        self.log("train/loss", loss)
        return loss

    def configure_optimizers(self):
        decayed = [p for p in self.parameters() if p.ndim > 1]
        others = [p for p in self.parameters() if p.ndim <= 1]
        groups = [{"params": decayed, "weight_decay": 0.1}, {"params": others, "weight_decay": 0.0}]
        optimizer = torch.optim.AdamW(groups, lr=3e-3)
        return [optimizer], [torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, 10)]


def main(budget: str = "state_25", steps: int = 60) -> None:
    torch.manual_seed(0)
    data = DataLoader(TensorDataset(torch.randn(256, 8) @ torch.randn(8, 64)), batch_size=32, shuffle=True)
    trainer = L.Trainer(
        strategy=BaocStrategy(budget),  # line 2
        max_steps=steps,
        gradient_clip_val=1.0,
        accelerator="auto",
        devices=1,
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
    )
    trainer.fit(Autoencoder(), data)
    print(f"loss {trainer.callback_metrics['train/loss']:.4f}")


if __name__ == "__main__":
    main(*sys.argv[1:2])
