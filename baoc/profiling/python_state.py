"""Restores Python state that a training step changes outside of parameters and buffers: counters, lists, generators.

A measured step is no step of the run, so counters and collections of a module must not show it. Objects keep their
identity: containers are refilled in place, so that other references to them stay valid.
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

_IMMUTABLE = (str, bytes, int, float, complex, bool, type(None), type, ModuleType, FunctionType, MethodType)
# Libraries whose objects are not traversed: they do not change in a step, or the caller restores them.
_SKIPPED = frozenset(
    {"torch", "lightning", "pytorch_lightning", "builtins", "numpy", "logging", "threading", "weakref"}
)
_RESTORED_ELSEWHERE = frozenset({"_parameters", "_buffers"})  # see `footprint.preserved_state`
_COPYABLE = ("builtins", "itertools")  # modules whose iterators can be copied
MAX_TRAVERSED = 100_000  # a container of this many elements or more is not traversed

Undo = Callable[[], object]


class PythonState:
    """Saves all Python state that is reachable from `roots`, modules or other objects; `restore` restores it.

    Tensors other than parameters and buffers are copied to the CPU. Not saved are generators (of `yield`), files,
    objects of C libraries, and tensors that are no leaves, sparse, on meta, or of a subclass.
    """

    def __init__(self, *roots: Any):
        self._undo: list[Undo] = []
        buffers = {id(b) for root in roots if isinstance(root, nn.Module) for b in root.buffers()}
        seen: dict[int, Any] = {}  # keeps visited objects alive, so that ids stay unique
        pending = list(roots)
        while pending:  # no recursion: linked objects may be deep
            value = pending.pop()
            if isinstance(value, _IMMUTABLE) or id(value) in seen or id(value) in buffers:
                continue
            seen[id(value)] = value
            if isinstance(value, nn.Module):
                seen |= {id(item): item for key, item in vars(value).items() if key in _RESTORED_ELSEWHERE}
            undo, items = _save_tensor(value) if isinstance(value, Tensor) else _save_container(value) or _save(value)
            self._undo += undo
            pending += items if len(items) < MAX_TRAVERSED else ()

    @torch.no_grad()
    def restore(self) -> None:
        for undo in self._undo:
            undo()


def _save_tensor(value: Tensor) -> tuple[list[Undo], Sequence[Any]]:
    if type(value) is not Tensor or value.is_meta or value.is_inference() or value.layout is not torch.strided:
        return [], ()
    if not value.is_leaf:
        return [], ()
    version = value._version
    with _disable_current_modes():  # a memory tracker would count the copy
        saved = value.detach().to("cpu", copy=True)
    return [lambda: value.copy_(saved) if value._version != version else None], ()


def _save_container(value: Any) -> tuple[list[Undo], Sequence[Any]] | None:
    """(undo, items) of a container of Python or NumPy; None for other objects."""
    if isinstance(value, dict):
        saved = {key: _saved_iterator(item) for key, item in value.items()}
        return [lambda: _refill(value, saved)], list(value.values())
    if isinstance(value, list | bytearray):
        elements = copy(value)
        return [lambda: value.__setitem__(slice(None), elements)], value if isinstance(value, list) else ()
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


def _save(value: Any) -> tuple[list[Undo], Sequence[Any]]:
    """(undo, attributes) of an object; of a generator of random numbers its state."""
    numpy: Any = sys.modules.get("numpy")
    if isinstance(value, torch.Generator):
        return [partial(value.set_state, value.get_state())], ()
    if isinstance(value, random.Random):
        return [partial(value.setstate, value.getstate())], ()
    if numpy is not None and isinstance(value, numpy.random.Generator):
        return [partial(setattr, value.bit_generator, "state", deepcopy(value.bit_generator.state))], ()
    if isinstance(value, nn.Module):
        return [], [vars(value)]
    if type(value).__module__.partition(".")[0] in _SKIPPED or isinstance(value, BuiltinFunctionType | Iterator):
        return [], ()
    declared = [vars(kind).get("__slots__", ()) for kind in type(value).__mro__]
    slots = [name for names in declared for name in ([names] if isinstance(names, str) else names)]
    attributes = {name: getattr(value, name) for name in slots if hasattr(value, name) and name != "__dict__"}
    undo: list[Undo] = [partial(object.__setattr__, value, name, item) for name, item in attributes.items()]
    by_name = getattr(value, "__dict__", None)
    return undo, [*attributes.values(), *([by_name] if isinstance(by_name, dict) else ())]


def _refill(value: dict[Any, Any], saved: dict[Any, Any]) -> None:
    if saved.keys() != value.keys() or any(value[key] is not item for key, item in saved.items()):
        value.clear()
        value.update(saved)


def _saved_iterator(value: Any) -> Any:
    """A copy of an iterator that can be copied; other values unchanged."""
    if isinstance(value, Iterator) and not isinstance(value, Generator) and type(value).__module__ in _COPYABLE:
        with suppress(TypeError), warnings.catch_warnings():
            warnings.simplefilter("ignore", DeprecationWarning)  # of itertools, in Python 3.12
            return copy(value)
    return value
