"""Host placement: states in CPU memory, and the pipelines by which they pass through the device."""

from collections.abc import Iterable, Iterator

from torch import Tensor

from baoc.optim.offload.arena import HostArena
from baoc.optim.offload.arrival import drop_stale_correction, fill_param, replace_params, weight_conversion_bytes
from baoc.optim.offload.streaming import StagingPipeline
from baoc.optim.offload.streams import Streams
from baoc.optim.state import LiveBlock, State

__all__ = [
    "HostArena",
    "Pipelines",
    "StagingPipeline",
    "Streams",
    "drop_stale_correction",
    "fill_param",
    "replace_params",
    "transfer_order",
    "weight_conversion_bytes",
]


def transfer_order(blocks: Iterable[LiveBlock]) -> list[LiveBlock]:
    """Host-placed blocks, the last ones first: about the order in which backward completes their gradients."""
    on_host = [live for live in blocks if live.on_host and any(slot.group_param.numel() for slot in live.slots)]
    return on_host[::-1]


class Pipelines:
    """The staging pipelines of an optimizer, one for each device that its host-placed blocks have."""

    def __init__(self, blocks: Iterable[LiveBlock], *, home: dict[Tensor, State]):
        """`blocks`: in the order in which they are stepped. `home`: the registry's states."""
        by_device: dict[object, list[LiveBlock]] = {}
        for live in blocks:
            by_device.setdefault(live.slots[0].param.device, []).append(live)
        self._pipelines = [StagingPipeline(blocks, home=home) for blocks in by_device.values()]

    def __iter__(self) -> Iterator[StagingPipeline]:
        return iter(self._pipelines)

    def of(self, block: LiveBlock) -> StagingPipeline | None:
        """The pipeline of a block; None if it is not placed on the host, or has no elements."""
        return next((pipeline for pipeline in self._pipelines if block in pipeline.blocks), None)

    def join(self) -> None:
        """Makes work that is launched from now on wait for the step."""
        for pipeline in self._pipelines:
            pipeline.join()

    def drain(self) -> None:
        """Waits until the memory of gradients that were dropped in the step is free. `join` comes first."""
        for pipeline in self._pipelines:
            pipeline.drain()

    def synchronize(self) -> None:
        """Waits until all states are on the host."""
        for pipeline in self._pipelines:
            pipeline.synchronize()

    def invalidate(self) -> None:
        """To be called after states were changed on the host."""
        for pipeline in self._pipelines:
            pipeline.invalidate()
