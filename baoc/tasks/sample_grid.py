"""Samples of a finished diffusion run, as a grid in a PNG file."""

import struct
import zlib
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from baoc.models.switches import count_recomputed_layers, recomputable_layers
from baoc.tasks.base import Task
from baoc.tracking.console import say

NUM_SAMPLES = 80
MIN_PIXELS = 32  # images are enlarged to at least this many pixels a side, as 8 x 8 ones are hard to see
MIN_COLUMNS = 8
MAX_COLUMNS = 10  # with one class per column; more classes are spread over MIN_COLUMNS
AFFORDABLE_ON_CPU = 5_000_000  # parameters; a larger network takes minutes for one grid on a CPU


def draw_sample_grid(
    task: Task, data: Any, *, sample: Callable[..., Tensor], folder: Path, num_samples: int | None
) -> Path | None:
    """Writes `samples.png` to `folder` and returns it, with one column per class if they fit. Prints why there is none.

    `sample` is `DiffusionTask.sample`. `num_samples` None means 80, or none for a large network on a CPU.
    """
    num_params = sum(parameter.numel() for parameter in task.parameters())
    if num_samples is None and task.device.type == "cpu" and num_params > AFFORDABLE_ON_CPU:
        say(f"no samples: {num_params / 1e6:.0f}M parameters on a CPU; ask with task.num_samples=16")
        return None
    count = NUM_SAMPLES if num_samples is None else num_samples
    if count == 0:
        say("no samples: task.num_samples=0")
        return None
    size = getattr(task.model, "image_size", data.spec.image_size)
    shape = (data.spec.channels, size, size)
    labels, columns = grid_labels(count, num_classes=data.spec.num_classes)
    batch_size = samples_at_once(task, micro_batch=data.batch_size)
    say(f"drawing {count} samples, {batch_size} at once; task.num_samples=0 leaves them out")
    images = sample(labels, shape=shape, batch_size=batch_size)
    path = folder / "samples.png"
    write_grid(images, path, columns=columns)
    return path


def samples_at_once(task: Task, *, micro_batch: int) -> int:
    """Number of samples that take no more memory at once than a micro-batch in training.

    Sampling keeps the activations of one layer at a time; training keeps those of all layers, unless it recomputes
    them. The temporaries of a running layer are assumed to be as large as what four layers keep for backward.
    """
    num_layers = len(recomputable_layers(task.model))
    return micro_batch * max(1, (num_layers - count_recomputed_layers(task.model)) // 4)


def grid_labels(count: int, *, num_classes: int) -> tuple[Tensor, int]:
    """(labels (count,), number of columns): one column per class, or labels spread evenly over all classes."""
    if num_classes <= MAX_COLUMNS:
        columns = num_classes * max(1, MIN_COLUMNS // num_classes)
        return torch.arange(count) % num_classes, columns
    return torch.arange(count) * num_classes // count, MIN_COLUMNS


# -- PNG, without an image library -------------------------------------------------------------------------------------


def write_grid(images: Tensor, path: Path, *, columns: int) -> None:
    """Writes images (N, C, S, S) with values in [-1, 1] row by row: 1 channel as grey, 3 as RGB.

    Of latents (other channel counts) the first three channels, or the first of two, are shown, each in its own range.
    """
    images = images.detach().float().cpu().nan_to_num(nan=-1.0)
    if images.shape[1] not in (1, 3):
        images = images[:, :3]
        low, high = images.amin((0, 2, 3), keepdim=True), images.amax((0, 2, 3), keepdim=True)
        images = (images - low) / (high - low).clamp_min(1e-12) * 2 - 1
    images = images if images.shape[1] in (1, 3) else images[:, :1]
    pixels = ((images.clamp(-1, 1) + 1) * 127.5).round().to(torch.uint8)
    factor = -(-MIN_PIXELS // pixels.shape[-1])
    pixels = pixels.repeat_interleave(factor, -1).repeat_interleave(factor, -2)
    path.write_bytes(png(_tiled(pixels, columns=columns)))


def png(pixels: Tensor) -> bytes:
    """(H, W, 1 or 3) uint8 as a PNG file (ISO/IEC 15948): 8 bits a channel, no filter, one zlib stream."""
    height, width, channels = pixels.shape
    colour = {1: 0, 3: 2}[channels]
    unfiltered = torch.zeros(height, 1, dtype=torch.uint8)  # each row begins with the number of its filter
    rows = torch.cat([unfiltered, pixels.reshape(height, -1)], dim=1)
    header = struct.pack(">IIBBBBB", width, height, 8, colour, 0, 0, 0)
    chunks = ((b"IHDR", header), (b"IDAT", zlib.compress(rows.numpy().tobytes(), 9)), (b"IEND", b""))
    return b"\x89PNG\r\n\x1a\n" + b"".join(
        struct.pack(">I", len(content)) + kind + content + struct.pack(">I", zlib.crc32(kind + content))
        for kind, content in chunks
    )


def _tiled(pixels: Tensor, *, columns: int) -> Tensor:
    """(N, C, S, S) -> (rows * (S + 1) + 1, columns * (S + 1) + 1, C), a white line between images."""
    count, channels, size, _ = pixels.shape
    rows = -(-count // columns)
    canvas = torch.full((rows * (size + 1) + 1, columns * (size + 1) + 1, channels), 255, dtype=torch.uint8)
    for index, image in enumerate(pixels):
        top, left = index // columns * (size + 1) + 1, index % columns * (size + 1) + 1
        canvas[top : top + size, left : left + size] = image.permute(1, 2, 0)
    return canvas
