"""An optimizer that other code builds, as timm's `create_optimizer_v2(model, opt="adamw")` does: groups without names,
a multiple of the rate per layer. `python examples/timm_like.py state_25`."""

import os
import sys

if os.path.realpath(sys.path[0]) == os.path.dirname(os.path.realpath(__file__)):
    del sys.path[0]  # scripts beside this one have the names of libraries
import torch
from torch import nn

from baoc import BaocOptimizer  # line 1


def create_optimizer(model: nn.Module, *, lr: float, weight_decay: float, layer_decay: float) -> torch.optim.AdamW:
    """AdamW with layer-wise rates and without decay of biases and norms."""
    groups = []
    for depth, layer in enumerate(reversed(list(model.children()))):
        for decays in (True, False):
            params = [param for param in layer.parameters() if (param.ndim > 1) == decays]
            scale = layer_decay**depth
            decay = weight_decay if decays else 0.0
            if params:
                groups.append({"params": params, "lr": lr * scale, "lr_scale": scale, "weight_decay": decay})
    return torch.optim.AdamW(groups, lr=lr)


def main(budget: str = "state_25", steps: int = 60) -> None:
    torch.manual_seed(0)
    model = nn.Sequential(
        nn.Conv2d(3, 32, 3, padding=1), nn.BatchNorm2d(32), nn.GELU(), nn.Conv2d(32, 64, 3, stride=2), nn.GELU(),
        nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(64, 4),
    ).to("cuda" if torch.cuda.is_available() else "cpu")  # fmt: skip
    device = next(model.parameters()).device
    optimizer = create_optimizer(model, lr=3e-3, weight_decay=0.05, layer_decay=0.8)
    optimizer = BaocOptimizer.from_optimizer(optimizer, model, budget=budget)  # line 2
    schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, steps)
    loss = torch.zeros(())
    for _ in range(steps):
        labels = torch.randint(0, 4, (32,), device=device)
        images = torch.randn(32, 3, 16, 16, device=device) + labels.view(-1, 1, 1, 1)
        loss = nn.functional.cross_entropy(model(images), labels, label_smoothing=0.1)
        optimizer.zero_grad()
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        schedule.step()
    print(f"loss {loss.item():.4f}, rates {[round(group['lr_scale'], 3) for group in optimizer.param_groups]}")


if __name__ == "__main__":
    main(*sys.argv[1:2])
