"""Parameters that `fully_shard` cuts along their first dimension: what a rank steps, and what ranks sum.

A rank steps its rows like a parameter: the slot has a `twin`, a plain tensor in the same memory, which shares the
gradient during a step. So backends, codecs and the finite check know nothing of ranks. Only sums over a whole tensor
(`ShardGroup.all_reduce_`) and what a checkpoint shows (`Shard.as_dtensor`) do.
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


def _tensors() -> Any:
    """The module torch.distributed.tensor if it is imported, else None: then there is no DTensor."""
    return sys.modules.get("torch.distributed.tensor")


def is_sharded(param: Any) -> bool:
    tensors = _tensors()
    return tensors is not None and isinstance(param, tensors.DTensor)


def local_shard(tensor: Any) -> Tensor:
    """This rank's part of a DTensor, in the same memory; any other tensor itself."""
    return tensor._local_tensor if is_sharded(tensor) else tensor


def unsharded(param: Any) -> Tensor:
    """The whole of a parameter or state. For a DTensor all ranks gather it on the mesh's device, as bytes: not every
    backend knows every type."""
    if not is_sharded(param):
        return param
    part = local_shard(param.detach()).contiguous().unsqueeze(-1).view(torch.uint8)
    shape = torch.Size((*param.shape, param.element_size()))
    given = {"run_check": False, "shape": shape, "stride": torch.empty(shape, device="meta").stride()}
    bytes_ = _tensors().DTensor.from_local(part, param.device_mesh, param.placements, **given)
    return bytes_.full_tensor().view(param.dtype).squeeze(-1)


def reshard(module: Any) -> None:
    """Frees what `fully_shard` has gathered: some of it stays so after a forward that no backward follows."""
    fsdp: Any = sys.modules.get("torch.distributed.fsdp")
    for part in module.modules():
        if fsdp is not None and isinstance(part, fsdp.FSDPModule):
            part.reshard()


def unsharded_on_rank_0(state: Any) -> Any:
    """`state` with each DTensor replaced by the whole on rank 0's CPU, and by None on other ranks. Collective."""
    if isinstance(state, Mapping):
        return {key: unsharded_on_rank_0(value) for key, value in state.items()}
    if isinstance(state, list | tuple):
        return type(state)(unsharded_on_rank_0(value) for value in state)
    if not is_sharded(state):
        return state
    found = unsharded(state)
    return found.cpu() if ranks().rank == 0 else None


def with_sharding(info: ParamInfo, *, param: Any) -> ParamInfo:
    """`info` of a whole parameter, with `whole` set where it is sharded."""
    if not is_sharded(param):
        return info if info.whole is None else replace(info, whole=None)
    shape = tuple(param.shape)
    return info if info.shape == info.whole == shape else replace(info, shape=shape, whole=shape)


def largest_shard(info: ParamInfo, *, param: Any) -> ParamInfo:
    """`info` of the largest part that a rank has of a parameter, which is the first rank's."""
    shard = shard_of(param)
    if shard is None:
        return info
    rows, *others = shard.param.shape
    return replace(info, shape=(-(-rows // shard.group.size), *others), whole=tuple(shard.param.shape))


def refuse_placement(param: Any, *, name: str) -> None:
    """Raises BadInputError for a DTensor that is not cut as `fully_shard` does it, or that is offloaded by it."""
    if not is_sharded(param):
        return
    cut = [placement for placement in param.placements if not placement.is_replicate()]
    plain = len(cut) == 1 and type(cut[0]) is _tensors().Shard and cut[0].dim == 0
    if not plain:
        raise refusal("placement", name=name, placements=", ".join(map(str, param.placements)))
    if param.device_mesh.device_type != "cpu" and local_shard(param).device.type == "cpu":
        raise refusal("offloaded", name=name)


@dataclass(frozen=True, slots=True, kw_only=True)
class ShardGroup:
    """The ranks over which parameters are cut."""

    process_group: Any
    rank: int
    size: int

    def all_reduce_(self, tensor: Tensor) -> Tensor:
        """Sums the tensor over ranks, in place."""
        if self.size > 1:
            torch.distributed.all_reduce(tensor, group=self.process_group)
        return tensor

    def all_reduce_numbers(self, numbers: Sequence[float]) -> list[float]:
        """The sum of each number over ranks."""
        if self.size == 1:
            return list(numbers)
        return self.all_reduce_(torch.tensor(numbers, dtype=torch.float64, device="cpu")).tolist()

    def all_to_all(self, parts: Tensor, *, into: Tensor) -> Tensor:
        """All-to-all: part i of the first dimension goes to rank i, and part i of `into` comes from rank i."""
        torch.distributed.all_to_all_single(into, parts, group=self.process_group)
        return into


@dataclass(frozen=True, slots=True, kw_only=True)
class Shard:
    """This rank's rows of a parameter: `owner` is the DTensor, `first` the index of their first element in it."""

    param: Any
    group: ShardGroup
    offset: int

    def local_part(self, value: Any, *, shape: Sequence[int]) -> Tensor:
        """This rank's part, of `shape`, of a whole tensor or of a DTensor that belongs to the parameter."""
        if is_sharded(value):
            if value.device_mesh == self.param.device_mesh and value.placements == self.param.placements:
                return local_shard(value).reshape(tuple(shape))
            value = unsharded(value)
        begin = self.offset * value.numel() // max(self.param.numel(), 1)
        return value.reshape(-1)[begin : begin + prod(shape)].reshape(tuple(shape))

    def all_gather(self, value: Tensor) -> Tensor:
        """The whole of a tensor that is cut as the parameter is, of which this rank has `value`. Collective."""
        return unsharded(self.as_dtensor(value, shape=tuple(self.param.shape)))

    def as_dtensor(self, value: Tensor, *, shape: Sequence[int]) -> Any:
        """`value`, this rank's part of a state, as a DTensor of `shape` that is cut as the parameter is, in the same
        memory: one on the host stays there, as fully_shard keeps what it offloads."""
        owner, DTensor = self.param, _tensors().DTensor
        stride = torch.empty(tuple(shape), device="meta").stride()
        rows = value.reshape(-1, *shape[1:])
        given = {"run_check": False, "shape": torch.Size(shape), "stride": stride}
        device = owner.device_mesh.device_type
        if rows.device.type == device:
            return DTensor.from_local(rows, owner.device_mesh, owner.placements, **given)
        there = rows.new_empty(0, *shape[1:], device=device)  # from_local would copy the rows to that device
        spec = DTensor.from_local(there, owner.device_mesh, owner.placements, **given)._spec
        return DTensor(rows.detach(), spec, requires_grad=False)


def shard_of(param: Any) -> Shard | None:
    """How a parameter is cut; None where it is not."""
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
    """Has the communicator allocate its buffers before the device's context is measured. Collective."""
    if device.type == "cuda" and ranks() is not SINGLE_PROCESS:
        sent = torch.zeros(WARM_UP_BYTES // ranks().size * ranks().size, dtype=torch.uint8, device=device)
        torch.distributed.all_reduce(sent)
        torch.distributed.all_to_all_single(torch.empty_like(sent), sent)
        del sent
        torch.cuda.synchronize(device)
        torch.cuda.empty_cache()


WARM_UP_BYTES = 64 * MIB


def check_codec_groups(info: ParamInfo, *, states: Mapping[str, tuple[int, int]], shard: Shard, spec: str) -> None:
    """Raises BadInputError where a rank's part of a state ends within a group of its codec.

    `states`: state -> (its elements on all ranks, elements of a group).
    """
    rows, size = shard.param.shape[0], shard.group.size
    for numel, grouped in states.values():
        edges = [min(rank * -(-rows // size), rows) * (numel // max(rows, 1)) for rank in range(size)]
        if any(edge % grouped for edge in edges):
            raise refusal(
                "edges", name=info.name, shape=tuple(shard.param.shape), size=size, spec=spec, parts=NUM_ROW_PARTS
            )


def common_group(shards: Mapping[str, Shard]) -> ShardGroup | None:
    """The ranks over which all sharded parameters are cut. Raises BadInputError where these are several sets of
    ranks."""
    found = list(shards.items())
    for name, shard in found[1:]:
        if shard.group.process_group is not found[0][1].group.process_group:
            raise refusal("meshes", name=name, other=found[0][0])
    return found[0][1].group if found else None
