"""Every field of a budget means the same through the command, BaocStrategy, BaocOptimizer and plans of absent cards."""

import json
import logging
import re
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import lightning as L
import pytest
import torch
from torch import Tensor, nn

import baoc
from baoc import BaocOptimizer, BaocStrategy
from baoc.config.compose import compose
from baoc.config.from_hydra import from_hydra
from baoc.config.resolve import resolve
from baoc.config.schema import CatalogueConfig, ModelConfig, ReallocationConfig, RunConfig, TrainerConfig
from baoc.core.budgets import parse_budget
from baoc.errors import BadInputError, InfeasibleBudgetError
from baoc.planning.planner import PlannerSettings
from baoc.profiling import memory
from baoc.profiling.caller_probe import CallerProbe
from baoc.training.fully_sharded import BaocFSDPStrategy
from baoc.training.lightning import BaocDDPStrategy
from baoc.training.measure.probe import silent
from baoc.training.run import build, run
from baoc.training.session import SessionSettings
from baoc.training.trainer import session_settings
from tests.support.classifier import Classifier, fit, loader
from tests.support.sessions import session

pytestmark = pytest.mark.slow  # each plans by both doors

SETTINGS = SessionSettings(
    planner=PlannerSettings(specs=("adamw", "adamw_int8", "lion", "sign"), keep_fp32_roles=()),
    reallocation=ReallocationConfig(mode="off"),
)


def by_strategy(budget: Any) -> Any:
    strategy = BaocStrategy(budget, settings=SETTINGS)
    fit(strategy, steps=1)
    assert strategy.reallocator is not None
    return strategy.reallocator.plan


def loss_of(module: Classifier) -> Callable[[], Tensor]:
    x, y = next(iter(loader()))
    return lambda: nn.functional.cross_entropy(module.net(x), y)


def by_optimizer(budget: Any, *, probed: bool = True) -> Any:
    module = Classifier()
    loss = loss_of(module)
    groups: Any = [
        {"params": [(n, p) for n, p in module.named_parameters() if p.ndim > 1], "weight_decay": 0.1},
        {"params": [(n, p) for n, p in module.named_parameters() if p.ndim <= 1], "weight_decay": 0.0},
    ]
    optimizer = BaocOptimizer(groups, budget=budget, settings=SETTINGS, probe=loss if probed else None)
    optimizer.zero_grad()
    loss().backward()
    optimizer.step()
    return optimizer.plan


@pytest.mark.parametrize(
    "budget",
    [
        "unlimited",
        "8gb",
        2**33,
        str(2**33),
        "state_50",
        0.25,
        {"memory": "8gb", "step_time": 1000.0},
        {"state_fraction": 0.25, "step_time": 1000.0},
        {"state_fraction": 0.25, "host_memory": "64mb"},
        {"memory": "8gb", "host_memory": "64mb"},
    ],
    ids=str,
)
def test_both_doors_choose_alike(budget: Any) -> None:
    ours, theirs = by_optimizer(budget), by_strategy(budget)
    assert set(ours.allocation.choices.values()) == set(theirs.allocation.choices.values())
    assert ours.allocation.state_bytes == theirs.allocation.state_bytes
    assert (ours.budget, ours.binding) == (theirs.budget, theirs.binding)


@pytest.mark.parametrize(
    "budget", [{"memory": "8gb", "step_time": 1e-6}, {"step_time": 1e-6}, {"state_fraction": 1e-9}]
)
def test_what_neither_can_meet_both_refuse_alike(budget: Any) -> None:
    errors = []
    for door in (by_optimizer, by_strategy):
        with pytest.raises(InfeasibleBudgetError) as caught:
            door(budget)
        errors.append(caught.value)
    ours, theirs = errors
    if "step_time" not in budget:
        assert ours.least_feasible_bytes == theirs.least_feasible_bytes
    assert (ours.least_step_s is None) is (theirs.least_step_s is None) is ("step_time" not in budget)


def test_a_limit_on_time_without_a_probe_names_it() -> None:
    with pytest.raises(BadInputError, match=r"budget.step_time=1.2 needs seconds .*: give probe="):
        BaocOptimizer(nn.Linear(2, 2), budget={"step_time": 1.2})


def test_host_memory_is_offered_without_a_probe_too() -> None:
    budget = {"memory": "8gb", "host_memory": "64mb"}
    module = Classifier()
    optimizer = BaocOptimizer(module, budget=budget, settings=SETTINGS)
    assert any(spec.endswith("@streamed") for spec in optimizer.reallocator.planner.specs)
    loss_of(module)().backward()
    optimizer.step()
    assert optimizer.plan.budget.host_memory_bytes == 64 * 2**20


@pytest.mark.parametrize(
    ("budget", "released"), [("8gb", False), ("8gb", True), ({"memory": "8gb", "step_time": 1000.0}, False)]
)
def test_a_probe_may_run_backward_and_return_the_loss(budget: Any, released: bool) -> None:
    found = []
    for kind in ("loss", "backward", "both"):
        module = Classifier()
        loss = loss_of(module)

        def probe(kind: str = kind, loss: Callable[[], Tensor] = loss) -> Tensor | None:
            value = loss()
            if kind != "loss":
                value.backward()
            return None if kind == "backward" else value

        optimizer = BaocOptimizer(module, budget=budget, settings=SETTINGS, probe=probe, release=released)
        assert all(param.grad is None for param in module.parameters())
        found.append(optimizer.plan.peak_bytes)
    assert found[1] == found[2]


@pytest.mark.parametrize("budget", ["8gb", "1kb"])
def test_a_probe_without_room_within_the_cap_is_run_outside(budget: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """A stand-in for CUDA's cap: it trains or is refused by number, and the cap is back either way."""
    calls: list[str] = []
    look = CallerProbe.footprint

    def footprint(probe: CallerProbe, **given: Any) -> Any:
        if calls[-1] == "cap":
            raise torch.OutOfMemoryError("CUDA out of memory")
        return look(probe, **given)

    for module in ("baoc.training.plain_loop", "baoc.profiling.memory"):
        monkeypatch.setattr(f"{module}.cap_device", lambda device, *, budget: calls.append("cap"))
    monkeypatch.setattr(memory, "uncap_device", lambda device: calls.append("uncap"))
    monkeypatch.setattr(CallerProbe, "footprint", footprint)
    if budget == "8gb":
        by_optimizer(budget)
    else:
        with pytest.raises(InfeasibleBudgetError, match="least feasible is"):
            by_optimizer(budget)
    assert calls == ["cap", "uncap", "cap"]


@pytest.mark.parametrize("budget", ["8gb", "1kb"])
def test_a_first_step_without_a_probe_is_outside_of_the_cap(budget: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """It cannot run out of memory by the budget then: what it took is held against the budget after it."""
    calls: list[str] = []
    for module in ("baoc.training.plain_loop", "baoc.profiling.memory"):
        monkeypatch.setattr(f"{module}.cap_device", lambda device, *, budget: calls.append("cap"))
    monkeypatch.setattr(memory, "uncap_device", lambda device: calls.append("uncap"))
    module = Classifier()
    optimizer = BaocOptimizer(module, budget=budget, settings=SETTINGS)
    loss_of(module)().backward()
    assert calls == ["uncap"]
    if budget == "8gb":
        optimizer.step()
    else:
        with pytest.raises(InfeasibleBudgetError, match="least feasible is"):
            optimizer.step()
    assert calls == ["uncap", "cap"]


@pytest.mark.parametrize(("dtype", "told"), [(torch.float64, True), (torch.float32, False)])
def test_float64_weights_are_told_of(dtype: torch.dtype, told: bool, caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.WARNING):
        session("8gb", dtype=dtype)
    assert ("2 of 2 parameters are float64" in caplog.text) is told


# -- the command, a plan of an absent card, and the doors' own words ---------------------------------------------------


def command(budget: Any, tmp_path: Path, **changes: Any) -> RunConfig:
    return RunConfig(
        mode="plan",
        batch_size=8,
        budget=parse_budget(budget),
        model=ModelConfig(size="tiny"),
        catalogue=CatalogueConfig(specs=SETTINGS.planner.specs, keep_fp32_roles=()),
        trainer=TrainerConfig(max_steps=1, limit_val_batches=1, precision="32-true"),
        **{"device": "cpu", **changes},
    )


def by_command(budget: Any, tmp_path: Path, **changes: Any) -> dict[str, Any]:
    run(command(budget, tmp_path, **changes), run_dir=tmp_path, command="run")
    found = json.loads((tmp_path / "plan.json").read_text())
    return found | {"choices": json.loads((tmp_path / "allocation.json").read_text())["choices"]}


def by_both_on_its_network(budget: Any, tmp_path: Path) -> list[Any]:
    """The plans of BaocStrategy and BaocOptimizer for the network and the data of the command."""
    config = command(budget, tmp_path)
    plans, resolved = [], resolve(config, device="cpu")
    for door in ("strategy", "optimizer"):
        task, data = build(resolved, run_dir=tmp_path, device="cpu")
        settings = session_settings(resolved.config)
        if door == "strategy":
            strategy = BaocStrategy(parse_budget(budget), settings=settings, plan_only=True)
            given = {"accelerator": "cpu", "logger": False, "enable_checkpointing": False, "max_steps": 1}
            trainer = L.Trainer(strategy=strategy, enable_progress_bar=False, enable_model_summary=False, **given)
            trainer.fit(task, datamodule=data)
            assert strategy.reallocator is not None
            plans.append(strategy.reallocator.plan)
            continue
        batch = next(iter(data.make_train_loader(limit=None)))
        with silent(task):
            optimizer = BaocOptimizer(
                task,
                budget=budget,
                settings=settings,
                probe=lambda task=task, batch=batch: task.training_step(batch, 0),
            )
        plans.append(optimizer.plan)
    return plans


@pytest.mark.parametrize(
    "budget",
    ["unlimited", "auto", "8gb", "state_50", {"state_fraction": 0.25, "step_time": 1000.0}, {"host_memory": "64mb"}],
    ids=str,
)
def test_the_command_chooses_like_both_and_like_a_plan_for_a_card(budget: Any, tmp_path: Path) -> None:
    ours = by_command(budget, tmp_path)
    for plan in by_both_on_its_network(budget, tmp_path):
        assert sorted(plan.allocation.choices.values()) == sorted(ours["choices"].values())
        assert (plan.allocation.state_bytes, plan.binding) == (ours["state_bytes"], ours["binding"])
    card = by_command(budget, tmp_path, device="h100", micro_batch=8)
    assert (card["choices"], card["state_bytes"]) == (ours["choices"], ours["state_bytes"])


@pytest.mark.parametrize("budget", [{"state_fraction": 1e-9}, {"memory": "1mb"}, {"step_time": 1e-6}], ids=str)
def test_what_cannot_be_met_is_refused_by_the_command_too(budget: Any, tmp_path: Path) -> None:
    errors = []
    for door in (
        lambda: by_command(budget, tmp_path),
        lambda: by_command(budget, tmp_path, device="h100", micro_batch=8),
        lambda: by_both_on_its_network(budget, tmp_path),
    ):
        with pytest.raises(InfeasibleBudgetError) as caught:
            door()
        errors.append(caught.value)
    assert len({error.least_step_s is None for error in errors}) == 1
    if "state_fraction" in budget:
        assert len({error.least_feasible_bytes for error in errors}) == 1


@pytest.mark.parametrize("door", [by_strategy, by_optimizer])
def test_a_refusal_names_the_settings_of_its_door(door: Callable[[Any], Any]) -> None:
    with pytest.raises(InfeasibleBudgetError, match=r"settings\.planner\.keep_fp32_roles") as caught:
        door({"state_fraction": 1e-9})
    assert "catalogue." not in str(caught.value) + " ".join(caught.value.advice)


def test_blocks_that_an_inner_model_declares_count_in_a_plain_loop() -> None:
    class Inner(nn.Linear):
        def parameter_blocks(self) -> dict[str, list[str]]:
            return {"all of it": ["weight", "bias"]}

    class Outer(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.model = Inner(4, 4)

    optimizer = BaocOptimizer(Outer(), budget="unlimited", settings=SETTINGS)
    assert [block.name for block in optimizer.reallocator.planner.blocks] == ["all of it"]


def test_weights_of_16_bits_need_autocast_in_a_plain_loop_too() -> None:
    narrow = replace(SETTINGS, planner=PlannerSettings(specs=("adamw+split8",), keep_fp32_roles=()))
    net, x = nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 2)), torch.ones(2, 8)

    def probe() -> Tensor:
        return net(x).sum()

    with pytest.raises(
        BadInputError, match=r"specs with bf16 weights \(adamw\+split8.* run forward under torch.autocast"
    ):
        BaocOptimizer(net, budget="unlimited", settings=narrow, probe=probe)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        BaocOptimizer(net, budget="unlimited", settings=narrow, probe=probe)


@pytest.mark.parametrize("room", [True, False])
def test_a_step_is_timed_outside_of_a_cap_without_room(room: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    calls: list[int] = []
    timed = CallerProbe.rest_seconds

    def rest_seconds(probe: CallerProbe, *args: Any, **given: Any) -> Any:
        calls.append(1)
        if len(calls) == 1 or not room:
            raise torch.OutOfMemoryError("CUDA out of memory")
        return timed(probe, *args, **given)

    monkeypatch.setattr(CallerProbe, "rest_seconds", rest_seconds)
    if room:
        assert by_optimizer({"memory": "8gb", "step_time": 1000.0}).budget.step_time == 1000.0
    else:
        with pytest.raises(BadInputError, match=r"budget.step_time=1000 needs seconds .* no room to time one"):
            by_optimizer({"memory": "8gb", "step_time": 1000.0})


@pytest.mark.parametrize(
    "door",
    [
        lambda recipe: from_hydra(compose(["model=vit", f"recipe={recipe}"])),
        lambda recipe: BaocStrategy("state_25", recipe=recipe),
        lambda recipe: BaocOptimizer(Classifier(), budget="state_25", recipe=recipe),
    ],
    ids=["run.py", "BaocStrategy", "BaocOptimizer"],
)
def test_a_recipe_typed_wrong_is_told_the_same_at_every_door(door: Callable[[str], object]):
    with pytest.raises(BadInputError) as refused:
        door("muon8_laen_m90")
    told = str(refused.value)
    assert told.startswith("recipe=muon8_laen_m90: there is no such recipe; did you mean muon8_lean_m90 or ")
    assert "raced, or a FILE.yaml with a spec by role; `python run.py --list recipes` says what each is" in told
    with pytest.raises(BadInputError, match="there is no such recipe; did you mean raced"):
        door("rased")


@pytest.mark.parametrize(
    "door",
    [BaocStrategy, BaocDDPStrategy, BaocFSDPStrategy, lambda **given: BaocOptimizer(Classifier(), **given)],
)
def test_an_argument_typed_wrong_is_told_with_what_is_near(door: Callable[..., object]):
    with pytest.raises(BadInputError, match=r"there is no argument 'receipe' \(did you mean recipe\?\)"):
        door(receipe="muon8_lean")
    with pytest.raises(BadInputError, match=r"there is no argument 'bugdet' \(did you mean budget\?\)"):
        door(bugdet="1gb")
    with pytest.raises(BadInputError, match=r"race is an argument of run.py.*mode=race. Here recipe=FILE takes what"):
        door(race="auto")


@pytest.mark.parametrize(
    ("given", "said"),
    [
        ({"settings": {"release": True}}, "settings is a dict: give SessionSettings"),
        ({"settings": {}}, "settings is a dict: give SessionSettings"),
        ({"settings": 0}, "settings is a int: give SessionSettings"),
        ({"checkpointing": "all"}, "checkpointing=all is not allowed: it must be a number of layers from 0"),
        ({"checkpointing": -1}, "checkpointing=-1 is not allowed"),
        ({"pretrained": "no"}, "pretrained=no is not allowed: it must be True, False or None"),
        ({"model": "net"}, "model is a str: give the torch.nn.Module that has the parameters"),
        ({"probe": 3}, "probe is a int: give a function that runs one forward and backward"),
        ({"lr": True}, "lr is True: give a finite number"),
        ({"lr": 10**400}, "give a finite number of at least 0"),
    ],
    ids=str,
)
def test_a_value_of_another_type_is_told_by_each_door_that_takes_it(given: dict[str, Any], said: str):
    with pytest.raises(BadInputError, match=re.escape(said)):
        BaocOptimizer(Classifier(), budget="state_25", verbose=False, **given)
    if next(iter(given)) in ("settings", "checkpointing"):
        with pytest.raises(BadInputError, match=re.escape(said)):
            BaocStrategy("state_25", **given)
    if next(iter(given)) in ("settings", "pretrained"):
        with pytest.raises(BadInputError, match=re.escape(said)):
            baoc.advise(Classifier(), torch.ones, lambda model, batch: batch, batch_size=2, budget="state_25", **given)


def test_a_limit_on_time_alone_is_no_lack_of_limits(capsys: pytest.CaptureFixture[str]) -> None:
    model, x = nn.Sequential(nn.Linear(7, 9), nn.Linear(9, 3)), torch.randn(4, 7)
    optimizer = BaocOptimizer(model, budget={"step_time": 1000}, probe=lambda: model(x).square().mean())
    model(x).square().mean().backward()
    optimizer.step()
    assert "every block runs what has the least risk within step_time=1000" in capsys.readouterr().out
    assert re.search(
        r"after 1 step: .*no limit on memory or state; optimizer step .* allowed by step_time=1000, not measured",
        optimizer.summary(),
    )


@pytest.mark.parametrize("allocator", ["exact", "lagrangian"])
@pytest.mark.parametrize(
    "net", [lambda: [torch.zeros((), requires_grad=True)], lambda: nn.Sequential(nn.Linear(7, 9), nn.Linear(9, 3))]
)
def test_a_share_of_the_state_that_is_too_small_is_told_with_the_one_that_does(
    net: Callable[[], Any], allocator: str
) -> None:
    """A scalar, as the temperature of an agent, needs more than a tenth of AdamW's state."""
    settings = SessionSettings(planner=PlannerSettings(allocator=allocator))
    params = net()
    with pytest.raises(InfeasibleBudgetError, match=r"\(budget=state_[\d.]+\)") as refused:
        BaocOptimizer(params, budget="state_0.5", settings=settings, verbose=False)
    (least,) = re.findall(r"budget=(state_[\d.]+)", str(refused.value))
    assert ("allocator='exact'" in str(refused.value).partition("would lower it")[2]) == (allocator != "exact")
    assert BaocOptimizer(params, budget=least, settings=settings, verbose=False).budget_met
