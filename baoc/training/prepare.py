"""Prepares a network after it is built: pretrained weights, adapters, frozen parameters, options of activations."""

from torch import nn

from baoc.config.schema import ModelConfig
from baoc.models import family_of
from baoc.models.adapters import add_lora, freeze
from baoc.models.pretrained import head_names, load_pretrained
from baoc.models.switches import enable_bf16_activations, recomputable_layers, set_compiled, set_recomputed


def prepare(model: nn.Module, config: ModelConfig, *, seed: int | None = None) -> tuple[str, ...]:
    """Changes `model` in place as `config` asks; returns a phrase for each change. Raises BadInputError if one fails.

    Values that a search still decides (`auto`) are left alone. `seed`: of the adapters' initial values.
    """
    changes: list[str] = []
    lora = config.lora
    if config.pretrained is not None and family_of(config.name).needs_pretrained:
        changes.append(f"weights of {config.pretrained}{', its head fresh' if config.new_head else ''}")
    elif config.pretrained is not None:
        loaded = load_pretrained(model, config.pretrained, new_head=config.new_head)
        fresh = f", {len(loaded.fresh)} tensors of the head fresh" if loaded.fresh else ""
        left_out = f", without its {', '.join(loaded.left_out)}" if loaded.left_out else ""
        changes.append(f"weights of {config.pretrained}{fresh}{left_out}")
    if lora.rank is not None:
        num = add_lora(model, rank=lora.rank, alpha=lora.alpha, targets=lora.targets, seed=seed)
        if config.new_head or config.pretrained is None:  # adapters alone cannot train a random head
            for head in head_names(model):
                model.get_parameter(head).requires_grad_(True)
        changes.append(f"adapters of rank {lora.rank} on {num} layers")
    if config.freeze:
        changes.append(f"{freeze(model, config.freeze):,} parameters frozen")
    if config.activations == "bf16":
        enable_bf16_activations(model, name=config.name)
        changes.append("bf16 between layers, norms included")
    if isinstance(config.checkpointing, int) and config.checkpointing:
        count = None if config.checkpointing is True else config.checkpointing
        recomputed = set_recomputed(model, count, name=config.name)
        changes.append(f"recomputed layers {recomputed} of {len(recomputable_layers(model))}")
    if config.compile is True:
        changes.append(f"layers compiled {set_compiled(model)}")
    return tuple(changes)
