"""Puts Python state back that a training step changes outside of parameters and buffers: counters, lists, generators.

A measured step is no step of the run, so that what a module counts or collects has to be as if it had not been. Objects
keep their identity: containers are filled again in place, so that whoever else refers to them sees the same.
"""

import random
import sys
import warnings
from collections import deque
from collections.abc import Callable, Generator, Iterator, Sequence
from contextlib import suppress
from copy import copy, deepcopy
from functools import partial
from types import BuiltinFunctionType, FunctionType, MethodType, ModuleType
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import _disable_current_modes

_PLAIN = (str, bytes, int, float, complex, bool, type(None), type, ModuleType, FunctionType, MethodType)
# Libraries whose objects are not looked into: they do not change in a step, or the caller restores them.
_LEFT = frozenset({"torch", "lightning", "pytorch_lightning", "builtins", "numpy", "logging", "threading", "weakref"})
_KEPT_BY_OTHERS = frozenset({"_parameters", "_buffers"})  # see `footprint.preserved_state`
MAX_TRAVERSED = 100_000  # a container of this many elements or more is not looked into


Undo = Callable[[], object]


class PythonState:
    """Remembers all Python state that is reached from `roots`, modules or other objects; `restore` puts it back.

    Tensors other than parameters and buffers are copied to the CPU. What cannot be remembered is left: generators (of
    `yield`), files, objects of C libraries.
    """

    def __init__(self, *roots: Any):
        self._undo: list[Undo] = []
        buffers = {id(b) for root in roots if isinstance(root, nn.Module) for b in root.buffers()}
        seen: dict[int, Any] = {}  # keeps what was visited alive, for ids to stay its own
        pending = list(roots)
        while pending:  # no recursion: linked objects may be deep
            value = pending.pop()
            if isinstance(value, _PLAIN) or id(value) in seen or id(value) in buffers:
                continue
            seen[id(value)] = value
            if isinstance(value, nn.Module):
                seen |= {id(held): held for key, held in vars(value).items() if key in _KEPT_BY_OTHERS}
            undo, held = _tensor(value) if isinstance(value, Tensor) else _container(value) or _object(value)
            self._undo += undo
            pending += held if len(held) < MAX_TRAVERSED else ()

    @torch.no_grad()
    def restore(self) -> None:
        for undo in self._undo:
            undo()


def _tensor(value: Tensor) -> tuple[list[Undo], Sequence[Any]]:
    if type(value) is not Tensor or value.is_meta or value.is_inference() or value.layout is not torch.strided:
        return [], ()
    if not value.is_leaf:
        return [], ()
    version = value._version
    with _disable_current_modes():  # a memory tracker would count the copy
        was = value.detach().to("cpu", copy=True)
    return [lambda: value.copy_(was) if value._version != version else None], ()


def _container(value: Any) -> tuple[list[Undo], Sequence[Any]] | None:
    """How to fill a container of Python's or NumPy's again, and what it holds; None for other objects."""
    if isinstance(value, dict):
        was = {key: _replayable(item) for key, item in value.items()}
        return [lambda: _refill(value, was)], list(value.values())
    if isinstance(value, list | bytearray):
        kept = copy(value)
        return [lambda: value.__setitem__(slice(None), kept)], value if isinstance(value, list) else ()
    if isinstance(value, deque):
        items = list(value)
        return [value.clear, lambda: value.extend(items)], items
    if isinstance(value, set):
        members = list(value)
        return [value.clear, lambda: value.update(members)], members
    if isinstance(value, tuple | frozenset):
        return [], list(value)
    numpy: Any = sys.modules.get("numpy")
    if numpy is not None and isinstance(value, numpy.ndarray):
        numbers = value.copy()
        return [lambda: value.__setitem__(..., numbers)], ()
    return None


def _object(value: Any) -> tuple[list[Undo], Sequence[Any]]:
    """How to give an object its attributes again, or a generator of random numbers its state."""
    numpy: Any = sys.modules.get("numpy")
    if isinstance(value, torch.Generator):
        return [partial(value.set_state, value.get_state())], ()
    if isinstance(value, random.Random):
        return [partial(value.setstate, value.getstate())], ()
    if numpy is not None and isinstance(value, numpy.random.Generator):
        return [partial(setattr, value.bit_generator, "state", deepcopy(value.bit_generator.state))], ()
    if isinstance(value, nn.Module):
        return [], [vars(value)]
    if type(value).__module__.partition(".")[0] in _LEFT or isinstance(value, BuiltinFunctionType | Iterator):
        return [], ()
    declared = [vars(kind).get("__slots__", ()) for kind in type(value).__mro__]
    slots = [name for names in declared for name in ([names] if isinstance(names, str) else names)]
    held = {name: getattr(value, name) for name in slots if hasattr(value, name) and name != "__dict__"}
    undo: list[Undo] = [partial(object.__setattr__, value, name, item) for name, item in held.items()]
    own = getattr(value, "__dict__", None)
    return undo, [*held.values(), *([own] if isinstance(own, dict) else ())]


def _refill(value: dict[Any, Any], was: dict[Any, Any]) -> None:
    if was.keys() != value.keys() or any(value[key] is not item for key, item in was.items()):
        value.clear()
        value.update(was)


def _replayable(value: Any) -> Any:
    """An iterator's own copy, from which it goes on as if nobody had asked it; other values as they are."""
    if isinstance(value, Iterator) and not isinstance(value, Generator) and type(value).__module__ in _COPIED:
        with suppress(TypeError), warnings.catch_warnings():
            warnings.simplefilter("ignore", DeprecationWarning)  # of itertools, in Python 3.12
            return copy(value)
    return value


_COPIED = ("builtins", "itertools")
