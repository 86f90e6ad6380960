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
    """Host-placed blocks in the order in which backward is done with them, near enough: the last ones first."""
    return [
        live for live in reversed(list(blocks)) if live.on_host and any(slot.group_param.numel() for slot in live.slots)
    ]


class Pipelines:
    """The staging pipelines of an optimizer, one for each device that its host-placed blocks have."""

    def __init__(self, blocks: Iterable[LiveBlock], *, home: dict[Tensor, State]):
        """`blocks` pass in this order."""
        groups: dict[object, list[LiveBlock]] = {}
        for live in blocks:
            groups.setdefault(live.slots[0].param.device, []).append(live)
        self._pipelines = [StagingPipeline(group, home=home) for group in groups.values()]

    def __iter__(self) -> Iterator[StagingPipeline]:
        return iter(self._pipelines)

    def of(self, block: LiveBlock) -> StagingPipeline | None:
        """None for a block that is not placed on the host, or has no elements."""
        return next((pipeline for pipeline in self._pipelines if block in pipeline.blocks), None)

    def join(self) -> None:
        """Work that is launched from now on sees the weights of the step."""
        for pipeline in self._pipelines:
            pipeline.join()

    def drain(self) -> None:
        """Memory of gradients that were dropped in the step which `join` ended is free when this returns."""
        for pipeline in self._pipelines:
            pipeline.drain()

    def synchronize(self) -> None:
        """States are at home when this returns."""
        for pipeline in self._pipelines:
            pipeline.synchronize()

    def invalidate(self) -> None:
        """States were changed at home."""
        for pipeline in self._pipelines:
            pipeline.invalidate()
