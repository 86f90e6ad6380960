"""Moves parameters to their device block by block, in the weights format of their spec.

Where weights are to be kept in 16 bits, the fp32 weights are never on the device together: it holds what was converted
so far, and one piece more (`weights.CONVERSION_BYTES`).
"""

from collections.abc import Iterable

import torch
from torch import Tensor

from baoc.optim import weights
from baoc.optim.state import LiveBlock, Slot, State
from baoc.types import OptimizerSpec


def weight_conversion_bytes(specs: Iterable[OptimizerSpec], *, device: str) -> int:
    """Temporary bytes on a GPU while weights are converted to 16 bits, if some of `specs` keep them so. Elsewhere host
    and device share memory, and the fp32 weights count from the start."""
    converts = device.startswith("cuda") and any(spec.weights != "native" for spec in specs)
    return weights.CONVERSION_BYTES if converts else 0


def replace_params(live: LiveBlock, *, device: torch.device | None) -> dict[Tensor, Tensor]:
    """Gives parameters that are not on `device` (None: all are) unfilled data there; returns parameter -> its old
    values."""
    values: dict[Tensor, Tensor] = {}
    for slot in live.slots:
        if device is not None and slot.param.device != device:
            dtype = weights.dtype_of(slot.weights, info=slot.info)
            values[slot.param] = weights.replace_data_(slot.param, dtype=dtype, device=device)
    return values


def fill_param(slot: Slot, state: State, *, values: Tensor | None) -> None:
    """Fills a parameter in its spec's weights format from `values`, or from its own if these are None."""
    if slot.weights != "native":
        if values is None:
            dtype = weights.dtype_of(slot.weights, info=slot.info)
            values = weights.replace_data_(slot.param, dtype=dtype, device=slot.param.device)
        weights.store_in_pieces_(slot.param, state, values, weights=slot.weights, name=slot.name)
        if weights.CORRECTION in state and not slot.param.is_meta:
            slot.weight_checksum = weights.checksum(slot.param)
    elif values is not None:
        slot.param.detach().copy_(values)


@torch.no_grad()
def drop_stale_correction(slot: Slot, state: State, *, step_begins: bool) -> None:
    """Zeroes the correction of weights that are not those it was split off, as when a model was loaded after its
    optimizer was built. Checksums tell, and tensors' versions do not: writing to `.data` changes none, and copies begin
    with others. `step_begins`: drops the checksum, because the step changes the weights."""
    if slot.weight_checksum is None or slot.param.dtype is not torch.bfloat16 or slot.param.is_meta:
        return  # `build_backends` refuses a parameter that was cast
    if weights.checksum(slot.param) != slot.weight_checksum:
        state[weights.CORRECTION].zero_()
    if step_begins:
        slot.weight_checksum = None
