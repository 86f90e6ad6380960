"""Options of every network: activation checkpointing, bf16 activations, and torch.compile.

None of them changes the name, dtype or value of a parameter.
"""

from collections.abc import Callable
from contextlib import ExitStack
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.overrides import (
    _get_current_function_mode_stack,  # pyright: ignore[reportPrivateUsage, reportAttributeAccessIssue]
)
from torch.utils.checkpoint import checkpoint

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


def kept_params(module: nn.Module, *, recomputed: int) -> frozenset[str]:
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


def enable_checkpointing(model: nn.Module, *, name: str, count: int | None = None) -> int:
    """Recomputes the activations of the first `count` of the network's `checkpoint_units` in backward, of all where it
    is None; returns the number of units that are.

    The first ones, as what they keep is kept longest: when backward reaches them, all others' activations are gone.
    Dropout repeats its random numbers. The class of the units is replaced by a subclass, so that copies, pickles and
    parameter names do not change. Raises BadInputError for a network without units, or with fewer than `count`.
    """
    units = recomputable_layers(model)
    if not units:
        raise BadInputError(
            f"model {name} names no parts whose activations could be recomputed: set model.checkpointing=false, "
            "or give the network a list of its layers as `checkpoint_units`"
        )
    if count is not None and count > len(units):
        raise BadInputError(
            f"model.checkpointing={count} is more than the {len(units)} layers of model {name}: give 0 to "
            f"{len(units)}, true for all of them, or auto"
        )
    for unit in units[:count]:
        if type(unit) not in _classes.values():
            unit.__class__ = _recomputing(type(unit))
    return len(units[:count])


def disable_checkpointing(model: nn.Module) -> None:
    """Reverses `enable_checkpointing`; does nothing to a network that keeps all activations."""
    for unit in recomputable_layers(model):
        unit.__class__ = _kept_class(unit)


def recomputed_layers(model: nn.Module) -> int:
    """How many of the network's `checkpoint_units` recompute their activations."""
    return sum(type(unit) in _classes.values() for unit in recomputable_layers(model))


_classes: dict[type[nn.Module], type[nn.Module]] = {}


def _kept_class(module: nn.Module) -> type[nn.Module]:
    """The class of a module that keeps its activations."""
    return type(module).__mro__[1] if type(module) in _classes.values() else type(module)


def _recomputing(cls: type[nn.Module]) -> type[nn.Module]:
    """A subclass of the same name whose forward pass in training is `torch.utils.checkpoint`."""
    if cls not in _classes:

        def forward(self: nn.Module, *args: Any, **kwargs: Any) -> Any:
            if not self.training:
                return cls.forward(self, *args, **kwargs)
            run = cls.forward
            if not torch.compiler.is_compiling() and (modes := _get_current_function_mode_stack()):
                run = partial(_under, modes, cls.forward)
            return checkpoint(run, self, *args, use_reentrant=False, **kwargs)

        names = {"forward": forward, "__module__": cls.__module__, "__qualname__": cls.__qualname__}
        _classes[cls] = type(cls.__name__, (cls,), names)
    return _classes[cls]


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
            module.__class__ = _computing_in_bf16(type(module), forward)
            changed += 1
    return changed


_bf16_classes: dict[type[nn.Module], type[nn.Module]] = {}


def _computing_in_bf16(cls: type[nn.Module], forward: Callable[..., Tensor]) -> type[nn.Module]:
    """A subclass of the same name with another forward pass."""
    if cls not in _bf16_classes:
        names = {"forward": forward, "__module__": cls.__module__, "__qualname__": cls.__qualname__}
        _bf16_classes[cls] = type(cls.__name__, (cls,), names)
    return _bf16_classes[cls]


def _bf16_forward(module: nn.Module) -> Callable[..., Tensor] | None:
    """The forward that replaces a module's; None if its output is bf16 under autocast alone."""
    if type(module) in _bf16_classes.values():
        return None
    if type(module).__name__.endswith("RMSNorm") and hasattr(module, "variance_epsilon"):  # transformers', of T5's kind
        return _library_rms_norm
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
    with torch.autocast(tokens.device.type, enabled=False):
        return F.rms_norm(_low(tokens), self.normalized_shape, _low(self.weight), self.eps)


def _library_rms_norm(self: Any, tokens: Tensor) -> Tensor:
    """Uses torch's fused RMS norm, which keeps only its input for backward."""
    with torch.autocast(tokens.device.type, enabled=False):
        return F.rms_norm(_low(tokens), tokens.shape[-1:], _low(self.weight), self.variance_epsilon)


def _embedding(self: Any, tokens: Tensor) -> Tensor:
    return _low(nn.Embedding.forward(self, tokens))


def enable_compile(model: nn.Module) -> None:
    """Compiles the whole network in place by torch.compile; the first steps include compilation."""
    model.compile()
