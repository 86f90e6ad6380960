"""Networks by name and size. They do not know that their optimizer is budgeted.

To add a family: a file with `build(settings, *, spec, **options) -> Module`, and a row here. Rows name their code
instead of importing it, so that listing them costs neither torch nor transformers.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field
from importlib import import_module
from typing import TYPE_CHECKING, Any

from baoc.errors import unknown_name

if TYPE_CHECKING:
    from torch import nn

__all__ = ["MODELS", "ModelFamily", "ModelSize", "SizeChoice", "build_model", "choose_size"]


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelSize:
    """One named size: `settings` are what the family's `build` reads, in its own words."""

    name: str
    description: str
    settings: Mapping[str, int]


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelFamily:
    """One row: the task it is trained for, its sizes by name, and its options with their defaults."""

    name: str
    description: str
    task: str
    module: str
    sizes: Mapping[str, ModelSize]
    auto: str  # the size that `auto` takes
    options: Mapping[str, Any] = field(default_factory=dict)


@dataclass(frozen=True, slots=True, kw_only=True)
class SizeChoice:
    size: ModelSize
    why: str


def _vit(name: str, description: str, **settings: int) -> ModelSize:
    """`grid`: patches a side, the patch then follows from the image; else `patch` and `image` in pixels."""
    return ModelSize(name=name, description=description, settings=settings)


_VIT_SIZES = (
    _vit("tiny", "0.2M parameters, 4 x 4 patches on the data's own images", width=64, depth=4, heads=4, grid=4),
    _vit("mini", "5.4M, patch 4 on 32 x 32 (ViT-Ti/4)", width=192, depth=12, heads=3, patch=4, image=32),
    _vit("small", "22M, patch 16 on 224 x 224 (ViT-S/16)", width=384, depth=12, heads=6, patch=16, image=224),
    _vit("base", "86M, patch 16 on 224 x 224 (ViT-B/16)", width=768, depth=12, heads=12, patch=16, image=224),
    _vit("large", "304M, patch 16 on 224 x 224 (ViT-L/16)", width=1024, depth=24, heads=16, patch=16, image=224),
    _vit("huge", "632M, patch 14 on 224 x 224 (ViT-H/14)", width=1280, depth=32, heads=16, patch=14, image=224),
)

MODELS: dict[str, ModelFamily] = {
    row.name: row
    for row in (
        ModelFamily(
            name="vit",
            description="Vision Transformer classifier (transformers' ViT, Xavier initialisation)",
            task="vision",
            module="baoc.models.vit",
            sizes={size.name: size for size in _VIT_SIZES},
            auto="tiny",
            options={"dropout": 0.0},
        ),
    )
}


def choose_size(name: str, *, size: str = "auto") -> SizeChoice:
    """The size that is meant by `size`, and why. `auto` is the small one everywhere, until it looks at the machine."""
    family = _family(name)
    if size == "auto":
        return SizeChoice(size=family.sizes[family.auto], why=f"model.size=auto takes {family.auto} on every machine")
    if size not in family.sizes:
        raise unknown_name(size, what=f"size of model {name}", allowed=("auto", *family.sizes))
    return SizeChoice(size=family.sizes[size], why=f"model.size={size} was asked for")


def build_model(name: str, *, spec: Any, size: str = "auto", seed: int | None = None, **options: Any) -> "nn.Module":
    """A freshly initialised float32 network for the data that `spec` describes.

    With a `seed` the weights depend on nothing else and the global random state stays as it was. Works on the meta
    device (`with torch.device("meta")`), where nothing is allocated. BadInputError for unknown names and options.
    """
    family = _family(name)
    choice = choose_size(name, size=size)
    for key in options.keys() - family.options.keys():
        raise unknown_name(key, what=f"option of model {name}", allowed=family.options)
    from baoc.models.construction import float32_and_seed

    with float32_and_seed(seed):
        return import_module(family.module).build(choice.size.settings, spec=spec, **{**family.options, **options})


def _family(name: str) -> ModelFamily:
    if name not in MODELS:
        raise unknown_name(name, what="model", allowed=MODELS)
    return MODELS[name]
