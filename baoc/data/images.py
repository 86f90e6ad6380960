"""Reads sets of labelled images from .npz files into memory and checks them; `check_labels` serves every reader.

`digits.npz` holds the UCI digits of E. Alpaydin and C. Kaynak (CC BY 4.0), 1,797 images of 8 x 8 pixels with values
0 to 16, as scikit-learn's `load_digits` gives them. A user's own .npz has the same two arrays, `images` and `labels`.
"""

import zipfile
import zlib
from dataclasses import dataclass
from importlib.resources import as_file, files
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from baoc.data.splits import has_ending
from baoc.errors import BadInputError

_KEYS = ("images", "labels")
_HOW = (
    'write one with numpy.savez_compressed("images.npz", images=images, labels=labels), '
    "images (N, H, W) or (N, H, W, C) and labels (N,) counting from 0"
)


@dataclass(frozen=True, slots=True, kw_only=True)
class ImageSet:
    """`images`: (N, H, W, C) uint8 or float32, H = W; `labels`: (N,) int64 in [0, num_classes)."""

    name: str
    images: NDArray[Any]
    labels: NDArray[np.int64]
    num_classes: int


def read_digits() -> ImageSet:
    with as_file(files("baoc.data") / "digits.npz") as path:
        return read_npz(path, name="digits")


def read_npz(path: str | Path, *, name: str | None = None) -> ImageSet:
    """Reads images and labels of a .npz file. Raises BadInputError with the file and the fault."""
    path = Path(path).expanduser()
    arrays = _load(path)
    images = _check_images(arrays["images"], path=path)
    labels, num_images = arrays["labels"], len(images)
    if labels.shape != (num_images,):
        raise BadInputError(
            f"labels of {path} have shape {labels.shape}; {num_images} images need labels of shape ({num_images},)"
        )
    labels, num_classes = check_labels(labels, name=str(path))
    return ImageSet(name=name or path.stem, images=images, labels=labels, num_classes=num_classes)


def _load(path: Path) -> dict[str, NDArray[Any]]:
    if not path.exists():
        raise BadInputError(f"dataset.path={path} does not exist: {_HOW}")
    if not has_ending(path, ".npz") or path.is_dir():
        raise BadInputError(f"dataset.path={path} is not a .npz file: {_HOW}")
    try:
        with zipfile.ZipFile(path) as archive:
            names = sorted(member.removesuffix(".npy") for member in archive.namelist())
        missing = [key for key in _KEYS if key not in names]
        if not missing:
            with np.load(path, allow_pickle=False) as arrays:
                return {key: arrays[key] for key in _KEYS}
    except (OSError, ValueError, EOFError, zipfile.BadZipFile, zlib.error) as error:
        raise BadInputError(f"{path} cannot be read as .npz ({error}): {_HOW}") from error
    raise BadInputError(
        f"{path} lacks the array {' and '.join(missing)}; it holds {', '.join(names) or 'nothing'}: {_HOW}"
    )


def _check_images(images: NDArray[Any], *, path: Path) -> NDArray[Any]:
    if images.ndim not in (3, 4) or 0 in images.shape:
        raise BadInputError(f"images of {path} have shape {images.shape}; they must be (N, H, W) or (N, H, W, C)")
    if images.dtype.kind not in "uifb":
        raise BadInputError(f"images of {path} have dtype {images.dtype}; they must be numbers, best uint8")
    images = images if images.ndim == 4 else images[..., None]
    height, width = images.shape[1:3]
    if height != width:
        advice = "move the channels to the last axis" if images.shape[2] == images.shape[3] else "crop or pad them"
        raise BadInputError(
            f"images of {path} have shape {images.shape}, read as {height} x {width} pixels; "
            f"images must be square and (N, H, W, C): {advice}"
        )
    if images.dtype == np.uint8:
        return images
    if images.dtype.kind == "f" and not np.isfinite(images).all():
        count = int((~np.isfinite(images)).sum())
        raise BadInputError(f"images of {path} hold {count} values that are nan or infinite: replace or drop them")
    return images.astype(np.float32)


def check_labels(labels: NDArray[Any], *, name: str, declared: int | None = None) -> tuple[NDArray[np.int64], int]:
    """Returns (labels as int64, number of classes). Raises BadInputError for other dtypes and labels out of range.

    Args:
        name: of the data, for messages.
        declared: number of classes that the set declares; None counts them by the largest label.
    """
    if labels.dtype.kind not in "ui":
        raise BadInputError(f"labels of {name} have dtype {labels.dtype}; they must be integers, 0 for the first class")
    low, high = int(labels.min()), int(labels.max())
    limit = declared or len(labels)
    if low < 0 or high >= limit:
        row = int(labels.argmin() if low < 0 else labels.argmax())
        allowed = f"the {declared} classes that there are" if declared else f"the number of images ({limit})"
        raise BadInputError(
            f"label {low if low < 0 else high} of image {row} in {name} is out of range: labels count classes from 0, "
            f"below {allowed}"
        )
    return labels.astype(np.int64), declared or high + 1
