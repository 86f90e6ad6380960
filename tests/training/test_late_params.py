"""Parameters that come late, by unfreezing, add_param_group or a head built lazily: names and budget hold."""

import copy
import logging
from typing import Any

import lightning as L
import pytest
import torch
from lightning.pytorch.callbacks import BackboneFinetuning
from torch import nn

from baoc import BaocOptimizer, BaocStrategy
from baoc.core.budgets import parse_budget
from baoc.errors import InfeasibleBudgetError
from baoc.profiling import late_step
from baoc.profiling.tracker import PeakMeter
from baoc.training import narration
from baoc.training import reallocator as reallocator_module
from tests.support.tiny import tiny_trainer

pytestmark = pytest.mark.slow  # they plan, save and load


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.backbone = nn.Sequential(nn.Linear(64, 64), nn.LayerNorm(64), nn.Linear(64, 64))
        self.head = nn.Linear(64, 8)

    def forward(self, x):
        return self.head(self.backbone(x))


def frozen() -> Net:
    torch.manual_seed(0)
    net = Net()
    net.backbone.requires_grad_(False)
    return net


def loss_of(net: nn.Module, *, samples: int = 16) -> torch.Tensor:
    return nn.functional.cross_entropy(net(torch.randn(samples, 64)), torch.arange(samples) % 8)


def trained(net: nn.Module, optimizer: BaocOptimizer, *, steps: int = 3) -> None:
    for _ in range(steps):
        optimizer.zero_grad()
        loss_of(net).backward()
        optimizer.step()


def adamw_bytes(net: nn.Module) -> int:
    return sum(8 * param.numel() for param in net.parameters() if param.requires_grad)


@pytest.mark.parametrize("way", ["unfrozen", "group", "tensors"])
def test_a_share_of_the_state_holds_when_the_backbone_comes(way, caplog):
    net = frozen()
    params = net if way == "unfrozen" else net.head
    optimizer = BaocOptimizer(params, model=net, budget="state_25", verbose=False)
    trained(net, optimizer)
    net.backbone.requires_grad_(True)
    with caplog.at_level(logging.INFO, logger="baoc"):
        if way == "group":
            optimizer.add_param_group({"params": net.backbone.parameters(), "lr": 1e-4})
        elif way == "tensors":
            optimizer.add_param_group({"params": list(net.backbone[0].parameters())})
            optimizer.add_param_group({"params": net.backbone[1:].parameters()})
        trained(net, optimizer)
    assert optimizer.state_bytes() <= 0.25 * adamw_bytes(net) + 64  # steps are counted beside
    assert optimizer.budget_met
    assert {"backbone.0.weight", "backbone.2.weight"} <= set(optimizer.specs)
    assert not any("param" in name for name in optimizer.specs)
    assert "backbone.0." in caplog.text and "came after the plan was made" in caplog.text
    assert "parameters came late" in optimizer.summary()


@pytest.mark.parametrize("when", [0, 2])
def test_within_a_memory_budget_they_resume_bit_for_bit_with_the_specs_they_had(when):
    """Whether they come before the first step is measured or after it; the prediction counts them, too."""

    def begun(net: nn.Module, *, came: bool) -> BaocOptimizer:
        optimizer = BaocOptimizer(net.head, model=net, budget="400kb", verbose=False)
        return came_late(net, optimizer) if came else optimizer

    def came_late(net: nn.Module, optimizer: BaocOptimizer) -> BaocOptimizer:
        net.backbone.requires_grad_(True)
        optimizer.add_param_group({"params": net.backbone.parameters(), "lr": 1e-4})
        return optimizer

    net = frozen()
    optimizer = begun(net, came=when == 0)
    torch.manual_seed(1)
    if when:
        trained(net, optimizer, steps=when)
        came_late(net, optimizer)
    trained(net, optimizer, steps=2)
    assert optimizer.budget_met
    assert optimizer.plan.peak_bytes > sum(4 * param.numel() + 2 * param.numel() for param in net.parameters())
    saved = copy.deepcopy((net.state_dict(), optimizer.state_dict(), torch.get_rng_state()))
    trained(net, optimizer, steps=2)
    specs = optimizer.specs
    del optimizer  # two beside each other are not judged
    again = frozen()
    again.load_state_dict(saved[0])
    resumed = begun(again, came=True)
    resumed.load_state_dict(saved[1])
    torch.set_rng_state(saved[2])
    trained(again, resumed, steps=2)
    assert resumed.specs == specs and resumed.budget_met
    assert all(torch.equal(a, b) for a, b in zip(net.parameters(), again.parameters(), strict=True))


@pytest.mark.parametrize("again", [True, False])
@pytest.mark.parametrize("probed", [True, False])
def test_a_checkpoint_that_is_loaded_after_they_came_counts_them_once(probed: bool, again: bool):
    """Into the run that saved it, and into a new one that has stepped them; the budget has no room for them twice."""

    def stepped(budget: int | str) -> BaocOptimizer:
        net = frozen()

        def probe():
            loss_of(net).backward()

        optimizer = BaocOptimizer(net, budget=budget, probe=probe if probed else None, verbose=False)
        net.backbone.requires_grad_(True)
        trained(net, optimizer, steps=2)
        return optimizer

    optimizer = stepped(stepped("1gb").plan.peak_bytes + 1000)
    plan, specs, footprint = optimizer.plan, dict(optimizer.specs), optimizer.reallocator.planner.footprint
    saved = copy.deepcopy(optimizer.state_dict())
    loaded = stepped(plan.budget.memory_bytes or 0) if again else optimizer
    loaded.load_state_dict(saved)
    assert loaded.plan.peak_bytes == plan.peak_bytes <= (plan.budget.memory_bytes or 0)
    assert loaded.specs == specs and set(specs.values()) == {"adamw"}
    assert loaded.reallocator.planner.footprint == footprint


def test_without_a_limit_what_comes_late_runs_adamw():
    net = frozen()
    optimizer = BaocOptimizer(net, budget="unlimited", verbose=False)
    trained(net, optimizer)
    net.backbone.requires_grad_(True)
    trained(net, optimizer)
    assert optimizer.specs["backbone.0.weight"] == "adamw"


def test_a_memory_budget_without_room_for_their_gradients_refuses_them_with_the_numbers():
    net = frozen()

    def probe():
        loss_of(net).backward()

    roomy = BaocOptimizer(net, budget="1gb", probe=probe, verbose=False)
    optimizer = BaocOptimizer(net, budget=roomy.plan.peak_bytes + 1000, probe=probe, verbose=False)
    trained(net, optimizer)
    held = {name: param.detach().clone() for name, param in net.named_parameters()}
    groups = len(optimizer.param_groups)
    net.backbone.requires_grad_(True)
    with pytest.raises(
        InfeasibleBudgetError, match=r"6 parameters .backbone.0.weight, ....* came after the plan was made"
    ):
        trained(net, optimizer, steps=1)
    assert all(torch.equal(param, held[name]) for name, param in net.named_parameters())
    assert len(optimizer.param_groups) == groups


def late_activations(budget: int | str, *, way: str, probed: bool) -> BaocOptimizer:
    """Six steps of which the backbone, whose backward keeps more than all states, is trained from the fourth on."""
    net, x = frozen(), torch.randn(512, 64)

    def forward_backward():
        nn.functional.cross_entropy(net(x), torch.arange(512) % 8).backward()

    given = {"model": net, "budget": budget, "probe": forward_backward if probed else None, "verbose": False}
    optimizer = BaocOptimizer(net.head if way == "group" else net, **given)
    for step in range(6):
        if step == 3:
            net.backbone.requires_grad_(True)
        if step == 3 and way == "group":
            optimizer.add_param_group({"params": net.backbone.parameters()})
        optimizer.zero_grad()
        forward_backward()
        optimizer.step()
    return optimizer


@pytest.mark.parametrize("probed", [True, False])
@pytest.mark.parametrize("way", ["unfrozen", "group"])
def test_what_their_backward_keeps_is_measured_and_all_states_make_room_for_it(
    way: str, probed: bool, monkeypatch: pytest.MonkeyPatch
):
    roomy = late_activations("1gb", way=way, probed=probed)
    assert roomy.plan.peak_bytes >= roomy.narrator.peak_bytes > 600_000 and set(roomy.specs.values()) == {"adamw"}
    gradients: list[bool] = []
    migrate = BaocOptimizer.migrate

    def noted(self: BaocOptimizer, *given: Any, **options: Any) -> Any:
        if self.reallocator.late_peak_bytes:  # the step with them was measured
            gradients.append(any(param.grad is not None for group in self.param_groups for param in group["params"]))
        return migrate(self, *given, **options)

    monkeypatch.setattr(BaocOptimizer, "migrate", noted)
    tight = late_activations(roomy.plan.peak_bytes - 30_000, way=way, probed=probed)
    assert gradients and not any(gradients), "used ones take the room that conversions need"
    assert (
        tight.plan.peak_bytes <= tight.plan.budget.memory_bytes and tight.state_bytes() < roomy.state_bytes() - 25_000
    )
    assert tight.budget_met is False  # of the step that was measured, and said
    with pytest.raises(InfeasibleBudgetError, match=r"6 parameters came .* a step with them takes .* KiB without any"):
        late_activations(roomy.plan.peak_bytes - roomy.state_bytes() - 30_000, way=way, probed=probed)


def test_forward_beside_the_gradients_of_the_step_before_is_predicted_for_what_came_late():
    """In a loop that zeroes them between forward and backward."""
    net = frozen()

    def step():
        loss = loss_of(net, samples=512) + torch.zeros(300_000).sum()  # which the forward alone holds
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()

    optimizer = BaocOptimizer(net.head, model=net, budget="1gb", verbose=False)
    step()
    net.backbone.requires_grad_(True)
    optimizer.add_param_group({"params": net.backbone.parameters()})
    step()
    assert optimizer.before_zeroing == [], "measured no longer than one step"
    with PeakMeter(torch.device("cpu"), net, optimizer.state) as meter:
        step()
    assert 0.98 * optimizer.plan.peak_bytes < meter.peak_bytes <= optimizer.plan.peak_bytes


@pytest.mark.parametrize("later", ["unlimited", "2gb"])
def test_a_budget_that_changes_while_a_late_step_is_measured_is_in_force_after_it(
    later: str, monkeypatch: pytest.MonkeyPatch
):
    capped: list[str] = []
    monkeypatch.setattr(late_step, "recap_device", lambda device, *, budget: capped.append(budget.name))
    net = frozen()
    optimizer = BaocOptimizer(net.head, model=net, budget="1gb", verbose=False)
    trained(net, optimizer, steps=1)
    net.backbone.requires_grad_(True)
    optimizer.add_param_group({"params": net.backbone.parameters()})
    optimizer.reallocator.rebudget(parse_budget(later), why="asked for")
    trained(net, optimizer, steps=1)
    assert capped == [later] and optimizer.reallocator.late_peak_bytes > 0
    assert set(optimizer.specs.values()) == {"adamw"}


def test_what_was_held_before_a_late_step_is_judged_where_its_measurement_has_the_peak_begin_anew(
    monkeypatch: pytest.MonkeyPatch,
):
    """On CUDA, by a stand-in whose peak is forgotten as it is there."""
    peaks = iter([2 << 30, 0, 0, 0])
    monkeypatch.setattr(reallocator_module, "device_peak_bytes", lambda device: next(peaks))
    net, told = frozen(), []
    optimizer = BaocOptimizer(net.head, model=net, budget="1gb", verbose=False)
    trained(net, optimizer, steps=1)
    optimizer.reallocator.peak_listeners.append(told.append)
    assert optimizer.budget_met
    net.backbone.requires_grad_(True)
    optimizer.add_param_group({"params": net.backbone.parameters()})
    trained(net, optimizer, steps=1)
    assert told[0] == 2 << 30 and 0 < told[-1] <= optimizer.plan.peak_bytes
    assert optimizer.budget_met is False and optimizer.narrator.peak_bytes == 2 << 30
    monkeypatch.setattr(narration, "device_peak_bytes", lambda device: 3 << 29)
    optimizer.narrator.device = torch.device("cuda")
    assert optimizer.narrator.peak_bytes == 2 << 30


@pytest.mark.parametrize("budget", ["state_25", "1gb"])
def test_backbone_finetuning_of_lightning_keeps_the_budget_and_names(budget: str, caplog):
    class Module(L.LightningModule):
        def __init__(self):
            super().__init__()
            net = Net()
            self.backbone, self.head = net.backbone, net.head

        def training_step(self, batch, batch_idx):
            x, y = batch
            return nn.functional.cross_entropy(self.head(self.backbone(x)), y)

        def configure_optimizers(self):
            return torch.optim.AdamW([p for p in self.parameters() if p.requires_grad], lr=1e-3)

    module = Module()
    data = torch.utils.data.DataLoader([(torch.randn(64), n % 8) for n in range(32)], batch_size=8)
    strategy = BaocStrategy(budget, device="cpu", verbose=False)
    trainer = tiny_trainer(
        strategy=strategy,
        max_steps=-1,
        max_epochs=3,
        callbacks=[BackboneFinetuning(unfreeze_backbone_at_epoch=1, verbose=False, backbone_initial_lr=1e-4)],
    )
    with caplog.at_level(logging.INFO, logger="baoc"):
        trainer.fit(module, data)
    optimizer = strategy.reallocator.optimizer
    assert "backbone.0.weight" in optimizer.specs
    assert not any(name.startswith("param") for name in optimizer.specs)
    if budget == "1gb":
        assert strategy.reallocator.late_peak_bytes <= strategy.plan.peak_bytes
        assert strategy.reallocator.late_peak_bytes > 3 * adamw_bytes(module) // 2 + 10_000  # with 8 kB of activations
    else:
        assert optimizer.state_bytes() <= 0.25 * adamw_bytes(module) + 64
    assert strategy.budget_met
