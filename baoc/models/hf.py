"""Stored networks of transformers, to fine-tune: causal and masked language models, and image classifiers.

`model.pretrained` is a folder of `from_pretrained`, or a name that the library's cache or the hub has. The data decide
between text and images, and the network's configuration between causal and masked.
"""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from baoc.errors import BadInputError, first_line
from baoc.models.llama import CausalLM, check_fit, read_config
from baoc.models.pretrained import refuse_nonfinite
from baoc.models.vit import ImageClassifier
from baoc.types import ImageDataSpec, TextDataSpec

_WHERE = "give the folder that save_pretrained wrote, or a name that the library's cache or the hub has"


class MaskedLM(CausalLM):
    """Tokens (B, T) int64, some of them masked -> logits (B, T, vocabulary); attention is bidirectional."""

    def forward(self, tokens: Tensor, positions: Tensor | None = None) -> Tensor:
        return self.net(input_ids=tokens).logits


def build(
    settings: Mapping[str, int], *, spec: Any, pretrained: str | None = None, new_head: bool = False
) -> nn.Module:
    """Loads the network at `pretrained` in float32; on the meta device, without weights.

    Raises BadInputError if there is none, if it does not suit the data, and for weights that are NaN.
    """
    if pretrained is None:
        raise BadInputError(f"model=hf needs model.pretrained: {_WHERE}")
    if Path(pretrained).expanduser().is_file():
        raise BadInputError(f"model.pretrained={pretrained} is a file: {_WHERE}")
    config = read_config(pretrained, key="model.pretrained", how=_WHERE)
    if isinstance(spec, ImageDataSpec):
        return _classifier(pretrained, config, spec=spec, new_head=new_head)
    if not isinstance(spec, TextDataSpec):
        raise BadInputError(f"model=hf reads text or images; a data set described by {type(spec).__name__} has neither")
    if not hasattr(config, "vocab_size"):
        raise BadInputError(
            f"model.pretrained={pretrained} is of type {config.model_type}, which reads no text, and dataset "
            f"{spec.dataset} is text: take a language model, or task=vision with images"
        )
    if hasattr(config, "use_cache"):
        config.use_cache = False
    check_fit(config, spec=spec)
    masked = any(name.endswith("ForMaskedLM") for name in config.architectures or ())
    net = _load("AutoModelForMaskedLM" if masked else "AutoModelForCausalLM", pretrained, config, fresh=())
    return MaskedLM(net) if masked else CausalLM(net)


def _classifier(pretrained: str, config: Any, *, spec: ImageDataSpec, new_head: bool) -> nn.Module:
    from transformers import MODEL_FOR_IMAGE_CLASSIFICATION_MAPPING

    if type(config) not in MODEL_FOR_IMAGE_CLASSIFICATION_MAPPING:
        raise BadInputError(
            f"model.pretrained={pretrained} is of type {config.model_type}, of which transformers has no image "
            f"classifier, and dataset {spec.dataset} is images"
        )
    channels = getattr(config, "num_channels", spec.channels)
    if channels != spec.channels:
        raise BadInputError(
            f"model.pretrained={pretrained} takes images of {channels} channels and the data have {spec.channels}: "
            "take a network or images with as many"
        )
    stored = config.num_labels
    if stored != spec.num_classes and not new_head:
        raise BadInputError(
            f"model.pretrained={pretrained} has a head for {stored} classes, the data has {spec.num_classes}: set "
            "model.new_head=true to start with a fresh head, or take the data that it was trained on"
        )
    if new_head:
        config.num_labels = spec.num_classes
    fresh = ("classifier", "head", "fc") if new_head else ()
    return ImageClassifier(_load("AutoModelForImageClassification", pretrained, config, fresh=fresh))


def _load(kind: str, pretrained: str, config: Any, *, fresh: Sequence[str]) -> Any:
    """Loads a network by the library's class `kind`. Only tensors of the modules `fresh` may be missing in its file."""
    import transformers

    loader = getattr(transformers, kind)
    try:
        if torch.get_default_device().type == "meta":
            return loader.from_config(config, dtype=torch.float32)
        path = Path(pretrained).expanduser()
        net, info = loader.from_pretrained(
            str(path) if path.is_dir() else pretrained,
            config=config,
            dtype=torch.float32,
            output_loading_info=True,
            ignore_mismatched_sizes=bool(fresh),
        )
    except Exception as error:  # OSError, ValueError, errors of safetensors and of the network
        raise BadInputError(
            f"model.pretrained={pretrained} cannot be read as {kind} ({first_line(error)}): {_WHERE}"
        ) from error
    missing = [name for name in info["missing_keys"] if not any(part in fresh for part in name.split("."))]
    if missing:
        raise BadInputError(
            f"model.pretrained={pretrained} lacks {', '.join(sorted(missing)[:4])} of {type(net).__name__}: it is "
            "stored as another kind of network"
            + ("" if fresh else ", or without its head: set model.new_head=true for images")
        )
    refuse_nonfinite(net, path=pretrained)
    return net
