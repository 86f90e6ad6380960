"""Kernels by Triton's interpreter, in the tests' own process: `interpreted` marks tests that step so on the CPU.

Triton decides whether it interprets kernels or compiles them for a GPU when it is imported. Here it interprets, but for
machines with a GPU, on which other tests train, and for processes that `TRITON_INTERPRET=0` asks to compile.
"""

import os
from collections.abc import Callable
from importlib.util import find_spec
from pathlib import Path

import pytest

_asked = os.environ.pop("TRITON_INTERPRET", None)
INTERPRETING = find_spec("triton") is not None and (
    _asked == "1" if _asked is not None else not Path("/dev/nvidiactl").exists()
)
if INTERPRETING:
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("TRITON_INTERPRET", "1")
        import triton  # noqa: F401


def interpreted(test: Callable[..., None]) -> Callable[..., None]:
    return pytest.mark.slow(pytest.mark.usefixtures("interpreted")(test))  # the fixture is of tests/conftest.py
