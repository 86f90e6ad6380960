"""Restores parameters that a forward pass writes into, so that a probe does not change the weights.

`nn.Embedding(max_norm=...)` renormalises the rows that it looks up; other modules average or clip weights in forward.
Hardly any module does so, and copies of all weights would take time and memory. So the first probe of a module watches
which parameters are written, and only these are copied, before the first write.
"""

from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode, _disable_current_modes
from torch.utils.weak import WeakTensorKeyDictionary

_WRITTEN = WeakTensorKeyDictionary()  # parameters that some forward pass wrote into
_WATCHED = WeakTensorKeyDictionary()  # the first parameter of each module that was watched to the end


class ParamRestorer:
    """Keeps CPU copies of the `params` that an earlier probe saw written, or that are written under `watching()`."""

    def __init__(self, params: Iterable[Tensor]):
        self._params = list(params)
        self._copies: dict[Tensor, Tensor] = {}
        for param in self._params:
            if param in _WRITTEN:
                self._save(param)

    @contextmanager
    def watching(self) -> Iterator[None]:
        """Inside, each parameter is copied before the first write into it.

        Does nothing if an earlier probe watched these parameters to the end; one that ran out of memory does not count.
        """
        if not self._params or self._params[0] in _WATCHED:
            yield
            return
        with _WriteWatcher(self._params, self._save):
            yield
        _WATCHED[self._params[0]] = True

    def _save(self, param: Tensor) -> None:
        _WRITTEN[param] = True
        if param not in self._copies:
            with _disable_current_modes():  # a memory tracker would count the copy
                self._copies[param] = param.detach().to("cpu", copy=True)

    @torch.no_grad()
    def restore(self) -> None:
        """Copies the saved values back; parameters may have another dtype or device by now."""
        for param, copy in self._copies.items():
            param.detach().copy_(copy)


class _WriteWatcher(TorchDispatchMode):
    """Calls `save` for a parameter before an operator writes into its storage."""

    def __init__(self, params: Iterable[Tensor], save: Any):
        super().__init__()
        self._by_storage = {param.untyped_storage()._cdata: param for param in params if param.device.type != "meta"}
        self._save = save

    supports_higher_order_operators = True

    @classmethod
    def ignore_compile_internals(cls) -> bool:
        return True

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Mapping[str, Any] | None = None) -> Any:
        kwargs = kwargs or {}
        if hasattr(func, "_schema") and func._schema.is_mutable:
            for index, declared in enumerate(func._schema.arguments):
                if declared.alias_info is not None and declared.alias_info.is_write:
                    argument = args[index] if index < len(args) else kwargs.get(declared.name)
                    for tensor in argument if isinstance(argument, list | tuple) else [argument]:
                        if isinstance(tensor, Tensor):
                            param = self._by_storage.get(tensor.untyped_storage()._cdata)
                            if param is not None:
                                self._save(param)
        return func(*args, **kwargs)
