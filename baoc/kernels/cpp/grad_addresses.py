"""Reads the addresses of many gradients in one C call: for 200 tensors 3 us instead of 42 us in a Python loop.

The C loop asks torch itself: `c10::TensorImpl::grad`, which its library exports, and `aoti_torch_get_data_ptr` of the C
interface for compiled models. Both depend on the torch build. The first use in a process therefore compares the result
with what Python reads, and callers fall back to a Python loop where it differs or nothing can be compiled.
"""

import ctypes
import logging
from array import array
from collections.abc import Sequence
from functools import lru_cache
from pathlib import Path
from typing import NamedTuple

import torch
from torch import Tensor

from baoc.kernels.cpp import build

log = logging.getLogger(__name__)
_SOURCE = build.SOURCES / "grad_addresses.c"
_FLAGS = ("-O2", "-shared", "-fPIC")
_MAX_OFFSET = 64  # bytes of a Python tensor object that are searched for the pointer to its TensorImpl


class _Calls(NamedTuple):
    """The compiled loop and its fixed arguments."""

    read: "ctypes._FuncPointer"
    grad: int  # address of c10::TensorImpl::grad
    data: int  # address of aoti_torch_get_data_ptr
    none: int  # TensorImpl of an undefined tensor
    offset: int  # bytes from the start of a Python tensor object to the pointer to its TensorImpl


class GradAddresses:
    """`read()` fills `addresses` with the addresses of the gradients of `params`, -1 where there is none.

    Use `grad_addresses` to make one; it returns None where this does not work.
    """

    def __init__(self, params: Sequence[Tensor], calls: _Calls):
        self.params = list(params)  # keeps the objects alive, whose memory is read
        self.addresses = array("q", [-1] * len(params))
        self._objects = array("q", map(id, params))  # not of their TensorImpl, which torch may swap
        objects, addresses = self._objects.buffer_info()[0], self.addresses.buffer_info()[0]
        numbers = (len(params), objects, calls.offset, addresses, calls.grad, calls.data, calls.none)
        self._arguments = [ctypes.c_int64(number) for number in numbers]
        self._read, self._num = calls.read, len(params)

    def read(self) -> bool:
        """Reads all addresses. False, with `addresses` invalid, if a gradient has none, such as a sparse one."""
        return self._read(*self._arguments) == self._num


def grad_addresses(params: Sequence[Tensor]) -> GradAddresses | None:
    """A reader of the gradients of `params`; None if it would not read what Python reads."""
    calls = torch_calls()
    if calls is None or not all(_impl_pointer(param, calls.offset) == param._cdata for param in params):
        return None
    return GradAddresses(params, calls)


def _impl_pointer(param: Tensor, offset: int) -> int:
    return ctypes.c_int64.from_address(id(param) + offset).value


@lru_cache(maxsize=1)
def torch_calls() -> _Calls | None:
    """The compiled loop, tested; None, with the reason logged, if it does not work. Tried once per process."""
    try:
        calls = _find_torch_calls()
    except (OSError, AttributeError, RuntimeError, build.Unavailable) as error:
        calls, why = None, str(error)
    else:
        why = "" if calls is not None and _agrees_with_python(calls) else "it does not read what Python reads"
    if why:
        log.info("addresses of gradients are read one by one, which takes 40 us more for 200 tensors: %s", why)
    return None if why else calls


def _find_torch_calls() -> _Calls | None:
    libraries = Path(torch.__file__).parent / "lib"
    grad = _pointer(ctypes.CDLL(str(libraries / "libc10.so"))["_ZNK3c1010TensorImpl4gradEv"])
    data = _pointer(ctypes.CDLL(str(libraries / "libtorch_cpu.so"))["aoti_torch_get_data_ptr"])
    # PyDLL keeps the interpreter lock, as other threads may step too
    read = ctypes.PyDLL(str(build.compiled(_SOURCE, flags=_FLAGS)))["baoc_grad_addresses"]
    read.argtypes, read.restype = [ctypes.c_int64] * 7, ctypes.c_int64
    probe = torch.zeros(1, requires_grad=True, device="cpu")
    offset = next((at for at in range(8, _MAX_OFFSET, 8) if _impl_pointer(probe, at) == probe._cdata), None)
    if offset is None:
        return None
    handle = ctypes.PYFUNCTYPE(ctypes.POINTER(ctypes.c_void_p), ctypes.c_void_p)(grad)(probe._cdata)
    return _Calls(read=read, grad=grad, data=data, none=int(handle[0] or 0), offset=offset)


def _pointer(function: "ctypes._FuncPointer") -> int:
    return int(ctypes.cast(function, ctypes.c_void_p).value or 0)


def _agrees_with_python(calls: _Calls) -> bool:
    """Compares on parameters and plain tensors, with and without gradients."""
    plain = [torch.zeros(3, device="cpu") for _ in range(4)]
    params = [torch.nn.Parameter(plain[0]), plain[1].requires_grad_(), torch.nn.Parameter(plain[2]), plain[3]]
    if not all(_impl_pointer(param, calls.offset) == param._cdata for param in params):
        return False
    reader = GradAddresses(params, calls)
    for with_grad in ((), (0, 1), (0, 3), (2, 3), ()):
        for index, param in enumerate(params):
            param.grad = torch.ones(3, device="cpu") if index in with_grad else None
        expected = [-1 if param.grad is None else param.grad.data_ptr() for param in params]
        if not reader.read() or reader.addresses.tolist() != expected:
            return False
    return True
