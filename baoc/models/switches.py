"""Switches that every network has: recomputed activations and torch.compile. Neither changes a parameter's name."""

from typing import Any

from torch import nn
from torch.utils.checkpoint import checkpoint

from baoc.errors import BadInputError


def enable_checkpointing(model: nn.Module, *, name: str) -> int:
    """Keep only what goes into each of the network's `checkpoint_units` and compute the rest again in the backward
    pass; gives their number. Random numbers (dropout) come out the same. BadInputError for a network that has none.

    The units' class is exchanged for one that recomputes, so that copies, pickles and names stay as they are.
    """
    units: list[nn.Module] = list(getattr(model, "checkpoint_units", ()))
    if not units:
        raise BadInputError(
            f"model {name} names no parts whose activations could be recomputed: set model.checkpointing=false"
        )
    for unit in units:
        unit.__class__ = _recomputing(type(unit))
    return len(units)


def disable_checkpointing(model: nn.Module) -> None:
    """Keeps all activations again; does nothing to a network that did already."""
    for unit in getattr(model, "checkpoint_units", ()):
        if type(unit) in _classes.values():
            unit.__class__ = type(unit).__mro__[1]


def is_checkpointing(model: nn.Module) -> bool:
    """True if the network recomputes activations."""
    return any(type(unit) in _classes.values() for unit in getattr(model, "checkpoint_units", ()))


_classes: dict[type[nn.Module], type[nn.Module]] = {}


def _recomputing(cls: type[nn.Module]) -> type[nn.Module]:
    """A subclass of the same name whose forward pass in training is `torch.utils.checkpoint`."""
    if cls not in _classes:

        def forward(self: nn.Module, *args: Any, **kwargs: Any) -> Any:
            if not self.training:
                return cls.forward(self, *args, **kwargs)
            return checkpoint(cls.forward, self, *args, use_reentrant=False, **kwargs)

        names = {"forward": forward, "__module__": cls.__module__, "__qualname__": cls.__qualname__}
        _classes[cls] = type(cls.__name__, (cls,), names)
    return _classes[cls]


def enable_compile(model: nn.Module) -> None:
    """torch.compile of the whole network, in place; the first steps then take as long as compiling does."""
    model.compile()
