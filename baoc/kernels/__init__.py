"""Fused optimizer steps in Triton: one launch per spec for all its tensors. Triton is imported by the first step.

`FusedTable` is built once per bucket; `fused_step` steps it. The eager twin is `baoc.rules` with `baoc.codecs`.
"""

from importlib.util import find_spec

import torch

from baoc.kernels.kinds import M_CODECS, RULE_KINDS, V_CODECS, Cut, Kind
from baoc.kernels.step import fused_step, launch, prepare
from baoc.kernels.table import FusedTable, fits
from baoc.kernels.weights import merge_weights, split_weights_

__all__ = [
    "M_CODECS", "RULE_KINDS", "V_CODECS", "Cut", "FusedTable", "Kind", "available", "fits", "fused_step", "launch",
    "merge_weights", "prepare", "split_weights_",
]  # fmt: skip


def available(device: torch.device) -> bool:
    """True if fused steps run on this device: an NVIDIA GPU, and Triton installed."""
    return device.type == "cuda" and torch.version.hip is None and find_spec("triton") is not None
