"""Batches of any loader: tensors in nested dicts, lists and tuples."""

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from lightning_utilities.core.apply_func import apply_to_collection
from torch import Tensor


@dataclass(frozen=True, slots=True)
class BatchFactory:
    """Stands in for a batch: `make(size)` returns a batch of `size` samples."""

    make: Callable[[int], Any]


def tensors_in(value: Any) -> Iterator[Tensor]:
    """Yields every tensor of nested dicts, lists and tuples."""
    if isinstance(value, Tensor):
        yield value
    elif isinstance(value, Mapping | list | tuple):
        for item in value.values() if isinstance(value, Mapping) else value:
            yield from tensors_in(item)


def num_samples(batch: Any) -> int:
    """Samples of a batch: the first dimension of its first tensor that has a non-empty one; 0 if there is none."""
    return next((size for tensor in tensors_in(batch) if tensor.ndim and (size := tensor.shape[0])), 0)


def resize_batch(batch: Any, size: int) -> Any:
    """Returns `batch` with `size` samples: its first ones, repeated from the start if there are fewer.

    Tensors whose first dimension is not the number of samples are returned as they are.
    """
    if isinstance(batch, BatchFactory):
        return batch.make(size)
    old_size = num_samples(batch)

    def resize(tensor: Tensor) -> Tensor:
        if not old_size or not tensor.ndim or len(tensor) != old_size:
            return tensor
        return tensor[torch.arange(size, device=tensor.device) % old_size]

    return apply_to_collection(batch, Tensor, resize)
