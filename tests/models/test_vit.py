"""The Vision Transformer: sizes, blocks, initialisation, and that the surroundings do not change what is built."""

import pytest
import torch

from baoc.errors import BadInputError
from baoc.models import build_model, choose_size
from baoc.types import ImageDataSpec, matrix_shape

DIGITS = ImageDataSpec(dataset="digits", image_size=8, channels=1, num_classes=10, num_train=1438, num_val=359)
IMAGENET = ImageDataSpec(dataset="x", image_size=224, channels=3, num_classes=1000, num_train=9, num_val=9)


@pytest.mark.parametrize(
    ("size", "num_params", "num_tensors"),
    [
        ("mini", 5_553_832, 200),  # ViT-Ti/4 at 32 x 32: 5.36M with 10 classes
        ("small", 22_050_664, 200),  # the published counts of ViT-S/16, B/16, L/16 and H/14 with 1,000 classes
        ("base", 86_567_656, 200),
        ("large", 304_326_632, 392),
        ("huge", 632_045_800, 520),
    ],
)
def test_sizes_have_the_published_number_of_parameters(size, num_params, num_tensors):
    with torch.device("meta"):
        model = build_model("vit", spec=IMAGENET, size=size)
    parameters = list(model.parameters())
    assert (sum(p.numel() for p in parameters), len(parameters)) == (num_params, num_tensors)
    assert {p.device.type for p in parameters} == {"meta"}, "something was allocated"


def test_auto_is_the_small_one_and_says_why():
    assert choose_size("vit").size.name == "tiny"
    assert choose_size("vit").why == "model.size=auto takes tiny on cpu: it trains in minutes there"
    assert choose_size("vit", device="cuda").size.name == "large"
    assert choose_size("vit", size="base").why == "model.size=base was asked for"
    assert sum(p.numel() for p in build_model("vit", spec=DIGITS).parameters()) == 202_186


@pytest.mark.parametrize(("pixels", "image_size", "patch"), [(8, 8, 2), (28, 28, 7), (30, 32, 8), (3, 4, 1)])
def test_tiny_follows_the_images_of_the_data(pixels, image_size, patch):
    spec = ImageDataSpec(dataset="x", image_size=pixels, channels=3, num_classes=7, num_train=9, num_val=9)
    model = build_model("vit", spec=spec, size="tiny")
    assert model.image_size == image_size
    assert model.net.config.patch_size == patch
    assert model(torch.zeros(2, 3, image_size, image_size)).shape == (2, 7)


def test_blocks_hold_every_parameter_once_and_keep_vectors_apart():
    model = build_model("vit", spec=DIGITS)
    blocks = model.parameter_blocks()
    layers = [f"layers.{layer}.{part}" for layer in range(4) for part in ("attention", "mlp", "norm")]
    assert set(blocks) == {"embedding", "head", "norm", *layers}
    named = dict(model.named_parameters())
    assert sorted(name for names in blocks.values() for name in names) == sorted(named)
    for block, names in blocks.items():
        dims = {named[name].ndim for name in names}
        assert dims == {1} if block.endswith("norm") else min(dims) >= 2, block
    assert len(blocks["layers.0.attention"]) == 4
    assert len(blocks["layers.0.mlp"]) == 2
    assert len(blocks["embedding"]) == 3  # patches, positions, class token
    assert all(matrix_shape(named[name].shape) for name in blocks["head"] + blocks["layers.3.mlp"])


def test_layers_are_told_apart_beyond_nine():
    with torch.device("meta"):
        blocks = build_model("vit", spec=IMAGENET, size="base").parameter_blocks()
    assert len(blocks) == 12 * 3 + 3
    assert all("layers.11." in name for name in blocks["layers.11.mlp"])


def test_matrices_start_as_xavier_and_biases_at_zero():
    named = dict(build_model("vit", spec=DIGITS, seed=0).named_parameters())
    for name, parameter in named.items():
        if name.endswith("bias"):
            assert not parameter.any(), name
        elif parameter.ndim >= 2 and "token" not in name and "position" not in name:
            rows, cols = matrix_shape(parameter.shape)
            bound = (6 / (rows + cols)) ** 0.5  # Glorot & Bengio 2010, uniform
            assert 0.9 * bound < parameter.abs().max() <= bound, name


def test_seed_decides_the_weights_and_leaves_the_random_state_alone():
    torch.manual_seed(5)
    before = torch.get_rng_state()
    one = build_model("vit", spec=DIGITS, seed=1)
    assert torch.equal(torch.get_rng_state(), before)
    torch.manual_seed(6)
    again, other = (build_model("vit", spec=DIGITS, seed=seed) for seed in (1, 2))
    assert all(torch.equal(a, b) for a, b in zip(one.parameters(), again.parameters(), strict=True))
    assert not torch.equal(one.net.classifier.weight, other.net.classifier.weight)


def test_default_dtype_of_the_caller_changes_nothing():
    expected = build_model("vit", spec=DIGITS, seed=1)
    torch.set_default_dtype(torch.bfloat16)
    try:
        model = build_model("vit", spec=DIGITS, seed=1)
        assert torch.get_default_dtype() is torch.bfloat16
    finally:
        torch.set_default_dtype(torch.float32)
    for parameter, other in zip(model.parameters(), expected.parameters(), strict=True):
        assert parameter.dtype is torch.float32
        assert torch.equal(parameter, other)


def test_failure_while_building_puts_the_surroundings_back():
    before = torch.get_rng_state()
    with pytest.raises(BadInputError, match="model vit classifies images; a data set described by str has none"):
        build_model("vit", spec="text", seed=3)
    assert torch.get_default_dtype() is torch.float32
    assert torch.equal(torch.get_rng_state(), before)


def test_dropout_acts_in_training_only():
    model = build_model("vit", spec=DIGITS, dropout=0.5, seed=0)
    assert {module.attention_dropout for module in model.modules() if hasattr(module, "attention_dropout")} == {0.5}
    images = torch.ones(2, 1, 8, 8)
    assert model.training
    assert not torch.equal(model(images), model(images))
    model.eval()
    assert torch.equal(model(images), model(images))
    assert torch.equal(model(images), build_model("vit", spec=DIGITS, seed=0).eval()(images))


@pytest.mark.parametrize("dropout", [-0.1, 1.0])
def test_impossible_dropout_is_refused(dropout):
    with pytest.raises(BadInputError, match=f"dropout must be at least 0 and below 1, not {dropout}"):
        build_model("vit", spec=DIGITS, dropout=dropout)
