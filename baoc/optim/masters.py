"""Exports and loads weights in full precision, and warns of 16-bit weights that would not move."""

import warnings
from collections.abc import Iterable, Mapping
from typing import Any

import torch
from torch import Tensor

from baoc.core.catalogue import WEIGHTS
from baoc.errors import BadInputError, unknown_name
from baoc.optim import weights
from baoc.optim.groups import named_params
from baoc.optim.registry import BlockRegistry
from baoc.optim.shards import local_shard, shard_of, unsharded
from baoc.optim.state import LiveBlock, State


def export(registry: BlockRegistry, *, param_groups: list[dict[str, Any]]) -> dict[str, Tensor]:
    """Name -> fp32 copy on the CPU of every parameter, corrections added. Sharded ones are gathered on all ranks."""
    registry.drop_stale_corrections()
    values: dict[Tensor, Tensor] = {}
    for live in registry.live.values():
        with registry.states_on_device(live, write_back=False):
            for slot in live.slots:
                master = weights.master(slot.param, registry.state[slot.param])
                values[slot.group_param] = _copy(master if slot.shard is None else slot.shard.all_gather(master))
    params = named_params(param_groups).items()
    return {name: values[param] if param in values else _copy(unsharded(param)) for name, (param, _) in params}


def synchronized_states(registry: BlockRegistry) -> Mapping[Tensor, State]:
    """Parameter -> its state where it is kept, which may be the host. Waits for corrections that are being copied."""
    if any(live.on_host and WEIGHTS[live.spec.weights].correction_bytes for live in registry.live.values()):
        registry.synchronize()
    return registry.state


def _copy(master: Tensor) -> Tensor:
    return master.detach().to("cpu", torch.float32, copy=True)


def load(values: Mapping[str, Tensor], *, registry: BlockRegistry, param_groups: list[dict[str, Any]]) -> None:
    """Sets parameters by name, in the weights format of their blocks. Raises BadInputError with nothing changed."""
    params = named_params(param_groups)
    for name, value in values.items():
        if name not in params:
            raise unknown_name(name, what="parameter", allowed=params)
        shape = tuple(params[name][0].shape)
        if value.shape != shape:
            raise BadInputError(f"{name} has shape {shape}, the given weights have {tuple(value.shape)}")
    slots = {slot.group_param: (live, slot) for live in registry.live.values() for slot in live.slots}
    for name, value in values.items():
        param = params[name][0]
        live, slot = slots.get(param, (None, None))
        if (shard := shard_of(param)) is not None:
            value = shard.local_part(value, shape=local_shard(param).shape)
        if live is None or slot is None or slot.weights == "native":
            (local_shard(param) if slot is None else slot.param).copy_(value)
            continue
        with registry.states_on_device(live):
            weights.store_in_pieces_(
                slot.param, registry.state[slot.param], value.to(torch.float32), weights=slot.weights, name=name
            )
        if slot.weight_checksum is not None:
            slot.weight_checksum = weights.checksum(slot.param)


def warn_of_stalling(lives: Iterable[LiveBlock]) -> list[str]:
    """Warns of blocks whose weights have 16 bits and are rounded to nearest. Returns their names."""
    dtypes = weights.SIXTEEN_BIT_DTYPES
    uncorrected = [live for live in lives if live.spec.weights in ("native", "bf16")]
    names = [live.block.name for live in uncorrected if any(slot.param.dtype in dtypes for slot in live.slots)]
    if not names:
        return names
    warnings.warn(
        "16-bit weights without correction lose every update below 1/512 of a weight, so at a low learning rate they "
        f"stand still. Block(s): {', '.join(names)}. Keep weights in fp32 (precision=bf16-mixed), or give the blocks "
        "specs with corrected weights, such as adamw+split8",
        UserWarning,
        stacklevel=4,
    )
    return names
