"""Kernels by Triton's interpreter, in the tests' own process: `interpreted` marks tests that step so on the CPU.

Triton decides whether it interprets kernels or compiles them for a GPU when it is imported. Here it interprets, but for
machines with a GPU, on which other tests train, and for processes that `TRITON_INTERPRET=0` asks to compile.
"""

import os
from collections.abc import Callable
from dataclasses import replace
from functools import cache
from importlib.util import find_spec
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

_asked = os.environ.pop("TRITON_INTERPRET", None)
INTERPRETING = find_spec("triton") is not None and (
    _asked == "1" if _asked is not None else not Path("/dev/nvidiactl").exists()
)
if INTERPRETING:
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("TRITON_INTERPRET", "1")
        import triton.language as tl
        from triton.runtime import interpreter

    patch_language, patched = interpreter._patch_lang, set[Any]()

    @cache
    def languages_of(function: Any) -> set[Any]:
        return {value for value in function.__globals__.values() if value is tl or value is tl.core}

    def patch_once(function: Any) -> Any:
        """Once a launch for all its device functions, in each call of which Triton looks through its whole language."""
        languages = languages_of(function)
        if languages <= patched:
            return SimpleNamespace(restore=lambda: None)
        is_launch = not patched
        patched.update(languages)
        scope = patch_language(function)
        if is_launch:
            restore = scope.restore
            scope.restore = lambda: (restore(), patched.clear())
        return scope

    find_dtype, dtypes = interpreter._get_np_dtype, dict[str, Any]()

    def dtype_of(dtype: Any) -> Any:
        """Triton makes the table of all for each look into it."""
        element = dtype.element_ty if isinstance(dtype, tl.block_type) else dtype
        if element.name not in dtypes:
            dtypes[element.name] = find_dtype(element)
        return dtypes[element.name]

    interpreter._patch_lang, interpreter._get_np_dtype = patch_once, dtype_of
    # No whole number comes near its type's end in tensors of these sizes; looking takes a quarter of a launch.
    builder: Any = interpreter.interpreter_builder
    builder.options = replace(builder.options, sanitize_overflow=False)


def interpreted(test: Callable[..., None]) -> Callable[..., None]:
    return pytest.mark.slow(pytest.mark.usefixtures("interpreted")(test))  # the fixture is of tests/conftest.py
