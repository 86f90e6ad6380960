"""Refuses wrappers that conflict with the optimizer: other sharding than `fully_shard`, hooks on gradients whose type
would change, and averages of weights that would be kept in 16 bits.

No wrapper announces itself, so each is searched for. Their messages are in `baoc.parallel.REFUSED`.
"""

import gc
import sys
import weakref
from collections import Counter
from collections.abc import Iterable, Mapping
from types import FrameType
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.graph import get_gradient_edge
from torch.nn.modules.module import register_module_module_registration_hook
from torch.nn.parallel import DistributedDataParallel
from torch.optim.swa_utils import AveragedModel

from baoc.optim import weights
from baoc.optim.shards import refuse_placement
from baoc.optim.state import LiveBlock
from baoc.parallel import refusal

_DEEPEST = 8  # frames up to who builds an optimizer: the constructors of subclasses come between
_HELD = "baoc: whether somebody holds this node"


def refuse_shard(param: Tensor, *, name: str) -> None:
    """Raises BadInputError where `param` is a part of a tensor that several processes share, and none of its rows."""
    refuse_placement(param, name=name)
    if getattr(param, "_fsdp_flattened", False):
        raise refusal("fsdp1", name=name)


def refuse_zero() -> None:
    """Raises BadInputError where ZeroRedundancyOptimizer is building an optimizer of its part of the parameters.

    It hands that over as plain groups, so that only the stack tells who asks.
    """
    module: Any = sys.modules.get("torch.distributed.optim.zero_redundancy_optimizer")
    frame: FrameType | None = sys._getframe(1)
    for _ in range(_DEEPEST):
        if module is None or frame is None:
            return
        builder: Any = frame.f_locals.get("self")
        if isinstance(builder, module.ZeroRedundancyOptimizer):
            raise refusal("zero", name=getattr(builder._optim_constructor, "__name__", "an optimizer"))
        frame = frame.f_back


def refuse_casts(lives: Iterable[LiveBlock]) -> None:
    """Raises BadInputError where changing a parameter's type would lose hooks on its gradient, such as those of
    DistributedDataParallel.

    A parameter gets a new AccumulateGrad node when its data change type, and hooks on the old node are lost. Python's
    hooks can be counted; those of DistributedDataParallel cannot, so its instances are searched for. That someone holds
    the node is no sign of hooks, as a live graph holds it too.
    """
    cast = [(live, slot) for live in lives for slot in live.slots if _target(slot) is not slot.param.dtype]
    held = [(live, slot) for live, slot in cast if slot.param.requires_grad and _is_held(slot.param)]
    of_ddp = _of_ddp() if held else set[int]()
    for live, slot in held:
        dtype = str(_target(slot)).removeprefix("torch.")
        facts = {"block": live.block.name, "spec": live.spec.name, "name": slot.name, "dtype": dtype}
        if id(slot.param) in of_ddp:
            raise refusal("cast_ddp", **facts)
        if count := _num_hooks(slot.param):
            raise refusal("cast_hooks", count=count, **facts)


def refuse_averages(lives: Iterable[LiveBlock], *, copies: Iterable[nn.Module] | None = None) -> None:
    """Raises BadInputError where a block would keep weights in 16 bits that an AveragedModel averages.

    `copies`: the averaged networks; None searches for all AveragedModels that exist.
    """
    narrow = [live for live in lives if live.spec.weights != "native"]
    params = {slot.name: slot.param for live in narrow for slot in live.slots}
    if narrow and has_averaged_copy(params, copies=copies):
        raise refusal("averaged", block=narrow[0].block.name, spec=narrow[0].spec.name)


def has_averaged_copy(params: Mapping[str, Tensor], *, copies: Iterable[nn.Module] | None = None) -> bool:
    """Whether an AveragedModel averages all of `params` by names and shapes, or no others by shapes alone.

    It has copied the network, so that none of its parameters is the network's own; another network that is averaged
    has other shapes, or is taken for this one.
    """
    shapes = {name: param.shape for name, param in params.items()}

    def is_copy(network: nn.Module) -> bool:
        own = {name: param.shape for name, param in network.named_parameters()}
        return shapes.items() <= own.items() or Counter(shapes.values()) == Counter(own.values())

    if copies is not None:
        return any(map(is_copy, copies))
    if not any(map(is_copy, _averaged_networks())):
        return False
    gc.collect()  # an average of a run that is over may wait for that
    return any(map(is_copy, _averaged_networks()))


_watched: "weakref.WeakSet[Any]" = weakref.WeakSet()  # optimizers
_made: list[bool] = [True]  # whether an AveragedModel may be alive; before this module was imported, nobody knows


def _averaged_networks() -> list[nn.Module]:
    """Networks inside existing AveragedModels.

    Searching all objects takes as long as building an optimizer. So it is done only after an AveragedModel was built,
    and once for those that were built before this module was imported."""
    if not _made[0]:
        return []
    found = [model.module for model in live_instances(AveragedModel) if hasattr(model, "module")]
    _made[0] = bool(found)
    return found


def watch_averages(optimizer: Any) -> None:
    """An AveragedModel that is made of narrow weights is refused then, for as long as `optimizer` lives."""
    _watched.add(optimizer)


def _note_average(module: nn.Module, name: str, part: nn.Module | None) -> None:
    if name == "module" and isinstance(module, AveragedModel) and part is not None:
        _made[0] = True
        for optimizer in tuple(_watched):
            refuse_averages(optimizer.registry.live.values(), copies=[part])


register_module_module_registration_hook(_note_average)


def _target(slot: Any) -> torch.dtype:
    return weights.dtype_of(slot.weights, info=slot.info)


def _node(param: Tensor) -> Any:
    with torch.inference_mode(False):
        return get_gradient_edge(param).node


def _is_held(param: Tensor) -> bool:
    """Whether anybody keeps the parameter's AccumulateGrad node; otherwise each access makes a new one."""
    _node(param).metadata[_HELD] = True
    return _node(param).metadata.pop(_HELD, False)


def _num_hooks(param: Tensor) -> int:
    """Python's hooks on the node, counted in the dict that the handle of one more refers to."""
    node, count = _node(param), 0
    for register in (node.register_hook, node.register_prehook):
        handle = register(lambda *_: None)
        count += len(handle.hooks_dict_ref()) - 1
        handle.remove()
    return count


def _of_ddp() -> set[int]:
    """Identities of the parameters whose gradients a DistributedDataParallel averages, whoever has it."""
    if not (torch.distributed.is_available() and torch.distributed.is_initialized()):
        return set()
    found = live_instances(DistributedDataParallel)
    return {id(param) for ddp in found for param in getattr(ddp, "_module_parameters", ddp.parameters())}


def live_instances(kind: type) -> list[Any]:
    """Objects of a type. isinstance would ask proxies of other libraries, which answer for what they stand for."""
    return [thing for thing in gc.get_objects() if issubclass(type(thing), kind)]
