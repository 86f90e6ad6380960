"""The three tasks of recipe_study.py: their networks, the data of every step, and what is held out.

What a seed decides (first weights, and which samples, shifts, timesteps and noise each step sees) is drawn before the
run, on the CPU, so it is the same for every recipe and machine and a step asks nothing of the host. Held out are two
parts: `choice` decides between rates, `report` is told and chooses nothing.
"""

import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Generator, Tensor, nn
from torch.nn import functional as F

from baoc.data.python_library import read_python_library
from baoc.models.dit import DiffusionTransformer
from baoc.models.vit import VisionTransformer

Plan = dict[str, Tensor]  # name -> [steps, ...]: what each step sees
PARTS = ("choice", "report")
TINY = {"width": 16, "depth": 1, "heads": 2}  # of networks that only try the script out


class Language:
    """Bytes of the frozen Python library by a Llama; bits per byte. The last 8 % are held out, half for each part."""

    name, unit, steps, ceiling = "language", "bits/byte", 600, 8.0  # ceiling: what an untrained network reaches

    def __init__(self, device: torch.device, *, tiny: bool = False, fashion: Path | None = None):
        self.device, self.tiny = device, tiny
        self.batch, self.length = (2, 32) if tiny else (32, 256)
        text = torch.frombuffer(bytearray(read_python_library()), dtype=torch.uint8).to(device)
        cut = int(len(text) * 0.92)
        self.train, held = text[:cut], text[cut:]
        self.windows = torch.arange(self.length + 1, device=device)
        num, half = (2 if tiny else 256), len(held) // 2
        starts = torch.arange(num, device=device) * (half - self.length - 1) // num
        self.held = {part: held[place * half + starts[:, None] + self.windows] for place, part in enumerate(PARTS)}

    def build(self) -> nn.Module:
        from transformers import AttentionInterface, LlamaConfig, LlamaForCausalLM

        AttentionInterface.register("causal_only", causal_only)
        width, depth, heads = (16, 1, 2) if self.tiny else (320, 6, 5)
        return LlamaForCausalLM(
            LlamaConfig(
                vocab_size=256,
                hidden_size=width,
                intermediate_size=round(2.7 * width),
                num_hidden_layers=depth,
                num_attention_heads=heads,
                tie_word_embeddings=False,
                max_position_embeddings=self.length,
                use_cache=False,
                attn_implementation="causal_only",
            )
        )

    def plan(self, generator: Generator, steps: int) -> Plan:
        highest = len(self.train) - self.length - 1
        return {"start": torch.randint(highest, (steps, self.batch), generator=generator)}

    def loss(self, model: nn.Module, step: Plan) -> Tensor:
        return self._nats(model, self.train[step["start"][:, None] + self.windows])

    def evaluate(self, model: nn.Module, part: str) -> Tensor:
        """[value, nan]"""
        nats = torch.stack([self._nats(model, rows) for rows in self.held[part].split(64)]).mean()
        return torch.stack([nats / math.log(2), torch.full_like(nats, math.nan)])

    def _nats(self, model: nn.Module, rows: Tensor) -> Tensor:
        rows = rows.long()
        # Without autocast's cache of lowered weights, which a captured graph could not refresh.
        with torch.autocast(self.device.type, torch.bfloat16, enabled=not self.tiny, cache_enabled=False):
            logits = model(input_ids=rows[:, :-1]).logits
        return F.cross_entropy(logits.float().flatten(0, 1), rows[:, 1:].flatten())


class Diffusion:
    """Noise in the 8x8 digits by a DiT; MSE with noise that stays. A fifth of the images is held out."""

    name, unit, steps, ceiling = "diffusion", "MSE", 800, 1.0
    batch, repeats = 64, 8

    def __init__(self, device: torch.device, *, tiny: bool = False, fashion: Path | None = None):
        self.device, self.tiny = device, tiny
        import baoc

        assert baoc.__file__ is not None
        stored = np.load(Path(baoc.__file__).parent / "data" / "digits.npz")
        images = torch.tensor(stored["images"]).float().reshape(-1, 1, 8, 8)
        self.images = ((images - images.mean()) / images.std()).to(device)
        self.labels = torch.tensor(stored["labels"]).long().to(device)
        order = torch.randperm(len(images), generator=Generator().manual_seed(123)).to(device)
        held, self.train = order[: len(images) // 5], order[len(images) // 5 :]
        angles = torch.linspace(0, 1, 1001)[:-1] * math.pi / 2
        self.kept = angles.cos().square().clamp(1e-4, 1).to(device)  # of the signal's variance, by timestep
        parts = zip(PARTS, held.chunk(2), strict=True)
        self.held = {part: self._fixed(rows, seed=5 + at) for at, (part, rows) in enumerate(parts)}

    def _fixed(self, rows: Tensor, *, seed: int) -> Plan:
        rows = rows[:4] if self.tiny else rows.repeat(self.repeats)
        return {"index": rows, **self._noise((len(rows),), Generator().manual_seed(seed))}

    def _noise(self, shape: tuple[int, ...], generator: Generator) -> Plan:
        time = torch.randint(1000, shape, generator=generator)
        return {
            "time": time.to(self.device),
            "noise": torch.randn((*shape, 1, 8, 8), generator=generator).to(self.device),
        }

    def build(self) -> nn.Module:
        size = TINY if self.tiny else {"width": 192, "depth": 6, "heads": 6}
        return DiffusionTransformer(**size, patch_size=2, image_size=8, channels=1, num_classes=10)

    def plan(self, generator: Generator, steps: int) -> Plan:
        rows = torch.randint(len(self.train), (steps, self.batch), generator=generator).to(self.device)
        return {"index": self.train[rows], **self._noise((steps, self.batch), generator)}

    def loss(self, model: nn.Module, step: Plan) -> Tensor:
        kept = self.kept[step["time"]].view(-1, 1, 1, 1)
        noisy = kept.sqrt() * self.images[step["index"]] + (1 - kept).sqrt() * step["noise"]
        return F.mse_loss(model(noisy, step["time"], self.labels[step["index"]]), step["noise"])

    def evaluate(self, model: nn.Module, part: str) -> Tensor:
        """[value, nan]"""
        mse = self.loss(model, self.held[part])
        return torch.stack([mse, torch.full_like(mse, math.nan)])


class Vision:
    """Fashion-MNIST by a ViT; cross-entropy and accuracy. `report` is the official test split of 10,000 images,
    `choice` the last 5,000 of the training split. Training images are mirrored and moved by up to 2 pixels."""

    name, unit, steps, ceiling = "vision", "nats", 600, math.log(10)
    batch, moved = 128, 2

    def __init__(self, device: torch.device, *, tiny: bool = False, fashion: Path | None = None):
        self.device, self.tiny = device, tiny
        stored = read_fashion(fashion)
        images, labels = (torch.tensor(stored[f"train_{what}"]).to(device) for what in ("images", "labels"))
        self.padded = F.pad(images, (self.moved,) * 4)
        self.labels, self.num_train = labels.long(), len(images) - 5000
        test = (torch.tensor(stored[f"test_{what}"]).to(device) for what in ("images", "labels"))
        pairs = {"choice": (images[-5000:], labels[-5000:]), "report": tuple(test)}
        few = 64 if tiny else None
        self.held = {part: (seen[:few], truth[:few].long()) for part, (seen, truth) in pairs.items()}
        self.pixels = torch.arange(28, device=device)

    def build(self) -> nn.Module:
        size = TINY if self.tiny else {"width": 192, "depth": 6, "heads": 6}
        patch = 14 if self.tiny else 4
        return VisionTransformer(**size, patch_size=patch, image_size=28, channels=1, num_classes=10)

    def plan(self, generator: Generator, steps: int) -> Plan:
        shape = (steps, self.batch)
        return {
            "index": torch.randint(self.num_train, shape, generator=generator),
            "down": torch.randint(2 * self.moved + 1, shape, generator=generator),
            "right": torch.randint(2 * self.moved + 1, shape, generator=generator),
            "mirrored": torch.randint(2, shape, generator=generator),
        }

    def loss(self, model: nn.Module, step: Plan) -> Tensor:
        columns = torch.where(step["mirrored"][:, None] == 1, 27 - self.pixels, self.pixels) + step["right"][:, None]
        rows = self.pixels + step["down"][:, None]
        images = self.padded[step["index"][:, None, None], rows[:, :, None], columns[:, None, :]]
        return F.cross_entropy(model(_normal(images)), self.labels[step["index"]])

    def evaluate(self, model: nn.Module, part: str) -> Tensor:
        """[value, accuracy]"""
        images, truth = self.held[part]
        logits = torch.cat([model(_normal(some)) for some in images.split(2500)])
        return torch.stack([F.cross_entropy(logits, truth), (logits.argmax(1) == truth).float().mean()])


TASKS: Mapping[str, Any] = {task.name: task for task in (Language, Diffusion, Vision)}


def causal_only(
    module: nn.Module, query: Tensor, key: Tensor, value: Tensor, attention_mask: None, *, scaling: float, **_: Any
) -> tuple[Tensor, None]:
    """torch's causal attention on (B, heads, T, size). The library's own looks for packed sequences first, by values on
    the device: a wait in every step, and under capture a mask for every layer."""
    assert attention_mask is None
    mixed = F.scaled_dot_product_attention(query, key, value, is_causal=True, scale=scaling)
    return mixed.transpose(1, 2).contiguous(), None


def _normal(images: Tensor) -> Tensor:
    """uint8 (B, 28, 28) -> (B, 1, 28, 28), mean 0 and variance 1 over the set."""
    return ((images.float() / 255 - 0.2860) / 0.3530)[:, None]


def read_fashion(path: Path | None) -> Mapping[str, np.ndarray]:
    """train_images, train_labels, test_images, test_labels from an .npz of these or a folder of the four IDX files."""
    from baoc.data.idx import FASHION_MNIST, read_idx

    path = path or FASHION_MNIST
    if path.is_file():
        return dict(np.load(path))
    names = {"train": "train", "test": "t10k"}
    kinds = {"images": ("images-idx3-ubyte.gz", 3), "labels": ("labels-idx1-ubyte.gz", 1)}
    return {
        f"{split}_{kind}": read_idx(path / f"{prefix}-{name}", dims=dims)
        for split, prefix in names.items()
        for kind, (name, dims) in kinds.items()
    }
