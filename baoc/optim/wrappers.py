"""Refuses wrappers that conflict with the optimizer: other sharding than `fully_shard`, hooks on gradients whose type
would change, and averages of weights that would be kept in 16 bits; notices a module that loads weights in mid-run.

Wrappers do not announce themselves, so each is searched for. The messages are in `baoc.parallel.REFUSED`.
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

from baoc.errors import BadInputError
from baoc.optim import weights
from baoc.optim.shards import is_sharded, local_shard
from baoc.optim.state import LiveBlock
from baoc.parallel import refusal, unwrapped

_MAX_FRAMES = 8  # up to the caller that builds the optimizer: constructors of subclasses are between
_MARK = "baoc: whether this node is kept"


def refuse_shard(param: Any, *, name: str) -> None:
    """Raises BadInputError if `param` is sharded in another way than by `fully_shard`, or offloaded by that."""
    if is_sharded(param):
        from torch.distributed.tensor import Shard  # imported by now, as there is a DTensor

        sharded = [placement for placement in param.placements if not placement.is_replicate()]
        if not (len(sharded) == 1 and type(sharded[0]) is Shard and sharded[0].dim == 0):
            raise refusal("placement", name=name, placements=", ".join(map(str, param.placements)))
        if param.device_mesh.device_type != "cpu" and local_shard(param).device.type == "cpu":
            raise refusal("offloaded", name=name)
    if getattr(param, "_fsdp_flattened", False):
        raise refusal("fsdp1", name=name)


def refuse_sparse(named: Iterable[tuple[str, Tensor]]) -> None:
    """Raises BadInputError if a parameter has a sparse gradient, by its name."""
    for name, param in named:
        if param.grad is not None and param.grad.is_sparse:
            raise BadInputError(
                f"{name} has a sparse gradient: build its layer with sparse=False, or leave it out of this optimizer "
                "and step it by torch.optim.SparseAdam"
            )


def refuse_zero() -> None:
    """Raises BadInputError if ZeroRedundancyOptimizer is building this optimizer, which only the call stack shows."""
    module: Any = sys.modules.get("torch.distributed.optim.zero_redundancy_optimizer")
    frame: FrameType | None = sys._getframe(1)
    for _ in range(_MAX_FRAMES):
        if module is None or frame is None:
            return
        builder: Any = frame.f_locals.get("self")
        if isinstance(builder, module.ZeroRedundancyOptimizer):
            raise refusal("zero", name=getattr(builder._optim_constructor, "__name__", "an optimizer"))
        frame = frame.f_back


def refuse_casts(lives: Iterable[LiveBlock]) -> None:
    """Raises BadInputError if changing a parameter's type would lose hooks on its gradient, such as those of
    DistributedDataParallel: its data then get a new AccumulateGrad node.

    Python's hooks can be counted. Those of DistributedDataParallel cannot, so its instances are searched for. A node
    that is kept does not prove hooks, as a live graph keeps it too.
    """
    cast = [(live, slot) for live in lives for slot in live.slots if _dtype_of(slot) is not slot.param.dtype]
    kept_nodes = [(live, slot) for live, slot in cast if slot.param.requires_grad and _is_kept(slot.param)]
    in_ddp = ddp_params() if kept_nodes else set[int]()
    for live, slot in kept_nodes:
        dtype = str(_dtype_of(slot)).removeprefix("torch.")
        facts = {"block": live.block.name, "spec": live.spec.name, "name": slot.name, "dtype": dtype}
        if id(slot.param) in in_ddp:
            raise refusal("cast_ddp", **facts)
        if count := _num_hooks(slot.param):
            raise refusal("cast_hooks", count=count, **facts)


def refuse_averages(lives: Iterable[LiveBlock], *, copies: Iterable[nn.Module] | None = None) -> None:
    """Raises BadInputError if a block would keep weights in 16 bits that an AveragedModel averages.

    `copies`: the averaged networks; None searches for all AveragedModels that exist.
    """
    in_16_bits = [live for live in lives if live.spec.weights != "native"]
    params = {slot.name: slot.param for live in in_16_bits for slot in live.slots}
    if in_16_bits and has_averaged_copy(params, copies=copies):
        raise refusal("averaged", block=in_16_bits[0].block.name, spec=in_16_bits[0].spec.name)


def has_averaged_copy(params: Mapping[str, Tensor], *, copies: Iterable[nn.Module] | None = None) -> bool:
    """True if an AveragedModel has parameters with the names and shapes of all `params`, or exactly their shapes.

    An AveragedModel copies the network, so its parameters cannot be compared by identity. Another network with the same
    shapes is mistaken for this one.
    """
    shapes = {name: param.shape for name, param in params.items()}

    def is_copy(network: nn.Module) -> bool:
        own = {name: param.shape for name, param in network.named_parameters()}
        return shapes.items() <= own.items() or Counter(shapes.values()) == Counter(own.values())

    if copies is not None:
        return any(map(is_copy, copies))
    if not any(map(is_copy, _averaged_networks())):
        return False
    gc.collect()  # the average of a run that is over may be garbage
    return any(map(is_copy, _averaged_networks()))


_watched: "weakref.WeakSet[Any]" = weakref.WeakSet()  # optimizers
_may_exist: list[bool] = [True]  # whether an AveragedModel may be alive; one may be older than this module


def _averaged_networks() -> list[nn.Module]:
    """Networks inside existing AveragedModels. Searching all objects takes as long as building an optimizer, so it is
    done once for those older than this module, and then only after one was built."""
    if not _may_exist[0]:
        return []
    networks = [model.module for model in live_instances(AveragedModel) if hasattr(model, "module")]
    _may_exist[0] = bool(networks)
    return networks


def watch_averages(optimizer: Any) -> None:
    """Refuses AveragedModels of 16-bit weights when they are built, as long as `optimizer` lives."""
    _watched.add(optimizer)


def watch_loads(module: nn.Module, registry: Any) -> None:
    """Makes a `BlockRegistry` take checksums of its split weights before `module`, or a submodule, loads others. Their
    corrections are then void, and an optimizer cannot see that by itself: `load_state_dict` copies into the parameters,
    as a user's constraint on them does, after which corrections are still good."""
    for submodule in unwrapped(module).modules():
        if not isinstance(submodule, torch.jit.ScriptModule) and submodule._parameters:  # which take no hooks
            submodule.register_load_state_dict_pre_hook(_BeforeLoad(registry))


class _BeforeLoad:
    """The hook. It does not keep the optimizer alive, and copies and pickles of the module leave it out, so that a
    pickled model is read where baoc is not installed."""

    def __init__(self, registry: Any):
        self._registry = weakref.ref(registry)

    def __call__(self, module: nn.Module, *_: Any) -> None:
        if (registry := self._registry()) is not None:
            registry.checksum_weights()

    def __reduce__(self) -> tuple[Any, ...]:
        return getattr, ("", "format")  # takes any arguments and does nothing


def _on_registration(module: nn.Module, name: str, child: nn.Module | None) -> None:
    if name == "module" and isinstance(module, AveragedModel) and child is not None:
        _may_exist[0] = True
        for optimizer in tuple(_watched):
            refuse_averages(optimizer.registry.live.values(), copies=[child])


register_module_module_registration_hook(_on_registration)


def _dtype_of(slot: Any) -> torch.dtype:
    return weights.dtype_of(slot.weights, info=slot.info)


def _node(param: Tensor) -> Any:
    with torch.inference_mode(False):
        return get_gradient_edge(param).node


def _is_kept(param: Tensor) -> bool:
    """True if anything keeps the parameter's AccumulateGrad node; otherwise each access makes a new one."""
    _node(param).metadata[_MARK] = True
    return _node(param).metadata.pop(_MARK, False)


def _num_hooks(param: Tensor) -> int:
    """Number of Python's hooks on the node. A new hook's handle refers to the dict of all."""
    node, count = _node(param), 0
    for register in (node.register_hook, node.register_prehook):
        handle = register(lambda *_: None)
        count += len(handle.hooks_dict_ref()) - 1
        handle.remove()
    return count


def ddp_params() -> set[int]:
    """`id` of the parameters whose gradients some DistributedDataParallel averages."""
    if not (torch.distributed.is_available() and torch.distributed.is_initialized()):
        return set()
    wrappers = live_instances(DistributedDataParallel)
    return {id(param) for ddp in wrappers for param in getattr(ddp, "_module_parameters", ddp.parameters())}


def live_instances(kind: type) -> list[Any]:
    """Live objects of a type. Proxies of other libraries would answer isinstance for the objects behind them."""
    return [each for each in gc.get_objects() if issubclass(type(each), kind)]
