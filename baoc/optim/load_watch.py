"""Notices that a module loads weights in the middle of a run, whose corrections then belong to weights that are gone.

An optimizer cannot see it: `load_state_dict` copies into the parameters as a user's constraint on them does, after
which corrections are as good as before. So each module of the network that has parameters says so before it loads;
whether other weights came is decided by their bits at the next step (`arrival.drop_stale`).
"""

import weakref
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from torch import nn

from baoc.parallel import unwrapped

if TYPE_CHECKING:
    from baoc.optim.optimizer import BlockwiseOptimizer


def watch_loads(module: nn.Module, optimizer: "BlockwiseOptimizer") -> None:
    """Makes `optimizer` compare its corrected weights with those that `module`, or a part of it, loads."""
    for part in unwrapped(module).modules():
        if part._parameters:
            part.register_load_state_dict_pre_hook(_BeforeLoad(optimizer))


class _BeforeLoad:
    """The hook. It does not keep the optimizer alive, and copies and pickles of the module come without it: a model
    that is saved whole is read where there is no baoc."""

    def __init__(self, optimizer: "BlockwiseOptimizer"):
        self._optimizer = weakref.ref(optimizer)

    def __call__(self, module: nn.Module, *_: Any) -> None:
        optimizer = self._optimizer()
        if optimizer is not None:
            optimizer.registry.note_bits()

    def __reduce__(self) -> tuple[Callable[..., Any], tuple[str, str]]:
        return getattr, ("", "format")  # takes any arguments and does nothing
