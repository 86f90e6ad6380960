"""Modules that step several AdamWs themselves, as GANs do: each has its share of the budget."""

import gc
import weakref
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import Mock

import lightning as L
import pytest
import torch
from lightning.pytorch.callbacks import ModelCheckpoint
from torch import Tensor, nn

from baoc import BaocStrategy
from baoc.core.budgets import parse_budget
from baoc.errors import BadInputError, CheckpointError, InfeasibleBudgetError
from baoc.planning.limits import savings_of_choices
from baoc.planning.planner import Planner, PlannerSettings
from baoc.training.measure import first_step
from baoc.training.session import SessionSettings
from baoc.types import Budget, Footprint, ParamInfo, Role, to_plain
from tests.support.classifier import QUIET, loader, same
from tests.support.planners import MIB, NO_TEMPORARIES

pytestmark = [
    pytest.mark.slow,  # they train by Lightning
    pytest.mark.filterwarnings("ignore:Checkpoint directory .* exists:UserWarning"),
]


class Gan(L.LightningModule):
    """Generator and discriminator in turn, clipped, with schedules; `every`: batches between the generator's steps."""

    def __init__(self, *, every: int = 1, toggles: bool = False):
        super().__init__()
        torch.manual_seed(7)
        self.automatic_optimization = False
        self.every, self.toggles = every, toggles
        self.generator = nn.Sequential(nn.Linear(4, 32), nn.GELU(), nn.Linear(32, 16))
        self.discriminator = nn.Sequential(nn.Linear(16, 32), nn.GELU(), nn.Linear(32, 1))

    def step(self, optimizer: Any, loss: Callable[[], Tensor]) -> None:
        if self.toggles:  # parameters of the other are switched off while this one steps
            self.toggle_optimizer(optimizer)
        optimizer.zero_grad()
        self.manual_backward(loss())
        self.clip_gradients(optimizer, gradient_clip_val=0.5, gradient_clip_algorithm="norm")
        optimizer.step()
        if self.toggles:
            self.untoggle_optimizer(optimizer)

    def training_step(self, batch: list[Tensor], batch_idx: int) -> None:
        ours, theirs = self.optimizers()  # pyright: ignore[reportGeneralTypeIssues]
        fake = self.generator(torch.randn(len(batch[0]), 4))
        if batch_idx % self.every == 0:
            self.step(ours, lambda: nn.functional.softplus(-self.discriminator(fake)).mean())

        def judged() -> Tensor:
            scores = self.discriminator(torch.cat([batch[0], fake.detach()]))
            signs = torch.cat([torch.ones(len(batch[0]), 1), -torch.ones(len(fake), 1)])
            loss = nn.functional.softplus(-signs * scores).mean()
            self.log("loss", loss)
            return loss

        self.step(theirs, judged)
        for schedule in self.lr_schedulers():  # pyright: ignore[reportGeneralTypeIssues, reportOptionalIterable]
            schedule.step()

    def configure_optimizers(self) -> Any:
        given: dict[str, Any] = {"foreach": False, "betas": (0.5, 0.9)}
        made = [
            torch.optim.AdamW(part.parameters(), lr=rate, **given)
            for part, rate in ((self.generator, 1e-3), (self.discriminator, 4e-3))
        ]
        return made, [torch.optim.lr_scheduler.LambdaLR(one, lambda step: 1 / (1 + step)) for one in made]


class Single(Gan):
    """One AdamW, stepped by the module."""

    def training_step(self, batch: list[Tensor], batch_idx: int) -> None:
        self.step(self.optimizers(), lambda: self.discriminator(self.generator(batch[0][:, :4])).square().mean())

    def configure_optimizers(self) -> Any:
        return torch.optim.AdamW(self.parameters(), lr=1e-3, foreach=False)


def trained(strategy: Any, module: L.LightningModule, *, batches: int = 4, **given: Any) -> L.LightningModule:
    torch.manual_seed(1)
    arguments = {**QUIET, "max_epochs": 2, "limit_train_batches": batches, **given}
    path = arguments.pop("ckpt_path", None)
    L.Trainer(strategy=strategy, **arguments).fit(module, loader(), ckpt_path=path, weights_only=bool(path) or None)
    return module


@pytest.mark.parametrize("make", [Gan, lambda: Gan(every=2), lambda: Gan(toggles=True), Single])
def test_without_a_limit_it_is_plain_lightning_bit_for_bit(make: Any):
    assert same(trained("auto", make()), trained(BaocStrategy("unlimited"), make()))


@pytest.mark.parametrize("make", [Gan, lambda: Gan(every=3), Single])
@pytest.mark.parametrize("budget", ["state_25", "8gb"])
def test_each_optimizer_has_its_share_and_says_so(budget: str, make: Any, capsys):
    strategy = BaocStrategy(budget)
    trained(strategy, make())
    told = capsys.readouterr().out
    number = len(strategy.reallocators)
    assert told.count(f"plan for budget {budget}") == number and told.count("met, ") == number
    assert strategy.budget_met is True and strategy.summary().count("the plan in force") == number
    for one in strategy.reallocators:
        share = one.optimizer.state_bytes() / one.plan.state_bytes_adamw
        assert share <= 0.25 if budget == "state_25" else share == 1


def test_a_memory_budget_that_binds_holds_for_both_together():
    free = BaocStrategy("8gb", verbose=False)
    trained(free, Gan())
    plans = [one.plan for one in free.reallocators]
    states = sum(plan.allocation.state_bytes for plan in plans)
    without = plans[0].peak_bytes - states  # each counts what the other keeps
    tight = without + states // 4
    strategy = BaocStrategy(tight, verbose=False)
    trained(strategy, Gan())
    held = sum(one.optimizer.state_bytes() for one in strategy.reallocators)
    assert 0 < held <= states // 4 and all(one.plan.binding for one in strategy.reallocators)
    assert strategy.budget_met and all(one.plan.budget.memory_bytes == tight for one in strategy.reallocators)


class Unlike(Gan):
    """The discriminator, a small part of all, has norms alone, which keep fp32 AdamW."""

    def __init__(self, **given: Any):
        super().__init__(**given)
        self.generator = nn.Sequential(*[nn.Linear(4, 4) for _ in range(60)], nn.Linear(4, 16))
        self.discriminator = nn.Sequential(*[nn.LayerNorm(16) for _ in range(8)])


class LateAtFirst(Gan):
    """Parameters come to the generator before it has stepped, so that no step of it was measured."""

    def on_train_batch_start(self, batch: Any, batch_idx: int) -> None:
        self.generator[0].requires_grad_(batch_idx > 1)

    def training_step(self, batch: list[Tensor], batch_idx: int) -> None:
        super().training_step(batch, batch_idx + 1)


@pytest.mark.filterwarnings("ignore:Detected call of `lr_scheduler.step:UserWarning")
@pytest.mark.parametrize(
    ("make", "allocator"),
    [(Gan, "exact"), (Unlike, "exact"), (lambda: LateAtFirst(every=3), "exact"), (Gan, "uniform_adamw")],
    ids=["alike", "unlike", "late", "uniform"],
)
def test_a_refusal_names_what_is_enough_for_all_optimizers(make: Callable[[], Gan], allocator: str):
    planner = PlannerSettings(specs=("adamw", "adamw_int8"), keep_fp32_roles=(Role.NORM,), allocator=allocator)
    given: dict[str, Any] = {"settings": SessionSettings(planner=planner), "verbose": False}
    with pytest.raises(InfeasibleBudgetError) as refused:
        trained(BaocStrategy(100, **given), make())
    least = refused.value.least_feasible_bytes
    with pytest.raises(InfeasibleBudgetError, match=f"least feasible is .*{least} bytes"):
        trained(BaocStrategy(least - 1, **given), make())
    strategy = BaocStrategy(least, **given)
    trained(strategy, make())
    assert all(one.plan.peak_bytes <= least for one in strategy.reallocators)


@pytest.mark.filterwarnings("ignore:Detected call of `lr_scheduler.step:UserWarning")
def test_a_budget_that_was_never_planned_for_is_not_called_none(capsys: pytest.CaptureFixture[str]):
    class First(Gan):
        def training_step(self, batch: list[Tensor], batch_idx: int) -> None:
            self.step(self.optimizers()[1], lambda: self.discriminator(batch[0]).mean())  # pyright: ignore[reportIndexIssue]

    trained(strategy := BaocStrategy("8gb"), First())
    assert "budget 8gb: not planned for, as not every optimizer has stepped yet" in capsys.readouterr().out
    assert strategy.budget_met is None


def test_each_verdict_knows_of_a_step_that_was_measured_as_parameters_came_to_one_optimizer():
    class Late(Gan):
        def configure_optimizers(self) -> Any:
            self.generator[0].requires_grad_(False)
            return super().configure_optimizers()

        def on_train_batch_start(self, batch: Any, batch_idx: int) -> None:
            self.generator[0].requires_grad_(batch_idx > 0)

    strategy, told = BaocStrategy("8gb", verbose=False), list[int]()
    strategy.plan_listeners.append(lambda *_: strategy.reallocators[1].peak_listeners.append(told.append))
    trained(strategy, module := Late())
    ours, theirs = strategy.reallocators
    assert len(ours.late) == 2 and not theirs.late
    assert ours.late_peak_bytes == theirs.late_peak_bytes == max(told)
    tensors = 4 * sum(param.numel() for param in module.parameters())
    assert ours.late_peak_bytes >= tensors + sum(one.optimizer.state_bytes() for one in strategy.reallocators)


def test_nothing_of_a_fit_lives_on_after_it():
    strategy, module = BaocStrategy("8gb", verbose=False), Gan()
    trained(strategy, module)
    gone = [weakref.ref(each) for each in (module, *strategy.optimizers)]
    del strategy, module
    gc.collect()
    assert [each() for each in gone] == [None] * 3


@pytest.mark.parametrize("toggled", [False, True])
@pytest.mark.parametrize("budget", ["state_25", "8gb", "tight"])
def test_it_resumes_bit_for_bit(budget: str, toggled: bool, tmp_path: Path):
    if budget == "tight":
        free = BaocStrategy("8gb", verbose=False)
        trained(free, Gan())
        budget = f"{free.reallocators[0].plan.peak_bytes - 3000}b"

    def saving() -> L.Callback:
        return ModelCheckpoint(tmp_path, filename="{epoch}", save_top_k=-1)

    def run(*, epochs: int, **given: Any) -> L.LightningModule:

        class Seeded(Gan):
            def on_train_batch_start(self, batch: Any, batch_idx: int) -> None:
                torch.manual_seed(self.global_step)

        strategy = BaocStrategy(budget, verbose=False)
        module = trained(
            strategy,
            Seeded(toggles=toggled),
            max_epochs=epochs,
            enable_checkpointing=True,
            callbacks=[saving()],
            **given,
        )
        assert strategy.budget_met
        return module

    whole = run(epochs=2)
    assert same(whole, run(epochs=2, ckpt_path=str(tmp_path / "epoch=0.ckpt")))
    with pytest.raises(CheckpointError, match="states of 2 optimizers, and the module makes 1"):
        trained(
            BaocStrategy(budget),
            Single(),
            callbacks=[saving()],
            enable_checkpointing=True,
            ckpt_path=str(tmp_path / "epoch=0.ckpt"),
        )


class Warmed(Gan):
    """The discriminator alone in the first six batches."""

    def training_step(self, batch: list[Tensor], batch_idx: int) -> None:
        ours, theirs = self.optimizers()  # pyright: ignore[reportGeneralTypeIssues]
        fake = self.generator(torch.randn(len(batch[0]), 4))
        if self.current_epoch * 4 + batch_idx >= 6:
            self.step(ours, lambda: nn.functional.softplus(-self.discriminator(fake)).mean())
        self.step(theirs, lambda: self.discriminator(torch.cat([batch[0], fake.detach()])).square().mean())


def saved_after_an_epoch(budget: str, module: L.LightningModule, *, path: Path) -> tuple[BaocStrategy, dict[str, Any]]:
    strategy, saving = BaocStrategy(budget, verbose=False), ModelCheckpoint(path.parent, filename=path.stem)
    trained(strategy, module, max_epochs=1, callbacks=[saving], enable_checkpointing=True)
    return strategy, {**torch.load(path, weights_only=True), "callbacks": {}}


@pytest.mark.parametrize("told", [True, False])
def test_a_checkpoint_of_before_all_have_stepped_is_planned_for_after_it(told: bool, tmp_path: Path):
    """Nothing was planned yet, so what it held is not gone on with; nor where an older checkpoint does not tell."""
    path = tmp_path / "saved.ckpt"
    _, saved = saved_after_an_epoch("8gb", Warmed(), path=path)
    online = [state["online"] for state in saved["optimizer_states"]]
    assert [each["step"] for each in online] == [0, 4] and not any(each["planned"] for each in online)
    for each in [] if told else online:
        del each["planned"]
    torch.save(saved, path)
    strategy = BaocStrategy("8gb", verbose=False)
    trained(strategy, Warmed(), max_epochs=2, ckpt_path=str(path))
    for one in strategy.reallocators:
        assert one.optimizer.state_bytes() == one.plan.state_bytes_adamw and one.state_dict()["planned"]


def test_what_is_planned_anew_leaves_room_for_what_goes_on(tmp_path: Path):
    """The generator keeps what AdamW does, more than its part of a smaller budget; the discriminator is cut anew."""
    path = tmp_path / "saved.ckpt"
    free, saved = saved_after_an_epoch("8gb", Gan(), path=path)
    states = sum(one.plan.allocation.state_bytes for one in free.reallocators)
    room = states * 3 // 4
    tight = free.reallocators[0].plan.peak_bytes - states + room
    online = [state["online"] for state in saved["optimizer_states"]]
    for each in online:
        each["budget"] = to_plain(parse_budget(tight))
    online[1]["choices"].popitem()
    torch.save(saved, path)
    strategy = BaocStrategy(tight, verbose=False)
    trained(strategy, Gan(), max_epochs=2, ckpt_path=str(path))
    kept, anew = strategy.reallocators
    assert (
        kept.continues_saved_plan
        and kept.optimizer.state_bytes() == kept.plan.state_bytes_adamw
        and not anew.continues_saved_plan
    )
    assert room // 2 < kept.optimizer.state_bytes() + anew.optimizer.state_bytes() <= room


class Wide(Gan):
    """Whose states are more than what a prediction reserves."""

    def __init__(self):
        super().__init__()
        self.generator = nn.Sequential(nn.Linear(4, 512), nn.GELU(), nn.Linear(512, 16))
        self.discriminator = nn.Sequential(nn.Linear(16, 512), nn.GELU(), nn.Linear(512, 1))


class Uneven(Gan):
    """Whose generator is wide alone."""

    def __init__(self):
        super().__init__()
        self.generator = nn.Sequential(nn.Linear(4, 512), nn.GELU(), nn.Linear(512, 16))


def test_those_that_go_on_are_predicted_as_the_one_step_that_they_share(tmp_path: Path):
    path = tmp_path / "saved.ckpt"
    first, saved = saved_after_an_epoch("8gb", Uneven(), path=path)
    torch.save(saved, path)
    strategy = BaocStrategy("8gb", verbose=False)
    trained(strategy, Uneven(), max_epochs=2, ckpt_path=str(path))
    fresh, resumed = ([one.plan.peak_bytes for one in each.reallocators] for each in (first, strategy))
    assert fresh[0] == fresh[1] and resumed == [pytest.approx(fresh[0], abs=1)] * 2


def test_a_resumed_batch_that_no_longer_fits_is_planned_for_as_in_a_fresh_run(tmp_path: Path):
    """Both give up their part of what is too much; neither is asked for all of it."""

    def run(budget: str, *, path: Path | None = None) -> BaocStrategy:
        strategy, data = BaocStrategy(budget, verbose=False), loader(batch_size=64, num=128)
        trainer = L.Trainer(strategy=strategy, max_epochs=2, **QUIET)
        trainer.fit(Wide(), data, ckpt_path=path, weights_only=bool(path) or None)
        return strategy

    plans = [one.plan for one in run("8gb").reallocators]
    budget = plans[0].peak_bytes - sum(plan.allocation.state_bytes for plan in plans) * 3 // 4
    path = tmp_path / "saved.ckpt"
    first, saved = saved_after_an_epoch(f"{budget}b", Wide(), path=path)
    torch.save(saved, path)
    assert not any(one.plan.binding for one in first.reallocators)
    strategy = run(f"{budget}b", path=path)
    for one in strategy.reallocators:
        assert one.continues_saved_plan and one.plan.binding and one.plan.peak_bytes <= budget


def test_what_needs_a_step_of_lightnings_is_refused():
    with pytest.raises(BadInputError, match=r"automatic_optimization=False, and budget.step_time=2 needs a step that"):
        trained(BaocStrategy({"step_time": 2.0}), Gan())


# -- weights of 16 bits -----------------------------------------------------------------------------------------------


def test_optimizers_that_each_save_gradients_pass_no_budget_together():
    """The step needs more than forward and backward by what is less than all of them save there."""
    of_each, temporaries = 4, dict.fromkeys(NO_TEMPORARIES, 4 * MIB)
    weights = 2 * of_each * MIB
    footprint = Footprint(
        device="cpu",
        micro_batch=0,
        weights_bytes=weights,
        gradients_bytes=weights,
        forward_backward_bytes=2 * weights + 3 * MIB,
        validation_bytes=0,
        resident_bytes=2 * weights,
        step_temporary_bytes=temporaries,
    )
    settings = PlannerSettings(specs=("sign", "sign+split8", "adamw", "adamw_int8+split8"), keep_fp32_roles=())
    planned = 0
    for quarters in range(70, 100, 2):
        budget = Budget(name="some", memory_bytes=quarters * MIB // 4)
        planners = [
            Planner(
                [
                    ParamInfo(name=f"{part}.{i}.weight", shape=(512, 512), dtype="float32", role=Role.MLP, depth=i)
                    for i in range(of_each)
                ],
                budget=budget,
                settings=settings,
                footprint=footprint,
            )
            for part in ("generator", "discriminator")
        ]
        late: dict[str, Any] = {"late": {}, "late_bytes": 0, "late_bytes_adamw": 0}
        idle = SimpleNamespace(state_bytes=lambda: 0)
        share: Any = [Mock(planner=each, optimizer=idle, **late) for each in planners]
        try:
            first_step.leave_to_others(share, staying=[])
            plans = [each.propose() for each in planners]
        except InfeasibleBudgetError:
            continue
        planned += 1
        choices = {block: spec for plan in plans for block, spec in plan.allocation.choices.items()}
        blocks, specs = [block for plan in plans for block in plan.blocks], planners[0].specs
        peak = footprint.peak_bytes(
            state_bytes=sum(plan.allocation.state_bytes for plan in plans),
            specs=sorted(set(choices.values())),
            saved=savings_of_choices(choices, blocks=blocks, specs=specs),
        )
        assert peak <= quarters * MIB // 4
    assert planned > 5
