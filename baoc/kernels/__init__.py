"""Fused optimizer steps in Triton, and C++ in `cpp/`. Triton is imported by the first step.

An `Engine` steps the tables of a device: one `FusedTable`, and one launch, per kernel kind and dtype. The eager
counterpart is `baoc.optim.rules` with `baoc.optim.codecs`.
"""

import os
from importlib.util import find_spec

import torch

from baoc.kernels.triton import matrix_kinds as _matrix_kinds  # noqa: F401 (registers its families)
from baoc.kernels.triton.engine import Engine, capturing
from baoc.kernels.triton.kinds import FAMILIES, Call, Family, Kind, LaunchConfig, RuleKind, Shape, register
from baoc.kernels.triton.table import FusedTable, fits

__all__ = [
    "FAMILIES", "Call", "Engine", "Family", "FusedTable", "Kind", "LaunchConfig", "RuleKind", "Shape", "available",
    "capturing", "fits", "interpreting", "register",
]  # fmt: skip


def interpreting() -> bool:
    """True if Triton's interpreter runs the kernels, slowly, on any device: for tests."""
    return os.environ.get("TRITON_INTERPRET") == "1"


def available(device: torch.device) -> bool:
    """True if fused steps run on this device: an NVIDIA GPU, and Triton installed."""
    on_gpu = device.type == "cuda" and torch.version.hip is None
    return (on_gpu or (device.type == "cpu" and interpreting())) and find_spec("triton") is not None
