"""A stopped and resumed Trainer sees exactly the batches of an uninterrupted one, wherever it was stopped."""

from pathlib import Path
from typing import Any

import lightning as L
import pytest
import torch
from torch import Tensor, nn

from baoc.data import build_data
from baoc.data.vision import VisionDataModule
from baoc.errors import CheckpointError
from baoc.tasks.settings import OptimizerSettings
from baoc.tasks.vision import VisionTask
from tests.support.tiny import tiny_trainer

pytestmark = pytest.mark.slow

BATCHES = 5  # an epoch of 1,438 samples in batches of 256


class RecordingTask(VisionTask):
    """Remembers the labels of each training batch, which tell it from all others."""

    def __init__(self, *, schedule: str = "cosine", warmup: float = 0.1):
        torch.manual_seed(3)
        optimizer = OptimizerSettings(lr=1e-2, schedule=schedule, warmup_fraction=warmup)
        super().__init__(nn.Sequential(nn.Flatten(), nn.Linear(64, 10)), optimizer=optimizer)
        self.seen: list[list[int]] = []

    def training_step(self, batch: dict[str, Tensor], batch_idx: int) -> Tensor:
        self.seen.append(batch["labels"].tolist())
        return super().training_step(batch, batch_idx)


class SaveAt(L.Callback):
    """Saves once, in `hook`, when `step` optimizer steps have been taken."""

    def __init__(self, hook: str, *, step: int, path: Path):
        self.path, self.step = path, step
        setattr(self, hook, self._save)

    def _save(self, trainer: L.Trainer, *_: Any) -> None:
        if trainer.global_step == self.step and not self.path.exists():
            trainer.save_checkpoint(self.path)


def digits(**settings: Any) -> VisionDataModule:
    return build_data("digits", task="vision", **{"batch_size": 256, "seed": 11, **settings})


def trainer(*callbacks: L.Callback, **limits: Any) -> L.Trainer:
    return tiny_trainer(callbacks=list(callbacks), **{"max_steps": -1, **limits})


def fit(data: VisionDataModule, *, resume: Path, **limits: Any) -> RecordingTask:
    task = RecordingTask()
    trainer(**limits).fit(task, data, ckpt_path=resume, weights_only=True)
    return task


LIMITS = {
    "steps": {"max_steps": 4 * BATCHES},
    "epochs": {"max_epochs": 4},
    "both": {"max_steps": 4 * BATCHES, "max_epochs": 9},
    "steps, validation inside": {"max_steps": 4 * BATCHES, "val_check_interval": 3, "check_val_every_n_epoch": None},
    "epochs, validation inside": {"max_epochs": 4, "val_check_interval": 2},
    "part of the data": {"max_steps": 12, "limit_train_batches": 3},
}
POINTS = {
    "first batch": ("on_train_batch_end", 1),
    "inside an epoch": ("on_train_batch_end", BATCHES + 2),
    "last batch of an epoch": ("on_train_batch_end", 2 * BATCHES),
    "end of an epoch": ("on_train_epoch_end", 2 * BATCHES),
    "after validation": ("on_validation_end", 2 * BATCHES),
}


@pytest.mark.parametrize(("at", "limits"), list(enumerate(LIMITS)))
def test_resumed_run_sees_the_batches_of_an_uninterrupted_one(at, limits, tmp_path):
    """Each limit at two points, each point under two limits or more."""
    saves = []
    for point in (list(POINTS)[(at + more) % len(POINTS)] for more in (0, 2)):
        hook, step = POINTS[point]
        if limits == "part of the data":
            step = {"first batch": 1, "inside an epoch": 5}.get(point, 6)
        if "validation inside" in limits and point == "after validation":
            step = 9  # both validate there
        saves.append(SaveAt(hook, step=step, path=tmp_path / f"{point}.ckpt"))
    whole = RecordingTask()
    trainer(*saves, **LIMITS[limits]).fit(whole, digits())
    for save in saves:
        assert save.path.exists(), "the run was not saved where the test meant to"
        resumed = fit(digits(), resume=save.path, **LIMITS[limits])
        assert resumed.seen == whole.seen[save.step :]
        for after, uninterrupted in zip(resumed.parameters(), whole.parameters(), strict=True):
            assert torch.equal(after, uninterrupted)


@pytest.mark.parametrize("accumulate", [1, 2])
def test_run_that_ended_goes_on_with_the_batch_after_its_last(accumulate, tmp_path):
    whole, first, second = (RecordingTask(schedule="constant", warmup=0.0) for _ in range(3))
    trainer(max_steps=8, accumulate_grad_batches=accumulate).fit(whole, digits(accumulate=accumulate))

    stopped = trainer(max_steps=3, accumulate_grad_batches=accumulate)
    stopped.fit(first, digits(accumulate=accumulate))
    stopped.save_checkpoint(tmp_path / "end.ckpt")
    resumed = trainer(max_steps=8, accumulate_grad_batches=accumulate)
    resumed.fit(second, digits(accumulate=accumulate), ckpt_path=tmp_path / "end.ckpt", weights_only=True)

    assert first.seen + second.seen == whole.seen
    for after, uninterrupted in zip(second.parameters(), whole.parameters(), strict=True):
        assert torch.equal(after, uninterrupted)


def test_resumed_twice_is_still_the_same(tmp_path):
    """Through Lightning's double count of an epoch, see ShuffledLoader.set_epoch, and then once more."""
    limits = {"max_steps": 6 * BATCHES}
    saves = [SaveAt("on_train_epoch_end", step=2 * BATCHES, path=tmp_path / "first.ckpt")]
    saves.append(SaveAt("on_train_batch_end", step=4 * BATCHES + 1, path=tmp_path / "second.ckpt"))
    whole, once = RecordingTask(), RecordingTask()
    trainer(saves[0], **limits).fit(whole, digits())
    trainer(saves[1], **limits).fit(once, digits(), ckpt_path=saves[0].path, weights_only=True)
    twice = fit(digits(), resume=saves[1].path, **limits)
    assert twice.seen == whole.seen[4 * BATCHES + 1 :]


def test_look_at_a_batch_does_not_move_the_training(tmp_path):
    """Whoever needs a sample batch before training, such as a memory probe, takes it from the same loader."""
    save = SaveAt("on_train_batch_end", step=BATCHES + 2, path=tmp_path / "saved.ckpt")
    whole, looked = RecordingTask(), RecordingTask()
    trainer(save, max_steps=2 * BATCHES).fit(whole, digits())

    class Look(L.Callback):
        def on_fit_start(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
            trainer.fit_loop.setup_data()  # before the loops are restored: Lightning then forgets the loader's state
            assert trainer.train_dataloader is not None
            next(iter(trainer.train_dataloader))

        def on_train_start(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
            next(iter(trainer.train_dataloader))

    trainer(Look(), max_steps=2 * BATCHES).fit(looked, digits(), ckpt_path=save.path, weights_only=True)
    assert looked.seen == whole.seen[BATCHES + 2 :]


def test_two_fits_with_one_data_module_see_the_same_batches():
    data, first, second = digits(), RecordingTask(), RecordingTask()
    trainer(max_steps=7).fit(first, data)
    trainer(max_steps=7).fit(second, data)
    assert first.seen == second.seen


def test_overfitting_repeats_the_same_batches():
    task = RecordingTask()
    trainer(max_steps=6, overfit_batches=2, check_val_every_n_epoch=50).fit(task, digits())
    assert task.seen[0] != task.seen[1]
    assert task.seen == task.seen[:2] * 3


@pytest.mark.parametrize("limit", [{"limit_train_batches": 3}, {"overfit_batches": 3}, {"limit_train_batches": 0.15}])
def test_an_epoch_of_part_of_a_step_is_of_a_whole_one(limit: dict[str, Any], caplog: pytest.LogCaptureFixture):
    """Of 44 micro-batches a share of .15 is 6."""
    task, whole = RecordingTask(), 4 if 3 in limit.values() else 8
    tuned = trainer(max_epochs=1, accumulate_grad_batches=4, check_val_every_n_epoch=50, **limit)
    tuned.fit(task, digits(batch_size=32, accumulate=4))
    assert (len(task.seen), tuned.global_step) == (whole, whole // 4)
    assert f"would end within a step of 4 micro-batches: it is of {whole} batches" in caplog.text


def test_resuming_with_other_data_settings_is_refused(tmp_path):
    save = SaveAt("on_train_batch_end", step=1, path=tmp_path / "saved.ckpt")
    trainer(save, max_steps=2).fit(RecordingTask(), digits())
    for settings, text in (
        ({"seed": 12}, "seed was 11, is 12"),
        ({"batch_size": 128}, "batch_size was 256, is 128"),
        ({"val_fraction": 0.1}, "num_samples was 1438, is 1617"),
    ):
        with pytest.raises(CheckpointError, match=f"{text}.*Resume with the settings of the first run"):
            fit(digits(**settings), resume=save.path, max_steps=4)
