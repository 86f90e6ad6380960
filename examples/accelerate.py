"""A loop on accelerate: accumulation, clipping, saving and going on. `python examples/accelerate.py state_25`."""

import os
import sys
import tempfile

if os.path.realpath(sys.path[0]) == os.path.dirname(os.path.realpath(__file__)):
    del sys.path[0]  # scripts beside this one have the names of libraries
import torch
from accelerate import Accelerator
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from baoc import BaocOptimizer  # line 1


def main(budget: str = "state_25", epochs: int = 3) -> None:
    torch.manual_seed(0)
    accelerator = Accelerator(gradient_accumulation_steps=2)
    model = nn.Sequential(nn.Linear(32, 128), nn.LayerNorm(128), nn.GELU(), nn.Linear(128, 4))
    model.to(accelerator.device)  # where it is planned for
    optimizer = BaocOptimizer(model, budget=budget, lr=3e-3, weight_decay=0.1)  # line 2
    x = torch.randn(512, 32)
    loader = DataLoader(TensorDataset(x, x[:, :4].argmax(1)), batch_size=16, shuffle=True)
    schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, epochs * len(loader) // 2)
    model, optimizer, loader, schedule = accelerator.prepare(model, optimizer, loader, schedule)
    loss = torch.zeros(())
    with tempfile.TemporaryDirectory() as folder:
        for epoch in range(epochs):
            for inputs, labels in loader:
                with accelerator.accumulate(model):
                    loss = nn.functional.cross_entropy(model(inputs), labels)
                    accelerator.backward(loss)
                    if accelerator.sync_gradients:
                        accelerator.clip_grad_norm_(model.parameters(), 1.0)
                    optimizer.step()
                    schedule.step()
                    optimizer.zero_grad()
            accelerator.save_state(folder)
            accelerator.load_state(folder)
            print(f"epoch {epoch}: loss {loss.item():.4f}")


if __name__ == "__main__":
    main(*sys.argv[1:2])
