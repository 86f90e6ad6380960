"""Host placement: states in CPU memory, and the pipelines by which they pass through the device."""

from collections.abc import Iterable

from torch import Tensor

from baoc.kernels.streams import Streams
from baoc.optim.offload.arena import HostArena
from baoc.optim.offload.streaming import StagingPipeline
from baoc.optim.state import LiveBlock, State

__all__ = ["HostArena", "StagingPipeline", "Streams", "build_pipelines", "transfer_order"]


def transfer_order(blocks: Iterable[LiveBlock]) -> list[LiveBlock]:
    """Host-placed blocks, the last ones first: about the order in which backward completes their gradients."""
    on_host = [live for live in blocks if live.on_host and any(slot.group_param.numel() for slot in live.slots)]
    return on_host[::-1]


def build_pipelines(blocks: Iterable[LiveBlock], *, home: dict[Tensor, State]) -> list[StagingPipeline]:
    """One for each device of the `blocks`, which are in the order of their steps. `home`: the registry's states."""
    by_device: dict[object, list[LiveBlock]] = {}
    for live in blocks:
        by_device.setdefault(live.slots[0].param.device, []).append(live)
    return [StagingPipeline(blocks, home=home) for blocks in by_device.values()]
