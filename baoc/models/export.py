"""Weights out: `model.safetensors`, with the configuration beside it that the network's library loads it back by."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from baoc.models.adapters import merged


def export_model(model: nn.Module, *, folder: Path, weights: Mapping[str, Tensor] | None = None) -> Path:
    """Writes the network to `folder` and gives the file of its weights.

    `weights`: name -> tensor that takes the place of a parameter of this name, such as the float32 value of a weight
    that is kept in parts. A network of transformers or diffusers is read back by `from_pretrained(folder)`; adapters
    are merged into what they adapt; tied tensors are written once, as the libraries do.
    """
    from safetensors.torch import save_file

    folder.mkdir(parents=True, exist_ok=True)
    state = {name: tensor.detach().cpu() for name, tensor in _once(model.state_dict()).items()}
    state.update({name: tensor for name, tensor in (weights or {}).items() if name in state})
    state = merged(state, model=model)
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


def _once(state: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """The first name of each tensor only."""
    seen: set[tuple[int, torch.Size, tuple[int, ...]]] = set()
    kept: dict[str, Tensor] = {}
    for name, tensor in state.items():
        key = (tensor.data_ptr(), tensor.shape, tensor.stride())
        if tensor.numel() and key in seen:
            continue
        seen.add(key)
        kept[name] = tensor
    return kept
