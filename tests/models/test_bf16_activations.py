"""model.activations=bf16: what flows between layers, what is kept of it, and that parameters and results stay sane."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from baoc.config.schema import ModelConfig
from baoc.errors import BadInputError
from baoc.models import build_model
from baoc.models.switches import enable_bf16_activations, set_recomputed
from baoc.optim import BlockwiseOptimizer
from baoc.tasks import build_task
from baoc.training.prepare import prepare
from baoc.types import ImageDataSpec, TextDataSpec

DIGITS = ImageDataSpec(dataset="digits", image_size=8, channels=1, num_classes=10, num_train=64, num_val=32)
TEXT = TextDataSpec(dataset="text", vocab_size=64, sequence_length=32, num_train=64, num_val=8)
NAMES = ("vit", "dit", "unet", "llama")


def network(name: str, *, bf16: bool, **asked: Any) -> nn.Module:
    """With weights that leave no layer at zero, as dit's begin."""
    model = build_model(
        name, spec=TEXT if name == "llama" else DIGITS, size="nano" if name == "llama" else "tiny", seed=0
    )
    torch.manual_seed(0)
    for param in model.parameters():
        if not param.any():
            nn.init.normal_(param, std=0.05)
    prepare(model, ModelConfig(name=name, activations="bf16" if bf16 else None, **asked))
    return model


def inputs(name: str, model: Any) -> tuple[Tensor, ...]:
    generator = torch.Generator().manual_seed(1)
    if name == "llama":
        return (torch.randint(64, (2, 32), generator=generator),)
    images = torch.randn(4, 1, model.image_size, model.image_size, generator=generator)
    return (images,) if name == "vit" else (images, torch.arange(4) * 200, torch.arange(4))


def forward(name: str, model: nn.Module) -> Tensor:
    with torch.autocast("cpu", dtype=torch.bfloat16):
        return model(*inputs(name, model)).float()


def kept_bytes(run: Callable[[], Tensor]) -> dict[torch.dtype, int]:
    """Bytes that the backward pass keeps, by type."""
    seen: dict[torch.dtype, int] = {}

    def pack(tensor: Tensor) -> Tensor:
        seen[tensor.dtype] = seen.get(tensor.dtype, 0) + tensor.nbytes
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        run()
    return seen


@pytest.mark.parametrize("name", NAMES)
def test_what_flows_between_layers_is_bf16_and_results_are_those_of_autocast(name: str):
    plain, small = network(name, bf16=False), network(name, bf16=True)
    seen: set[torch.dtype] = set()
    for unit in small.checkpoint_units:  # pyright: ignore[reportGeneralTypeIssues]
        unit.register_forward_hook(lambda _, __, out: seen.add((out[0] if isinstance(out, tuple) else out).dtype))
    exact = plain(*inputs(name, plain))
    off, off_small = ((forward(name, m) - exact).norm() / exact.norm() for m in (plain, small))
    assert seen == {torch.bfloat16}
    assert 0 < off_small < max(3 * off, 0.02)
    for model in (plain, small):
        forward(name, model).square().mean().backward()
    ours, theirs = ([p.grad for p in m.parameters()] for m in (small, plain))
    assert {g.dtype for g in ours if g is not None} == {torch.float32}, "parameters are stored in float32"
    flat = [torch.cat([g.flatten() for g in grads if g is not None]) for grads in (ours, theirs)]
    assert torch.cosine_similarity(flat[0], flat[1], dim=0) > 0.99
    assert not torch.equal(flat[0], flat[1])


# On a CPU an RMS norm is made of parts that keep float32 in any precision; a GPU has one kernel, which keeps its input.
@pytest.mark.parametrize(
    ("name", "share", "less"), [("vit", 0.10, 2.0), ("dit", 0.05, 2.0), ("llama", 0.30, 1.0), ("unet", 0.02, 2.0)]
)
def test_the_backward_pass_keeps_next_to_nothing_in_float32(name: str, share: float, less: float):
    kept = {small: kept_bytes(lambda small=small: forward(name, network(name, bf16=small))) for small in (False, True)}
    wide, narrow = (k.get(torch.float32, 0) / sum(k.values()) for k in (kept[False], kept[True]))
    assert narrow < share and narrow < wide / less
    assert sum(kept[True].values()) < sum(kept[False].values())


@pytest.mark.parametrize("name", NAMES)
def test_recomputed_activations_are_the_same_ones(name: str):
    model = network(name, bf16=True)
    found = []
    for recomputed in (False, True):
        if recomputed:
            set_recomputed(model, name=name)
        model.zero_grad()
        forward(name, model).square().mean().backward()
        found.append([p.grad.clone() for p in model.parameters() if p.grad is not None])
    set_recomputed(model, 0)
    assert all(torch.equal(a, b) for a, b in zip(*found, strict=True))


def test_weights_of_16_bits_train_in_it():
    model = network("vit", bf16=True)
    specs = {name: "adamw_int8+split8" if param.ndim == 2 else "adamw" for name, param in model.named_parameters()}
    optimizer = BlockwiseOptimizer(model, specs, lr=3e-3)
    assert {p.dtype for p in model.parameters()} == {torch.bfloat16, torch.float32}
    labels, losses = torch.arange(4), []
    for _ in range(8):
        optimizer.zero_grad()
        loss = nn.functional.cross_entropy(forward("vit", model), labels)
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    assert losses[-1] < losses[0] / 2


def test_names_types_and_values_stay():
    plain, small = network("vit", bf16=False), network("vit", bf16=True)
    ours, theirs = small.state_dict(), plain.state_dict()
    assert ours.keys() == theirs.keys() and all(torch.equal(ours[key], theirs[key]) for key in ours)
    assert [type(m).__name__ for m in small.modules()] == [type(m).__name__ for m in plain.modules()]
    assert enable_bf16_activations(network("vit", bf16=False), name="vit") == 9, (
        "two norms of four layers, and the last"
    )


def test_losses_are_taken_in_float32():
    task = build_task("vision", model=network("vit", bf16=True), spec=DIGITS)
    batch = {"images": inputs("vit", task.model)[0], "labels": torch.arange(4)}
    task.log = lambda *_, **__: None  # pyright: ignore[reportAttributeAccessIssue]
    with torch.autocast("cpu", dtype=torch.bfloat16):
        assert task.training_step(batch, 0).dtype is torch.float32


def test_a_network_without_units_is_refused():
    with pytest.raises(BadInputError, match="model own names no parts between which activations could be bf16: set"):
        enable_bf16_activations(nn.Linear(2, 2), name="own")
