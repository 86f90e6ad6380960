"""The tasks of role_study.py: the product's smallest networks on data that hardly repeat, for many replicas at once.

A replica is a network of a seed; its first weights, samples, shifts, timesteps and noise follow from the seed alone. So
runs of one seed are paired, whatever recipe they run. Held out are two parts: `choice` chooses, `report` is told.
"""

import lzma
import math
from collections.abc import Iterator, Mapping, Sequence
from hashlib import sha256
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Generator, Tensor, nn
from torch.func import functional_call
from torch.nn import functional as F

from baoc.models import dit, llama, vit
from baoc.types import ImageDataSpec, TextDataSpec
from experiments.analysis.package_text import SHA256

Batch = dict[str, Tensor]
Weights = Mapping[str, Tensor]
_attend = F.scaled_dot_product_attention


class _Attend(torch.autograd.Function):
    """Attention of replicas as one of a larger batch: the library's kernels know nothing of vmap."""

    @staticmethod
    def forward(query: Tensor, key: Tensor, value: Tensor, causal: bool, scale: float | None) -> Tensor:
        return _attend(query, key, value, is_causal=causal, scale=scale)

    @staticmethod
    def setup_context(ctx: Any, inputs: Any, output: Any) -> None:
        del ctx, inputs, output

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:
        raise NotImplementedError("attention is differentiated behind vmap")

    @staticmethod
    def vmap(info: Any, in_dims: Any, query: Tensor, key: Tensor, value: Tensor, causal: bool, scale: Any) -> Any:
        assert in_dims[:3] == (0, 0, 0)
        shape = query.shape
        query, key, value = (part.flatten(0, 1) for part in (query, key, value))
        return _attend(query, key, value, is_causal=causal, scale=scale).view(shape), 0


def attend_replicas(query: Tensor, key: Tensor, value: Tensor, attn_mask: Tensor | None = None, dropout_p: float = 0.0,
                    is_causal: bool = False, scale: float | None = None, **_: Any) -> Tensor:  # fmt: skip
    assert attn_mask is None and not dropout_p
    return _Attend.apply(query, key, value, is_causal, scale)  # pyright: ignore[reportReturnType]


class _PatchLinear(nn.Conv2d):
    """A convolution of patches side by side as a product of matrices: replicas become a batch of those."""

    def forward(self, images: Tensor) -> Tensor:
        size = self.kernel_size[0]
        rows, cols = images.shape[-2] // size, images.shape[-1] // size
        patches = images.unflatten(-2, (rows, size)).unflatten(-1, (cols, size))  # B, C, rows, size, cols, size
        patches = patches.permute(0, 2, 4, 1, 3, 5).flatten(3).flatten(1, 2)
        tokens = F.linear(patches, self.weight.flatten(1), self.bias)
        return tokens.transpose(1, 2).unflatten(2, (rows, cols))


def for_replicas(model: nn.Module) -> nn.Module:
    for module in model.modules():
        if type(module) is nn.Conv2d:
            assert module.kernel_size == module.stride
            module.__class__ = _PatchLinear
    return model


class Task:
    """What is trained. `batch` makes what a step sees of each replica, `loss` is of one replica."""

    name: str
    family: str
    size: str
    unit: str
    batch: int
    ceiling: float  # what an untrained network reaches
    device: torch.device

    def build(self) -> nn.Module:
        raise NotImplementedError

    def plan(self, generator: Generator, steps: int) -> Batch:
        """What each step of a seed sees, on the CPU."""
        raise NotImplementedError

    def seen(self, step: Batch) -> Batch:
        """[replicas, batch, ...] of a step, from its plan [replicas, batch]."""
        raise NotImplementedError

    def loss(self, model: nn.Module, weights: Weights, seen: Batch) -> Tensor:
        raise NotImplementedError

    def held(self, part: str) -> Iterator[Batch]:
        """Chunks of what is held out, of equal sizes."""
        raise NotImplementedError

    def judge(self, model: nn.Module, weights: Weights, seen: Batch) -> Tensor:
        """[value, accuracy] of a chunk."""
        raise NotImplementedError


class Language(Task):
    """Bytes of Python source by a Llama; bits per byte. Held out are whole files."""

    name, family, unit, ceiling = "language", "llama", "bits/byte", 8.0
    length = 128
    sizes: Mapping[str, Any] = {
        "nano": {"width": 96, "hidden": 256, "depth": 4, "heads": 4},
        "mini": {"width": 192, "hidden": 512, "depth": 6, "heads": 6},
        "6m": {"width": 256, "hidden": 704, "depth": 8, "heads": 8},
        "25m": {"width": 512, "hidden": 1376, "depth": 8, "heads": 8},
        "test": {"width": 32, "hidden": 64, "depth": 2, "heads": 2},
    }

    def __init__(self, device: torch.device, *, data: Path, size: str = "nano"):
        self.device, self.size = device, size
        self.batch = 2 if size == "test" else 16
        stored = lzma.decompress((data / "package_text.xz").read_bytes())
        cut, text = int.from_bytes(stored[:8], "big"), stored[8:]
        assert size == "test" or sha256(text).hexdigest() == SHA256, "another text than experiments/analysis makes"
        numbers = torch.frombuffer(bytearray(text), dtype=torch.uint8).to(device)
        self.train, held = numbers[cut:], numbers[:cut]
        self.windows = torch.arange(self.length + 1, device=device)
        num, half = 8 if size == "test" else 256, len(held) // 2
        starts = torch.arange(num, device=device) * (half - self.length - 1) // num
        self.rows = {
            part: held[place * half + starts[:, None] + self.windows] for place, part in enumerate(("choice", "report"))
        }

    def build(self) -> nn.Module:
        from transformers import AttentionInterface

        spec = TextDataSpec(dataset="packages", vocab_size=256, sequence_length=self.length, num_train=0, num_val=1)
        model = llama.build(self.sizes[self.size], spec=spec, source="sizes", name_or_path=None, vocab_size=256)
        AttentionInterface.register("causal_only", causal_only)
        model.net.config._attn_implementation = "causal_only"
        return model

    def plan(self, generator: Generator, steps: int) -> Batch:
        highest = len(self.train) - self.length - 1
        return {"start": torch.randint(highest, (steps, self.batch), generator=generator)}

    def seen(self, step: Batch) -> Batch:
        return {"tokens": self.train[step["start"][..., None] + self.windows].long()}

    def loss(self, model: nn.Module, weights: Weights, seen: Batch) -> Tensor:
        tokens = seen["tokens"]
        logits = functional_call(model, dict(weights), (tokens[:, :-1],))
        return F.cross_entropy(logits.flatten(0, 1), tokens[:, 1:].flatten())

    def held(self, part: str) -> Iterator[Batch]:
        for rows in self.rows[part].split(16):
            yield {"tokens": rows.long()}

    def judge(self, model: nn.Module, weights: Weights, seen: Batch) -> Tensor:
        nats = self.loss(model, weights, seen)
        return torch.stack([nats / math.log(2), torch.full_like(nats, math.nan)])


class _Fashion(Task):
    def __init__(self, device: torch.device, *, data: Path, size: str = "tiny"):
        self.device, self.size = device, size
        self.batch = 4 if size == "test" else 64
        stored = np.load(data / "fashion_mnist.npz")
        few = {"test": 64}.get(size)
        self.images, labels = (torch.tensor(stored[f"train_{what}"]).to(device) for what in ("images", "labels"))
        self.labels, self.num_train = labels.long(), len(self.images) - 5000
        test = (torch.tensor(stored[f"test_{what}"]).to(device)[:few] for what in ("images", "labels"))
        last = (self.images[self.num_train :][:few], self.labels[self.num_train :][:few])
        self.parts: dict[str, tuple[Tensor, ...]] = {"choice": last, "report": tuple(test)}

    def _order(self, generator: Generator, steps: int) -> Tensor:
        """[steps, batch] training images, all once before any comes again."""
        need = steps * self.batch
        epochs = [torch.randperm(self.num_train, generator=generator) for _ in range(-(-need // self.num_train))]
        return torch.cat(epochs)[:need].view(steps, self.batch)


class Vision(_Fashion):
    """Fashion-MNIST by a ViT; cross-entropy and accuracy. `report` is the official test split of 10,000 images,
    `choice` the last 5,000 of the training split. Training images are mirrored and moved by up to 2 pixels."""

    name, family, unit, ceiling = "vision", "vit", "nats", math.log(10)
    moved = 2
    sizes: Mapping[str, Any] = {
        "tiny": {"width": 64, "depth": 4, "heads": 4, "grid": 4},
        "mini": {"width": 128, "depth": 6, "heads": 4, "patch": 4, "image": 28},
        "test": {"width": 32, "depth": 2, "heads": 2, "grid": 2},
    }

    def __init__(self, device: torch.device, *, data: Path, size: str = "tiny"):
        super().__init__(device, data=data, size=size)
        self.padded = F.pad(self.images, (self.moved,) * 4)
        self.pixels = torch.arange(28, device=device)

    def build(self) -> nn.Module:
        spec = ImageDataSpec(dataset="fashion", image_size=28, channels=1, num_classes=10, num_train=1, num_val=1)
        from transformers import AttentionInterface

        model = vit.build(self.sizes[self.size], spec=spec, dropout=0.0)
        AttentionInterface.register("all_patches", _all_patches)  # the library's own makes masks under capture
        model.net.config._attn_implementation = "all_patches"
        return model

    def plan(self, generator: Generator, steps: int) -> Batch:
        shape = (steps, self.batch)
        return {
            "index": self._order(generator, steps),
            "down": torch.randint(2 * self.moved + 1, shape, generator=generator),
            "right": torch.randint(2 * self.moved + 1, shape, generator=generator),
            "mirrored": torch.randint(2, shape, generator=generator),
        }

    def seen(self, step: Batch) -> Batch:
        cols = torch.where(step["mirrored"][..., None] == 1, 27 - self.pixels, self.pixels) + step["right"][..., None]
        rows = self.pixels + step["down"][..., None]
        images = self.padded[step["index"][..., None, None], rows[..., :, None], cols[..., None, :]]
        return {"images": _normal(images), "labels": self.labels[step["index"]]}

    def loss(self, model: nn.Module, weights: Weights, seen: Batch) -> Tensor:
        return F.cross_entropy(functional_call(model, dict(weights), (seen["images"],)), seen["labels"])

    def held(self, part: str) -> Iterator[Batch]:
        images, labels = self.parts[part]
        for some, truth in zip(images.split(500), labels.split(500), strict=True):
            yield {"images": _normal(some), "labels": truth.long()}

    def judge(self, model: nn.Module, weights: Weights, seen: Batch) -> Tensor:
        logits = functional_call(model, dict(weights), (seen["images"],))
        right = (logits.argmax(1) == seen["labels"]).float().mean()
        return torch.stack([F.cross_entropy(logits, seen["labels"]), right])


class Diffusion(_Fashion):
    """Noise in Fashion-MNIST by a DiT; MSE with noise that stays. Held out are images as of vision, 2,000 for each
    part. Noise comes from a bank of BANK images, the held-out images' from one of their own."""

    name, family, unit, ceiling = "diffusion", "dit", "MSE", 1.0
    sizes: Mapping[str, Any] = {
        "tiny": {"width": 64, "depth": 4, "heads": 4, "max_grid": 8},
        "mini": {"width": 128, "depth": 6, "heads": 4, "max_grid": 8},
        "test": {"width": 32, "depth": 2, "heads": 2, "max_grid": 2},
    }

    def __init__(self, device: torch.device, *, data: Path, size: str = "tiny"):
        super().__init__(device, data=data, size=size)
        kept = self.images.float() / 255
        self.clean = ((kept - kept.mean()) / kept.std()).unsqueeze(1)
        self.test = ((self.parts["report"][0].float() / 255 - kept.mean()) / kept.std()).unsqueeze(1)
        generator = torch.Generator(device).manual_seed(77)
        num = 256 if size == "test" else 131_072
        self.bank = torch.randn((num, 1, 28, 28), generator=generator, device=device, dtype=torch.float16)
        few = 16 if size == "test" else 2000
        sources = {"choice": self.clean[self.num_train :][:few], "report": self.test[:few]}
        self.fixed: dict[str, Batch] = {}
        for place, (part, images) in enumerate(sources.items()):
            labels = (self.labels[self.num_train :] if part == "choice" else self.parts["report"][1])[: len(images)]
            drawn = torch.Generator(device).manual_seed(78 + place)
            self.fixed[part] = {
                "clean": images,
                "labels": labels.long(),
                "time": (torch.arange(len(images), device=device) * 1000 // len(images)),
                "noise": torch.randn(images.shape, generator=drawn, device=device),
            }
        angles = torch.linspace(0, 1, 1001)[:-1] * math.pi / 2
        self.signal = angles.cos().square().clamp(1e-4, 1).to(device)  # share of the variance, by timestep

    def build(self) -> nn.Module:
        spec = ImageDataSpec(dataset="fashion", image_size=28, channels=1, num_classes=10, num_train=1, num_val=1)
        return dit.build(self.sizes[self.size], spec=spec)

    def plan(self, generator: Generator, steps: int) -> Batch:
        shape = (steps, self.batch)
        return {
            "index": self._order(generator, steps),
            "time": torch.randint(1000, shape, generator=generator),
            "noise": torch.randint(len(self.bank), shape, generator=generator),
        }

    def seen(self, step: Batch) -> Batch:
        return self._noised(
            self.clean[step["index"]], self.bank[step["noise"]].float(), step["time"], self.labels[step["index"]]
        )

    def _noised(self, clean: Tensor, noise: Tensor, time: Tensor, labels: Tensor) -> Batch:
        signal = self.signal[time][..., None, None, None]
        noisy = signal.sqrt() * clean + (1 - signal).sqrt() * noise
        return {"noisy": noisy, "time": time, "labels": labels, "noise": noise}

    def loss(self, model: nn.Module, weights: Weights, seen: Batch) -> Tensor:
        told = functional_call(model, dict(weights), (seen["noisy"], seen["time"], seen["labels"]))
        return F.mse_loss(told, seen["noise"])

    def held(self, part: str) -> Iterator[Batch]:
        fixed = self.fixed[part]
        # Each chunk has every timestep's neighbours, so that chunks are alike.
        chunks = 4 if self.size == "test" else 8
        for at in range(chunks):
            own = {name: held[at::chunks] for name, held in fixed.items()}
            yield self._noised(own["clean"], own["noise"], own["time"], own["labels"])

    def judge(self, model: nn.Module, weights: Weights, seen: Batch) -> Tensor:
        error = self.loss(model, weights, seen)
        return torch.stack([error, torch.full_like(error, math.nan)])


TASKS: Mapping[str, Any] = {task.name: task for task in (Language, Vision, Diffusion)}
SIZES: Mapping[str, str] = {"language": "nano", "vision": "tiny", "diffusion": "tiny"}


def causal_only(
    module: nn.Module, query: Tensor, key: Tensor, value: Tensor, attention_mask: None, *, scaling: float, **_: Any
) -> tuple[Tensor, None]:
    """torch's causal attention on (B, heads, T, size). The library's own looks for packed sequences first, by values on
    the device: a wait in every step, and under capture a mask for every layer."""
    assert attention_mask is None
    mixed = F.scaled_dot_product_attention(query, key, value, is_causal=True, scale=scaling)
    return mixed.transpose(1, 2).contiguous(), None


def _all_patches(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Any = None,
    *,
    scaling: float,
    **_: Any,
) -> tuple[Tensor, None]:
    del module, attention_mask  # every patch sees every other
    mixed = F.scaled_dot_product_attention(query, key, value, scale=scaling)
    return mixed.transpose(1, 2).contiguous(), None


def _normal(images: Tensor) -> Tensor:
    """uint8 (..., 28, 28) -> (..., 1, 28, 28), mean 0 and variance 1 over the set."""
    return ((images.float() / 255 - 0.2860) / 0.3530).unsqueeze(-3)


def stacked_plan(task: Task, seeds: Sequence[int], steps: int) -> Batch:
    """[seeds, steps, batch] of what the steps of each seed see."""
    plans = [task.plan(Generator().manual_seed(1000 + seed), steps) for seed in seeds]
    return {name: torch.stack([plan[name] for plan in plans]).to(task.device) for name in plans[0]}
