"""Parameters that a forward pass writes into: a look before training puts them back.

`nn.Embedding(max_norm=...)` shortens the rows that it looks up; others average weights, or clip them, in a training
step of their own. Copies of all weights would take time and memory that hardly any module needs, so what is written
to is found in the first look at a module, and copied before the first write.
"""

from collections.abc import Iterable, Mapping
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode, _disable_current_modes
from torch.utils.weak import WeakTensorKeyDictionary

_WRITTEN = WeakTensorKeyDictionary()  # parameters that some forward pass was seen to write into
_LOOKED_AT = WeakTensorKeyDictionary()  # the first parameters of those that were looked at


class Unwritten:
    """Keeps what `params` hold from when it is made, where they are known to be written to, or are seen to be."""

    def __init__(self, params: Iterable[Tensor]):
        self._params = list(params)
        self._before: dict[Tensor, Tensor] = {}
        for param in self._params:
            if param in _WRITTEN:
                self._keep(param)

    def watching(self) -> TorchDispatchMode:
        """A mode that notes the first write into each, and keeps what was there before it."""
        return _Watch(self._params, self._keep)

    @property
    def looked_at(self) -> bool:
        """Whether writes into these were watched for before."""
        return not self._params or self._params[0] in _LOOKED_AT

    def _keep(self, param: Tensor) -> None:
        _WRITTEN[param] = True
        if param not in self._before:
            with _disable_current_modes():  # whoever counts memory would count this
                self._before[param] = param.detach().to("cpu", copy=True)

    def was_whole(self) -> None:
        """What was watched came to its end: one that ran out of memory has not shown all that it writes into."""
        if self._params:
            _LOOKED_AT[self._params[0]] = True

    @torch.no_grad()
    def put_back(self) -> None:
        """Into the parameters as they are now, which may be of another type or elsewhere."""
        for param, before in self._before.items():
            param.detach().copy_(before)


class _Watch(TorchDispatchMode):
    def __init__(self, params: Iterable[Tensor], keep: Any):
        super().__init__()
        self._of = {param.untyped_storage()._cdata: param for param in params if param.device.type != "meta"}
        self._keep = keep

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Mapping[str, Any] | None = None) -> Any:
        kwargs = kwargs or {}
        if func._schema.is_mutable:
            for index, declared in enumerate(func._schema.arguments):
                if declared.alias_info is not None and declared.alias_info.is_write:
                    given = args[index] if index < len(args) else kwargs.get(declared.name)
                    for tensor in given if isinstance(given, list | tuple) else [given]:
                        if isinstance(tensor, Tensor) and (owner := self._owner(tensor)) is not None:
                            self._keep(owner)
        return func(*args, **kwargs)

    def _owner(self, tensor: Tensor) -> Tensor | None:
        return self._of.get(tensor.untyped_storage()._cdata)
