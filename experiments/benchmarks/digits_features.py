"""Makes baoc/tasks/digits_features.npz: the small classifier whose features the Frechet distance of digits is taken on.

    python experiments/benchmarks/digits_features.py

Trained on the training part of the default split alone, for a minute on one core; the file that is kept was made once,
so that distances agree between machines. Prints the accuracy on the held-out part.
"""

import numpy as np
import torch
from torch import nn
from torch.nn import functional as F

from baoc.data import build_data
from baoc.tasks.frechet import FILE, FeatureNet

STEPS, BATCH, LR, NOISE = 3000, 64, 3e-3, 0.1


def main() -> None:
    torch.manual_seed(0)
    data = build_data("digits", task="diffusion", batch_size=BATCH)
    weights = {
        name: nn.Parameter(torch.randn(shape) * (2 / max(1, np.prod(shape[1:]))) ** 0.5 * (len(shape) > 1))
        for name, shape in FeatureNet.SHAPES.items()
    }
    optimizer = torch.optim.AdamW(weights.values(), lr=LR, weight_decay=0.05)
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, LR, total_steps=STEPS)
    step = 0
    while step < STEPS:
        for batch in data.train_dataloader():
            images = batch["images"] + NOISE * torch.randn_like(batch["images"])
            F.cross_entropy(FeatureNet(weights).classify(images), batch["labels"]).backward()
            optimizer.step()
            optimizer.zero_grad()
            step += 1
            if step >= STEPS:
                break
            schedule.step()
    np.savez_compressed(FILE, **{name: weight.detach().half().numpy() for name, weight in weights.items()})
    held_out = {key: torch.cat([batch[key] for batch in data.val_dataloader()]) for key in ("images", "labels")}
    accuracy = (FeatureNet.load().classify(held_out["images"]).argmax(-1) == held_out["labels"]).float().mean()
    print(f"{FILE}: {FILE.stat().st_size} bytes, held-out accuracy {accuracy:.3f}")


if __name__ == "__main__":
    main()
