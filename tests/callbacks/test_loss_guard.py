"""A NaN or infinite loss costs a step, and too many of them the run."""

import math
from collections.abc import Sequence
from typing import Any

import lightning as L
import pytest
import torch

from baoc import BaocStrategy
from baoc.callbacks.loss_guard import LossGuard
from baoc.config.schema import ReallocationConfig
from baoc.errors import DivergedError
from baoc.training.session import SessionSettings
from tests.support.tiny import TinyBatches, TinyLoader, TinyModule, tiny_trainer


class Poisoned(TinyModule):
    """Its loss is `value` in the given training batches; weights after each batch are kept in `trace`."""

    def __init__(self, bad: Sequence[int], *, value: float = math.nan):
        super().__init__(dropout=0.0)
        self.bad, self.value, self.count = set(bad), value, 0
        self.trace: list[torch.Tensor] = []

    def training_step(self, batch: torch.Tensor, batch_idx: int) -> torch.Tensor:
        loss = super().training_step(batch, batch_idx)
        self.count += 1
        return loss + self.value if self.count - 1 in self.bad else loss

    def on_train_start(self) -> None:
        self.count = 0  # the look before training counts for nothing

    def on_train_batch_end(self, *_: Any) -> None:
        self.trace.append(self.net[0].weight.detach().clone())


def fit(module: Poisoned, **options: Any):
    L.seed_everything(0, verbose=False)
    module.net[0].reset_parameters()
    module.net[2].reset_parameters()
    guard = LossGuard(patience=options.pop("patience", 20))
    said: list[str] = []
    guard.say = said.append
    settings = SessionSettings(reallocation=ReallocationConfig(mode="once", warmup_steps=2))
    strategy = BaocStrategy("state_50", device="cpu", settings=settings)
    trainer = tiny_trainer(strategy=strategy, callbacks=[guard], **options)
    trainer.fit(module, TinyLoader(), TinyBatches())
    return trainer, guard, said


@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
def test_a_skipped_step_changes_no_weight(value: float) -> None:
    """loss + inf has finite gradients: they are left out all the same."""
    module = Poisoned([3], value=value)
    trainer, guard, said = fit(module)
    assert trainer.global_step == 8 and guard.num_nonfinite == 1 and guard.num_consecutive == 0
    changed = [not torch.equal(a, b) for a, b in zip(module.trace, module.trace[1:], strict=False)]
    assert changed == [True, True, False, True, True, True, True]
    what = "the step leaves out what has no finite gradient"
    assert said == [f"the loss of step 4 is {value}: {what} (number 1 of this run)"]


def test_a_bad_micro_batch_costs_its_whole_step() -> None:
    module = Poisoned([5])
    _, guard, _ = fit(module, accumulate_grad_batches=2, max_steps=5)
    assert guard.num_nonfinite == 1
    assert torch.equal(module.trace[3], module.trace[5]) and not torch.equal(module.trace[5], module.trace[7])


def test_too_many_in_a_row_end_the_run() -> None:
    with pytest.raises(DivergedError, match=r"step 6 is nan, as was that of the 2 steps before it .*lower optim.lr"):
        fit(Poisoned([0, 3, 4, 5]), patience=3)


def test_a_patience_of_one_ends_the_run_at_the_first() -> None:
    with pytest.raises(DivergedError, match=r"the loss of step 4 is inf \(faults.patience\): lower") as error:
        fit(Poisoned([3], value=math.inf), patience=1)
    assert error.value.exit_code == 5
