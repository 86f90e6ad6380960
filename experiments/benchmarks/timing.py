"""What several benchmarks share: timed calls, freed memory, and bytes of optimizer states."""

import gc
from collections.abc import Callable
from time import perf_counter
from typing import Any

import torch

from baoc.optim import BlockwiseOptimizer


def seconds(run: Callable[[], object]) -> float:
    """Seconds of `run`, with all work of the GPU that it launches."""
    synchronize = torch.cuda.synchronize if torch.cuda.is_initialized() else lambda: None
    synchronize()
    begin = perf_counter()
    run()
    synchronize()
    return perf_counter() - begin


def free_memory() -> None:
    """Collects garbage and gives torch's unused blocks of device memory back."""
    gc.collect()
    torch.cuda.empty_cache()  # does nothing before CUDA is used


def optimizer_state_bytes(optimizer: Any) -> int:
    """Bytes of an optimizer's states on this rank, of BAOC's or of any other."""
    if isinstance(optimizer, BlockwiseOptimizer):
        return optimizer.state_bytes()
    values = [value for state in optimizer.state.values() for value in state.values()]
    return sum(getattr(value, "_local_tensor", value).nbytes for value in values)
