"""advise(): micro-batch, accumulation, recomputation and optimizer for a loop of one's own, by the search of run.py."""

import re
from contextlib import nullcontext
from dataclasses import dataclass

import pytest
import torch
from torch import nn

import baoc
from baoc.errors import BadInputError, InfeasibleBudgetError


class Stack(nn.Module):
    """Layers whose activations are most of what a step holds."""

    def __init__(self, *, norm: bool = False):
        super().__init__()
        norms = nn.BatchNorm1d if norm else nn.LayerNorm
        self.layers = nn.ModuleList(nn.Sequential(nn.Linear(64, 64), norms(64), nn.Tanh()) for _ in range(4))
        self.head = nn.Linear(64, 4)

    def forward(self, x):
        for layer in self.layers:
            x = layer(x)
        return self.head(x)


def make_batch(size: int):
    x = torch.randn(size, 64)
    return {"x": x, "y": (x[:, 0] > 0).long() + 2 * (x[:, 1] > 0)}


def loss(model, batch):
    return nn.functional.cross_entropy(model(batch["x"]), batch["y"])


def test_without_a_limit_the_network_is_as_before():
    torch.manual_seed(0)
    model = Stack().eval()
    before = {name: value.clone() for name, value in model.state_dict().items()}
    drawn = torch.get_rng_state()
    found = baoc.advise(model, make_batch, loss, batch_size=64, budget="unlimited", device="cpu")
    assert (found.micro_batch * found.accumulation, found.recomputed) == (64, 0)
    assert torch.equal(torch.get_rng_state(), drawn) and not model.training
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())
    assert all(param.grad is None for param in model.parameters()) and not hasattr(model, "checkpoint_units")
    assert f"{found.accumulation} x {found.micro_batch} samples a step: peak " in str(found)


def test_a_tight_budget_splits_the_batch_and_its_optimizer_holds_it():
    model = Stack()
    budget = 400_000  # the activations of 512 samples are over 1 MB
    found = baoc.advise(model, make_batch, loss, batch_size=512, budget=budget, device="cpu")
    assert found.micro_batch * found.accumulation == 512
    assert found.micro_batch < 512
    assert found.peak_bytes <= budget
    found.recompute()
    optimizer = found.optimizer(lr=1e-2, verbose=False)
    assert optimizer.plan.budget.memory_bytes == budget
    losses = []
    for _ in range(3):
        optimizer.zero_grad()
        losses.append(0.0)
        for _ in range(found.accumulation):
            value = loss(model, make_batch(found.micro_batch)) / found.accumulation
            value.backward()
            losses[-1] += value.item()
        optimizer.step()
    assert losses[-1] < losses[0]


def test_a_module_of_lightning_is_asked_for_its_training_step():
    import lightning as L

    class Own(L.LightningModule):
        def __init__(self):
            super().__init__()
            self.net = Stack()

        def training_step(self, batch, batch_idx):
            value = loss(self.net, batch)
            self.log("train/loss", value)
            return value

    found = baoc.advise(Own(), make_batch, batch_size=16, budget="unlimited", device="cpu")
    assert found.micro_batch * found.accumulation == 16


@pytest.mark.parametrize(
    ("given", "said"),
    [
        ({"loss": None}, "advise needs a loss: a function of"),
        (
            {"loss": lambda model, batch: model(batch["x"])},
            ", 4): it must return a tensor of one number, the mean over the batch",
        ),
        ({"precision": "16-mixed"}, "precision=16-mixed is not allowed"),
        ({"model": Stack(norm=True)}, "layers.0.1 is a BatchNorm, whose statistics are of one micro-batch"),
        ({"objective": "speed"}, "objective=speed is not allowed: it must be one of quality, throughput, balanced"),
        ({"model": nn.Flatten()}, "has no parameters to train"),
        ({"receipe": "adamw8"}, "there is no argument 'receipe' (did you mean recipe?)"),
        ({"recipe": "adamw9"}, "recipe=adamw9: there is no such recipe"),
        ({"betas": (0.9,)}, "betas are (0.9,): give two numbers in [0, 1)"),
        ({"device": "mps"}, "device=mps is not allowed: it must be cpu or cuda"),
        ({"device": "cpu:x"}, "device=cpu:x is not allowed: it must be cpu or cuda, or cuda:INDEX of a GPU"),
        ({"device": "cpu:-1"}, "device=cpu:-1 is not allowed"),
        ({"device": ""}, "device= is not allowed"),
        ({"device": True}, "device=True is not allowed"),
        ({"batch_size": True}, "batch_size=true is not allowed"),
        ({"batch_size": 0}, "batch_size=0 is not allowed"),
        ({"batch_size": 2.5}, "batch_size=2.5 is not allowed: it must be 1 or more samples a step, a whole number"),
        ({"model": 3}, "advise was given a int as its network: pass a torch.nn.Module"),
        ({"make_batch": torch.ones(4, 64)}, "make_batch is a Tensor: pass a function"),
        ({"make_batch": lambda size: [][size]}, "raised IndexError ("),
        ({"make_batch": lambda size: None}, "make_batch(1) returned None: return the batch"),
        ({"loss": lambda model, batch: batch["z"]}, "<lambda> raised KeyError (tests/training/test_advise.py:"),
        ({"make_batch": lambda size: make_batch(4)}, "make_batch(1) and make_batch(2) have equal shapes: it must make"),
        ({"layers": [nn.Linear(3, 3)]}, "layers has Linear(in_features=3"),
        ({"layers": "layers"}, "layers has 'l', which is no module of the network: pass its modules"),
        ({"layers": 3}, "layers has 3, which is no module of the network"),
    ],
)
def test_what_cannot_be_advised_is_told(given, said):
    arguments = {"model": Stack(), "make_batch": make_batch, "loss": loss, "batch_size": 8, **given}
    with pytest.raises(BadInputError, match=re.escape(said)):
        baoc.advise(**{"device": "cpu", **arguments})


@dataclass
class Packed:
    """Samples in one row, as packed sequences and graphs are."""

    rows: torch.Tensor

    def to(self, device: torch.device) -> "Packed":
        return Packed(self.rows.to(device))


@pytest.mark.parametrize("form", ["one row", "time first", "object"])
def test_a_batch_of_any_form_is_made_anew_and_never_cut(form: str):
    """Sizes that were tried are whole batches of so many samples, wherever the samples lie in them."""
    seen: set[int] = set()

    def made(size: int):
        rows = torch.randn(size, 64)
        return {"one row": rows.reshape(1, -1), "time first": rows.T, "object": Packed(rows)}[form]

    def of(model, batch):
        rows = batch.rows if form == "object" else batch.T if form == "time first" else batch.reshape(-1, 64)
        assert rows.shape[1] == 64
        seen.add(len(rows))
        return model(rows).square().mean()

    found = baoc.advise(Stack(), made, of, batch_size=8, budget="unlimited", device="cpu")
    assert found.micro_batch * found.accumulation == 8 and seen <= {1, 2, 4, 8} and found.micro_batch in seen


def test_a_budget_that_nothing_fits_names_the_least():
    with pytest.raises(InfeasibleBudgetError) as caught:
        baoc.advise(Stack(), make_batch, loss, batch_size=8, budget="10kb", device="cpu")
    assert caught.value.least_feasible_bytes > 10_000


def test_the_search_measures_on_the_gpu_that_was_asked_for(monkeypatch: pytest.MonkeyPatch):
    """The search knows the current device alone, which is the one that was asked for as long as it runs."""
    entered: list[torch.device] = []

    def begin(device: torch.device) -> None:
        assert entered == [device], "before anything is drawn or measured"
        raise KeyboardInterrupt

    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    monkeypatch.setattr(torch.cuda, "device", lambda device: entered.append(device) or nullcontext())
    monkeypatch.setattr("baoc.training.advise.capture_rng", begin)
    with pytest.raises(KeyboardInterrupt):
        baoc.advise(Stack(), make_batch, loss, batch_size=8, device="cuda:1")
    assert entered == [torch.device("cuda:1")]


@pytest.mark.parametrize("device", [0, 7])
def test_a_number_is_that_of_a_gpu(device: int, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 0)
    with pytest.raises(BadInputError, match=f"device=cuda:{device} is not allowed: it must be cpu or cuda, or cuda:IN"):
        baoc.advise(Stack(), make_batch, loss, batch_size=8, device=device)
