"""Measures the first whole step after parameters were added or unfrozen, whose activations no plan counts."""

import weakref
from collections.abc import Sequence
from contextlib import ExitStack
from typing import Any

from torch import nn

from baoc.optim import BlockwiseOptimizer
from baoc.profiling import FirstStepMemory, context_bytes, current_context_bytes, recap_device, uncapped
from baoc.profiling.memory import use_expandable_segments
from baoc.types import Budget, Footprint


def subscribe(memory: FirstStepMemory, optimizer: BlockwiseOptimizer, *, ends: ExitStack) -> None:
    """Reports to `memory` when the optimizer zeroes gradients, until `ends` closes, and when it steps a block."""
    optimizer.before_zeroing.append(memory.record_zeroing)
    ends.callback(optimizer.before_zeroing.remove, memory.record_zeroing)
    if optimizer.releaser is not None:
        optimizer.releaser.before_block = memory.record_block_step


class LateStep:
    """Measures from its construction, between two steps, to `finish` after the next one, which runs without a cap.

    Counted are the optimizer's states and parameters, all weights and buffers of `network`, and `others`, the states of
    other optimizers.
    """

    def __init__(
        self, optimizer: BlockwiseOptimizer, *, network: nn.Module | None, budget: Budget, others: Sequence[Any]
    ):
        registry = optimizer.registry
        params = list(registry.names)
        self._device = device = params[0].device
        use_expandable_segments(device)
        self._ends = ExitStack()
        self._ends.enter_context(uncapped(device, budget=budget))
        tensors = params if network is None else [*network.parameters(), *network.buffers()]
        self._memory = FirstStepMemory(
            tensors, existing=[optimizer.state, *others], context_bytes=context_bytes(device)
        )
        self._ends.callback(self._memory.stop)
        subscribe(self._memory, optimizer, ends=self._ends)
        weakref.finalize(registry, self._ends.close).atexit = False

    @property
    def peak_bytes(self) -> int:
        return current_context_bytes(self._device) + self._memory.peak_bytes

    def finish(self, optimizer: BlockwiseOptimizer, *, budget: Budget) -> Footprint:
        """Ends the measurement; returns the step's bytes without optimizer state, and caps the device at `budget`."""
        footprint = self._memory.finish(state_bytes=optimizer.state_bytes())
        self.close(optimizer)
        recap_device(self._device, budget=budget)
        return footprint

    def close(self, optimizer: BlockwiseOptimizer) -> None:
        if optimizer.releaser is not None:
            optimizer.releaser.before_block = None
        self._ends.close()
