"""Gradient release under BaocStrategy and in BaocOptimizer: the same run in less memory, or a refusal."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import lightning as L
import pytest
import torch
from lightning.pytorch.callbacks import GradientAccumulationScheduler, LearningRateMonitor
from lightning.pytorch.loggers import CSVLogger
from lightning.pytorch.plugins.precision import MixedPrecision
from torch import Tensor, nn

from baoc import BaocOptimizer, BaocStrategy
from baoc.callbacks.checkpoint import SafeCheckpoint
from baoc.callbacks.generators import RngState
from baoc.callbacks.memory import MemoryMonitor
from baoc.config.schema import ReallocationConfig
from baoc.errors import BadInputError
from baoc.optim import GradientRelease
from baoc.planning.planner import PlannerSettings
from baoc.profiling.tracker import PeakMeter
from baoc.training.session import SessionSettings
from tests.support.classifier import same
from tests.support.plain_loops import train
from tests.support.tiny import TinyBatches, TinyLoader, TinyModule, tiny_trainer

pytestmark = [pytest.mark.slow, pytest.mark.filterwarnings("ignore:16-bit weights without correction")]


class Deep(TinyModule):
    """Six equal layers, so that the gradients of one are a small part of all."""

    def __init__(self, *, width: int = 8):
        super().__init__(dropout=0.5)
        torch.manual_seed(7)
        layers = [nn.Sequential(nn.Linear(width, width), nn.ReLU()) for _ in range(6)]
        self.net = nn.Sequential(nn.Linear(8, width), nn.Dropout(0.2), *layers, nn.Linear(width, 1))


def settings(release: bool | GradientRelease = True, **planner: Any) -> SessionSettings:
    return SessionSettings(
        planner=PlannerSettings(**planner),
        reallocation=ReallocationConfig(mode="once", warmup_steps=4),
        release=release,
    )


def large(release: bool) -> SessionSettings:
    """One spec for all and no profile, so that a step holds what the network and one block need."""
    planner = PlannerSettings(specs=("sign",), keep_fp32_roles=())
    return SessionSettings(planner=planner, reallocation=ReallocationConfig(mode="off"), release=release)


def fit(
    release: bool | GradientRelease = True, *, module: L.LightningModule | None = None, **options: Any
) -> tuple[L.LightningModule, BaocStrategy]:
    L.seed_everything(0, verbose=False)
    module = module or Deep()
    budget = options.pop("budget", "state_25")
    given = options.pop("settings", None) or settings(release, **options.pop("planner", {}))
    strategy = BaocStrategy(budget, settings=given)
    trainer = tiny_trainer(strategy=strategy, devices=1, **{"max_steps": 10, **options})
    trainer.fit(module, TinyLoader(), TinyBatches())
    return module, strategy


# -- Lightning -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("precision", ["32-true", "bf16-mixed", "bf16-true"])
def test_a_run_is_the_same_bit_for_bit_through_a_reallocation(precision: str) -> None:
    risk = {"risk": "statistics"}
    (kept, one), (released, two) = (fit(release, precision=precision, planner=risk) for release in (False, True))
    assert same(kept, released)
    assert one.reallocator is not None and two.reallocator is not None
    assert two.reallocator.last_decision == 4 and one.reallocator.plan.allocation == two.reallocator.plan.allocation
    assert two.reallocator.optimizer.releaser is not None


@pytest.mark.parametrize(
    ("precision", "algorithm"),
    [("32-true", "norm"), ("32-true", "value"), ("bf16-mixed", "norm"), ("bf16-true", "value")],
)
def test_the_trainer_s_clipping_is_taken_over(precision: str, algorithm: str) -> None:
    options = {"precision": precision, "gradient_clip_val": 1e-3, "gradient_clip_algorithm": algorithm}
    released, strategy = fit(True, **options)
    assert strategy.reallocator is not None and strategy.reallocator.optimizer.releaser is not None
    name = {"norm": "clip_norm", "value": "clip_value"}[algorithm]
    assert strategy.reallocator.optimizer.releaser.settings == GradientRelease(**{name: 1e-3})
    assert not same(released, fit(True, precision=precision)[0]), "it clips"
    # An element's limit needs to know nothing of the others; a norm is that of the step before.
    assert same(released, fit(False, **options)[0]) == (algorithm == "value")


class Scaled(MixedPrecision):
    """Lightning's fp16 with its GradScaler, which the Trainer gives on a GPU only."""

    def __init__(self):
        super().__init__("16-mixed", "cpu", scaler=torch.amp.GradScaler("cpu"))


class OwnClipping(Deep):
    def configure_gradient_clipping(self, *args: Any, **kwargs: Any) -> None:
        pass


@pytest.mark.parametrize(
    ("options", "text"),
    [
        ({"accumulate_grad_batches": 4}, "accumulate_grad_batches=4: set it to 1"),
        ({"callbacks": [GradientAccumulationScheduler({0: 1, 4: 2})]}, "accumulate_grad_batches=2: set it to 1"),
        ({"plugins": [Scaled()]}, "trainer.precision=16-mixed has a GradScaler.*use bf16-mixed"),
        ({"module": OwnClipping()}, "OwnClipping has a configure_gradient_clipping of its own"),
        ({"release": GradientRelease(clip_norm=1.0), "gradient_clip_val": 0.5}, "say it in one of the two places"),
    ],
)
def test_what_cannot_be_is_refused_before_training(options: dict[str, Any], text: str) -> None:
    with pytest.raises(BadInputError, match=text):
        fit(**options)


def test_hooks_that_find_no_gradients_are_named(caplog: pytest.LogCaptureFixture) -> None:
    class Curious(Deep):
        def on_after_backward(self) -> None:
            assert all(p.grad is None for p in self.parameters())

    class Watcher(L.Callback):
        def on_before_optimizer_step(self, *_: Any) -> None:
            pass

    fit(module=Curious(), callbacks=[Watcher()], max_steps=2)
    assert "on_after_backward of Curious find none" in caplog.text
    assert "on_before_optimizer_step of Watcher find none" in caplog.text


def test_schedules_act_and_are_logged(tmp_path: Path) -> None:
    monitor = LearningRateMonitor(logging_interval="step", log_momentum=True)
    _, strategy = fit(max_steps=5, callbacks=[monitor], logger=CSVLogger(tmp_path))
    assert strategy.optimizers[0].param_groups[0]["lr"] == pytest.approx(1e-2 / 6)
    assert strategy.reallocator is not None and strategy.reallocator.step == 5


def test_after_a_fit_a_backward_is_nobody_s_step_and_a_second_fit_trains_on() -> None:
    module = Deep()
    strategy = BaocStrategy("state_25", settings=settings())
    trainer = tiny_trainer(strategy=strategy, devices=1, max_steps=3)
    trainer.fit(module, TinyLoader(), TinyBatches())
    before = [param.detach().clone() for param in module.parameters()]
    module.net(torch.ones(2, 8)).sum().backward()
    assert all(torch.equal(p, q) and p.grad is not None for p, q in zip(module.parameters(), before, strict=True))
    trainer.fit_loop.epoch_loop.max_steps = 6
    trainer.fit(module, TinyLoader(), TinyBatches())
    assert strategy.reallocator is not None and strategy.reallocator.step == 3 and trainer.global_step == 6


@pytest.mark.parametrize("clip", [None, 0.05])
def test_stopped_and_resumed_it_is_the_uninterrupted_run(tmp_path: Path, clip: float | None) -> None:
    def run(folder: Path, *, steps: int, resume: Path | None = None) -> Deep:
        L.seed_everything(0 if resume is None else 99, verbose=False)
        module = Deep()
        saved = SafeCheckpoint(folder, every_n_steps=3, monitor="val/loss", keep=9, meta={"name": "deep"})
        strategy = BaocStrategy("state_25", settings=settings())
        trainer = tiny_trainer(
            strategy=strategy,
            devices=1,
            max_steps=steps,
            callbacks=[RngState(), saved],
            enable_checkpointing=True,
            gradient_clip_val=clip,
        )
        trainer.fit(module, TinyLoader(), TinyBatches(), ckpt_path=resume, weights_only=True)
        return module

    whole = run(tmp_path / "whole", steps=9)
    run(tmp_path / "part", steps=3)
    (checkpoint,) = (tmp_path / "part").rglob("*.ckpt")
    assert same(whole, run(tmp_path / "part", steps=9, resume=checkpoint))


def test_the_peak_is_lower_and_predicted() -> None:
    """Eight rows through layers of 128 x 128: gradients are most of what weights do not take."""
    peaks, predicted = [], []
    for release in (False, True):
        monitor = MemoryMonitor()
        _, strategy = fit(module=Deep(width=128), budget="8gb", settings=large(release), callbacks=[monitor])
        assert strategy.reallocator is not None
        peaks.append(monitor.peaks["training"])
        predicted.append(strategy.reallocator.plan.peak_bytes)
        footprint = strategy.reallocator.planner.footprint
        assert footprint is not None and footprint.released == release
    layer = (128 * 128 + 128) * 4
    assert peaks[0] - peaks[1] >= 3 * layer, "of six; the step holds one or two more meanwhile"
    for peak, bound in zip(peaks, predicted, strict=True):
        assert 0.9 * bound <= peak <= bound
    assert footprint.gradients_bytes < 2 * layer  # pyright: ignore


# -- a plain loop --------------------------------------------------------------------------------------------------


def make(depth: int = 6, rows: int = 32) -> tuple[nn.Sequential, Callable[[], Tensor]]:
    torch.manual_seed(0)
    layers = [nn.Sequential(nn.Linear(64, 64), nn.LayerNorm(64), nn.ReLU()) for _ in range(depth)]
    model = nn.Sequential(nn.Linear(16, 64), *layers, nn.Linear(64, 8))
    x = torch.randn(rows, 16)
    return model, lambda: nn.functional.cross_entropy(model(x), x[:, :8].argmax(1))


@pytest.mark.parametrize("probed", [True, False])
@pytest.mark.parametrize("budget", ["state_25", "64mb"])
def test_a_loop_is_the_same_bit_for_bit(budget: str, probed: bool) -> None:
    models = []
    for release in (False, True):
        model, loss = make()
        probe = (lambda loss=loss: loss().backward()) if probed else None
        optimizer = BaocOptimizer(model, budget=budget, lr=1e-2, probe=probe, settings=settings(release))
        train(optimizer, loss, steps=8)
        assert optimizer.reallocator.last_decision == 4
        models.append(model)
    assert same(*models)


@pytest.mark.parametrize("probed", [True, False])
def test_a_loop_holds_less_and_no_more_than_predicted(probed: bool) -> None:
    peaks = []
    for release in (False, True):
        model, loss = make(24, rows=2)
        probe = (lambda loss=loss: loss().backward()) if probed else None
        optimizer = BaocOptimizer(model, budget="64mb", probe=probe, settings=large(False), release=release)
        train(optimizer, loss, steps=2)
        with PeakMeter(torch.device("cpu"), model, list(optimizer.state.values())) as meter:
            train(optimizer, loss, steps=2)
        assert meter.peak_bytes <= optimizer.plan.peak_bytes
        if probed:
            assert optimizer.plan.peak_bytes <= 1.1 * meter.peak_bytes
        peaks.append(meter.peak_bytes)
    assert peaks[0] - peaks[1] >= 12 * 64 * 64 * 4, "of 24 layers"


def test_a_new_optimizer_s_probe_is_no_step_of_the_old_one() -> None:
    model, loss = make()
    old = BaocOptimizer(model, budget="state_25", release=True)
    before = [param.detach().clone() for param in model.parameters()]
    BaocOptimizer(model, budget="8gb", probe=lambda: loss().backward(), release=True)
    assert all(torch.equal(p, q) for p, q in zip(model.parameters(), before, strict=True))
    assert old.reallocator.step == 0
