"""Scales pixels to the values that a network is trained on. Free of Lightning, because worker processes import it."""

import logging
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn import functional as F

from baoc.data.image_sources import EncodedImages, ImageSource
from baoc.data.sources import Batch

log = logging.getLogger(__name__)
_SAMPLED_IMAGES = 512  # encoded images that are decoded to estimate mean and standard deviation


@dataclass(frozen=True, slots=True, kw_only=True)
class Scaling:
    """Images to float32: (value - mean) / std per channel, then resized to `size` pixels per side, if given."""

    mean: Tensor  # (C, 1, 1), as std
    std: Tensor
    size: int | None = None

    def __call__(self, batch: Batch) -> Batch:
        images = batch["images"].float().sub_(self.mean).div_(self.std)
        if self.size is not None and images.shape[-1] != self.size:
            images = F.interpolate(images, size=self.size, mode="bilinear", antialias=True)
        return {**batch, "images": images}


def standardise(source: ImageSource, *, rows: Tensor) -> Scaling:
    """Returns the scaling to mean 0 and standard deviation 1 per channel, measured over `rows` (n,) of `source`.

    A constant channel is divided by 1, with a warning. Sums are float64 over chunks of rows, so that a large uint8 set
    is never converted to floats at once.
    """
    if isinstance(source, EncodedImages) and len(rows) > _SAMPLED_IMAGES:
        # Evenly spaced, because a folder is sorted by class.
        rows = rows[torch.linspace(0, len(rows) - 1, _SAMPLED_IMAGES).long()]
    total = torch.zeros(source.channels, dtype=torch.float64)
    squares, count = torch.zeros_like(total), 0
    for chunk in rows.split(64 if isinstance(source, EncodedImages) else 4096):
        values = source.gather(chunk)["images"].double()
        total += values.sum((0, 2, 3))
        squares += values.square().sum((0, 2, 3))
        count += values.numel() // source.channels
    mean = total / count
    std = (squares / count - mean.square()).clamp_min(0).sqrt()
    constant = std < 1e-12
    if constant.any():
        where = "all channels" if constant.all() else f"channel {int(constant.nonzero()[0])} of {len(constant)}"
        _warn_of_constant(where, mean[constant][0].item())
    std[constant] = 1.0
    return Scaling(mean=mean.float().view(-1, 1, 1), std=std.float().view(-1, 1, 1))


def unit_range(source: ImageSource, *, rows: Tensor) -> Scaling:
    """Returns the scaling of the smallest value in `rows` to -1 and the largest to 1; encoded images span 0 to 255."""
    low, high = torch.tensor(0.0), torch.tensor(255.0)
    if not isinstance(source, EncodedImages):
        ranges = [torch.stack(source.gather(chunk)["images"].aminmax()).float() for chunk in rows.split(4096)]
        low, high = torch.stack(ranges)[:, 0].min(), torch.stack(ranges)[:, 1].max()
    if high == low:
        _warn_of_constant("all channels", low.item())
    half = ((high - low) / 2).clamp_min(1e-12)
    ones = torch.ones(source.channels, 1, 1)
    return Scaling(mean=ones * (low + high) / 2, std=ones * half)


def _warn_of_constant(where: str, value: float) -> None:
    log.warning(
        "every pixel that was read is %g in %s: nothing can be learned from that; look at how the images are stored "
        "(bits per pixel, transparency)",
        value,
        where,
    )
