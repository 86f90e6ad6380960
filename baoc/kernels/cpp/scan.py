"""Checks that all gradients on the CPU are usable (see `baoc.kernels.usable`) in one pass on all threads."""

from array import array
from collections.abc import Iterable

import torch
from torch import Tensor

from baoc.kernels.cpp.build import library

_READ = {torch.float32: 4, torch.bfloat16: 2}  # bytes of an element


def scannable(tensor: Tensor) -> bool:
    """True for tensors that `all_finite` can read: contiguous fp32 or bf16 on the CPU."""
    return tensor.device.type == "cpu" and tensor.dtype in _READ and tensor.is_contiguous()


def all_finite(tensors: Iterable[Tensor]) -> bool:
    """True if every element of all `tensors` is usable. Each tensor must be `scannable`."""
    rows = array("q")
    for tensor in tensors:
        rows.extend((tensor.data_ptr(), tensor.numel(), _READ[tensor.dtype]))
    address, length = rows.buffer_info()
    return bool(library().baoc_all_finite(address, length // 3, torch.get_num_threads()))
