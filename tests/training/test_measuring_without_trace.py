"""Measuring a step before training: every module form that plain Lightning trains, and nothing of it left behind."""

import itertools
import random
from collections import Counter, deque
from dataclasses import dataclass
from typing import Any

import lightning as L
import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, Dataset

from baoc import BaocStrategy
from baoc.errors import BadInputError
from tests.support.classifier import QUIET, Classifier, fit, loader, same

pytestmark = [
    pytest.mark.slow,  # they train by every door
    pytest.mark.filterwarnings("ignore:.*num_workers.*"),
]


@dataclass(slots=True)
class Slots:
    seen: int = 0


class Counting(Classifier):
    """Counts in every kind of Python state, and weighs its loss by it."""

    def __init__(self):
        super().__init__()
        self.count, self.losses, self.window, self.names = 0, [], deque(maxlen=50), set()
        self.by_label, self.nested, self.slots = Counter(), {"inner": {"count": [0]}}, Slots()
        self.array, self.numbers, self.bank = np.zeros(2), itertools.count(), torch.zeros(3)
        self.dice, self.generator = random.Random(5), torch.Generator().manual_seed(5)
        self.numpy_dice = np.random.default_rng(5)
        self.loss_list = self.losses  # another name of the same list

    def training_step(self, batch: list[Tensor], batch_idx: int) -> Tensor:
        self.count += 1
        self.losses.append(self.count)
        self.window.append(self.count)
        self.names.add(f"step {self.count}")
        self.by_label.update(batch[1].tolist())
        self.nested["inner"]["count"][0] += 1
        self.slots.seen += 1
        self.array += 1
        self.bank += 1
        if not hasattr(self, "first"):
            self.first = self.count
        noise = self.dice.random() + self.numpy_dice.random() + torch.rand(1, generator=self.generator).item()
        weight = 1 + 0.1 * (self.count + next(self.numbers) + noise)
        return nn.functional.cross_entropy(self.net(batch[0]), batch[1]) * weight

    def told(self) -> list[Any]:
        return [
            self.count, self.losses, self.window, self.names, self.by_label, self.nested, self.slots, self.first,
            self.array.tolist(), self.bank.tolist(), self.dice.random(), next(self.numbers), self.numpy_dice.random(),
        ]  # fmt: skip


@pytest.mark.parametrize("budget", ["unlimited", "8gb", {"memory": "8gb", "step_time": 1e6}], ids=str)
def test_python_state_is_as_if_nothing_had_been_measured(budget: Any):
    plain, ours = fit("auto", module=Counting()), fit(BaocStrategy(budget), module=Counting())
    assert isinstance(plain, Counting) and isinstance(ours, Counting)
    assert plain.told() == ours.told()
    assert ours.loss_list is ours.losses
    assert same(plain, ours)


def test_a_data_set_that_counts_is_as_before():
    class Counted(Dataset):
        def __init__(self):
            self.asked = 0

        def __len__(self) -> int:
            return 64

        def __getitem__(self, index: int) -> tuple[Tensor, int]:
            self.asked += 1
            return torch.full((16,), float(self.asked)), self.asked % 4

    plain, ours = Counted(), Counted()
    first = fit("auto", data=DataLoader(plain, batch_size=8), steps=4)
    second = fit(BaocStrategy("8gb"), data=DataLoader(ours, batch_size=8), steps=4)
    assert plain.asked == ours.asked and same(first, second)


# -- module forms ------------------------------------------------------------------------------------------------------


class OnlyBatch(Classifier):
    def training_step(self, batch: Any) -> Tensor:  # pyright: ignore[reportIncompatibleMethodOverride]
        return nn.functional.cross_entropy(self.net(batch[0]), batch[1])

    def validation_step(self, batch: Any) -> None:
        self.training_step(batch)


class OfDict(Classifier):
    def training_step(self, batch: Any) -> Tensor:  # pyright: ignore[reportIncompatibleMethodOverride]
        return super().training_step(batch["a"], 0) + super().training_step(batch["b"], 0)


class OfList(Classifier):
    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        return super().training_step(batch[0], batch_idx) + super().training_step(batch[1], batch_idx)

    def validation_step(self, batch: Any, batch_idx: int, dataloader_idx: int) -> None:
        assert batch[0].shape[0] == (8, 4)[dataloader_idx]


class LateAttributes(Classifier):
    """Makes what its step needs in the hooks before the first one."""

    def on_fit_start(self) -> None:
        self.scale = torch.tensor(2.0)

    def on_train_start(self) -> None:
        self.began = torch.rand(())

    def on_train_epoch_start(self) -> None:
        self.epochs = getattr(self, "epochs", 0) + 1

    def on_train_batch_start(self, batch: Any, batch_idx: int) -> None:
        self.size = len(batch[0])

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        return super().training_step(batch, batch_idx) * self.scale * self.began * self.epochs / self.size


class LoaderOfItsOwn(OnlyBatch):
    def train_dataloader(self) -> Any:
        return loader()

    def val_dataloader(self) -> Any:
        return [loader(), loader(batch_size=4)]

    def validation_step(self, batch: Any, batch_idx: int, dataloader_idx: int = 0) -> None:  # pyright: ignore
        assert batch[0].shape[0] == (8, 4)[dataloader_idx]


FORMS: dict[str, tuple[type[Classifier], Any, Any]] = {
    "training_step(batch)": (OnlyBatch, loader, loader),
    "dict of loaders": (OfDict, lambda: {"a": loader(), "b": loader(batch_size=4)}, lambda: None),
    "list of loaders, two of validation": (
        OfList,
        lambda: [loader(), loader(batch_size=4)],
        lambda: [loader(), loader(batch_size=4)],
    ),
    "attributes of hooks": (LateAttributes, loader, lambda: None),
    "loaders of its own": (LoaderOfItsOwn, lambda: None, lambda: None),
}


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("budget", ["unlimited", "8gb"])
def test_a_module_form_trains_as_in_plain_lightning(form: str, budget: str, caplog):
    make, data, validation = FORMS[form]

    def trained(strategy: Any) -> Classifier:
        L.seed_everything(3, verbose=False)
        module = make()
        trainer = L.Trainer(strategy=strategy, max_steps=6, **QUIET)
        trainer.fit(module, data(), validation())
        return module

    assert same(trained("auto"), trained(BaocStrategy(budget)))
    assert "could not be measured" not in caplog.text


class OnlyInTraining(Classifier):
    """Its step needs what a callback makes, which nothing calls before training."""

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        return super().training_step(batch, batch_idx) * self.scale  # pyright: ignore[reportOperatorIssue]


class Scales(L.Callback):
    def on_train_start(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        pl_module.scale = 2.0


@pytest.mark.parametrize(("budget", "then"), [("unlimited", "no limit needs it"), ("8gb", "first real step")])
def test_a_step_that_cannot_run_before_training_is_measured_in_training(budget: str, then: str, caplog, capsys):
    plain = fit("auto", module=OnlyInTraining(), callbacks=[Scales()])
    strategy = BaocStrategy(budget)
    ours = fit(strategy, module=OnlyInTraining(), callbacks=[Scales()])
    assert same(plain, ours) or budget == "8gb"  # whose first step runs on the plan of least state
    assert "could not be measured before training (AttributeError: 'OnlyInTraining' object has no" in caplog.text
    assert then in caplog.text
    assert capsys.readouterr().out.count(f"plan for budget {budget}") == 1
    assert strategy.budget_met is (True if budget == "8gb" else None)


@pytest.mark.filterwarnings("ignore:.training_step. returned .None.")
def test_a_module_that_skips_its_first_batches_is_measured_by_the_first_that_it_takes(caplog):
    """As filters of bad batches do; a step without gradients tells nothing of memory."""

    class Skips(Classifier):
        def training_step(self, batch: Any, batch_idx: int) -> Tensor | None:
            return None if batch_idx < 2 else super().training_step(batch, batch_idx)

    strategy = BaocStrategy("8gb")
    fit(strategy, module=Skips())
    assert "(TypeError: training_step returned no loss for the first batch)" in caplog.text
    assert strategy.budget_met and strategy.plan.peak_bytes > 0
    assert strategy.reallocator.planner.footprint.gradients_bytes > 0


def test_a_limit_on_time_says_what_it_lacks_then():
    with pytest.raises(BadInputError, match=r"could not be measured before training .*, which step_time=2 needs"):
        fit(BaocStrategy({"step_time": 2.0}), module=OnlyInTraining(), callbacks=[Scales()])


def test_a_step_that_never_runs_shows_its_own_error():
    class Broken(Classifier):
        def training_step(self, batch: Any, batch_idx: int) -> Tensor:
            raise KeyError("of the user's own")

    with pytest.raises(KeyError, match="of the user's own"):
        fit(BaocStrategy("8gb"), module=Broken())
