"""A small network of like layers, and the gradients that a batch gives it."""

from typing import Any

import torch
from torch import Tensor, nn


class Layer(nn.Module):
    def __init__(self, width: int = 8, *, dropout: float = 0.0, normed: bool = False):
        super().__init__()
        self.up, self.down = nn.Linear(width, 2 * width), nn.Linear(2 * width, width)
        self.dropout, self.norm = nn.Dropout(dropout), nn.BatchNorm1d(width) if normed else nn.Identity()

    def forward(self, tokens: Tensor) -> Tensor:
        return tokens + self.dropout(self.down(torch.tanh(self.up(self.norm(tokens)))))


class Net(nn.Module):
    def __init__(self, depth: int = 4, **given: Any):
        super().__init__()
        self.embed, self.head = nn.Linear(3, 8), nn.Linear(8, 2)
        self.layers = nn.ModuleList(Layer(**given) for _ in range(depth))

    def forward(self, inputs: Tensor) -> Tensor:
        tokens = self.embed(inputs)
        for layer in self.layers:
            tokens = layer(tokens)
        return self.head(tokens)


def gradients(net: nn.Module, inputs: Tensor) -> list[Tensor]:
    net.zero_grad(set_to_none=True)
    torch.manual_seed(7)  # of dropout
    net(inputs).square().sum().backward()
    return [param.grad for param in net.parameters() if param.grad is not None]
