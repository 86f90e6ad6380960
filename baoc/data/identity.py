"""The identity of data: one hash of their content and of the settings that decide what is trained and validated on.

Runs whose hashes differ are never compared. Images that are decoded during training are too many to be read twice. Of
these the hash covers the labels, the number and sizes of the files, and the content of HASHED_SAMPLES images.
"""

import hashlib
import json
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from baoc.data.image_sources import EncodedImages, FileItems, MemoryImages
from baoc.data.sources import Source, TensorSource, evenly_spaced

HASHED_SAMPLES = 64
_MAX_FILES_WITH_SIZES = 20_000  # the sizes of more files take seconds to read
# Settings that change how samples reach the network, but not which samples they are.
_IGNORED_SETTINGS = frozenset({"augment", "workers", "streaming", "path", "task"})


def identity_of(contents: Iterable[str], *, settings: Mapping[str, Any]) -> str:
    """SHA-256 of the hashes of all parts and of the settings that are not ignored."""
    counted = {key: value for key, value in settings.items() if key not in _IGNORED_SETTINGS}
    text = json.dumps(
        {"parts": list(contents), "settings": counted}, sort_keys=True, default=lambda value: type(value).__qualname__
    )
    return hashlib.sha256(text.encode()).hexdigest()


def hash_source(source: Source) -> str:
    """SHA-256 of a source: of all samples if they are in memory, else of HASHED_SAMPLES of them.

    Of encoded images it also covers all labels, and the sizes of at most _MAX_FILES_WITH_SIZES files.
    """
    digest = hashlib.sha256(f"{len(source)}".encode())
    if isinstance(source, MemoryImages):
        _update(digest, {"images": source.images, "labels": source.labels})
    elif isinstance(source, TensorSource):
        _update(digest, source.tensors)
    elif isinstance(source, EncodedImages):
        _update(digest, {"labels": source.labels})
        if isinstance(source.items, FileItems) and len(source) <= _MAX_FILES_WITH_SIZES:
            sizes = [source.items[row][0].stat().st_size for row in range(len(source))]
            digest.update(",".join(map(str, sizes)).encode())
        for row in evenly_spaced(len(source), at_most=HASHED_SAMPLES).tolist():
            content, _ = source.items[row]
            digest.update(content.read_bytes() if isinstance(content, Path) else content)
    elif len(source):
        _update(digest, source.gather(evenly_spaced(len(source), at_most=HASHED_SAMPLES)))
    return digest.hexdigest()


def _update(digest: Any, tensors: Mapping[str, Tensor]) -> None:
    for key, tensor in sorted(tensors.items()):
        on_cpu = tensor.detach().cpu().contiguous()
        digest.update(f"{key} {on_cpu.dtype} {tuple(on_cpu.shape)}".encode())
        digest.update(on_cpu.reshape(-1).view(torch.uint8).numpy())
