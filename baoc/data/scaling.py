"""Scales pixels to the values a network is trained on. Imports no Lightning, as worker processes import it."""

import logging
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn import functional as F

from baoc.data.image_sources import EncodedImages, ImageSource
from baoc.data.sources import Batch

log = logging.getLogger(__name__)
_SAMPLED = 512  # encoded images decoded to estimate mean and standard deviation


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
    """Scaling by mean and standard deviation per channel over `rows`; a constant channel gets deviation 1.

    Computed in float64 and in parts, so that a large uint8 set is never held as floats.
    """
    if isinstance(source, EncodedImages) and len(rows) > _SAMPLED:
        rows = rows[torch.linspace(0, len(rows) - 1, _SAMPLED).long()]  # evenly: a folder is ordered by class
    total = torch.zeros(source.channels, dtype=torch.float64)
    squares, count = torch.zeros_like(total), 0
    for part in rows.split(4096 if not isinstance(source, EncodedImages) else 64):
        values = source.gather(part)["images"].double()
        total += values.sum((0, 2, 3))
        squares += values.square().sum((0, 2, 3))
        count += values.numel() // source.channels
    mean = total / count
    std = (squares / count - mean.square()).clamp_min(0).sqrt()
    constant = std < 1e-12
    if not constant.is_meta and constant.any():  # a plan of an absent card decodes nothing
        where = "all channels" if constant.all() else f"channel {int(constant.nonzero()[0])} of {len(constant)}"
        _warn_of_constant(where, mean[constant][0].item())
    std[constant] = 1.0
    return Scaling(mean=mean.float().view(-1, 1, 1), std=std.float().view(-1, 1, 1))


def unit_range(source: ImageSource, *, rows: Tensor) -> Scaling:
    """Scaling of the smallest and largest training value to -1 and 1; encoded images are assumed to span 0 to 255."""
    low, high = torch.tensor(0.0), torch.tensor(255.0)
    if not isinstance(source, EncodedImages):
        ends = [torch.stack(source.gather(part)["images"].aminmax()).float() for part in rows.split(4096)]
        low, high = torch.stack(ends)[:, 0].min(), torch.stack(ends)[:, 1].max()
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
