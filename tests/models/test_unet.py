"""The UNet: the published count, blocks, shapes, and that the library is asked for only where it is there."""

import pytest
import torch

from baoc.models import build_model, choose_size
from baoc.types import ImageDataSpec

DIGITS = ImageDataSpec(dataset="digits", image_size=8, channels=1, num_classes=10, num_train=1438, num_val=359)
CIFAR = ImageDataSpec(dataset="cifar10", image_size=32, channels=3, num_classes=10, num_train=9, num_val=9)


def meta(spec, *, size):
    with torch.device("meta"):
        return build_model("unet", spec=spec, size=size)


def test_tiny_is_what_auto_takes_on_a_cpu():
    assert choose_size("unet").size.name == "tiny"
    assert choose_size("unet", device="cuda").size.name == "cifar"
    model = build_model("unet", spec=DIGITS, seed=0)
    assert 600_000 < sum(p.numel() for p in model.parameters()) < 800_000
    images, labels = torch.randn(1, 1, 8, 8).expand(3, -1, -1, -1), torch.tensor([1, 1, 2])
    out = model(images, torch.tensor([5, 6, 5]), labels)
    assert out.shape == (3, 1, 8, 8)
    assert not torch.allclose(out[0], out[1], atol=1e-4)
    assert not torch.allclose(out[0], out[2], atol=1e-4)


@pytest.mark.parametrize(("size", "pixels", "image_size"), [("tiny", 7, 8), ("cifar", 28, 32), ("cifar", 32, 32)])
def test_images_are_enlarged_to_what_every_level_can_halve(size, pixels, image_size):
    spec = ImageDataSpec(dataset="x", image_size=pixels, channels=4, num_classes=3, num_train=9, num_val=9)
    model = meta(spec, size=size)
    assert model.image_size == image_size
    with torch.device("meta"):
        out = model(torch.zeros(2, 4, image_size, image_size), torch.zeros(2).long(), torch.zeros(2).long())
    assert out.shape == (2, 4, image_size, image_size)


def test_blocks_hold_every_parameter_once_and_keep_vectors_apart():
    model = meta(CIFAR, size="cifar")
    blocks, named = model.parameter_blocks(), dict(model.named_parameters())
    assert sorted(name for names in blocks.values() for name in names) == sorted(named)
    for block, names in blocks.items():
        dims = {named[name].ndim for name in names}
        assert dims == {1} if block.endswith("norm") else min(dims) >= 2, block
    for level, layer in (("down.1", 0), ("down.1", 1), ("up.2", 2), ("mid", 0)):
        assert len(blocks[f"{level}.{layer}.attention"]) == 4
        assert blocks[f"{level}.{layer}.modulation"][0].endswith("time_emb_proj.weight")
    assert "down.0.0.attention" not in blocks
    assert blocks["down.0.down.conv"] == ("net.down_blocks.0.downsamplers.0.conv.weight",)
    assert blocks["up.2.up.conv"] == ("net.up_blocks.2.upsamplers.0.conv.weight",)
    assert blocks["head"] == ("net.conv_out.weight",)
    assert len(blocks["embedding"]) == 4  # first convolution, labels, and two of timesteps


def test_recomputed_units_cover_what_is_deep():
    model = build_model("unet", spec=DIGITS, seed=0)
    kinds = [type(unit).__name__ for unit in model.checkpoint_units]
    assert kinds.count("ResnetBlock2D") == 2 + 2 + 4
    assert kinds.count("Attention") == 1 + 1 + 2
