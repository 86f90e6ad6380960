"""Images drawn by number, 40 million of a kind under noise: waves in ten directions, coloured rings of eight sizes.
`race=auto` was tried on them, with the small convolutional net below and others.

python run.py model=experiments/benchmarks/waves.py:net dataset=experiments/benchmarks/waves.py:data batch_size=32 \
    trainer.max_steps=600000 budget=state_15 race=auto race.least_run_s=300 race.workers=2
python run.py model=experiments/benchmarks/own_networks.py:depthwise dataset=experiments/benchmarks/waves.py:rings \
    batch_size=16 trainer.max_steps=400000 budget=state_15 race=auto race.least_run_s=300 race.workers=2
"""

from typing import Any

import torch
from torch import Tensor, nn


def net(num_classes: int, channels: int = 1, width: int = 16) -> nn.Module:
    def stage(before: int, after: int) -> nn.Module:
        conv = nn.Conv2d(before, after, 3, padding=1, bias=False)
        return nn.Sequential(conv, nn.GroupNorm(4, after), nn.GELU(), nn.AvgPool2d(2))

    last = [nn.Conv2d(2 * width, 4 * width, 3, padding=1), nn.GELU(), nn.AdaptiveAvgPool2d(1), nn.Flatten()]
    return nn.Sequential(stage(channels, width), stage(width, 2 * width), *last, nn.Linear(4 * width, num_classes))


class Waves(torch.utils.data.Dataset[tuple[Tensor, int]]):
    """Each image is drawn by its number: a direction, which is its class, a phase, and noise."""

    def __init__(self, start: int, count: int):
        self.start, self.count = start, count

    def __len__(self) -> int:
        return self.count

    def __getitem__(self, index: int) -> tuple[Tensor, int]:
        random = torch.Generator().manual_seed(self.start + index)
        label = int(torch.randint(10, (1,), generator=random))
        y, x = torch.meshgrid(torch.arange(16.0), torch.arange(16.0), indexing="ij")
        angle = torch.rand(1, generator=random) * 0.35 + label * 0.314
        phase = torch.rand(1, generator=random) * 6.3
        wave = torch.sin((x * angle.cos() + y * angle.sin()) * 1.1 + phase)
        return (wave + 0.9 * torch.randn(16, 16, generator=random))[None], label


class Rings(Waves):
    """A ring of a radius, which is its class, at some place, in some colour."""

    def __getitem__(self, index: int) -> tuple[Tensor, int]:
        drawn = torch.rand(6, generator=(random := torch.Generator().manual_seed(self.start + index)))
        label = int(drawn[0] * 8)
        y, x = torch.meshgrid(torch.arange(16.0), torch.arange(16.0), indexing="ij")
        radius = ((x - 5 - 6 * drawn[1]) ** 2 + (y - 5 - 6 * drawn[2]) ** 2).sqrt()
        ring = torch.exp(-((radius - 1.2 - 0.7 * label) ** 2))
        return ring * (0.5 + drawn[3:, None, None]) + 0.5 * torch.randn(3, 16, 16, generator=random), label


def rings(seed: int = 0) -> tuple[Rings, Rings, dict[str, Any]]:
    return Rings(0, 40_000_000), Rings(50_000_000, 512), {"num_classes": 8}


def data(seed: int = 0) -> tuple[Waves, Waves, dict[str, Any]]:
    return Waves(0, 40_000_000), Waves(50_000_000, 512), {"num_classes": 10}
