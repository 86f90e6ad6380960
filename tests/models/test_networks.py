"""What every network of MODELS owes: published counts, blocks, a seed that decides it, and data that it can read."""

import pytest
import torch
from torch import nn

from baoc.errors import BadInputError
from baoc.models import build_model, choose_size
from baoc.types import ImageDataSpec, TextDataSpec


def images(pixels: int, *, channels: int, classes: int) -> ImageDataSpec:
    return ImageDataSpec(dataset="x", image_size=pixels, channels=channels, num_classes=classes, num_train=9, num_val=9)


def text(vocab_size: int) -> TextDataSpec:
    return TextDataSpec(dataset="x", vocab_size=vocab_size, sequence_length=256, num_train=9, num_val=9)


SMALL = {name: images(8, channels=1, classes=10) for name in ("vit", "dit", "unet")} | {"llama": text(256)}
PUBLISHED = {
    "vit": images(224, channels=3, classes=1000), "dit": images(32, channels=4, classes=1000),
    "unet": images(32, channels=3, classes=10), "llama": text(32_000),
}  # fmt: skip
# network, size: numbers of parameters and of tensors
COUNTS = {
    ("vit", "mini"): (5_553_832, 200),  # ViT-Ti/4 at 32 x 32: 5.36M with 10 classes
    ("vit", "small"): (22_050_664, 200),  # the published counts of ViT-S/16, B/16, L/16 and H/14 with 1,000 classes
    ("vit", "base"): (86_567_656, 200),
    ("vit", "large"): (304_326_632, 392),
    ("vit", "huge"): (632_045_800, 520),
    ("dit", "s2"): (32_858_896, 131),  # Peebles & Xie 2023, table 1: 33M, 130M, 458M, 675M
    ("dit", "b2"): (130_303_504, 131),
    ("dit", "l2"): (457_824_272, 251),
    ("dit", "xl2"): (674_816_272, 291),
    ("unet", "cifar"): (35_746_307 + 11 * 512, 329),  # Ho et al. 2020 on CIFAR-10: 35.7M; and labels
    ("llama", "60m"): (58_073_600, 75),  # 58.07M, 134.11M, 367.97M, 1,339M are published; 7b's follows from its shape
    ("llama", "130m"): (134_105_856, 111),
    ("llama", "350m"): (367_969_280, 219),
    ("llama", "1b"): (1_339_082_752, 219),
    ("llama", "7b"): (2 * 32_000 * 4096 + 32 * (4 * 4096**2 + 3 * 4096 * 11_008 + 2 * 4096) + 4096, 291),
}
AUTO = {
    "vit": ("tiny", 202_186, "large"), "dit": ("tiny", 328_964, "xl2"), "unet": ("tiny", None, "cifar"),
    "llama": ("nano", 492_384, "350m"),
}  # fmt: skip
# network: what its small one has beside embedding, head and norm; numbers of tensors of some blocks
BLOCKS = {
    "vit": (("attention", "mlp", "norm"), {"layers.0.attention": 4, "layers.0.mlp": 2, "embedding": 3}),
    "dit": (("attention", "mlp", "modulation", "norm"), {"layers.2.modulation": 1, "embedding": 4}),
    "unet": ((), {"embedding": 4, "head": 1}),
    "llama": (("attention", "mlp", "norm"), {"layers.3.attention": 4, "layers.3.mlp": 3, "layers.3.norm": 2}),
}


def counts(model: nn.Module) -> tuple[int, int]:
    parameters = list(model.parameters())
    return sum(p.numel() for p in parameters), len(parameters)


@pytest.mark.parametrize(("name", "size"), COUNTS)
def test_sizes_have_the_published_number_of_parameters(name: str, size: str):
    with torch.device("meta"):
        model = build_model(name, spec=PUBLISHED[name], size=size)
    assert counts(model) == COUNTS[name, size]
    assert {p.device.type for p in model.parameters()} == {"meta"}, "something was allocated"


@pytest.mark.parametrize("name", AUTO)
def test_auto_takes_a_small_one_on_a_cpu(name: str):
    small, count, large = AUTO[name]
    assert (choose_size(name).size.name, choose_size(name, device="cuda").size.name) == (small, large)
    found = build_model(name, spec=SMALL[name])
    assert found.training and counts(found)[0] == (count or counts(found)[0])


@pytest.mark.parametrize("name", BLOCKS)
def test_blocks_hold_every_parameter_once_and_keep_vectors_apart(name: str):
    model = build_model(name, spec=SMALL[name])
    blocks, named = model.parameter_blocks(), dict(model.named_parameters())
    assert sorted(name for names in blocks.values() for name in names) == sorted(named)
    for block, names in blocks.items():
        dims = {named[name].ndim for name in names}
        assert dims == {1} if block.endswith("norm") else min(dims) >= 2, block
    parts, sizes = BLOCKS[name]
    assert {f"layers.{layer}.{part}" for layer in range(4) for part in parts} <= set(blocks)
    assert {"embedding", "head", "norm"} <= set(blocks)
    assert {block: len(blocks[block]) for block in sizes} == sizes


@pytest.mark.parametrize(("name", "size", "layers"), [("vit", "base", 12), ("llama", "350m", 24)])
def test_layers_are_told_apart_beyond_nine(name: str, size: str, layers: int):
    with torch.device("meta"):
        blocks = build_model(name, spec=PUBLISHED[name], size=size).parameter_blocks()
    assert len(blocks) == layers * 3 + 3
    assert all(f"layers.{layers - 1}." in parameter for parameter in blocks[f"layers.{layers - 1}.mlp"])


@pytest.mark.parametrize("name", SMALL)
def test_seed_decides_the_weights_and_leaves_the_random_state_alone(name: str):
    torch.manual_seed(5)
    before = torch.get_rng_state()
    one = build_model(name, spec=SMALL[name], seed=1)
    assert torch.equal(torch.get_rng_state(), before)
    torch.manual_seed(6)
    again, other = (list(build_model(name, spec=SMALL[name], seed=seed).parameters()) for seed in (1, 2))
    assert all(torch.equal(a, b) for a, b in zip(one.parameters(), again, strict=True))
    assert not all(torch.equal(a, b) for a, b in zip(one.parameters(), other, strict=True))


@pytest.mark.parametrize(
    ("name", "does"),
    [("vit", "classifies images"), ("dit", "denoises images"), ("unet", "denoises images"), ("llama", "reads text")],
)
def test_other_data_is_refused_and_the_surroundings_are_put_back(name: str, does: str):
    before = torch.get_rng_state()
    with pytest.raises(BadInputError, match=f"model {name} {does}; a data set described by str has none"):
        build_model(name, spec="other", seed=3)
    assert torch.get_default_dtype() is torch.float32
    assert torch.equal(torch.get_rng_state(), before)
