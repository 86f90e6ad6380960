"""Small pictures, and the files in which tests keep them: folders of classes, parquet, IDX."""

import io
import struct
from pathlib import Path

import numpy as np
from PIL import Image

RNG = np.random.default_rng(3)


def picture(*, size=(20, 16), mode="RGB", level=0) -> Image.Image:
    channels = () if mode == "L" else (3,)
    values = RNG.integers(0, 60, (size[1], size[0], *channels), dtype=np.uint8) + np.uint8(level)
    return Image.fromarray(values, mode)


def encoded(image: Image.Image) -> bytes:
    stream = io.BytesIO()
    image.save(stream, "png")
    return stream.getvalue()


def write_folder(root: Path, *, classes=("cat", "dog"), count=12, **settings) -> Path:
    for place, name in enumerate(classes):
        (root / name).mkdir(parents=True)
        for number in range(count):
            picture(level=100 * place, **settings).save(root / name / f"{number:02}.png")
    return root


def write_parquet(path: Path, *, rows: list[dict]) -> Path:
    import pyarrow
    import pyarrow.parquet

    path.parent.mkdir(parents=True, exist_ok=True)
    pyarrow.parquet.write_table(pyarrow.Table.from_pylist(rows), path)
    return path


def idx_bytes(array: np.ndarray) -> bytes:
    return struct.pack(f">HBB{array.ndim}i", 0, 8, array.ndim, *array.shape) + array.astype(np.uint8).tobytes()
