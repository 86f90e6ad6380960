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

MAX_STAGES = 4  # modules of one class, at most, that may be stages of layers instead of layers
MIN_SHARE = 0.1  # of all parameters that a list of layers must hold
_MAX_VARIANTS = 64  # compiled graphs per class of layers: one for each batch size and each set of weight dtypes
_RECOMPUTES, _COMPILES = "_baoc_recomputes", "_baoc_compiles"  # attributes of layers that do so
_classes: dict[type[nn.Module], type[nn.Module]] = {}  # class -> its subclass that recomputes or runs compiled
compiled_layers: dict[tuple[type[nn.Module], bool], Callable[..., Any]] = {}  # (class, recomputes) -> forward


# -- recomputed activations -------------------------------------------------------------------------------------------


def recomputable_layers(model: nn.Module) -> list[nn.Module]:
    """The layers whose activations may be recomputed, in the order in which they run.

    These are the `checkpoint_units` that the network or a part of it declares, else its repeated layers: the children
    of each ModuleList or Sequential whose children are all of one class, if these hold most parameters. If the children
    are a few stages made of repeated layers, it is the layers of the stages. Layers that update running statistics in
    forward, such as batch norms, are left out, as recomputation would update them twice.
    """
    for child in model.modules():
        declared = getattr(child, "checkpoint_units", None)
        if declared is not None:
            return list(declared)
    numel = _numel(model)
    layers = list({id(layer): layer for layer in _repeated_layers(model, min_numel=MIN_SHARE * numel)}.values())
    if 2 * sum(map(_numel, layers)) < numel:
        return []
    return [layer for layer in layers if not any(getattr(m, "track_running_stats", False) for m in layer.modules())]


def _repeated_layers(module: nn.Module, *, min_numel: float) -> list[nn.Module]:
    children = list(module.children())
    of_one_class = len(children) > 1 and len({_original_class(child) for child in children}) == 1
    inner = [layer for child in children for layer in _repeated_layers(child, min_numel=min_numel)]
    if not (isinstance(module, nn.ModuleList | nn.Sequential) and of_one_class) or _numel(module) < max(min_numel, 1):
        return inner
    are_stages = len(children) <= MAX_STAGES and 2 * sum(map(_numel, inner)) >= _numel(module)
    return inner if are_stages else children


def params_keeping_activations(module: nn.Module, *, recomputed: int) -> frozenset[str]:
    """Names of the parameters of all layers after the first `recomputed` ones."""
    ids = {id(param) for layer in recomputable_layers(module)[recomputed:] for param in layer.parameters()}
    return frozenset(name for name, param in module.named_parameters() if id(param) in ids)


def _numel(module: nn.Module) -> int:
    return sum(param.numel() for param in module.parameters())


def set_recomputed(model: nn.Module, count: int | None = None, *, name: str | None = None) -> int:
    """Has the first `count` layers recompute their activations in backward, and the others keep them; None is all.

    It is the first layers, as their activations live longest: when backward reaches them, those of all others are gone.
    Dropout repeats its random numbers. The class of the layers is replaced by a subclass, so that copies, pickles and
    parameter names do not change.

    Returns the number of layers that recompute. Raises BadInputError, whose message calls the model `name`, for a
    network without `recomputable_layers`, or with fewer than `count`.
    """
    layers, name = recomputable_layers(model), name or type(model).__name__
    if not layers and count != 0:
        raise BadInputError(
            f"model {name} names no parts whose activations could be recomputed: set model.checkpointing=false, "
            "or give the network a list of its layers as `checkpoint_units`"
        )
    number = len(layers) if count is None else count
    if number > len(layers):
        raise BadInputError(
            f"model.checkpointing={count} is more than the {len(layers)} layers of model {name}: give 0 to "
            f"{len(layers)}, true for all of them, or auto"
        )
    for index, layer in enumerate(layers):
        _set_attribute(layer, _RECOMPUTES, "all" if index < number else None)
    return number


def count_recomputed_layers(model: nn.Module) -> int:
    return sum(_RECOMPUTES in layer.__dict__ for layer in recomputable_layers(model))


def set_compiled(model: nn.Module, compiled: bool = True) -> int:
    """Has the layers run by torch.compile in training, or no longer; returns their number.

    A network without `recomputable_layers` is one layer. In evaluation, layers do not run compiled. Layers of one class
    share a compiled graph for each batch size, one for those that recompute their activations and one for the others.
    Results of matrix products are kept for backward; norms, activation functions and casts are computed again in its
    kernels. Kernels are chosen without timing them: with the same versions and size, every process computes the same
    bits.
    """
    layers = recomputable_layers(model) or [model]
    for layer in layers:
        _set_attribute(layer, _COMPILES, "layer" if compiled else None)
    return len(layers)


def is_compiled(model: nn.Module) -> bool:
    """Whether any layer runs by torch.compile, see `set_compiled`."""
    return any(_COMPILES in part.__dict__ for part in model.modules())


def _set_attribute(layer: nn.Module, name: str, value: str | None) -> None:
    """Sets _RECOMPUTES or _COMPILES (None removes it), and the class that follows from both."""
    layer.__dict__.pop(name, None)
    if value:
        layer.__dict__[name] = value
    original = _original_class(layer)
    layer.__class__ = _switchable_class(original) if layer.__dict__.keys() & {_RECOMPUTES, _COMPILES} else original


def _original_class(module: nn.Module) -> type[nn.Module]:
    """The class of a module before `_set_attribute` replaced it."""
    return type(module).__mro__[1] if type(module) in _classes.values() else type(module)


def _switchable_class(cls: type[nn.Module]) -> type[nn.Module]:
    """A subclass of the same name whose forward pass in training is `torch.utils.checkpoint`, compiled, or both."""
    if cls not in _classes:

        def forward(self: nn.Module, *args: Any, **kwargs: Any) -> Any:
            if not self.training:
                return cls.forward(self, *args, **kwargs)
            recomputes = _RECOMPUTES in self.__dict__
            modes = [] if torch.compiler.is_compiling() else _get_current_function_mode_stack()
            if not modes and _COMPILES in self.__dict__:
                return _compiled_forward(cls, recomputes)(self, *args, **kwargs)
            run = partial(_run_under, modes, cls.forward) if modes else cls.forward
            if recomputes:
                return checkpoint(run, self, *args, use_reentrant=False, **kwargs)
            return run(self, *args, **kwargs)

        _classes[cls] = _subclass(cls, forward)
    return _classes[cls]


def _compiled_forward(cls: type[nn.Module], recomputes: bool) -> Callable[..., Any]:
    """The compiled forward of all layers of a class that recompute their activations, or of all that keep them."""
    key = cls, recomputes
    if key not in compiled_layers:
        from torch import _dynamo

        _use_private_cache()
        _dynamo.config.recompile_limit = max(_MAX_VARIANTS, _dynamo.config.recompile_limit)
        # Without this, dynamo would not notice that weights were cast to 16 bits in place.
        _dynamo.config.skip_tensor_guards_with_matching_dict_tags = False
        _dynamo.config.use_recursive_dict_tags_for_guards = False

        def run(self: nn.Module, *args: Any, **kwargs: Any) -> Any:
            if recomputes:
                return checkpoint(cls.forward, self, *args, use_reentrant=False, **kwargs)
            return cls.forward(self, *args, **kwargs)

        # torch looks compiled graphs up by the code object, so each variant needs one of its own
        code = run.__code__.replace(co_name=f"{cls.__name__}_{'recomputed' if recomputes else 'kept'}")
        variant = FunctionType(code, run.__globals__, closure=run.__closure__)
        compiled_layers[key] = torch.compile(variant, dynamic=False, backend=inductor_kernels)
    return compiled_layers[key]


def inductor_kernels(graph: Any, inputs: Any) -> Any:
    """Compiles a graph by torch's inductor, see `set_compiled`.

    RNG states of recomputed operators are passed as tensors: with generators, torch could not cache what it compiles.
    """
    from torch._functorch import config
    from torch._inductor.compile_fx import compile_fx

    with config.patch(aggressive_recomputation=True, graphsafe_rng_functionalization=False):
        return compile_fx(graph, inputs, config_patches={"deterministic": True})


def start_compiler() -> None:
    """Starts the processes that compile kernels, unless they run. They take seconds to start, while a network is built;
    until then kernels are compiled one after the other."""
    from torch._inductor.async_compile import maybe_warm_pool

    _use_private_cache()
    maybe_warm_pool()


def _use_private_cache() -> None:
    """Makes torch's folder of compiled code private. By default it is among temporary files, under a name that another
    user may take first."""
    from torch._inductor.runtime.cache_dir_utils import cache_dir

    ensure_private_folder("TORCHINDUCTOR_CACHE_DIR", Path(cache_dir()))


def _subclass(cls: type[nn.Module], forward: Callable[..., Any]) -> type[nn.Module]:
    """A subclass of the same name with another forward pass."""
    names = {"forward": forward, "__module__": cls.__module__, "__qualname__": cls.__qualname__}
    return type(cls.__name__, (cls,), names)


def _run_under(modes: list[Any], forward: Any, *args: Any, **kwargs: Any) -> Any:
    """Runs `forward` under the function modes of the first pass: backward recomputes without them.

    Planning for an absent card uses such a mode to compute in CUDA's dtypes.
    """
    with ExitStack() as stack:
        if not _get_current_function_mode_stack():
            for mode in modes:
                stack.enter_context(mode)
        return forward(*args, **kwargs)


# -- activations of 16 bits -------------------------------------------------------------------------------------------


def enable_bf16_activations(model: nn.Module, *, name: str) -> int:
    """Makes activations between layers bf16 under bf16 autocast, forward and backward.

    Autocast alone runs matmuls in bf16 and norms in float32, whose outputs keep the residual stream in float32: twice
    the bytes to keep and to move. Here norms take and return bf16 (their kernels still accumulate in float32),
    embeddings return bf16, and the inputs of `checkpoint_units` are cast. Parameters keep their dtype and are cast
    when they are used, so gradients have the parameters' dtype. Losses stay in float32.

    Returns the number of changed norms and embeddings. Raises BadInputError for a network without `checkpoint_units`.
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
    forwards = {nn.LayerNorm: _layer_norm, nn.GroupNorm: _group_norm, nn.RMSNorm: _rms_norm, nn.Embedding: _embedding}
    return forwards.get(type(module))


def _in_bf16(_: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """Casts positional float32 inputs to bf16; keyword inputs (masks, positions) keep their dtype."""
    return tuple(_to_bf16(value) for value in args), kwargs


def _to_bf16(value: Any) -> Any:
    return value.to(torch.bfloat16) if isinstance(value, Tensor) and value.dtype is torch.float32 else value


def _layer_norm(self: Any, tokens: Tensor) -> Tensor:
    with torch.autocast(tokens.device.type, enabled=False):
        weight, bias = _to_bf16(self.weight), _to_bf16(self.bias)
        return F.layer_norm(_to_bf16(tokens), self.normalized_shape, weight, bias, self.eps)


def _group_norm(self: Any, images: Tensor) -> Tensor:
    with torch.autocast(images.device.type, enabled=False):
        return F.group_norm(_to_bf16(images), self.num_groups, _to_bf16(self.weight), _to_bf16(self.bias), self.eps)


def _rms_norm(self: Any, tokens: Tensor) -> Tensor:
    """RMSNorm of torch, also in place of transformers': the fused kernel keeps only its input for backward."""
    of_torch = isinstance(self, nn.RMSNorm)
    shape, eps = (self.normalized_shape, self.eps) if of_torch else (tokens.shape[-1:], self.variance_epsilon)
    with torch.autocast(tokens.device.type, enabled=False):
        return F.rms_norm(_to_bf16(tokens), shape, _to_bf16(self.weight), eps)


def _embedding(self: Any, tokens: Tensor) -> Tensor:
    return _to_bf16(nn.Embedding.forward(self, tokens))
