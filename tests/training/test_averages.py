"""torch's AveragedModel beside weights in 16 bits with corrections: refused by a sentence whichever was made first."""

import copy
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn.modules.module import _global_module_registration_hooks
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn

from baoc import BaocOptimizer
from baoc.errors import BadInputError
from baoc.optim import BlockwiseOptimizer, wrappers
from baoc.planning.planner import PlannerSettings
from baoc.training.session import SessionSettings

REFUSED = r"AveragedModel would average block .* without the last bits .*{spec}.*Average optimizer.export_weights\(\)"
NARROW = ("adamw_int8+split8", "adamw_int8+bf16", "adamw_int8+bf16_sr")
pytestmark = pytest.mark.filterwarnings("ignore:16-bit weights")


def network() -> nn.Sequential:
    return nn.Sequential(nn.Linear(8, 16), nn.Linear(16, 4))


@pytest.mark.slow
@pytest.mark.parametrize(("spec", "nameless"), list(zip(NARROW, (False, True, False), strict=True)))
def test_an_average_that_was_there_before(spec: str, nameless: bool) -> None:
    model = network()
    average = AveragedModel(model)
    with pytest.raises(BadInputError, match=REFUSED.format(spec=spec.replace("+", r"\+"))):
        BlockwiseOptimizer(list(model.parameters()) if nameless else model, spec)
    assert all(param.dtype is torch.float32 for param in (*model.parameters(), *average.parameters()))
    optimizer = BlockwiseOptimizer(model, "adamw_int8")
    with pytest.raises(BadInputError, match="AveragedModel would average"):
        optimizer.migrate({name: spec for name in optimizer.specs})
    del average
    optimizer.migrate({name: spec for name in optimizer.specs})


@pytest.mark.parametrize("spec", NARROW)
def test_an_average_that_is_made_afterwards(spec: str) -> None:
    model = network()
    optimizer = BlockwiseOptimizer(model, spec)
    with pytest.raises(BadInputError, match="AveragedModel would average"):
        AveragedModel(model)
    copy.deepcopy(model)  # is nobody's average
    AveragedModel(nn.Linear(3, 3))  # of another network
    del optimizer
    AveragedModel(model)


def test_the_average_that_the_sentence_advises_is_that_of_the_full_weights() -> None:
    """Steps of 1e-5 are below what bf16 can tell: an average of what is left in the model stands still."""
    torch.manual_seed(0)
    ends: dict[str, list[torch.Tensor]] = {}
    start = network().state_dict()
    for spec in ("sign", "sign+split8"):
        torch.manual_seed(1)
        model = network()
        model.load_state_dict(start)
        optimizer = BlockwiseOptimizer(model, spec, lr=1e-5, rms_matching=False, weight_decay=0.0)
        average = {name: value.clone() for name, value in optimizer.export_weights().items()}
        ema: Any = get_ema_multi_avg_fn(0.9)
        for _ in range(20):
            for param in model.parameters():
                param.grad = torch.ones_like(param)
            optimizer.step()
            ema(list(average.values()), list(optimizer.export_weights().values()), 1)
        ends[spec] = list(average.values())
    for wide, narrow, first in zip(*ends.values(), start.values(), strict=True):
        torch.testing.assert_close(narrow, wide, rtol=0, atol=2e-5)
        assert ((first - narrow).abs() > 5e-5).all()


def settings(*specs: str) -> SessionSettings:
    return SessionSettings(planner=PlannerSettings(specs=specs, keep_fp32_roles=()))


@pytest.mark.slow
def test_a_plan_leaves_such_weights_out_and_says_so(caplog: pytest.LogCaptureFixture) -> None:
    model = network()
    average = AveragedModel(model, multi_avg_fn=get_ema_multi_avg_fn(0.5))
    optimizer = BaocOptimizer(
        model, budget="state_50", settings=settings("adamw_int8+split8", "adamw_int8", "adamw"), verbose=False
    )
    assert "AveragedModel averages weights, so that specs with weights of 16 bits are left out" in caplog.text
    model(torch.randn(3, 8)).square().mean().backward()
    optimizer.step()
    average.update_parameters(model)
    assert all(torch.equal(a, b) for a, b in zip(average.module.parameters(), model.parameters(), strict=True))


@pytest.mark.slow
def test_a_plan_of_nothing_else_is_refused() -> None:
    model = network()
    average = AveragedModel(model)
    with pytest.raises(BadInputError, match=r"AveragedModel averages weights, and adamw_int8\+split8 keeps them"):
        BaocOptimizer(model, budget="state_50", settings=settings("adamw_int8+split8"), verbose=False)
    del average


@pytest.mark.slow
def test_living_objects_are_looked_at_only_where_there_may_be_an_average(monkeypatch: pytest.MonkeyPatch) -> None:
    looks = []
    get_objects = wrappers.gc.get_objects
    monkeypatch.setattr(wrappers.gc, "get_objects", lambda: looks.append(1) or get_objects())
    hooks = len(_global_module_registration_hooks)
    average = AveragedModel(network())
    with pytest.raises(BadInputError, match="AveragedModel would average"):
        BlockwiseOptimizer(network(), "adamw+split8")
    assert looks
    del average
    BlockwiseOptimizer(network(), "adamw+split8")
    del looks[:]
    for _ in range(3):
        BlockwiseOptimizer(network(), "adamw+split8")
    assert not looks and len(_global_module_registration_hooks) == hooks
