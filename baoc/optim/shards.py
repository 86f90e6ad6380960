"""Parameters that `fully_shard` has sharded along their first dimension: a rank's rows, and sums over ranks.

A rank steps its rows as a local parameter: a plain tensor in the same memory, which has the gradient during a step. So
backends, codecs and the finite check know nothing of ranks. Two things do: sums over all rows of a tensor
(`ShardGroup.all_reduce_`), and states in a checkpoint (`Shard.as_dtensor`).
"""

import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from math import prod
from typing import Any

import torch
from torch import Tensor

from baoc.parallel import SINGLE_PROCESS, ranks, refusal
from baoc.types import ParamInfo
from baoc.types.specs import NUM_ROW_PARTS
from baoc.units import MIB

WARM_UP_BYTES = 64 * MIB


def _tensor_module() -> Any:
    """The module torch.distributed.tensor if it is imported, else None: then there is no DTensor."""
    return sys.modules.get("torch.distributed.tensor")


def is_sharded(param: Any) -> bool:
    module = _tensor_module()
    return module is not None and isinstance(param, module.DTensor)


def local_shard(tensor: Any) -> Tensor:
    """This rank's shard of a DTensor, in the same memory; any other tensor itself."""
    return tensor._local_tensor if is_sharded(tensor) else tensor


def unsharded(param: Any) -> Tensor:
    """All rows of a parameter or state; a tensor that is not sharded itself. Ranks gather a DTensor as bytes, because
    not every communication library takes every type."""
    if not is_sharded(param):
        return param
    local_bytes = local_shard(param.detach()).contiguous().unsqueeze(-1).view(torch.uint8)
    all_bytes = _dtensor(local_bytes, like=param, shape=(*param.shape, param.element_size()))
    return all_bytes.full_tensor().view(param.dtype).squeeze(-1)


def _dtensor(rows: Tensor, *, like: Any, shape: Sequence[int]) -> Any:
    """This rank's `rows` as a DTensor of `shape` that is sharded like `like`."""
    stride = torch.empty(tuple(shape), device="meta").stride()
    make = _tensor_module().DTensor.from_local
    return make(rows, like.device_mesh, like.placements, run_check=False, shape=torch.Size(shape), stride=stride)


def reshard(module: Any) -> None:
    """Frees gathered parameters of `fully_shard`: some stay gathered after a forward without a backward."""
    fsdp: Any = sys.modules.get("torch.distributed.fsdp")
    for submodule in module.modules():
        if fsdp is not None and isinstance(submodule, fsdp.FSDPModule):
            submodule.reshard()


def unsharded_on_rank_0(state: Any) -> Any:
    """`state` with each DTensor gathered to rank 0's CPU, and replaced by None on other ranks. Collective."""
    if isinstance(state, Mapping):
        return {key: unsharded_on_rank_0(value) for key, value in state.items()}
    if isinstance(state, list | tuple):
        return type(state)(unsharded_on_rank_0(value) for value in state)
    if not is_sharded(state):
        return state
    gathered = unsharded(state)
    return gathered.cpu() if ranks().rank == 0 else None


def with_sharding(info: ParamInfo, *, param: Any) -> ParamInfo:
    """`info` with the parameter's unsharded shape, and `whole` set to that if it is sharded."""
    if not is_sharded(param):
        return info if info.whole is None else replace(info, whole=None)
    shape = tuple(param.shape)
    return info if info.shape == info.whole == shape else replace(info, shape=shape, whole=shape)


def largest_shard(info: ParamInfo, *, param: Any) -> ParamInfo:
    """`info` of the largest shard of a parameter, which is rank 0's."""
    shard = shard_of(param)
    if shard is None:
        return info
    rows, *others = shard.param.shape
    return replace(info, shape=(-(-rows // shard.group.size), *others), whole=tuple(shard.param.shape))


@dataclass(frozen=True, slots=True, kw_only=True)
class ShardGroup:
    """The ranks over which parameters are sharded."""

    process_group: Any
    rank: int
    size: int

    def all_reduce_(self, tensor: Tensor) -> Tensor:
        """Sums the tensor over ranks, in place."""
        if self.size > 1:
            torch.distributed.all_reduce(tensor, group=self.process_group)
        return tensor

    def all_to_all(self, parts: Tensor, *, into: Tensor) -> Tensor:
        """All-to-all: part i of the first dimension goes to rank i, and part i of `into` comes from rank i."""
        torch.distributed.all_to_all_single(into, parts, group=self.process_group)
        return into


@dataclass(frozen=True, slots=True, kw_only=True)
class Shard:
    """This rank's rows of a parameter: `param` is the DTensor, `offset` the index of their first element in it."""

    param: Any
    group: ShardGroup
    offset: int

    def local_part(self, value: Any, *, shape: Sequence[int]) -> Tensor:
        """This rank's rows of an unsharded tensor or of a DTensor that belongs to the parameter, as `shape`."""
        if is_sharded(value):
            if value.device_mesh == self.param.device_mesh and value.placements == self.param.placements:
                return local_shard(value).reshape(tuple(shape))
            value = unsharded(value)
        begin = self.offset * value.numel() // max(self.param.numel(), 1)
        return value.reshape(-1)[begin : begin + prod(shape)].reshape(tuple(shape))

    def all_gather(self, value: Tensor) -> Tensor:
        """All rows of a tensor that is sharded like the parameter, and of which this rank has `value`. Collective."""
        return unsharded(self.as_dtensor(value, shape=tuple(self.param.shape)))

    def as_dtensor(self, value: Tensor, *, shape: Sequence[int]) -> Any:
        """`value`, this rank's rows of a state, as a DTensor of `shape`, sharded as the parameter, in the same
        memory."""
        rows, device = value.reshape(-1, *shape[1:]), self.param.device_mesh.device_type
        if rows.device.type == device:
            return _dtensor(rows, like=self.param, shape=shape)
        # from_local would copy the rows to the mesh's device, so they take the spec of a DTensor without rows there.
        empty = _dtensor(rows.new_empty(0, *shape[1:], device=device), like=self.param, shape=shape)
        return _tensor_module().DTensor(rows.detach(), empty._spec, requires_grad=False)


def shard_of(param: Any) -> Shard | None:
    """This rank's shard of a parameter; None if it is not sharded."""
    if not is_sharded(param):
        return None
    dim = next(i for i, placement in enumerate(param.placements) if not placement.is_replicate())
    mesh = param.device_mesh
    size, rank = mesh.size(dim), mesh.get_local_rank(dim)
    rows = param.shape[0]
    begin = min(rank * -(-rows // size), rows)  # as torch.chunk
    shards = ShardGroup(process_group=mesh.get_group(dim), rank=rank, size=size)
    return Shard(param=param, group=shards, offset=begin * (param.numel() // max(rows, 1)))


def warm_up_communicator(device: torch.device) -> None:
    """Makes the communicator allocate its buffers, so that they are counted with the device's context. Collective."""
    if device.type == "cuda" and ranks() is not SINGLE_PROCESS:
        sent = torch.zeros(WARM_UP_BYTES // ranks().size * ranks().size, dtype=torch.uint8, device=device)
        torch.distributed.all_reduce(sent)
        torch.distributed.all_to_all_single(torch.empty_like(sent), sent)
        del sent
        torch.cuda.synchronize(device)
        torch.cuda.empty_cache()


def check_codec_groups(info: ParamInfo, *, states: Mapping[str, tuple[int, int]], shard: Shard, spec: str) -> None:
    """Raises BadInputError if rows of a state are no whole groups of its codec and ranks do not share NUM_ROW_PARTS.

    `states`: state -> (its elements on all ranks, elements of a group).
    """
    rows, size = max(shard.param.shape[0], 1), shard.group.size
    in_parts = any(numel % (rows * group_size) for numel, group_size in states.values())
    if in_parts and NUM_ROW_PARTS % size:  # else a rank's rows are some of these parts, of which checkpoints are made
        raise refusal(
            "edges", name=info.name, shape=tuple(shard.param.shape), size=size, spec=spec, parts=NUM_ROW_PARTS
        )
