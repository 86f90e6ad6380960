"""Networks of kinds that the measured table has not: convolutional ones, a recurrent one, and a GPT of another layout
and width.

    python run.py model=experiments/benchmarks/own_networks.py:conv dataset=fashion_mnist budget=state_15 race=600

The list own_runs.tsv trains them (listed_runs.py).
"""

import torch
from torch import Tensor, nn
from torch.nn import functional as F


def conv(num_classes: int, channels: int = 1, width: int = 32) -> nn.Module:
    def stage(inputs: int, outputs: int) -> nn.Module:
        layers = nn.Conv2d(inputs, outputs, 3, padding=1, bias=False), nn.GroupNorm(4, outputs), nn.GELU()
        return nn.Sequential(*layers)

    return nn.Sequential(
        stage(channels, width), nn.AvgPool2d(2), stage(width, 2 * width), stage(2 * width, 2 * width), nn.AvgPool2d(2),
        stage(2 * width, 4 * width), nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(4 * width, num_classes),
    )  # fmt: skip


class Residual(nn.Module):
    def __init__(self, inputs: int, outputs: int, stride: int):
        super().__init__()
        self.conv1 = nn.Conv2d(inputs, outputs, 3, stride, padding=1, bias=False)
        self.conv2 = nn.Conv2d(outputs, outputs, 3, padding=1, bias=False)
        self.bn1, self.bn2 = nn.BatchNorm2d(outputs), nn.BatchNorm2d(outputs)
        self.skip = nn.Conv2d(inputs, outputs, 1, stride, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        inner = self.bn2(self.conv2(F.relu(self.bn1(self.conv1(x)))))
        return F.relu(self.skip(x) + inner)


def resnet(num_classes: int, channels: int = 1, width: int = 24) -> nn.Module:
    """Residual blocks with BatchNorm, as in ResNet."""
    stages = [Residual(inputs * width, 2 * inputs * width, 2) for inputs in (1, 2)]
    return nn.Sequential(
        nn.Conv2d(channels, width, 3, padding=1, bias=False), nn.BatchNorm2d(width), nn.ReLU(),
        Residual(width, width, 1), *stages, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(4 * width, num_classes),
    )  # fmt: skip


def depthwise(num_classes: int, channels: int = 3, width: int = 24) -> nn.Module:
    """Depthwise-separable convolutions with BatchNorm, as in MobileNet."""

    def stage(inputs: int, outputs: int) -> nn.Module:
        each = nn.Conv2d(inputs, inputs, 3, padding=1, groups=inputs, bias=False), nn.BatchNorm2d(inputs), nn.ReLU()
        across = nn.Conv2d(inputs, outputs, 1, bias=False), nn.BatchNorm2d(outputs), nn.ReLU()
        return nn.Sequential(*each, *across, nn.AvgPool2d(2))

    return nn.Sequential(
        nn.Conv2d(channels, width, 1), stage(width, 2 * width), stage(2 * width, 4 * width), nn.AdaptiveAvgPool2d(1),
        nn.Flatten(), nn.Linear(4 * width, num_classes),
    )  # fmt: skip


class GRU(nn.Module):
    """Two recurrent layers over bytes; embedding and head are two matrices."""

    def __init__(self, vocab_size: int, width: int):
        super().__init__()
        self.tok, self.head = nn.Embedding(vocab_size, width), nn.Linear(width, vocab_size)
        self.rnn = nn.GRU(width, width, num_layers=2, batch_first=True)

    def forward(self, input_ids: Tensor) -> Tensor:
        return self.head(self.rnn(self.tok(input_ids))[0])


def gru(vocab_size: int, sequence_length: int, width: int = 256) -> nn.Module:
    return GRU(vocab_size, width)


class Layer(nn.Module):
    def __init__(self, width: int, heads: int):
        super().__init__()
        self.heads = heads
        self.norm1, self.norm2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.qkv, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def forward(self, x: Tensor) -> Tensor:
        b, t, w = x.shape
        q, k, v = self.qkv(self.norm1(x)).view(b, t, 3, self.heads, w // self.heads).permute(2, 0, 3, 1, 4)
        mixed = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.out(mixed.transpose(1, 2).reshape(b, t, w))
        return x + self.down(F.gelu(self.up(self.norm2(x))))


class GPT(nn.Module):
    """Learned positions, biases, fused q, k and v, as in GPT-2; embedding and head are two matrices."""

    def __init__(self, vocab_size: int, sequence_length: int, width: int, depth: int):
        super().__init__()
        self.tok, self.pos = nn.Embedding(vocab_size, width), nn.Embedding(sequence_length, width)
        self.layers = nn.ModuleList(Layer(width, 4) for _ in range(depth))
        self.norm, self.head = nn.LayerNorm(width), nn.Linear(width, vocab_size, bias=False)
        for table in (self.tok, self.pos):
            nn.init.normal_(table.weight, std=0.02)

    def forward(self, input_ids: Tensor) -> Tensor:
        x = self.tok(input_ids) + self.pos(torch.arange(input_ids.shape[1], device=input_ids.device))
        for layer in self.layers:
            x = layer(x)
        return self.head(self.norm(x))


def gpt(vocab_size: int, sequence_length: int, width: int = 160, depth: int = 4) -> nn.Module:
    return GPT(vocab_size, sequence_length, width, depth)
