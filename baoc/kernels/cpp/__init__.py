"""The optimizer step on the CPU in C++: one call per kind for all its tensors, compiled where it runs.

`NativeTable` is made once per kind; `baoc.optim.rules`, `baoc.optim.codecs` and `baoc.optim.weights` compute the same
in eager torch. The library needs a C++17 compiler but no torch headers; without one, `library` raises `Unavailable`.
"""

from baoc.kernels.cpp.build import Unavailable, library, library_or_error
from baoc.kernels.cpp.table import CODECS, RULES, THRESHOLDS, WEIGHTS, NativeKind, NativeTable

__all__ = [
    "CODECS", "RULES", "THRESHOLDS", "WEIGHTS", "NativeKind", "NativeTable", "Unavailable", "library",
    "library_or_error",
]  # fmt: skip
