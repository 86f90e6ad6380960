"""Compiling what a launch would run for an NVIDIA GPU, on a machine that has none: ptxas comes with Triton.

`recording` puts recorders in place of the kernels of a module; a launch then compiles each for compute capability 9.0,
as it would be specialised, and says what it takes: registers, bytes spilled, and the widest accesses.
"""

import re
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from types import ModuleType, SimpleNamespace
from typing import Any
from unittest.mock import patch

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource
from triton.runtime import driver

_TYPES = {
    torch.float32: "fp32", torch.bfloat16: "bf16", torch.float16: "fp16", torch.int8: "i8", torch.uint8: "u8",
    torch.int16: "i16", torch.int32: "i32", torch.int64: "i64",
}  # fmt: skip
_TARGET = GPUTarget("cuda", 90, 32)


@dataclass(frozen=True, slots=True, kw_only=True)
class Compiled:
    """One kernel as it was specialised. `widest`: bits of its widest access to global memory, by loads and stores."""

    kernel: str
    switches: str
    registers: int
    spilled_bytes: int
    shared_bytes: int
    widest: tuple[int, int]
    ptx: str


class _Recorder:
    def __init__(self, kernel: Any, found: list[Compiled]):
        self.kernel, self.found = kernel, found

    def __getitem__(self, grid: Any) -> "_Recorder":
        return self

    def __call__(self, *args: Any, **kwargs: Any) -> None:
        self.found.append(compile_for_gpu(self.kernel, args, kwargs))


@contextmanager
def recording(modules: Sequence[ModuleType]) -> Iterator[list[Compiled]]:
    """Kernels of the modules are compiled instead of launched."""
    found: list[Compiled] = []
    kept = [(m, name, item) for m in modules for name, item in vars(m).items() if name.endswith("_kernel")]
    for module, name, kernel in kept:
        setattr(module, name, _Recorder(kernel, found))
    try:
        yield found
    finally:
        for module, name, kernel in kept:
            setattr(module, name, kernel)


@dataclass(frozen=True, slots=True, kw_only=True)
class Launched:
    """What the driver would get. `kernel`: what was compiled, by identity."""

    kernel: int
    grid: tuple[int, int, int]
    stream: int
    arguments: tuple[Any, ...]

    @property
    def is_bare(self) -> bool:
        return not any(isinstance(item, Tensor) for item in self.arguments)

    def bare(self) -> "Launched":
        """With addresses in place of tensors, as the driver reads them."""
        addresses = (item.data_ptr() if isinstance(item, Tensor) else item for item in self.arguments)
        return replace(self, arguments=tuple(addresses))


@contextmanager
def noted_launches() -> Iterator[list[Launched]]:
    """Inside, kernels are compiled for a GPU that is not there, and their launches noted."""
    noted: list[Launched] = []

    class Launcher:
        def __init__(self, source: Any, metadata: Any):
            self.source = source

        def __call__(self, x: int, y: int, z: int, stream: int, function: Any, *rest: Any) -> None:
            arguments = rest[4:]  # after metadata and hooks
            noted.append(Launched(kernel=id(self.source), grid=(x, y, z), stream=stream, arguments=arguments))

    properties = {"max_shared_mem": 232448, "multiprocessor_count": 132}
    utils = SimpleNamespace(
        load_binary=lambda name, *_: (1, name, 32, 0, 1024),
        get_device_properties=lambda device: properties,
        unload_module=lambda module: None,
    )
    fake = SimpleNamespace(
        utils=utils, launcher_cls=Launcher, get_current_device=lambda: 0, get_current_stream=lambda device: 7,
        get_current_target=lambda: _TARGET,
    )  # fmt: skip
    with patch.object(driver, "_active", fake):
        yield noted


def compile_for_gpu(kernel: Any, args: Sequence[Any], kwargs: dict[str, Any]) -> Compiled:
    options = {name: kwargs.pop(name) for name in ("num_warps", "num_stages", "maxnreg") if name in kwargs}
    names = kernel.arg_names
    values = dict(zip(names, args, strict=False)) | kwargs
    constant = {param.name for param in kernel.params if param.is_constexpr}
    signature, constexprs, attributes = {}, {}, {}
    for index, name in enumerate(names):
        value = values[name]
        if name in constant:
            signature[name] = "constexpr"
            constexprs[(index,)] = value
        elif isinstance(value, Tensor):
            signature[name] = "*" + _TYPES[value.dtype]
            if value.data_ptr() % 16 == 0:
                attributes[(index,)] = [["tt.divisibility", 16]]
        elif isinstance(value, float):
            signature[name] = "fp32"
        elif value == 1:  # as a launch is specialised
            signature[name] = "constexpr"
            constexprs[(index,)] = 1
        else:
            signature[name] = "i32"
            if value % 16 == 0:
                attributes[(index,)] = [["tt.divisibility", 16]]
    source = ASTSource(kernel, signature, constexprs, attributes)
    compiled = triton.compile(source, target=_TARGET, options=options)
    ptx = compiled.asm["ptx"]
    registers, spilled = _resources(compiled.asm["cubin"])
    shown = [f"{k}={v}" for k, v in values.items() if k in constant and not isinstance(v, tl.dtype)]
    return Compiled(
        kernel=kernel.fn.__name__, switches=" ".join(shown), registers=registers, spilled_bytes=spilled,
        shared_bytes=compiled.metadata.shared, widest=(_widest(ptx, "ld"), _widest(ptx, "st")),
        ptx=ptx,
    )  # fmt: skip


def _widest(ptx: str, what: str) -> int:
    found = re.findall(rf"{what}\.global(?:\.\w+)*?(?:\.v(\d))?\.[bfsu](\d+)", ptx)
    return max((int(vector or 1) * int(bits) for vector, bits in found), default=0)


def _resources(cubin: bytes) -> tuple[int, int]:
    """Registers of a thread and bytes of its stack, from the binary's own notes (EIATTR REGCOUNT and FRAME_SIZE)."""
    registers, frame = _notes(cubin, 0x2F), _notes(cubin, 0x11)
    return max((value for value in registers if value < 256), default=0), max(frame, default=0)


def _notes(cubin: bytes, attribute: int) -> list[int]:
    """Values of an attribute that is a (symbol, value) pair of 32-bit numbers; both are small."""
    pattern = rb"\x04" + re.escape(bytes([attribute])) + rb"\x08\x00(..)\x00\x00(..)\x00\x00"
    return [int.from_bytes(match.group(2), "little") for match in re.finditer(pattern, cubin, re.DOTALL)]
