"""The identity of data: one hash of their content and of the settings that decide what is trained and judged on.

Runs whose hashes differ are never compared. Images that are decoded during training are too many to be read twice:
of those the labels, the number and sizes of files, and the content of SAMPLED images spread over the set count.
"""

import hashlib
import json
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from baoc.data.image_sources import EncodedImages, FileItems, MemoryImages
from baoc.data.sources import Source, TensorSource

HASHED_SAMPLES = 64
_SIZED = 20_000  # files whose sizes are asked for
# Settings that change how samples reach the network, and not which they are.
_INCIDENTAL = frozenset({"augment", "workers", "streaming", "path", "task"})


def identity_of(contents: Iterable[str], *, settings: Mapping[str, Any]) -> str:
    """SHA-256 of the hashes of all parts and of the settings that count."""
    kept = {key: value for key, value in settings.items() if key not in _INCIDENTAL}
    text = json.dumps(
        {"parts": list(contents), "settings": kept}, sort_keys=True, default=lambda value: type(value).__qualname__
    )
    return hashlib.sha256(text.encode()).hexdigest()


def hash_source(source: Source) -> str:
    """SHA-256 of a source's samples: of all that are in memory, else of SAMPLED ones and of what describes the rest."""
    digest = hashlib.sha256(f"{len(source)}".encode())
    if isinstance(source, MemoryImages):
        _update(digest, {"images": source.images, "labels": source.labels})
    elif isinstance(source, TensorSource):
        _update(digest, source.tensors)
    elif isinstance(source, EncodedImages):
        _update(digest, {"labels": source.labels})
        if isinstance(source.items, FileItems) and len(source) <= _SIZED:
            digest.update(
                ",".join(str(Path(source.items[row][0]).stat().st_size) for row in range(len(source))).encode()
            )
        for row in _spread(len(source)).tolist():
            content, _ = source.items[row]
            digest.update(content.read_bytes() if isinstance(content, Path) else content)
    elif len(source):
        _update(digest, source.gather(_spread(len(source))))
    return digest.hexdigest()


def _spread(count: int) -> Tensor:
    kept = min(count, HASHED_SAMPLES)
    return torch.arange(kept) * count // max(kept, 1)


def _update(digest: Any, tensors: Mapping[str, Tensor]) -> None:
    for key, tensor in sorted(tensors.items()):
        held = tensor.detach().cpu().contiguous()
        digest.update(f"{key} {held.dtype} {tuple(held.shape)}".encode())
        digest.update(held.reshape(-1).view(torch.uint8).numpy())
