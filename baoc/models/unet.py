"""UNet of Ho et al. 2020 for images and latents with class labels, as diffusers implements it.

diffusers is an optional dependency and takes seconds to import, so it is imported only when a network is built.
"""

import re
from collections.abc import Mapping
from typing import Any

from torch import Tensor, nn

from baoc.errors import BadInputError
from baoc.models.construction import group_by_block
from baoc.types import ImageDataSpec

_PART = re.compile(r"^net\.(down|up|mid)_block(?:s\.(\d+))?\.(resnets|attentions|downsamplers|upsamplers)\.(\d+)\.")


def build(settings: Mapping[str, int], *, spec: Any) -> "UNet":
    """`settings` of a size: width of the first of `levels` (the others have twice that), residual modules per
    level, the level with attention, width of a head (0: one head), groups of a norm."""
    if not isinstance(spec, ImageDataSpec):
        raise BadInputError(f"model unet denoises images; a data set described by {type(spec).__name__} has none")
    from diffusers.models.unets.unet_2d import UNet2DModel

    width, levels = settings["width"], settings["levels"]
    multiple = 2 ** (levels - 1)  # each level but the last halves the image
    attends = [level == settings["attention_level"] for level in range(levels)]
    net = UNet2DModel(
        sample_size=-(-spec.image_size // multiple) * multiple,
        in_channels=spec.channels,
        out_channels=spec.channels,
        block_out_channels=(width, *(2 * width,) * (levels - 1)),
        down_block_types=tuple("AttnDownBlock2D" if attend else "DownBlock2D" for attend in attends),
        up_block_types=tuple("AttnUpBlock2D" if attend else "UpBlock2D" for attend in reversed(attends)),
        layers_per_block=settings["layers"],
        attention_head_dim=settings["head_width"] or None,  # pyright: ignore[reportArgumentType] - None is one head
        norm_num_groups=settings["norm_groups"],
        norm_eps=1e-6,
        downsample_padding=0,
        flip_sin_to_cos=False,
        freq_shift=1,
        num_class_embeds=spec.num_classes + 1,
    )
    return UNet(net, spec=spec)


class UNet(nn.Module):
    """(images (B, channels, image_size, image_size), timesteps (B,), labels (B,)) -> prediction of the images' shape.

    Label `null_label` (= `num_classes`) stands for no label. `checkpoint_units` are the modules whose activations may
    be recomputed.
    """

    def __init__(self, net: Any, *, spec: ImageDataSpec):
        super().__init__()
        self.net: Any = net
        self.image_size, self.channels = net.config.sample_size, spec.channels
        self.num_classes = self.null_label = spec.num_classes

    @property
    def checkpoint_units(self) -> list[nn.Module]:
        """Residual and attention modules; recomputing a whole level would have to include its skip connections."""
        levels: list[Any] = [*self.net.down_blocks, self.net.mid_block, *self.net.up_blocks]
        return [unit for level in levels for unit in (*level.resnets, *(getattr(level, "attentions", None) or ()))]

    def forward(self, images: Tensor, timesteps: Tensor, labels: Tensor) -> Tensor:
        return self.net(images, timesteps, class_labels=labels, return_dict=False)[0]

    def parameter_blocks(self) -> dict[str, tuple[str, ...]]:
        """See `group_by_block`: conv, attention, modulation and norm by layer.

        A layer is a residual module with the attention after it, such as `down.1.0`; resampling is one of its own.
        """
        return group_by_block(self, _block_of)


def _block_of(name: str, num_dims: int) -> str:
    part = _PART.match(name)
    if part is None:
        if num_dims < 2:
            return "norm"
        return "head" if "conv_out" in name else "embedding"
    side, level, kind, index = part.groups()
    layer = {"downsamplers": "down", "upsamplers": "up"}.get(kind, index)
    prefix = f"{side}.{layer}" if level is None else f"{side}.{level}.{layer}"
    if num_dims < 2:
        return f"{prefix}.norm"
    if kind == "attentions":
        return f"{prefix}.attention"
    return f"{prefix}.{'modulation' if 'time_emb_proj' in name else 'conv'}"
