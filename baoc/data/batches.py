"""The tensors of a batch, in whatever nesting of dicts, lists and tuples a loader has them."""

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from lightning_utilities.core.apply_func import apply_to_collection
from torch import Tensor


@dataclass(frozen=True, slots=True)
class BatchFactory:
    """In place of a batch: what makes one of so many samples, in whatever form."""

    make: Callable[[int], Any]


def tensors_in(value: Any) -> Iterator[Tensor]:
    """Every tensor of nested dicts, lists and tuples."""
    if isinstance(value, Tensor):
        yield value
    elif isinstance(value, Mapping | list | tuple):
        for item in value.values() if isinstance(value, Mapping) else value:
            yield from tensors_in(item)


def num_samples(batch: Any) -> int:
    """Samples of a batch: the first dimension of its first tensor that has one; 0 where there is none."""
    return next((size for tensor in tensors_in(batch) if tensor.ndim and (size := tensor.shape[0])), 0)


def resize_batch(batch: Any, size: int) -> Any:
    """The batch with `size` samples, the first ones taken again where there are not enough."""
    if isinstance(batch, BatchFactory):
        return batch.make(size)
    held = num_samples(batch)

    def taken(tensor: Tensor) -> Tensor:
        return (
            tensor[torch.arange(size, device=tensor.device) % held]
            if tensor.ndim and held and len(tensor) == held
            else tensor
        )

    return apply_to_collection(batch, Tensor, taken)
