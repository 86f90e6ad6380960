"""Moves parameters to their device block by block, in the weights format of their spec.

Where weights are to be kept in fewer bits, those in full never are on the device together: it holds what was taken in
so far, and one piece more (`weights.PIECE_BYTES`).
"""

from collections.abc import Iterable

import torch
from torch import Tensor

from baoc.optim import weights
from baoc.optim.state import LiveBlock, Slot, State
from baoc.types import OptimizerSpec


def weight_conversion_bytes(specs: Iterable[OptimizerSpec], *, device: str) -> int:
    """Temporary bytes on a GPU while weights are converted to the fewer bits that some of `specs` keep.

    0 elsewhere: host and device share memory there, and the full weights count from the start.
    """
    some = device.startswith("cuda") and any(spec.weights != "native" for spec in specs)
    return weights.CONVERSION_BYTES if some else 0


def replace_params(live: LiveBlock, *, device: torch.device | None) -> dict[Tensor, Tensor]:
    """Gives parameters that are not on `device` data there, yet to be filled; parameter -> the numbers that are to."""
    waiting: dict[Tensor, Tensor] = {}
    for slot in live.slots:
        if device is not None and slot.param.device != device:
            dtype = weights.dtype_of(slot.weights, info=slot.info)
            waiting[slot.param] = weights.replace_data_(slot.param, dtype=dtype, device=device)
    return waiting


def fill_param(slot: Slot, state: State, *, whole: Tensor | None) -> None:
    """Fills a parameter in its spec's weight format from `whole`, or from its own values if they are on the device."""
    if slot.weights != "native":
        if whole is None:
            dtype = weights.dtype_of(slot.weights, info=slot.info)
            whole = weights.replace_data_(slot.param, dtype=dtype, device=slot.param.device)
        weights.store_in_pieces_(slot.param, state, whole, weights=slot.weights, name=slot.name)
        if weights.CORRECTION in state and not slot.param.is_meta:
            slot.weight_checksum = weights.checksum(slot.param)
    elif whole is not None:
        slot.param.detach().copy_(whole)


@torch.no_grad()
def drop_stale_correction(slot: Slot, state: State, *, for_good: bool) -> None:
    """Before the first step: the correction of weights that are not those it was split off, as a model was loaded after
    its optimizer was built, is not theirs and goes. What was written back as it was counts as nothing. Versions do not
    tell: writing to `.data` changes none, and copies begin with others.

    `for_good`: a step begins, after which no one can tell any more.
    """
    if slot.weight_checksum is None or slot.param.dtype is not torch.bfloat16 or slot.param.is_meta:
        return  # a parameter that was cast is refused by who steps it
    if weights.checksum(slot.param) != slot.weight_checksum:
        state[weights.CORRECTION].zero_()
    if for_good:
        slot.weight_checksum = None
