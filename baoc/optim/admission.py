"""What is looked at before blocks get their states: whether they could be stepped, and what that would break."""

from collections.abc import Iterable

import torch

from baoc.errors import BadInputError
from baoc.kernels.host_memory import check_host_memory
from baoc.optim.offload import order_of_travel
from baoc.optim.state import LiveBlock
from baoc.optim.wrappers import refuse_casts
from baoc.planning.cost import passing_bytes
from baoc.planning.transfer import buffer_bytes
from baoc.types import Placement


def check(lives: Iterable[LiveBlock], *, device: torch.device | None = None) -> None:
    """Raises BadInputError where the blocks' weights cannot be kept as their specs say, where host-placed ones cannot
    pass, or where there is no room for what they need there.

    `device`: where their parameters will be, if they are not there yet.
    """
    lives = list(lives)
    refuse_casts(lives)
    placed = order_of_travel(lives)
    for live in placed:
        devices = sorted({str(device or slot.param.device) for slot in live.slots})
        if len(devices) > 1:
            raise BadInputError(
                f"block {live.block.name} cannot run {live.spec.name}: its parameters are on {', '.join(devices)}, "
                "and the states of a host-placed block pass to one device. Make them two blocks"
            )
    if placed and placed[0].slots[0].param.device.type != "meta":
        updated = [live for live in placed if live.spec.placement == Placement.HOST_UPDATED]
        passing = buffer_bytes([passing_bytes(live.block, spec=live.spec) for live in updated])
        needed = sum(live.slab_bytes for live in placed) + passing
        check_host_memory(needed, what="the states of host-placed blocks")
