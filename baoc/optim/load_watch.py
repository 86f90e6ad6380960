"""Notices that a module loads weights in the middle of a run: corrections of the overwritten weights are then void.

An optimizer cannot see it by itself: `load_state_dict` copies into the parameters, as a user's constraint on them does,
after which corrections are still good. So each module of the network with parameters tells the registry before it
loads. The next step compares checksums to decide which weights changed (`arrival.drop_stale_correction`).
"""

import weakref
from collections.abc import Callable
from typing import Any

import torch
from torch import nn

from baoc.optim.registry import BlockRegistry
from baoc.parallel import unwrapped


def watch_loads(module: nn.Module, registry: BlockRegistry) -> None:
    """Makes `registry` take checksums of its split weights before `module`, or a submodule, loads others."""
    for submodule in unwrapped(module).modules():
        if not isinstance(submodule, torch.jit.ScriptModule) and submodule._parameters:  # which take no hooks
            submodule.register_load_state_dict_pre_hook(_BeforeLoad(registry))


class _BeforeLoad:
    """The hook. It does not keep the optimizer alive, and copies and pickles of the module leave it out, so that a
    pickled model is read where baoc is not installed."""

    def __init__(self, registry: BlockRegistry):
        self._registry = weakref.ref(registry)

    def __call__(self, module: nn.Module, *_: Any) -> None:
        registry = self._registry()
        if registry is not None:
            registry.checksum_weights()

    def __reduce__(self) -> tuple[Callable[..., Any], tuple[str, str]]:
        return getattr, ("", "format")  # takes any arguments and does nothing
