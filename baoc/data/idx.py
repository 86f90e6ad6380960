"""Fashion-MNIST (and any set in MNIST's format) from its four IDX files, compressed or not.

Format: two zero bytes, a type byte (8 is unsigned), the number of dimensions, each dimension as a big-endian int32,
then the values (Y. LeCun's description of MNIST).
"""

import gzip
import struct
from math import prod
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from baoc.data.images import ImageSet, check_labels
from baoc.errors import BadInputError

FASHION_MNIST = Path("/usr/share/datasets/fashion-mnist")  # where Debian's package dataset-fashion-mnist puts it
SPLIT_PREFIXES = {"train": "train", "test": "t10k"}  # split -> prefix of its file names
_HOW = (
    "on Debian and Ubuntu `apt install dataset-fashion-mnist` brings it; elsewhere put the files "
    "train-images-idx3-ubyte.gz and train-labels-idx1-ubyte.gz into a folder and name it by dataset.path=FOLDER; "
    "names of the test part begin with t10k"
)


def read_fashion_mnist(path: str | None, *, split: str = "train") -> ImageSet:
    """Reads the 60,000 images of split `train`, or the 10,000 of `test`. `path=None`: from the Debian package."""
    folder = FASHION_MNIST if path is None else Path(path).expanduser()
    if not folder.is_dir():
        place = f"dataset.path={folder}" if path is not None else str(folder)
        raise BadInputError(f"{place} is no folder with Fashion-MNIST: {_HOW}")
    images = read_idx(_find(folder, name=f"{SPLIT_PREFIXES[split]}-images-idx3-ubyte"), dims=3)
    labels_file = _find(folder, name=f"{SPLIT_PREFIXES[split]}-labels-idx1-ubyte")
    labels = read_idx(labels_file, dims=1)
    if len(images) != len(labels):
        raise BadInputError(f"{labels_file} holds {len(labels)} labels for {len(images)} images: get both files anew")
    numbers, num_classes = check_labels(labels, name=str(labels_file))
    return ImageSet(name="fashion_mnist", images=images[..., None], labels=numbers, num_classes=num_classes)


def read_idx(file: Path, *, dims: int) -> NDArray[np.uint8]:
    """Reads an array of unsigned bytes with `dims` dimensions. Raises BadInputError if the file holds none."""
    try:
        with gzip.open(file) if file.suffix == ".gz" else file.open("rb") as stream:
            content = stream.read()
        zero, kind, num_dims = struct.unpack(">HBB", content[:4])
        shape = struct.unpack(f">{num_dims}i", content[4 : 4 + 4 * num_dims])
    except (OSError, EOFError, struct.error) as error:
        raise BadInputError(f"{file} cannot be read as IDX ({error}): get it anew") from error
    values = content[4 + 4 * num_dims :]
    if (zero, kind, num_dims) != (0, 8, dims) or len(values) != prod(shape):
        raise BadInputError(
            f"{file} is no IDX file of unsigned bytes with {dims} dimensions: its header says type {kind}, shape "
            f"{tuple(shape)}, and {len(values)} bytes follow; get it anew"
        )
    return np.frombuffer(values, dtype=np.uint8).reshape(shape)


def _find(folder: Path, *, name: str) -> Path:
    for file in (folder / f"{name}.gz", folder / name):
        if file.is_file():
            return file
    raise BadInputError(f"{folder} holds neither {name}.gz nor {name}: {_HOW}")
