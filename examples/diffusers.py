"""A UNet of diffusers that learns to take noise away, with a scheduler of diffusers and an average of the weights.
`python examples/diffusers.py state_25`."""

import os
import sys

if os.path.realpath(sys.path[0]) == os.path.dirname(os.path.realpath(__file__)):
    del sys.path[0]  # scripts beside this one have the names of libraries
import torch
from diffusers import DDPMScheduler, UNet2DModel
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn

from baoc import BaocOptimizer  # line 1


def main(budget: str = "state_25", steps: int = 20) -> None:
    torch.manual_seed(0)
    device = "cuda" if torch.cuda.is_available() else "cpu"
    model = UNet2DModel(
        sample_size=8,
        in_channels=1,
        out_channels=1,
        layers_per_block=1,
        block_out_channels=(16, 32),
        norm_num_groups=8,
        down_block_types=("DownBlock2D", "AttnDownBlock2D"),
        up_block_types=("AttnUpBlock2D", "UpBlock2D"),
    ).to(device)
    noise_scheduler = DDPMScheduler(num_train_timesteps=100)
    optimizer = BaocOptimizer(model, budget=budget, lr=2e-3, weight_decay=1e-2)  # line 2
    schedule = torch.optim.lr_scheduler.LinearLR(optimizer, start_factor=0.1, total_iters=5)
    average = AveragedModel(model, multi_avg_fn=get_ema_multi_avg_fn(0.95))
    loss = torch.zeros(())
    for _ in range(steps):
        images = torch.linspace(-1, 1, 8, device=device).expand(16, 1, 8, 8) * torch.randn(16, 1, 1, 1, device=device)
        noise, times = torch.randn_like(images), torch.randint(0, 100, (16,), device=device)
        predicted = model(noise_scheduler.add_noise(images, noise, times), times).sample
        loss = (predicted - noise).square().mean()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        schedule.step()
        optimizer.zero_grad()
        average.update_parameters(model)
    print(f"loss {loss.item():.4f}")


if __name__ == "__main__":
    main(*sys.argv[1:2])
