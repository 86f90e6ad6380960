"""Image files to tensors: decoding with Pillow, resizing to a square, and random crops and flips for training.

All randomness comes from a generator that the caller seeds, so a batch can be repeated exactly.
"""

import io
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Literal, cast, get_args

import numpy as np
import torch
from torch import Generator, Tensor
from torch.nn import functional as F

from baoc.errors import BadInputError, TrainingFailedError, unknown_name

if TYPE_CHECKING:
    from PIL.Image import Image

Augment = Literal["none", "flip", "crop_flip"]
# Of Inception-style crops (Szegedy et al. 2015), as used for ViT: share of the image's area, and width / height.
_CROP_AREA, _CROP_RATIO = (0.08, 1.0), (3 / 4, 4 / 3)
# Pillow's modes.
_GREY_MODES = ("1", "L", "LA", "La")
_SIXTEEN_BIT_MODES = ("I;16", "I;16B", "I;16L", "I;16N")
BACKGROUND = 255  # white, behind transparent pixels


def check_augment(augment: str) -> Augment:
    """Returns `augment`. Raises BadInputError if it is no Augment."""
    if augment not in get_args(Augment):
        raise unknown_name(augment, what="dataset.augment", allowed=get_args(Augment))
    return cast(Augment, augment)


def open_image(content: bytes | Path, *, where: str) -> "Image":
    """Decodes an image and applies its EXIF orientation. Raises TrainingFailedError with `where` for a broken one."""
    pillow = require_pillow()
    try:
        image = pillow.Image.open(io.BytesIO(content if isinstance(content, bytes) else content.read_bytes()))
        image.load()
        image = pillow.ImageOps.exif_transpose(image)
    except Exception as error:  # Pillow raises many kinds: UnidentifiedImageError, SyntaxError, struct.error, ...
        reason = f"{type(error).__name__}: {error}"
        if isinstance(error, pillow.UnidentifiedImageError):  # its text is the address of the buffer
            reason = "no image format is recognised"
        raise TrainingFailedError(f"{where} cannot be decoded as an image ({reason}): replace or remove it") from error
    return _without_transparency(_to_eight_bits(image, where=where))


@dataclass(frozen=True, slots=True)
class Header:
    """`side`: pixels of the shorter side. `animated`: has several frames or pages, of which the first is read."""

    grey: bool
    side: int
    animated: bool


def read_header(content: bytes | Path, *, where: str) -> Header:
    """Reads an image's header. Decodes the image only if Pillow cannot read the header alone."""
    pillow = require_pillow()
    try:
        with pillow.Image.open(io.BytesIO(content) if isinstance(content, bytes) else content) as image:
            grey = image.mode in (*_GREY_MODES, *_SIXTEEN_BIT_MODES, "I", "F")
            return Header(grey, min(image.size), bool(getattr(image, "is_animated", False)))
    except Exception:  # of any of Pillow's decoders; `open_image` decodes the image or raises with the reason
        image = open_image(content, where=where)
        return Header(_is_grey(image), min(image.size), animated=False)


def _to_eight_bits(image: "Image", *, where: str) -> "Image":
    """Returns the image with 8 bits per channel. 16 bits are scaled, where Pillow's own conversion clips at 255.

    Raises BadInputError for values outside 16 bits, whose white is unknown.
    """
    pillow = require_pillow()
    if image.mode in ("I", "F"):
        values = np.asarray(image)
        if image.mode == "F" or values.min(initial=0) < 0 or values.max(initial=0) > 65535:
            raise BadInputError(
                f"{where} has pixels of 32 bits (mode {image.mode}), from {values.min():g} to {values.max():g}: "
                "nothing says which value is white; save the images with 8 or 16 bits per channel"
            )
    elif image.mode in _SIXTEEN_BIT_MODES:
        values = np.asarray(image)
    else:
        return image
    return pillow.Image.fromarray(((values.astype(np.uint32) + 128) // 257).astype(np.uint8))


def _without_transparency(image: "Image") -> "Image":
    """Returns a transparent image on a white background, any other as it is."""
    if image.mode not in ("LA", "La", "PA", "RGBA", "RGBa") and "transparency" not in image.info:
        return image
    grey = _is_grey(image)
    foreground = (image.convert("LA") if image.mode == "La" else image).convert("RGBA")
    background = require_pillow().Image.new("RGBA", foreground.size, (BACKGROUND, BACKGROUND, BACKGROUND, 255))
    return require_pillow().Image.alpha_composite(background, foreground).convert("L" if grey else "RGB")


def require_pillow():
    """Imports PIL with Image and ImageOps."""
    import PIL.Image
    import PIL.ImageOps

    return PIL


def _is_grey(image: "Image") -> bool:
    return image.mode in _GREY_MODES


def to_tensor(image: "Image", *, channels: int) -> Tensor:
    """Returns the image as (channels, H, W) uint8; `channels` is 1 (grey) or 3 (RGB)."""
    array = np.asarray(image.convert("L" if channels == 1 else "RGB"))
    return torch.from_numpy(array.reshape(*array.shape[:2], channels).copy()).permute(2, 0, 1)


def center_crop(image: "Image", *, size: int) -> "Image":
    """Returns the central square of an image, resized to `size` pixels per side."""
    side = min(image.size)
    left, top = (image.width - side) // 2, (image.height - side) // 2
    return _resized_crop(image, box=(left, top, left + side, top + side), size=size)


def augment_image(image: "Image", *, size: int, augment: Augment, generator: Generator) -> "Image":
    """Returns a crop of an image, `size` pixels per side: a random box for `crop_flip`, else the central square.

    Mirrors it with probability 1/2, unless `augment` is `none`.
    """
    if augment == "crop_flip":
        crop = _resized_crop(image, box=_random_box(image, generator=generator), size=size)
    else:
        crop = center_crop(image, size=size)
    flip = augment != "none" and bool(torch.rand((), generator=generator) < 0.5)
    return require_pillow().ImageOps.mirror(crop) if flip else crop


def augment_batch(images: Tensor, *, augment: Augment, generator: Generator) -> Tensor:
    """Augments images (B, C, S, S) of any dtype.

    Mirrors each with probability 1/2. For `crop_flip` it then pads with zeros and crops to S again: a random shift by
    at most an eighth of S (Krizhevsky's 4 of 32 pixels).
    """
    if augment == "none":
        return images
    num, _, size, _ = images.shape
    flips = torch.rand(num, generator=generator) < 0.5
    images = torch.where(flips.view(-1, 1, 1, 1), images.flip(-1), images)
    if augment == "flip":
        return images
    pad = max(1, size // 8)
    padded = F.pad(images, (pad, pad, pad, pad))
    top, left = torch.randint(0, 2 * pad + 1, (2, num), generator=generator)
    rows = (top.view(-1, 1) + torch.arange(size)).view(num, 1, size, 1)
    cols = (left.view(-1, 1) + torch.arange(size)).view(num, 1, 1, size)
    return padded[torch.arange(num).view(-1, 1, 1, 1), torch.arange(images.shape[1]).view(1, -1, 1, 1), rows, cols]


def _resized_crop(image: "Image", *, box: tuple[float, float, float, float], size: int) -> "Image":
    resampling = require_pillow().Image.Resampling.BILINEAR
    if image.mode not in ("L", "RGB"):
        image = image.convert("L" if _is_grey(image) else "RGB")
    return image.resize((size, size), resampling, box=box, reducing_gap=2.0)


def _random_box(image: "Image", *, generator: Generator) -> tuple[float, float, float, float]:
    """Draws (left, top, right, bottom) by _CROP_AREA and _CROP_RATIO; the central square if ten draws do not fit."""
    for _ in range(10):
        area, log_ratio, across, down = torch.rand(4, generator=generator).tolist()
        area = image.width * image.height * (_CROP_AREA[0] + area * (_CROP_AREA[1] - _CROP_AREA[0]))
        ratio = _CROP_RATIO[0] * (_CROP_RATIO[1] / _CROP_RATIO[0]) ** log_ratio
        width, height = (area * ratio) ** 0.5, (area / ratio) ** 0.5
        if width <= image.width and height <= image.height:
            left, top = across * (image.width - width), down * (image.height - height)
            return left, top, left + width, top + height
    side = min(image.size)
    left, top = (image.width - side) / 2, (image.height - side) / 2
    return left, top, left + side, top + side
