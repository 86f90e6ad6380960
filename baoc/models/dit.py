"""Diffusion transformer of Peebles & Xie 2023 (adaLN-Zero), for images and latents with class labels.

This is not diffusers' implementation, which repeats timestep and class embedders in every layer (39.8M parameters for
DiT-S/2 instead of 32.9M). It differs from the published network in two points: there is no learned variance (half of
the last layer's outputs), and the fixed positions are a buffer instead of a parameter.
"""

import math
import re
from collections.abc import Mapping
from contextlib import nullcontext
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from baoc.errors import BadInputError
from baoc.models.construction import group_by_block
from baoc.types import ImageDataSpec

FREQUENCIES = 256  # values of the sinusoidal embedding of a timestep
_LAYER = re.compile(r"^layers\.(\d+)\.(attention|mlp|modulation)\.")


def build(settings: Mapping[str, int], *, spec: Any) -> "DiffusionTransformer":
    """`settings` of a size: width, depth, heads, and either patch or max_grid (patches per side)."""
    if not isinstance(spec, ImageDataSpec):
        raise BadInputError(f"model dit denoises images; a data set described by {type(spec).__name__} has none")
    return DiffusionTransformer(settings, spec=spec)


class DiffusionTransformer(nn.Module):
    """(images (B, channels, image_size, image_size), timesteps (B,), labels (B,)) -> prediction of the images' shape.

    Label `null_label` (= `num_classes`) stands for no label, for classifier-free guidance. `checkpoint_units` are the
    modules whose activations may be recomputed.
    """

    def __init__(self, settings: Mapping[str, int], *, spec: ImageDataSpec):
        super().__init__()
        width, heads, channels = settings["width"], settings["heads"], spec.channels
        patch_size = settings.get("patch") or max(2, -(-spec.image_size // settings["max_grid"]))
        assert width % heads == 0 and width % 4 == 0
        self.image_size = -(-spec.image_size // patch_size) * patch_size
        self.patch_size = patch_size
        self.channels = channels
        self.num_classes = self.null_label = spec.num_classes
        self.patch_embed = nn.Conv2d(channels, width, kernel_size=patch_size, stride=patch_size)
        self.time_embed = TimeEmbedding(width)
        self.label_embed = nn.Embedding(spec.num_classes + 1, width)
        self.layers = nn.ModuleList(Layer(width, heads=heads) for _ in range(settings["depth"]))
        self.final = FinalLayer(width, num_outputs=patch_size**2 * channels)
        positions = grid_positions(self.image_size // patch_size, width=width)
        self.register_buffer("positions", positions, persistent=False)
        self._initialise()

    @property
    def checkpoint_units(self) -> list[nn.Module]:
        return list(self.layers)

    def forward(self, images: Tensor, timesteps: Tensor, labels: Tensor) -> Tensor:
        tokens = self.patch_embed(images).flatten(2).transpose(1, 2) + self.positions
        condition = F.silu(self.time_embed(timesteps) + self.label_embed(labels))
        for layer in self.layers:
            tokens = layer(tokens, condition)
        return self.unpatchify(self.final(tokens, condition))

    def parameter_blocks(self) -> dict[str, tuple[str, ...]]:
        """See `group_by_block`: attention, mlp, modulation and norm of `layers.N`; norms have no weights here."""
        return group_by_block(self, _block_of)

    def unpatchify(self, tokens: Tensor) -> Tensor:
        """(B, grid * grid, patch * patch * channels) -> (B, channels, image_size, image_size)."""
        grid, patch = self.image_size // self.patch_size, self.patch_size
        pixels = tokens.view(-1, grid, grid, patch, patch, self.channels)
        return pixels.permute(0, 5, 1, 3, 2, 4).reshape(-1, self.channels, self.image_size, self.image_size)

    def _initialise(self) -> None:
        """The published initialisation: Xavier matrices, small embeddings, and zero gates of the residual branches.

        The network starts as the identity on tokens, with output 0.
        """
        for module in self.modules():
            if isinstance(module, nn.Linear | nn.Conv2d):
                nn.init.xavier_uniform_(module.weight.view(module.weight.shape[0], -1))
                assert module.bias is not None
                nn.init.zeros_(module.bias)
        for module in (self.label_embed, self.time_embed.first, self.time_embed.second):
            nn.init.normal_(module.weight, std=0.02)
        nn.init.zeros_(self.final.modulation.weight)
        nn.init.zeros_(self.final.linear.weight)
        for layer in self.layers:
            assert isinstance(layer, Layer)
            nn.init.zeros_(layer.modulation.weight)


class TimeEmbedding(nn.Module):
    """Timesteps (B,) -> (B, width)."""

    def __init__(self, width: int):
        super().__init__()
        self.first = nn.Linear(FREQUENCIES, width)
        self.second = nn.Linear(width, width)

    def forward(self, timesteps: Tensor) -> Tensor:
        frequencies = sinusoids(timesteps, width=FREQUENCIES).to(self.first.weight.dtype)
        return self.second(F.silu(self.first(frequencies)))


class Layer(nn.Module):
    """Attention and MLP on tokens (B, N, width); shift, scale and gate of both come from the condition (B, width)."""

    def __init__(self, width: int, *, heads: int):
        super().__init__()
        self.attention = Attention(width, heads=heads)
        self.mlp = nn.Sequential(nn.Linear(width, 4 * width), nn.GELU(approximate="tanh"), nn.Linear(4 * width, width))
        self.modulation = nn.Linear(width, 6 * width)

    def forward(self, tokens: Tensor, condition: Tensor) -> Tensor:
        parts = self.modulation(condition).unsqueeze(1).chunk(6, dim=-1)
        shift, scale, gate = parts[:3]
        tokens = tokens + gate * self.attention(modulated_norm(tokens, shift=shift, scale=scale))
        shift, scale, gate = parts[3:]
        return tokens + gate * self.mlp(modulated_norm(tokens, shift=shift, scale=scale))


class Attention(nn.Module):
    def __init__(self, width: int, *, heads: int):
        super().__init__()
        self.heads = heads
        self.qkv = nn.Linear(width, 3 * width)
        self.out = nn.Linear(width, width)

    def forward(self, tokens: Tensor) -> Tensor:
        batch, length, width = tokens.shape
        qkv = self.qkv(tokens).view(batch, length, 3, self.heads, width // self.heads)
        query, key, value = qkv.permute(2, 0, 3, 1, 4)
        mixed = F.scaled_dot_product_attention(query, key, value)
        return self.out(mixed.transpose(1, 2).reshape(batch, length, width))


class FinalLayer(nn.Module):
    """(B, N, width) -> (B, N, num_outputs), the values of each patch."""

    def __init__(self, width: int, *, num_outputs: int):
        super().__init__()
        self.modulation = nn.Linear(width, 2 * width)
        self.linear = nn.Linear(width, num_outputs)

    def forward(self, tokens: Tensor, condition: Tensor) -> Tensor:
        shift, scale = self.modulation(condition).unsqueeze(1).chunk(2, dim=-1)
        return self.linear(modulated_norm(tokens, shift=shift, scale=scale))


def modulated_norm(tokens: Tensor, *, shift: Tensor, scale: Tensor) -> Tensor:
    """LayerNorm without weights, then scale and shift.

    Under autocast the norm returns float32. It is cast to the dtype of the following matmul, so that backward keeps
    half the bytes. bf16 tokens stay bf16.
    """
    with torch.autocast(tokens.device.type, enabled=False) if tokens.dtype is torch.bfloat16 else nullcontext():
        normed = F.layer_norm(tokens, tokens.shape[-1:], eps=1e-6).to(scale.dtype)
    return torch.addcmul(shift, normed, 1 + scale)


def sinusoids(positions: Tensor, *, width: int) -> Tensor:
    """(N,) -> (N, width) float32: cosines, then sines, of wavelengths from 2 pi to 20,000 pi (Vaswani et al. 2017)."""
    half = width // 2
    exponents = torch.arange(half, dtype=torch.float32, device=positions.device) / half
    angles = positions.float()[:, None] * torch.exp(-math.log(10_000) * exponents)
    return torch.cat((angles.cos(), angles.sin()), dim=-1)


def grid_positions(grid: int, *, width: int) -> Tensor:
    """(grid * grid, width): half of the values encode the column of a patch, half its row."""
    steps = torch.arange(grid, dtype=torch.float32)
    rows, columns = torch.meshgrid(steps, steps, indexing="ij")
    return torch.cat([sinusoids(part.flatten(), width=width // 2) for part in (columns, rows)], dim=-1)


def _block_of(name: str, num_dims: int) -> str:
    layer = _LAYER.match(name)
    if layer is not None:
        return f"layers.{layer.group(1)}.{'norm' if num_dims < 2 else layer.group(2)}"
    if num_dims < 2:
        return "norm"
    if name.startswith("final."):
        return "final.modulation" if "modulation" in name else "head"
    return "embedding"
