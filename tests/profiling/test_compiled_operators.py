"""Operators of operators, which compiled layers call (attention under a random state), pass through what measures."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch._prims.rng_prims import run_and_save_rng_state
from torch.utils._python_dispatch import TorchDispatchMode

from baoc.profiling.param_restorer import ParamRestorer
from baoc.profiling.timeline import Timeline
from baoc.profiling.tracker import MemoryTracker, PeakMeter

MODES: dict[str, Callable[[], TorchDispatchMode]] = {
    "tracker": lambda: MemoryTracker(device="cpu"),
    "timeline": lambda: Timeline(PeakMeter(torch.device("cpu")), named={}, gradients_alive=True),
    "watcher": lambda: ParamRestorer([torch.zeros(3)]).watching(),
}


@pytest.mark.parametrize("name", MODES)
def test_operators_of_operators_run_under_every_mode(name: str):
    a: Any = torch.ones(3)
    with MODES[name]():
        _, found = run_and_save_rng_state(torch.ops.aten.add.Tensor, a, a)
    assert torch.equal(found, torch.full((3,), 2.0))
