"""The diffusion transformer: published counts, blocks, a start that is the identity, and what conditions it."""

import pytest
import torch
from torch.nn import functional as F

from baoc.models import build_model
from baoc.models.dit import FREQUENCIES, DiffusionTransformer, grid_positions, modulated_norm, sinusoids
from baoc.types import ImageDataSpec

DIGITS = ImageDataSpec(dataset="digits", image_size=8, channels=1, num_classes=10, num_train=1438, num_val=359)
LATENTS = ImageDataSpec(dataset="x", image_size=32, channels=4, num_classes=1000, num_train=9, num_val=9)


def spec(pixels, *, channels=3):
    return ImageDataSpec(dataset="x", image_size=pixels, channels=channels, num_classes=7, num_train=9, num_val=9)


def test_xl2_is_the_published_network_but_for_variance_and_positions():
    with torch.device("meta"):
        model = build_model("dit", spec=LATENTS, size="xl2")
    variance = model.final.linear.weight.numel() + model.final.linear.bias.numel()
    everything = sum(p.numel() for p in model.parameters()) + variance + model.positions.numel()
    assert everything == 675_129_632  # parameters of the published DiT-XL/2, fixed positions among them


@pytest.mark.parametrize(
    ("size", "pixels", "image_size", "patch"),
    [("tiny", 8, 8, 2), ("tiny", 28, 28, 4), ("tiny", 30, 32, 4), ("tiny", 3, 4, 2), ("s2", 7, 8, 2)],
)
def test_images_are_enlarged_to_whole_patches(size, pixels, image_size, patch):
    with torch.device("meta"):
        model = build_model("dit", spec=spec(pixels), size=size)
        out = model(torch.zeros(2, 3, image_size, image_size), torch.zeros(2).long(), torch.zeros(2).long())
    assert (model.image_size, model.patch_size) == (image_size, patch)
    assert out.shape == (2, 3, image_size, image_size)


def random_model(*, zeros=False):
    model = build_model("dit", spec=DIGITS, seed=0)
    if not zeros:
        generator = torch.Generator().manual_seed(0)
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.copy_(0.2 * torch.randn(parameter.shape, generator=generator))
    return model


def test_start_is_the_identity_with_output_zero_and_only_the_last_layer_learns_at_first():
    model = random_model(zeros=True)
    images, timesteps, labels = torch.randn(3, 1, 8, 8), torch.tensor([0, 500, 999]), torch.tensor([0, 9, 10])
    seen = []
    model.final.register_forward_pre_hook(lambda _, args: seen.append(args[0]))
    out = model(images, timesteps, labels)
    assert not out.any()
    tokens = model.patch_embed(images).flatten(2).transpose(1, 2) + model.positions
    assert torch.equal(seen[0], tokens)
    F.mse_loss(out, images).backward()
    moved = {name for name, p in model.named_parameters() if p.grad is not None and p.grad.any()}
    assert moved == {"final.linear.weight", "final.linear.bias"}


def test_timesteps_labels_and_positions_matter():
    model, images = random_model(), torch.randn(1, 1, 8, 8).expand(2, -1, -1, -1)

    def differ(images, timesteps, labels):
        one, other = model(images, torch.tensor(timesteps), torch.tensor(labels))
        return not torch.allclose(one, other, atol=1e-3)

    assert not differ(images, [5, 5], [1, 1])
    assert differ(images, [5, 6], [1, 1])
    assert differ(images, [5, 5], [1, 2])
    assert differ(images, [5, 5], [1, model.null_label])
    model.positions.zero_()
    flipped = torch.cat([images[:1], images[:1].roll(2, -1)])  # by one patch: without positions the patches just move
    out = model(flipped, torch.tensor([5, 5]), torch.tensor([1, 1]))
    torch.testing.assert_close(out[0].roll(2, -1), out[1])


def test_patches_come_back_where_they_were():
    model = random_model()
    model.final = torch.nn.Identity()
    model.final.forward = lambda tokens, condition: tokens
    pixels = torch.arange(64.0).view(1, 1, 8, 8)
    tokens = F.unfold(pixels, kernel_size=2, stride=2).transpose(1, 2)  # (1, 16, 4), row by row
    assert torch.equal(model.unpatchify(tokens), pixels)


def test_attention_is_softmax_of_scaled_products():
    layer = random_model().layers[0].attention
    tokens = torch.randn(2, 5, 64)
    query, key, value = layer.qkv(tokens).chunk(3, -1)
    heads = []
    for head in range(4):
        part = slice(head * 16, head * 16 + 16)
        weights = (query[..., part] @ key[..., part].transpose(1, 2) / 4).softmax(-1)
        heads.append(weights @ value[..., part])
    torch.testing.assert_close(layer(tokens), layer.out(torch.cat(heads, -1)))


def test_modulated_norm_scales_and_shifts_what_has_mean_0_and_deviation_1():
    tokens = 3 + 5 * torch.randn(2, 4, 64)
    out = modulated_norm(tokens, shift=torch.full((2, 1, 64), 2.0), scale=torch.full((2, 1, 64), 0.5))
    torch.testing.assert_close(out.mean(-1), torch.full((2, 4), 2.0))
    torch.testing.assert_close(out.std(-1, correction=0), torch.full((2, 4), 1.5), atol=1e-4, rtol=0)


def test_sinusoids_and_positions_tell_all_places_apart():
    assert torch.equal(sinusoids(torch.tensor([0]), width=FREQUENCIES), torch.tensor([[1.0] * 128 + [0.0] * 128]))
    for table in (sinusoids(torch.arange(1000), width=FREQUENCIES), grid_positions(16, width=64)):
        distances = torch.cdist(table, table) + 100 * torch.eye(len(table))
        assert distances.min() > 0.5
    rows = grid_positions(3, width=64)
    assert torch.equal(rows[0, :32], rows[3, :32])  # same column
    assert torch.equal(rows[0, 32:], rows[2, 32:])  # same row


def test_autocast_keeps_the_stream_of_tokens_in_float32():
    model = random_model()
    seen = []
    model.final.register_forward_pre_hook(lambda _, args: seen.append(args[0].dtype))
    with torch.autocast("cpu", dtype=torch.bfloat16):
        out = model(torch.randn(2, 1, 8, 8), torch.tensor([1, 2]), torch.tensor([1, 2]))
    assert seen == [torch.float32]
    assert out.dtype is torch.bfloat16


def test_units_whose_activations_may_be_recomputed_are_the_layers():
    model = random_model()
    assert model.checkpoint_units == list(model.layers)
    assert isinstance(model, DiffusionTransformer)
