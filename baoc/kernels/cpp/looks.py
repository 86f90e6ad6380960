"""Where the gradients of many parameters are, in one call: Python takes a tenth of a microsecond to look at each.

The call is a dozen lines of C that ask torch itself: `c10::TensorImpl::grad`, which its library exports, and
`aoti_torch_get_data_ptr` of its C interface for compiled models. Whatever of that a machine or a torch does not have is
noticed when a `Look` is made, which compares what it finds with what Python sees; then there is none.
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
_SOURCE = build.SOURCES / "looks.c"
_FLAGS = ("-O2", "-shared", "-fPIC")
_FAR = 64  # bytes from the beginning of a tensor's Python object within which its implementation is looked for


class _Calls(NamedTuple):
    """The compiled loop, and what it asks."""

    look: "ctypes._FuncPointer"
    grad: int
    data: int
    none: int
    at: int  # bytes from the beginning of a Python object to its implementation


class Look:
    """`all_seen()` looks at the gradients of `params`; then `seen` has their addresses, -1 where there is none.

    `look_at` makes one, or None where it does not work.
    """

    def __init__(self, params: Sequence[Tensor], calls: _Calls):
        self.params = list(params)  # alive as long as they are looked at
        self.seen = array("q", [-1] * len(params))
        self._objects = array("q", map(id, params))  # read anew each time: torch may give one another implementation
        ints = (len(params), _address(self._objects), calls.at, _address(self.seen), calls.grad, calls.data, calls.none)
        self._arguments = [ctypes.c_int64(number) for number in ints]
        self._look, self._num = calls.look, len(params)

    def all_seen(self) -> bool:
        """Looks; False if some gradient has no address, as a sparse one, and `seen` is of no use."""
        return self._look(*self._arguments) == self._num


def look_at(params: Sequence[Tensor]) -> Look | None:
    """A look at the gradients of `params`, None where it would not see what Python sees."""
    calls = found_calls()
    if calls is None or not all(_implementation(param, calls.at) == param._cdata for param in params):
        return None
    return Look(params, calls)


def _address(values: array) -> int:
    return values.buffer_info()[0]


def _implementation(param: Tensor, at: int) -> int:
    return ctypes.c_int64.from_address(id(param) + at).value


@lru_cache(maxsize=1)
def found_calls() -> _Calls | None:
    """Asks once per process."""
    try:
        found = _found()
    except (OSError, AttributeError, RuntimeError, build.Unavailable) as error:
        found, why = None, str(error)
    else:
        why = "" if found is not None and _works(found) else "it does not see what Python sees"
    if why:
        log.info("gradients are looked at one by one, which costs the host 20 us for 200 of them: %s", why)
    return None if why else found


def _found() -> _Calls | None:
    libraries = Path(torch.__file__).parent / "lib"
    grad = ctypes.CDLL(str(libraries / "libc10.so"))["_ZNK3c1010TensorImpl4gradEv"]
    data = ctypes.CDLL(str(libraries / "libtorch_cpu.so"))["aoti_torch_get_data_ptr"]
    look = ctypes.PyDLL(str(build.compiled(_SOURCE, flags=_FLAGS)))["baoc_look"]  # holds the lock: others may step too
    look.argtypes, look.restype = [ctypes.c_int64] * 7, ctypes.c_int64
    probe = torch.zeros(1, requires_grad=True, device="cpu")
    at = next((at for at in range(8, _FAR, 8) if _implementation(probe, at) == probe._cdata), None)
    if at is None:
        return None
    handle = ctypes.PYFUNCTYPE(ctypes.POINTER(ctypes.c_void_p), ctypes.c_void_p)(_pointer(grad))(probe._cdata)
    return _Calls(look=look, grad=_pointer(grad), data=_pointer(data), none=int(handle[0] or 0), at=at)


def _pointer(function: "ctypes._FuncPointer") -> int:
    return int(ctypes.cast(function, ctypes.c_void_p).value or 0)


def _works(calls: _Calls) -> bool:
    """Tries it on parameters and plain tensors, with and without gradients."""
    made = [torch.zeros(3, device="cpu") for _ in range(4)]
    params = [torch.nn.Parameter(made[0]), made[1].requires_grad_(), torch.nn.Parameter(made[2]), made[3]]
    if not all(_implementation(param, calls.at) == param._cdata for param in params):
        return False
    look = Look(params, calls)
    for given in ((), (0, 1), (0, 3), (2, 3), ()):
        for index, param in enumerate(params):
            param.grad = torch.ones(3, device="cpu") if index in given else None
        expected = [-1 if param.grad is None else param.grad.data_ptr() for param in params]
        if not look.all_seen() or look.seen.tolist() != expected:
            return False
    return True
