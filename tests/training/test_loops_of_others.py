"""Training loops as strangers write them, with BaocOptimizer in AdamW's place: they train, hold the budget, and go on
from a checkpoint bit for bit."""

import copy
import io
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn.functional import cross_entropy
from torch.nn.utils.rnn import pack_padded_sequence

from baoc import BaocOptimizer
from baoc.errors import BadInputError

STEPS = 4


def drawn(step: int, *shape: int, below: int = 0) -> torch.Tensor:
    rng = torch.Generator().manual_seed(step)
    return torch.randint(below, shape, generator=rng) if below else torch.randn(*shape, generator=rng)


class Tagger(nn.Module):
    """A packed LSTM."""

    def __init__(self):
        super().__init__()
        self.words, self.rnn = nn.Embedding(40, 16, padding_idx=0), nn.LSTM(16, 16, 2, bidirectional=True, dropout=0.2)
        self.out = nn.Linear(32, 5)

    def loss(self, step: int) -> torch.Tensor:
        words, lengths = drawn(step, 10, 6, below=40), drawn(step, 6, below=9) + 1
        _, (last, _) = self.rnn(pack_padded_sequence(self.words(words), lengths, enforce_sorted=False))
        return cross_entropy(self.out(torch.cat([last[-1], last[-2]], 1)), drawn(step, 6, below=5))


class Experts(nn.Module):
    """A mixture whose experts a batch may not reach: their gradients are None."""

    def __init__(self):
        super().__init__()
        self.router = nn.Linear(16, 4, bias=False)
        self.experts = nn.ModuleList(nn.Sequential(nn.Linear(16, 32), nn.SiLU(), nn.Linear(32, 16)) for _ in range(4))

    def loss(self, step: int) -> torch.Tensor:
        x = drawn(step, 2, 16)
        weight, chosen = self.router(x).softmax(-1).max(-1)
        reached = zip(x, weight, chosen, strict=True)
        return torch.stack([(w * self.experts[int(k)](row)).square().sum() for row, w, k in reached]).sum()


class Translator(nn.Module):
    """An encoder and decoder that share an embedding with the head."""

    def __init__(self):
        super().__init__()
        self.words = nn.Embedding(30, 16)
        nn.init.normal_(self.words.weight, std=0.02)
        self.core = nn.Transformer(16, 2, 1, 1, 32, 0.1, batch_first=True)
        self.head = nn.Linear(16, 30, bias=False)
        self.head.weight = self.words.weight

    def loss(self, step: int) -> torch.Tensor:
        source = drawn(step, 4, 8, below=30)
        mask = nn.Transformer.generate_square_subsequent_mask(7)
        made = self.core(self.words(source), self.words(source.flip(1)[:, :-1]), tgt_mask=mask)
        return cross_entropy(self.head(made).flatten(0, 1), source.flip(1)[:, 1:].flatten())


class Conv(nn.Module):
    """Grouped and transposed convolutions, batch norm, spectral norm, channels last."""

    def __init__(self):
        super().__init__()
        parts = (nn.Conv2d(3, 8, 3), nn.BatchNorm2d(8), nn.Conv2d(8, 8, 3, groups=4), nn.ConvTranspose2d(8, 4, 2, 2))
        head = nn.utils.parametrizations.spectral_norm(nn.Linear(4, 3))
        self.net = nn.Sequential(*parts, nn.AdaptiveAvgPool2d(1), nn.Flatten(), head)
        self.net.to(memory_format=torch.channels_last)  # pyright: ignore[reportCallIssue]

    def loss(self, step: int) -> torch.Tensor:
        images = drawn(step, 4, 3, 10, 10).to(memory_format=torch.channels_last)
        return cross_entropy(self.net(images), drawn(step, 4, below=3))


def plainly(optimizer: Any, loss: Callable[[int], torch.Tensor], step: int, extra: Any) -> None:
    loss(step).backward()
    optimizer.step()
    optimizer.zero_grad(set_to_none=True)


def accumulating(optimizer: Any, loss: Callable[[int], torch.Tensor], step: int, extra: Any) -> None:
    for part in range(3):
        (loss(3 * step + part) / 3).backward()
    torch.nn.utils.clip_grad_norm_([p for g in optimizer.param_groups for p in g["params"]], 1.0)
    optimizer.step()
    optimizer.zero_grad()


def by_closure(optimizer: Any, loss: Callable[[int], torch.Tensor], step: int, extra: Any) -> None:
    def closure() -> torch.Tensor:
        optimizer.zero_grad()
        value = loss(step)
        value.backward()
        return value

    assert optimizer.step(closure).requires_grad


def scaled(optimizer: Any, loss: Callable[[int], torch.Tensor], step: int, scaler: Any) -> None:
    with torch.autocast("cpu", dtype=torch.float16):
        value = loss(step)
    scaler.scale(value).backward()
    scaler.step(optimizer)
    scaler.update()
    optimizer.zero_grad()


@pytest.mark.parametrize(
    ("kind", "way"), [(Tagger, accumulating), (Experts, by_closure), (Translator, scaled), (Conv, plainly)]
)
def test_a_loop_goes_on_bit_for_bit(kind: Any, way: Any):
    torch.manual_seed(0)
    first = kind()

    def made(model: nn.Module) -> tuple[BaocOptimizer, torch.amp.GradScaler]:
        scaler = torch.amp.GradScaler("cpu", init_scale=2.0**20, growth_interval=2)  # the first steps overflow
        return BaocOptimizer(model, budget="state_25", lr=1e-2, verbose=False), scaler

    optimizer, scaler = made(first)
    for step in range(STEPS):
        if step == STEPS // 2:
            kept = {"model": first.state_dict(), "optimizer": optimizer.state_dict(), "scaler": scaler.state_dict()}
            torch.save({**kept, "rng": torch.get_rng_state()}, file := io.BytesIO())
        way(optimizer, first.loss, step, scaler)
    assert optimizer.budget_met
    saved = torch.load(io.BytesIO(file.getvalue()), weights_only=True)
    second = kind()
    optimizer, scaler = made(second)
    second.load_state_dict(saved["model"])
    optimizer.load_state_dict(saved["optimizer"])
    scaler.load_state_dict(saved["scaler"])
    torch.set_rng_state(saved["rng"])
    for step in range(STEPS // 2, STEPS):
        way(optimizer, second.loss, step, scaler)
    for (name, a), b in zip(first.state_dict().items(), second.state_dict().values(), strict=True):
        assert torch.equal(a, b), name


class Deep(nn.Module):
    def __init__(self):
        super().__init__()
        self.layers = nn.ModuleList(nn.Sequential(nn.Linear(16, 16), nn.Tanh()) for _ in range(4))

    def loss(self, step: int) -> torch.Tensor:
        x = drawn(step, 8, 16)
        for layer in self.layers:
            x = layer(x)
        return x.square().mean()


@pytest.mark.parametrize(("before", "after"), [(3, 1), (False, 2)])
def test_a_run_goes_on_with_another_number_of_recomputed_layers(before: bool | int, after: bool | int):
    torch.manual_seed(0)
    model = Deep()
    optimizer = BaocOptimizer(model, budget="state_25", checkpointing=before, verbose=False)
    for step in range(3):
        plainly(optimizer, model.loss, step, None)
    other = Deep()
    other.load_state_dict(model.state_dict())
    resumed = BaocOptimizer(other, budget="state_25", checkpointing=after, verbose=False)
    resumed.load_state_dict(copy.deepcopy(optimizer.state_dict()))
    for step in range(3, 6):
        plainly(optimizer, model.loss, step, None)
        plainly(resumed, other.loss, step, None)
    assert all(torch.equal(a, b) for a, b in zip(model.parameters(), other.parameters(), strict=True))


def test_a_lazy_head_is_asked_for_one_batch():
    model = nn.Sequential(nn.LazyConv2d(4, 3), nn.Flatten(), nn.LazyLinear(3))
    with pytest.raises(BadInputError, match=r"'0\.weight' has no shape yet, as its layer is lazy: run one batch"):
        BaocOptimizer(model, budget="state_25", verbose=False)
    model(drawn(0, 2, 1, 6, 6))
    optimizer = BaocOptimizer(model, budget="state_25", verbose=False)
    plainly(optimizer, lambda step: cross_entropy(model(drawn(step, 2, 1, 6, 6)), drawn(step, 2, below=3)), 1, None)
    assert optimizer.budget_met
