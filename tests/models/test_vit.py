"""The Vision Transformer: sizes, blocks, initialisation, and that the surroundings do not change what is built."""

import pytest
import torch

from baoc.errors import BadInputError
from baoc.models import build_model, choose_size
from baoc.types import ImageDataSpec, matrix_shape

DIGITS = ImageDataSpec(dataset="digits", image_size=8, channels=1, num_classes=10, num_train=1438, num_val=359)
IMAGENET = ImageDataSpec(dataset="x", image_size=224, channels=3, num_classes=1000, num_train=9, num_val=9)


def test_auto_is_the_small_one_and_says_why():
    assert choose_size("vit").why == "model.size=auto takes tiny on cpu: it trains in minutes there"
    assert choose_size("vit", size="base").why == "model.size=base was asked for"


@pytest.mark.parametrize(("pixels", "image_size", "patch"), [(8, 8, 2), (28, 28, 7), (30, 32, 8), (3, 4, 1)])
def test_tiny_follows_the_images_of_the_data(pixels, image_size, patch):
    spec = ImageDataSpec(dataset="x", image_size=pixels, channels=3, num_classes=7, num_train=9, num_val=9)
    model = build_model("vit", spec=spec, size="tiny")
    assert model.image_size == image_size
    assert model.net.config.patch_size == patch
    assert model(torch.zeros(2, 3, image_size, image_size)).shape == (2, 7)


def test_matrices_start_as_xavier_and_biases_at_zero():
    named = dict(build_model("vit", spec=DIGITS, seed=0).named_parameters())
    for name, parameter in named.items():
        if name.endswith("bias"):
            assert not parameter.any(), name
        elif parameter.ndim >= 2 and "token" not in name and "position" not in name:
            rows, cols = matrix_shape(parameter.shape)
            bound = (6 / (rows + cols)) ** 0.5  # Glorot & Bengio 2010, uniform
            assert 0.9 * bound < parameter.abs().max() <= bound, name


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
