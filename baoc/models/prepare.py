"""Prepares a network after it is built: pretrained weights, adapters, frozen parameters, options of activations."""

from collections.abc import Sequence
from dataclasses import dataclass

from torch import nn

from baoc.models.adapters import add_lora, freeze
from baoc.models.pretrained import head_names, load_pretrained
from baoc.models.switches import enable_bf16_activations, recomputable_layers, set_compiled, set_recomputed


@dataclass(frozen=True, slots=True, kw_only=True)
class Preparation:
    """Options of `prepare`, documented in `baoc.config.schema.ModelConfig`. `lora_rank` None adds no adapters.

    `loaded`: the network was built with the weights of `pretrained`.
    """

    pretrained: str | None = None
    new_head: bool = False
    freeze: Sequence[str] = ()
    lora_rank: int | None = None
    lora_alpha: float | None = None
    lora_targets: Sequence[str] = ()
    activations: str | None = None
    checkpointing: bool | int = False  # of all layers, or so many
    compile: bool = False
    loaded: bool = False


def prepare(model: nn.Module, asked: Preparation, *, name: str, seed: int | None = None) -> tuple[str, ...]:
    """Changes `model` in place as `asked`; returns a phrase for each change. Raises BadInputError if one fails."""
    done: list[str] = []
    if asked.pretrained is not None and asked.loaded:
        done.append(f"weights of {asked.pretrained}{', its head fresh' if asked.new_head else ''}")
    elif asked.pretrained is not None:
        loaded = load_pretrained(model, asked.pretrained, new_head=asked.new_head)
        fresh = f", {len(loaded.fresh)} tensors of the head fresh" if loaded.fresh else ""
        left_out = f", without its {', '.join(loaded.left_out)}" if loaded.left_out else ""
        done.append(f"weights of {asked.pretrained}{fresh}{left_out}")
    if asked.lora_rank is not None:
        num = add_lora(model, rank=asked.lora_rank, alpha=asked.lora_alpha, targets=asked.lora_targets, seed=seed)
        if asked.new_head or asked.pretrained is None:  # adapters alone cannot train a random head
            for head in head_names(model):
                model.get_parameter(head).requires_grad_(True)
        done.append(f"adapters of rank {asked.lora_rank} on {num} layers")
    if asked.freeze:
        done.append(f"{freeze(model, asked.freeze):,} parameters frozen")
    if asked.activations == "bf16":
        enable_bf16_activations(model, name=name)
        done.append("bf16 between layers, norms included")
    if asked.checkpointing:
        count = None if asked.checkpointing is True else asked.checkpointing
        recomputed = set_recomputed(model, count, name=name)
        done.append(f"recomputed layers {recomputed} of {len(recomputable_layers(model))}")
    if asked.compile:
        done.append(f"layers compiled {set_compiled(model)}")
    return tuple(done)
