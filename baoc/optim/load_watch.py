"""Notices that a module loads weights in the middle of a run, whose corrections then belong to weights that are gone.

An optimizer cannot see it: `load_state_dict` copies into the parameters as a user's constraint on them does, after
which corrections are as good as before. So each module of the network that has parameters says so before it loads;
whether other weights came is decided by their bits at the next step (`arrival.drop_stale_correction`).
"""

import weakref
from collections.abc import Callable
from typing import Any

from torch import nn

from baoc.optim.registry import BlockRegistry
from baoc.parallel import unwrapped


def watch_loads(module: nn.Module, registry: BlockRegistry) -> None:
    """Makes `registry` compare its corrected weights with those that `module`, or a part of it, loads."""
    for part in unwrapped(module).modules():
        if part._parameters:
            part.register_load_state_dict_pre_hook(_BeforeLoad(registry))


class _BeforeLoad:
    """The hook. It does not keep the optimizer alive, and copies and pickles of the module come without it: a model
    that is saved whole is read where there is no baoc."""

    def __init__(self, registry: BlockRegistry):
        self._registry = weakref.ref(registry)

    def __call__(self, module: nn.Module, *_: Any) -> None:
        registry = self._registry()
        if registry is not None:
            registry.checksum_weights()

    def __reduce__(self) -> tuple[Callable[..., Any], tuple[str, str]]:
        return getattr, ("", "format")  # takes any arguments and does nothing
