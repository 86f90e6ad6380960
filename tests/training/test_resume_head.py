"""Checkpoints of runs in which the head was a hidden matrix, as an earlier version knew it by its name alone."""

import gc
from typing import Any

import pytest
import torch
from torch import nn

from baoc import BaocOptimizer

pytestmark = pytest.mark.slow


class Nameless(nn.Linear):
    """Ends in no known type, so its weight is no head by its place."""


Nameless.__name__ = "Last"


def network(kind: str, last: type[nn.Linear]) -> nn.Module:
    blocks = nn.ModuleList(nn.TransformerEncoderLayer(64, 2, 256) for _ in range(2))
    tail: dict[str, nn.Module] = {
        "transformer": {"blocks": blocks},
        "perceptron": {"net": nn.Sequential(nn.Linear(64, 128), nn.Linear(128, 64))},
        "behind fc": {"rnn": nn.GRU(64, 64), "fc": nn.Linear(64, 64)},
    }[kind]
    return nn.ModuleDict({"tok": nn.Embedding(256, 64), **tail, "out": last(64, 256)})


def step(optimizer: BaocOptimizer, model: nn.Module) -> None:
    for param in model.parameters():
        param.grad = torch.full_like(param, 0.01)
    optimizer.step()


@pytest.mark.parametrize("budget", ["state_15", "unlimited", "1gb"])
@pytest.mark.parametrize("kind", ["transformer", "perceptron", "behind fc"])
def test_a_run_keeps_specs_and_rates_where_its_head_is_now_known(kind: str, budget: str, capsys: Any):
    before = network(kind, Nameless)
    first = BaocOptimizer(before, budget=budget, lr=1e-3, verbose=False)
    step(first, before)
    saved = first.state_dict()
    ran = {block: entry["spec"] for block, entry in saved["blocks"].items()}
    (old,) = {ran[block] for block, entry in saved["blocks"].items() if "out.weight" in entry["params"]}
    assert old.startswith("muon") or kind == "behind fc"
    del first
    gc.collect()  # two on one device that live are warned of
    model = network(kind, nn.Linear)
    again = BaocOptimizer(model, budget=budget, lr=1e-3)
    capsys.readouterr()
    again.load_state_dict(saved)
    choices = dict(again.plan.allocation.choices)
    head = choices["head"]
    said = capsys.readouterr().out
    assert not head.startswith("muon")
    if budget != "1gb":  # of which no more is told than the plan, until a step is measured
        assert ("out is now the head" + (f", which runs {head}, not {old}" if head != old else "")) in said
    assert "parameters were cut" not in said and again.reallocator.continues_saved_plan
    assert {b: s for b, s in choices.items() if b != "head"} == {
        b: s for b, s in ran.items() if b in choices and b != "head"
    }
    assert again.state_dict()["online"]["tuning"] == saved["online"]["tuning"]
    step(again, model)
    assert dict(again.plan.allocation.choices) == choices


def test_other_blocks_are_planned_anew_and_damaged_ones_are_reported():
    before, model = network("perceptron", Nameless), network("perceptron", nn.Linear)
    saved = BaocOptimizer(before, budget="state_15", verbose=False).state_dict()
    for blocks in ({}, {"head": 3}):
        again = BaocOptimizer(model, budget="state_15", verbose=False)
        notes = again.reallocator.load_state_dict(saved["online"], blocks=blocks)
        assert notes[0].startswith("parameters were cut into")
