"""Trains a part of a network: frozen parameters, and low-rank adapters (LoRA) by peft.

peft is an optional dependency and imported only when adapters are added.
"""

from collections.abc import Mapping, Sequence
from fnmatch import fnmatchcase
from typing import Any

from torch import Tensor, nn

from baoc.errors import BadInputError
from baoc.models.construction import seeded
from baoc.models.pretrained import head_names

_ADAPTER = "default"


def freeze(model: nn.Module, patterns: Sequence[str]) -> int:
    """Freezes parameters whose names match one of the glob `patterns`; returns the number of frozen elements.

    Raises BadInputError for a pattern that matches no parameter, and if all parameters are frozen.
    """
    named = dict(model.named_parameters())
    for pattern in patterns:
        matching = [name for name in named if fnmatchcase(name, pattern)]
        if not matching:
            raise BadInputError(
                f"model.freeze: {pattern!r} matches no parameter. It must match the whole name, such as "
                f"{next(iter(named))}; *embeddings* matches every name with embeddings in it"
            )
        for name in matching:
            named[name].requires_grad_(False)
    if patterns and not any(parameter.requires_grad for parameter in named.values()):
        raise BadInputError(f"model.freeze={list(patterns)} freezes every parameter: leave one to train")
    return sum(parameter.numel() for parameter in named.values() if not parameter.requires_grad)


def add_lora(
    model: nn.Module, *, rank: int, alpha: float | None = None, targets: Sequence[str] = (), seed: int | None = None
) -> int:
    """Adds LoRA adapters in place and freezes everything else; returns the number of adapted layers.

    Args:
        targets: ends of the names of linear layers to adapt; empty adapts every linear layer but the head.
        alpha: LoRA's scale; None is twice the rank.
        seed: of the adapters' initial values; leaves the global generator unchanged.

    Raises:
        BadInputError: `targets` match no layer.
    """
    from peft import LoraConfig, inject_adapter_in_model

    linear = [name for name, module in model.named_modules() if isinstance(module, nn.Linear)]
    head = {name.rpartition(".")[0] for name in head_names(model)}
    if targets:
        chosen = [name for name in linear if any(f".{name}".endswith(f".{target}") for target in targets)]
    else:
        chosen = [name for name in linear if name not in head]
    if not chosen:
        ends = sorted({name.rpartition(".")[2] for name in linear})
        raise BadInputError(
            f"model.lora.targets={list(targets)} matches no linear layer; their names end in: {', '.join(ends)}"
        )
    model.requires_grad_(False)
    config = LoraConfig(r=rank, lora_alpha=2 * rank if alpha is None else alpha, target_modules=chosen)  # pyright: ignore[reportArgumentType]
    with seeded(seed):
        inject_adapter_in_model(config, model, adapter_name=_ADAPTER)
    return len(chosen)


def merge_adapters(state: Mapping[str, Tensor], *, model: nn.Module) -> dict[str, Tensor]:
    """A state dict of `model` without adapters: each product of a pair is added to the weight that it adapts."""
    state = dict(state)
    for name, module in model.named_modules():
        if hasattr(module, "lora_A") and hasattr(module, "base_layer"):
            layer: Any = module
            down, up = (state.pop(f"{name}.lora_{part}.{_ADAPTER}.weight") for part in "AB")
            weight = state.pop(f"{name}.base_layer.weight")
            delta = layer.scaling[_ADAPTER] * (up.float() @ down.float())
            state[f"{name}.weight"] = (weight.float() + delta).to(weight.dtype)
            if (bias := state.pop(f"{name}.base_layer.bias", None)) is not None:
                state[f"{name}.bias"] = bias
    return state
