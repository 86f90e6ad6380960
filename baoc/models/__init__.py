"""Networks by name and size. They do not depend on budgets.

To add a family: a file with `build(settings, *, spec, **options) -> Module`, and an entry in MODELS. Entries name their
module instead of importing it, so that listing them imports neither torch nor transformers. Networks of the user's own
code need no entry (`baoc.core.own_code`).
"""

from collections.abc import Mapping
from dataclasses import dataclass
from functools import partial
from importlib import import_module
from typing import TYPE_CHECKING, Any

from baoc.core import own_code
from baoc.errors import BadInputError, unknown_name

if TYPE_CHECKING:
    from torch import nn

__all__ = ["MODELS", "OWN_SIZE", "ModelFamily", "ModelSize", "SizeChoice", "build_model", "choose_size", "family_of"]

STORED = "stored"  # the only size of a network that is built from its file
OWN_SIZE = "own"  # the only size of a network of the user's code
OWN_LR = 1e-3  # the default of torch.optim.AdamW, for networks of the user's code


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelSize:
    """One named size.

    Args:
        settings: arguments of the family's `build`.
        lr: a good learning rate for fp32 AdamW.
        micro_batch: samples per forward that fit into 8 GiB on a GPU, or the smallest number if none does; None if the
            whole batch fits.
    """

    name: str
    description: str
    settings: Mapping[str, int]
    lr: float
    micro_batch: int | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelFamily(own_code.Entry):
    """An entry of MODELS: the task it is trained for, and its sizes by name.

    Args:
        auto: device type -> the size that `model.size=auto` takes.
        imports: library modules that building it imports; a fork server imports them in advance.
        task: None supports any.
        other_tasks: tasks that it also supports.
        needs_pretrained: it is built from `model.pretrained` alone, and has its weights from the start.
    """

    task: str | None
    sizes: Mapping[str, ModelSize]
    auto: Mapping[str, str]
    imports: tuple[str, ...] = ()
    other_tasks: tuple[str, ...] = ()
    needs_pretrained: bool = False

    def supports(self, task: str) -> bool:
        return self.task is None or task in (self.task, *self.other_tasks)


@dataclass(frozen=True, slots=True, kw_only=True)
class SizeChoice:
    size: ModelSize
    why: str


def _size(name: str, description: str, *, lr: float, micro_batch: int | None = None, **settings: int) -> ModelSize:
    return ModelSize(name=name, description=description, settings=settings, lr=lr, micro_batch=micro_batch)


def _vit_224(name: str, description: str, *, patch: int = 16, **settings: Any) -> ModelSize:
    return _size(name, f"{description} on 224 x 224", patch=patch, image=224, **settings)


# `grid`: patches per side, with a patch size that follows from the image; or `patch` and `image` in pixels.
_VIT_SIZES = (
    _size("tiny", "0.2M, 4 x 4 patches on the data's own images", lr=3e-3, width=64, depth=4, heads=4, grid=4),
    _size("mini", "5.4M, patch 4 on 32 x 32 (ViT-Ti/4)", lr=1e-3, width=192, depth=12, heads=3, patch=4, image=32),
    _vit_224("small", "22M, patch 16 (ViT-S/16)", lr=1e-3, width=384, depth=12, heads=6),
    _vit_224("base", "86.6M, patch 16 (ViT-B/16)", lr=5e-4, width=768, depth=12, heads=12, micro_batch=64),
    _vit_224("large", "304M, patch 16 (ViT-L/16)", lr=2e-4, width=1024, depth=24, heads=16, micro_batch=16),
    _vit_224("huge", "632M, patch 14 (ViT-H/14)", lr=1e-4, width=1280, depth=32, heads=16, patch=14, micro_batch=8),
)


# `patch` in pixels, or at most `max_grid` patches per side; the data's image is enlarged to whole patches.
_DIT_SIZES = (
    _size("tiny", "0.3M, up to 8 x 8 patches, of 2 pixels or more", lr=1e-2, width=64, depth=4, heads=4, max_grid=8),
    _size("s2", "33M, patch 2 (DiT-S/2)", lr=4e-4, width=384, depth=12, heads=6, patch=2, micro_batch=128),
    _size("b2", "130M, patch 2 (DiT-B/2)", lr=2e-4, width=768, depth=12, heads=12, patch=2, micro_batch=32),
    _size("l2", "458M, patch 2 (DiT-L/2)", lr=1e-4, width=1024, depth=24, heads=16, patch=2, micro_batch=8),
    _size("xl2", "675M, patch 2 (DiT-XL/2)", lr=1e-4, width=1152, depth=28, heads=16, patch=2, micro_batch=8),
)


# `width` of the first level; the others have twice that. `head_width` 0 is one head of the level's width.
_UNET_SIZES = (
    _size(
        "tiny", "0.7M, two levels, attention at half of the image", lr=5e-3,
        width=32, levels=2, attention_level=1, layers=1, head_width=16, norm_groups=8,
    ),
    _size(
        "cifar", "35.7M, four levels, attention at 16 x 16 of 32 x 32 (DDPM on CIFAR-10)", lr=2e-4, micro_batch=64,
        width=128, levels=4, attention_level=1, layers=2, head_width=0, norm_groups=32,
    ),
)  # fmt: skip


# `hidden`: width of the gated MLP. The vocabulary is the data's.
_LLAMA_SIZES = (
    _size("nano", "0.5M on bytes", lr=3e-3, width=96, hidden=256, depth=4, heads=4),
    _size("60m", "58M at 32,000 tokens", lr=1e-3, width=512, hidden=1376, depth=8, heads=8),
    _size("130m", "134M at 32,000 tokens", lr=1e-3, width=768, hidden=2048, depth=12, heads=12),
    _size("350m", "368M at 32,000 tokens", lr=6e-4, width=1024, hidden=2736, depth=24, heads=16, micro_batch=8),
    _size("1b", "1.34B at 32,000 tokens", lr=4e-4, width=2048, hidden=5461, depth=24, heads=32, micro_batch=4),
    _size("3b", "3.37B at 32,000 tokens", lr=3e-4, width=3072, hidden=8192, depth=28, heads=24, micro_batch=2),
    _size("7b", "6.74B at 32,000 tokens", lr=3e-4, width=4096, hidden=11008, depth=32, heads=32, micro_batch=1),
)

MODELS: dict[str, ModelFamily] = {
    family.name: family
    for family in (
        ModelFamily(
            name="vit",
            description="Vision Transformer classifier (transformers' ViT, Xavier initialisation)",
            task="vision",
            module="baoc.models.vit",
            imports=("transformers.models.vit.modeling_vit",),
            sizes={size.name: size for size in _VIT_SIZES},
            auto={"cpu": "tiny", "cuda": "large"},
            options={"dropout": 0.0},
        ),
        ModelFamily(
            name="dit",
            description="Diffusion transformer with adaLN-Zero (our own, of the published shapes)",
            task="diffusion",
            module="baoc.models.dit",
            sizes={size.name: size for size in _DIT_SIZES},
            auto={"cpu": "tiny", "cuda": "xl2"},
        ),
        ModelFamily(
            name="unet",
            description="UNet that denoises images (diffusers' UNet2DModel)",
            task="diffusion",
            module="baoc.models.unet",
            imports=("diffusers.models.unets.unet_2d",),
            sizes={size.name: size for size in _UNET_SIZES},
            auto={"cpu": "tiny", "cuda": "cifar"},
        ),
        ModelFamily(
            name="hf",
            description="a stored network of transformers, to fine-tune: model.pretrained=FOLDER or NAME",
            task="language",
            other_tasks=("masked", "vision"),
            module="baoc.models.hf",
            imports=("transformers.modeling_utils",),
            sizes={STORED: _size(STORED, "as model.pretrained says", lr=2e-5)},
            auto={"cpu": STORED, "cuda": STORED},
            needs_pretrained=True,
        ),
        ModelFamily(
            name="llama",
            description="Language model (transformers' Llama), or any causal model with model.source=hf",
            task="language",
            module="baoc.models.llama",
            imports=("transformers.models.llama.modeling_llama",),
            sizes={size.name: size for size in _LLAMA_SIZES},
            auto={"cpu": "nano", "cuda": "350m"},
            options={"source": "sizes", "name_or_path": None, "vocab_size": 0},
        ),
    )
}


def choose_size(name: str, *, size: str = "auto", device: str = "cpu") -> SizeChoice:
    """The named size and why it was chosen.

    `auto` takes a size that trains in minutes on a laptop's CPU, or one that budgets of 4 to 16 GiB limit on a GPU.
    """
    family = family_of(name)
    if family.is_own and size in ("auto", OWN_SIZE):
        return SizeChoice(size=family.sizes[OWN_SIZE], why=f"{name} is code of your own")
    if family.is_own:
        raise BadInputError(
            f"model.size={size} is of networks that come with sizes, and model={name} is your own code: give its "
            "arguments as model.ARGUMENT=VALUE"
        )
    if size == "auto":
        chosen = family.sizes[family.auto[device]]
        suits = "budgets of 4 to 16 GiB bind there" if device == "cuda" else "it trains in minutes there"
        return SizeChoice(size=chosen, why=f"model.size=auto takes {chosen.name} on {device}: {suits}")
    if size not in family.sizes:
        error = unknown_name(size, what=f"size of model {name}", allowed=("auto", *family.sizes))
        others = [f"model={other}" for other, model in MODELS.items() if size in model.sizes]
        raise BadInputError(f"{error}; {', '.join(others)} has that size") if others else error
    return SizeChoice(size=family.sizes[size], why=f"model.size={size} was asked for")


def build_model(
    name: str, *, spec: Any, size: str = "auto", device: str = "cpu", seed: int | None = None, **options: Any
) -> "nn.Module":
    """Builds a freshly initialised float32 network for the data that `spec` describes.

    With a `seed`, the weights depend on it alone and the global random state is unchanged. `device` only selects the
    size for `auto`. Under `torch.device("meta")` nothing is allocated. Raises BadInputError for unknown names,
    and for what the user's own code does wrong.
    """
    family = family_of(name)
    choice = choose_size(name, size=size, device=device)
    from baoc.models.construction import build_user_model, float32_and_seed

    with float32_and_seed(seed):
        if family.is_own:
            return build_user_model(name, spec=spec, options=options)
        return import_module(family.module).build(choice.size.settings, spec=spec, **{**family.options, **options})


def family_of(name: str) -> ModelFamily:
    """The entry of a name, or one for the user's own code. Raises BadInputError for a name that is neither."""
    size = ModelSize(name=OWN_SIZE, description="as its arguments say", settings={}, lr=OWN_LR)
    own = partial(ModelFamily, task=None, sizes={OWN_SIZE: size}, auto={"cpu": OWN_SIZE, "cuda": OWN_SIZE})
    return own_code.find_entry(name, group="model", registry=MODELS, own=own)
