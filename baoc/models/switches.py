"""Options of every network: activation checkpointing, bf16 activations, and torch.compile.

None of them changes the name, dtype or value of a parameter.
"""

from collections.abc import Callable
from contextlib import ExitStack
from functools import partial
from pathlib import Path
from types import FunctionType
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.overrides import (
    _get_current_function_mode_stack,  # pyright: ignore[reportPrivateUsage, reportAttributeAccessIssue]
)
from torch.utils.checkpoint import checkpoint

from baoc.cache import ensure_private_folder
from baoc.errors import BadInputError


def recomputable_layers(model: nn.Module) -> list[nn.Module]:
    """The layers whose activations may be recomputed, in the order in which they run: the `checkpoint_units` that the
    network or a part of it declares, else its repeated layers.

    Repeated layers are the children of each ModuleList or Sequential whose children are all of one class, where such
    hold most parameters. Of a few stages that are made of repeated layers themselves it is those. Layers that count
    what they see, such as batch norms, are left out, as they would count it twice.
    """
    for child in model.modules():
        declared = getattr(child, "checkpoint_units", None)
        if declared is not None:
            return list(declared)
    total = _numel(model)
    found = list({id(layer): layer for layer in _repeated(model, least=MINOR * total)}.values())
    if 2 * sum(map(_numel, found)) < total:
        return []
    return [layer for layer in found if not any(getattr(m, "track_running_stats", False) for m in layer.modules())]


def params_keeping_activations(module: nn.Module, *, recomputed: int) -> frozenset[str]:
    """The names, in `module`, of the parameters of its layers after the first `recomputed` ones."""
    there = {id(param) for layer in recomputable_layers(module)[recomputed:] for param in layer.parameters()}
    return frozenset(name for name, param in module.named_parameters() if id(param) in there)


STAGES = 4  # so few alike parts may be stages of layers
MINOR = 0.1  # of all parameters: repeated layers that hold less are not what a network is made of


def _repeated(module: nn.Module, *, least: float) -> list[nn.Module]:
    children = list(module.children())
    alike = len(children) > 1 and len({_kept_class(child) for child in children}) == 1
    inner = [layer for child in children for layer in _repeated(child, least=least)]
    if not (isinstance(module, nn.ModuleList | nn.Sequential) and alike) or _numel(module) < max(least, 1):
        return inner
    return inner if len(children) <= STAGES and 2 * sum(map(_numel, inner)) >= _numel(module) else children


def _numel(module: nn.Module) -> int:
    return sum(param.numel() for param in module.parameters())


def set_recomputed(model: nn.Module, count: int | None = None, *, name: str | None = None) -> int:
    """Recomputes the activations of the first `count` of the network's `checkpoint_units` in backward, of all where it
    is None, and keeps those of the others; returns the number of units that are recomputed.

    The first ones, as what they keep is kept longest: when backward reaches them, all others' activations are gone.
    Dropout repeats its random numbers. The class of the units is replaced by a subclass, so that copies, pickles and
    parameter names do not change. Raises BadInputError for a network without units, or with fewer than `count`, which
    messages call `name`.
    """
    units, name = recomputable_layers(model), name or type(model).__name__
    if not units and count != 0:
        raise BadInputError(
            f"model {name} names no parts whose activations could be recomputed: set model.checkpointing=false, "
            "or give the network a list of its layers as `checkpoint_units`"
        )
    number = len(units) if count is None else count
    if number > len(units):
        raise BadInputError(
            f"model.checkpointing={count} is more than the {len(units)} layers of model {name}: give 0 to "
            f"{len(units)}, true for all of them, or auto"
        )
    for at, unit in enumerate(units):
        _switch(unit, _RECOMPUTES, "all" if at < number else None)
    return number


def count_recomputed_layers(model: nn.Module) -> int:
    """How many of the network's `checkpoint_units` recompute their activations."""
    return sum(_RECOMPUTES in unit.__dict__ for unit in recomputable_layers(model))


def set_compiled(model: nn.Module, compiled: bool = True) -> int:
    """Has the network's `checkpoint_units` run by torch.compile in training, or no more; returns their number. A
    network that names none is one unit.

    Layers of one class share what is compiled, those that recompute their activations and those that keep them apart;
    in evaluation they run as they are. It is compiled for each size of a batch. What is kept are results of products:
    norms, activation functions and casts are computed again, in the kernels of backward. Kernels are chosen without
    timing them: with the same versions and size, every process computes the same bits.
    """
    units = recomputable_layers(model) or [model]
    for unit in units:
        _switch(unit, COMPILES, "layer" if compiled else None)
    return len(units)


def is_compiled(model: nn.Module) -> bool:
    """Whether any of its layers runs by torch.compile, see `set_compiled`."""
    return any(COMPILES in part.__dict__ for part in model.modules())


_RECOMPUTES, COMPILES = "_baoc_recomputes", "_baoc_compiles"  # set in layers that do
_classes: dict[type[nn.Module], type[nn.Module]] = {}
compiled_layers: dict[tuple[type[nn.Module], bool], Callable[..., Any]] = {}
_VARIANTS = 64  # of what is compiled of a class at most: by size, and by the types of its weights


def _switch(unit: nn.Module, name: str, value: str | None) -> None:
    unit.__dict__.pop(name, None)
    if value:
        unit.__dict__[name] = value
    kept = _kept_class(unit)
    unit.__class__ = _switchable(kept) if unit.__dict__.keys() & {_RECOMPUTES, COMPILES} else kept


def _kept_class(module: nn.Module) -> type[nn.Module]:
    """The class of a module that keeps its activations."""
    return type(module).__mro__[1] if type(module) in _classes.values() else type(module)


def _switchable(cls: type[nn.Module]) -> type[nn.Module]:
    """A subclass of the same name whose forward pass in training is `torch.utils.checkpoint`, compiled, or both."""
    if cls not in _classes:

        def forward(self: nn.Module, *args: Any, **kwargs: Any) -> Any:
            if not self.training:
                return cls.forward(self, *args, **kwargs)
            recomputes = _RECOMPUTES in self.__dict__
            modes = [] if torch.compiler.is_compiling() else _get_current_function_mode_stack()
            if not modes and COMPILES in self.__dict__:
                return _compiled_forward(cls, recomputes)(self, *args, **kwargs)
            run = partial(_under, modes, cls.forward) if modes else cls.forward
            return (
                checkpoint(run, self, *args, use_reentrant=False, **kwargs)
                if recomputes
                else run(self, *args, **kwargs)
            )

        _classes[cls] = _subclass(cls, forward)
    return _classes[cls]


def _compiled_forward(cls: type[nn.Module], recomputes: bool) -> Callable[..., Any]:
    key = cls, recomputes
    if key not in compiled_layers:
        from torch import _dynamo

        _load_own_code()
        _dynamo.config.recompile_limit = max(_VARIANTS, _dynamo.config.recompile_limit)
        # Else weights that were narrowed in place since are taken for what they were.
        _dynamo.config.skip_tensor_guards_with_matching_dict_tags = False
        _dynamo.config.use_recursive_dict_tags_for_guards = False

        def run(self: nn.Module, *args: Any, **kwargs: Any) -> Any:
            if recomputes:
                return checkpoint(cls.forward, self, *args, use_reentrant=False, **kwargs)
            return cls.forward(self, *args, **kwargs)

        # torch knows what it compiled by the code
        code = run.__code__.replace(co_name=f"{cls.__name__}_{'recomputed' if recomputes else 'kept'}")
        own = FunctionType(code, run.__globals__, closure=run.__closure__)
        compiled_layers[key] = torch.compile(own, dynamic=False, backend=inductor_kernels)
    return compiled_layers[key]


def inductor_kernels(graph: Any, inputs: Any) -> Any:
    """What torch's inductor makes of a graph, see `set_compiled`. The state of a random generator that a recomputed
    operator begins with is a tensor: where it is a generator, torch cannot keep what it compiled for the next process.
    """
    from torch._functorch import config
    from torch._inductor.compile_fx import compile_fx

    with config.patch(aggressive_recomputation=True, graphsafe_rng_functionalization=False):
        return compile_fx(graph, inputs, config_patches={"deterministic": True})


def start_compiler() -> None:
    """Starts the processes that compile kernels, if there are none: they take seconds to come up, in which a network
    is built, and what is asked for before they are there is compiled one kernel after the other."""
    from torch._inductor.async_compile import maybe_warm_pool

    _load_own_code()
    maybe_warm_pool()


def _load_own_code() -> None:
    """By default torch keeps it in the folder for temporary files, under a name that another user may take first."""
    from torch._inductor.runtime.cache_dir_utils import cache_dir

    ensure_private_folder("TORCHINDUCTOR_CACHE_DIR", Path(cache_dir()))


def _subclass(cls: type[nn.Module], forward: Callable[..., Any]) -> type[nn.Module]:
    """A subclass of the same name with another forward pass."""
    names = {"forward": forward, "__module__": cls.__module__, "__qualname__": cls.__qualname__}
    return type(cls.__name__, (cls,), names)


def _under(modes: list[Any], forward: Any, *args: Any, **kwargs: Any) -> Any:
    """Runs `forward` under the function modes of the first pass, as backward runs without them.

    Planning for an absent card uses such a mode to compute in CUDA's dtypes.
    """
    with ExitStack() as stack:
        if not _get_current_function_mode_stack():
            for mode in modes:
                stack.enter_context(mode)
        return forward(*args, **kwargs)


# -- activations of 16 bits -------------------------------------------------------------------------------------------


def enable_bf16_activations(model: nn.Module, *, name: str) -> int:
    """Makes activations between layers bf16 under bf16 autocast, forward and backward; returns the number of changes.

    Autocast alone runs matmuls in bf16 and norms in float32, whose outputs keep the residual stream in float32: twice
    the bytes to keep and to move. Here norms take and return bf16 (their kernels still accumulate in float32),
    embeddings return bf16, and the inputs of `checkpoint_units` are cast. Parameters keep their dtype and are cast
    where they are used, so gradients have the parameters' dtype. Losses stay in float32. Raises BadInputError for a
    network without `checkpoint_units`.
    """
    units: list[nn.Module] = list(getattr(model, "checkpoint_units", ()))
    if not units:
        raise BadInputError(
            f"model {name} names no parts between which activations could be bf16: set model.activations=null"
        )
    for unit in units:
        unit.register_forward_pre_hook(_in_bf16, with_kwargs=True)
    changed = 0
    for module in model.modules():
        forward = _bf16_forward(module)
        if forward is not None:
            cls = type(module)
            module.__class__ = _bf16_classes.get(cls) or _bf16_classes.setdefault(cls, _subclass(cls, forward))
            changed += 1
    return changed


_bf16_classes: dict[type[nn.Module], type[nn.Module]] = {}


def _bf16_forward(module: nn.Module) -> Callable[..., Tensor] | None:
    """The forward that replaces a module's; None if its output is bf16 under autocast alone."""
    if type(module) in _bf16_classes.values():
        return None
    if type(module).__name__.endswith("RMSNorm") and hasattr(module, "variance_epsilon"):  # transformers', of T5's kind
        return _rms_norm
    rows = {nn.LayerNorm: _layer_norm, nn.GroupNorm: _group_norm, nn.RMSNorm: _rms_norm, nn.Embedding: _embedding}
    return rows.get(type(module))


def _in_bf16(_: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """Casts positional float32 inputs to bf16; keyword inputs (masks, positions) keep their dtype."""
    return tuple(_low(value) for value in args), kwargs


def _low(value: Any) -> Any:
    return value.to(torch.bfloat16) if isinstance(value, Tensor) and value.dtype is torch.float32 else value


def _layer_norm(self: Any, tokens: Tensor) -> Tensor:
    with torch.autocast(tokens.device.type, enabled=False):
        return F.layer_norm(_low(tokens), self.normalized_shape, _low(self.weight), _low(self.bias), self.eps)


def _group_norm(self: Any, images: Tensor) -> Tensor:
    with torch.autocast(images.device.type, enabled=False):
        return F.group_norm(_low(images), self.num_groups, _low(self.weight), _low(self.bias), self.eps)


def _rms_norm(self: Any, tokens: Tensor) -> Tensor:
    """Torch's own, or torch's in place of transformers': fused, it keeps only its input for backward."""
    own = isinstance(self, nn.RMSNorm)
    shape, eps = (self.normalized_shape, self.eps) if own else (tokens.shape[-1:], self.variance_epsilon)
    with torch.autocast(tokens.device.type, enabled=False):
        return F.rms_norm(_low(tokens), shape, _low(self.weight), eps)


def _embedding(self: Any, tokens: Tensor) -> Tensor:
    return _low(nn.Embedding.forward(self, tokens))
