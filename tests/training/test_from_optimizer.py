"""BaocOptimizer in the place of an AdamW that other code built: groups, names, states, and what is refused."""

import copy
from typing import Any

import pytest
import torch
from torch import nn

from baoc import BaocOptimizer
from baoc.errors import BadInputError
from baoc.training.plain_loop import network_of
from baoc.types import Role
from tests.support.classifier import same
from tests.support.plain_loops import net, train

pytestmark = pytest.mark.slow  # they plan, time and step networks


def adamw(model: nn.Module, **changed: Any) -> torch.optim.AdamW:
    """As timm builds one: decay by dimensions, a multiple of the rate per layer, no names."""
    groups: list[dict[str, Any]] = [
        {"params": [p for p in model.parameters() if p.ndim > 1], "weight_decay": 0.1, "lr": 2e-2, "lr_scale": 0.5},
        {"params": [p for p in model.parameters() if p.ndim <= 1], "weight_decay": 0.0, "lr_scale": 1.0},
    ]
    return torch.optim.AdamW(groups, **{"lr": 1e-2, "betas": (0.8, 0.95), "foreach": False, **changed})


@pytest.mark.parametrize("taken_after", [0, 3])
def test_it_goes_on_as_the_given_adamw_bit_for_bit(taken_after: int):
    plain, plain_loss = net()
    train(adamw(plain), plain_loss, steps=6)
    model, loss = net()
    given = adamw(model)
    train(given, loss, steps=taken_after)
    optimizer = BaocOptimizer.from_optimizer(given, model, budget="unlimited", verbose=False)
    train(optimizer, loss, steps=6 - taken_after)
    assert same(plain, model)
    first, second = optimizer.param_groups
    assert first["param_names"] == ["0.weight", "2.weight"] and "1.bias" in second["param_names"]
    assert (first["lr_scale"], first["lr"], second["lr"], second["weight_decay"]) == (0.5, 2e-2, 1e-2, 0.0)
    assert first["betas"] == (0.8, 0.95)


def test_names_make_the_plan_the_same_as_that_of_the_module():
    model, _ = net()
    plans = [
        BaocOptimizer(model, budget="state_25", verbose=False).plan,
        BaocOptimizer.from_optimizer(torch.optim.AdamW(model.parameters()), model, budget="state_25").plan,
        BaocOptimizer(list(model.parameters()), model=model, budget="state_25", verbose=False).plan,
        BaocOptimizer(model.parameters(), budget="state_25", verbose=False).plan,
        BaocOptimizer(list(model.named_parameters()), budget="state_25", verbose=False).plan,
        BaocOptimizer.from_optimizer(adamw(model), budget="state_25", verbose=False).plan,
    ]
    assert all(plan.allocation.choices == plans[0].allocation.choices for plan in plans[1:])


@pytest.mark.parametrize("prefix", ["", "mine."])
def test_named_parameters_have_the_types_of_their_network_unless_they_are_called_otherwise(prefix: str):
    model = nn.Sequential(nn.Embedding(9, 8), nn.GRU(8, 8), nn.Linear(8, 9))
    named = [(f"{prefix}{name}", param) for name, param in model.named_parameters()]
    plan = BaocOptimizer(named, budget="state_25", verbose=False).plan
    roles = {param.name: param.role for block in plan.blocks for param in block.params}
    assert roles[f"{prefix}0.weight"] is (Role.OTHER if prefix else Role.EMBEDDING)


@pytest.mark.parametrize("named", [False, True])
@pytest.mark.parametrize("head", ["head", "out", None])
def test_the_last_of_hidden_layers_is_no_head_where_their_network_lives(head: str | None, named: bool):
    blocks = nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 4))
    model = nn.ModuleDict({"first": nn.Linear(3, 8), "blocks": blocks, **({head: nn.Linear(4, 2)} if head else {})})
    given = list(blocks.named_parameters()) if named else blocks.parameters()
    plan = BaocOptimizer(given, budget="state_25", verbose=False).plan
    heads = [param.name for block in plan.blocks for param in block.params if param.role is Role.HEAD]
    assert model and heads == ([] if head else ["2.weight"])


def test_the_network_of_plain_parameters_is_the_smallest_that_lives_with_all_of_them():
    inner: Any = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 2))
    outer = nn.ModuleDict({"ours": inner, "other": nn.Linear(2, 2)})
    wrapper = nn.ModuleDict({"module": inner})
    copied: Any = copy.deepcopy(outer)
    unbuilt = nn.Module.__new__(nn.Module)  # as before super().__init__(), which some helpers never call
    assert not vars(unbuilt)
    assert network_of(inner.parameters()) is network_of(wrapper.parameters()) is inner
    assert network_of([inner[1].weight]) is inner[1] and network_of(outer.parameters()) is outer
    assert network_of([*copied["other"].parameters(), *copied["ours"][0].parameters()]) is copied
    assert network_of([inner[0].weight, copied["other"].weight]) is None
    lone = BaocOptimizer([inner[0].weight, nn.Parameter(torch.ones(3, 3))], budget="state_25", verbose=False)
    assert sorted(lone.registry.names.values()) == ["param0", "param1"]
    part = BaocOptimizer([p for p in outer.parameters() if p.ndim > 1], budget="state_25", verbose=False)
    assert sorted(part.registry.names.values()) == ["other.weight", "ours.0.weight", "ours.1.weight"]


def test_what_cannot_be_taken_over_is_refused_in_one_sentence():
    model, _ = net()
    take = BaocOptimizer.from_optimizer
    with pytest.raises(BadInputError, match="from_optimizer was given SGD: BAOC takes over"):
        take(torch.optim.SGD(model.parameters()), model)
    with pytest.raises(BadInputError, match="lr is given beside an optimizer that says it: leave it out"):
        take(adamw(model), model, lr=0.1)
    with pytest.raises(BadInputError, match=r"param0 of shape .* is no parameter of the model \(Linear\)"):
        take(adamw(model), nn.Linear(2, 2))
    with pytest.raises(BadInputError, match="sets amsgrad=True, which no rule here has"):
        take(adamw(model, amsgrad=True), model)
    given = adamw(model)
    torch.optim.lr_scheduler.LambdaLR(given, lambda step: 1.0)
    with pytest.raises(BadInputError, match="build the schedule afterwards"):
        take(given, model)


def test_torchs_switches_are_taken_with_a_word_or_refused(caplog):
    model, _ = net()
    with caplog.at_level("INFO"):
        BaocOptimizer(model, budget="state_25", fused=True, foreach=None, amsgrad=False, verbose=False)
    assert "fused=True has no effect" in caplog.text
    with pytest.raises(BadInputError, match="sets maximize=True, which no rule here has"):
        BaocOptimizer(model, maximize=True)
    with pytest.raises(BadInputError, match=r"there is no argument 'fuse' \(did you mean fused\?\)"):
        BaocOptimizer(model, fuse=True)
