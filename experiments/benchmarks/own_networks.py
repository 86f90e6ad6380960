"""Networks of kinds that the measured table has not: a convolutional net, and a GPT with another layout and width.

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
