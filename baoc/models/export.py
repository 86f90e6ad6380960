"""Exports weights as safetensors, with the configuration that the network's library needs to load them."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from baoc.models.adapters import merge_adapters
from baoc.optim.shards import local_shard


def export_model(model: nn.Module, *, folder: Path, weights: Mapping[str, Tensor] | None = None) -> Path:
    """Writes the network to `folder` and returns the file of its weights.

    Networks of transformers and diffusers can be loaded by `from_pretrained(folder)`. Adapters are merged into the
    weights they adapt. Tied tensors are written once, as the libraries do. `weights` replace parameters of the same
    name, for example float32 values of weights that training keeps as bf16 and a correction.
    """
    from safetensors.torch import save_file

    folder.mkdir(parents=True, exist_ok=True)
    weights = weights or {}
    state = _without_aliases(model.state_dict())
    state = {name: weights[name] if name in weights else tensor.detach().cpu() for name, tensor in state.items()}
    state = merge_adapters(state, model=model)
    net: Any = getattr(model, "net", None)
    name = "model.safetensors"
    if net is not None and hasattr(net, "config"):
        state = {key.removeprefix("net."): tensor for key, tensor in state.items()}
        if hasattr(net, "save_config"):  # diffusers
            net.save_config(folder)
            name = "diffusion_pytorch_model.safetensors"
        else:
            net.config.architectures = [type(net).__name__]
            net.config.save_pretrained(folder)
    file = folder / name
    save_file({key: tensor.contiguous() for key, tensor in state.items()}, file, metadata={"format": "pt"})
    return file


def _without_aliases(state: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Keeps only the first name of each tensor."""
    seen: set[tuple[int, torch.Size, tuple[int, ...]]] = set()
    unaliased: dict[str, Tensor] = {}
    for name, tensor in state.items():
        key = (local_shard(tensor).data_ptr(), tensor.shape, tensor.stride())
        if tensor.numel() and key in seen:
            continue
        seen.add(key)
        unaliased[name] = tensor
    return unaliased
