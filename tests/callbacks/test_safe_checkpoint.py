"""What lies in checkpoints/ and when, and that nothing there is ever half-written."""

import errno
import os
from pathlib import Path
from typing import Any

import lightning as L
import pytest
import torch

from baoc.callbacks.checkpoint import AtomicCheckpointIO, SafeCheckpoint, unsafe_entries
from baoc.errors import CheckpointError, OutputError
from baoc.tracking.checkpoints import load_checked
from baoc.tracking.files import read_jsonl
from baoc.tracking.jsonl import JsonlLogger
from baoc.tracking.metrics import read_metrics
from tests.support.tiny import TinyBatches, TinyLoader, TinyModule, tiny_trainer


class Scripted(TinyModule):
    """Validation losses as told, one per validation."""

    def __init__(self, losses: list[float]):
        super().__init__()
        self.losses = list(losses)

    def validation_step(self, batch: torch.Tensor, batch_idx: int) -> None:
        if batch_idx == 0:
            self.now = self.losses.pop(0)
        self.log("val/loss", self.now)


def fit(checkpoint: SafeCheckpoint, *, module: TinyModule | None = None, **options: Any) -> L.Trainer:
    trainer = tiny_trainer(**({"enable_checkpointing": True} | options), callbacks=[checkpoint])
    trainer.fit(module or TinyModule(), TinyLoader(), TinyBatches())
    return trainer


def names(run_dir: Path) -> list[str]:
    return sorted(path.name for path in (run_dir / "checkpoints").iterdir())


def test_the_last_step_is_always_kept(tmp_path: Path) -> None:
    fit(SafeCheckpoint(tmp_path, meta={"name": "a"}), max_steps=7)
    assert names(tmp_path) == ["last.ckpt"]
    content = load_checked(tmp_path / "checkpoints" / "last.ckpt")
    assert (content["baoc_schema"], content["baoc"]["name"], content["global_step"]) == (1, "a", 7)


def test_minutes_count_from_the_newest_one(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each step takes three minutes here: every fourth is written, and the last."""
    now = [0.0]

    class Slow(TinyModule):
        def training_step(self, batch: torch.Tensor, batch_idx: int) -> torch.Tensor:
            now[0] += 180
            return super().training_step(batch, batch_idx)

    monkeypatch.setattr("baoc.callbacks.checkpoint.monotonic", lambda: now[0])
    fit(SafeCheckpoint(tmp_path, every_minutes=10, keep=9), module=Slow(), max_steps=11)
    assert names(tmp_path) == ["last.ckpt", "step_00000004.ckpt", "step_00000008.ckpt"]


def test_the_newest_are_kept(tmp_path: Path) -> None:
    fit(SafeCheckpoint(tmp_path, every_n_steps=2, keep=3), max_steps=9)
    assert names(tmp_path) == ["last.ckpt", "step_00000006.ckpt", "step_00000008.ckpt"]
    for name, step in (("last", 9), ("step_00000006", 6), ("step_00000008", 8)):
        assert load_checked(tmp_path / "checkpoints" / f"{name}.ckpt")["global_step"] == step


@pytest.mark.parametrize(("mode", "best"), [("min", 8), ("max", 2)])
def test_the_best_is_kept(tmp_path: Path, mode: str, best: int) -> None:
    checkpoint = SafeCheckpoint(tmp_path, monitor="val/loss", mode=mode)
    losses = [5.0, 2.0, 4.0, 1.0, float("nan")]
    trainer = fit(checkpoint, module=Scripted(losses), max_steps=10, val_check_interval=2)
    assert names(tmp_path) == [f"best_{best:08d}.ckpt", "last.ckpt"]
    assert checkpoint.best_model_path == str(tmp_path / "checkpoints" / f"best_{best:08d}.ckpt")
    assert load_checked(checkpoint.best_model_path)["global_step"] == best
    assert trainer.checkpoint_callback is checkpoint


def test_best_and_last_of_one_step_are_written_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    written: list[str] = []
    real = AtomicCheckpointIO.save_checkpoint

    def save(self: AtomicCheckpointIO, checkpoint: dict[str, Any], path: Any, storage_options: Any = None) -> None:
        written.append(Path(path).name)
        real(self, checkpoint, path, storage_options)

    monkeypatch.setattr(AtomicCheckpointIO, "save_checkpoint", save)
    fit(SafeCheckpoint(tmp_path, monitor="val/loss"), module=Scripted([1.0]), max_steps=6)
    assert written == ["best_00000006.ckpt"]
    assert names(tmp_path) == ["best_00000006.ckpt", "last.ckpt"]
    assert load_checked(tmp_path / "checkpoints" / "last.ckpt")["global_step"] == 6


def test_the_best_of_the_resumed_run_still_counts(tmp_path: Path) -> None:
    fit(SafeCheckpoint(tmp_path, monitor="val/loss"), module=Scripted([1.0]), max_steps=6)
    checkpoint = SafeCheckpoint(tmp_path, monitor="val/loss")
    trainer = tiny_trainer(max_steps=12, enable_checkpointing=True, callbacks=[checkpoint])
    trainer.fit(Scripted([2.0]), TinyLoader(), TinyBatches(), ckpt_path=checkpoint.last_path)
    assert names(tmp_path) == ["best_00000006.ckpt", "last.ckpt"]
    assert load_checked(checkpoint.last_path)["global_step"] == 12


def test_a_full_disk_while_saving_keeps_the_last_good_one(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """torch hides the full disk behind an error about positions; the user must be told of the disk."""
    real = torch.save

    class Full:
        def __init__(self, file: Any):
            self.file, self.left = file, 300

        def write(self, data: Any) -> int:
            self.left -= len(data)
            if self.left < 0:
                raise OSError(28, os.strerror(28))
            return self.file.write(data)

        def flush(self) -> None:
            self.file.flush()

    def save(content: Any, file: Any) -> None:
        real(content, Full(file) if content["global_step"] == 4 else file)

    monkeypatch.setattr(torch, "save", save)
    with pytest.raises(OutputError, match=r"no space left for last\.ckpt in .*free space or set hydra\.run\.dir"):
        fit(SafeCheckpoint(tmp_path, every_n_steps=2))
    assert names(tmp_path) == ["last.ckpt"]
    assert load_checked(tmp_path / "checkpoints" / "last.ckpt")["global_step"] == 2


def test_an_error_of_torch_keeps_its_text_where_the_disk_has_room(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def save(*_: Any) -> None:
        try:
            raise OSError(errno.EIO, "of something else")
        except OSError:
            raise RuntimeError("cannot write this tensor")  # noqa: B904

    monkeypatch.setattr(torch, "save", save)
    with pytest.raises(RuntimeError, match="cannot write this tensor"):
        AtomicCheckpointIO().save_checkpoint({}, tmp_path / "last.ckpt")


def test_an_interrupt_in_the_middle_of_a_step_writes_nothing(tmp_path: Path) -> None:
    class Interrupted(TinyModule):
        def training_step(self, batch: torch.Tensor, batch_idx: int) -> torch.Tensor:
            if batch_idx == 3:
                raise RuntimeError("stop")
            return super().training_step(batch, batch_idx)

    with pytest.raises(RuntimeError, match="stop"):
        fit(SafeCheckpoint(tmp_path, every_n_steps=2), module=Interrupted())
    assert names(tmp_path) == ["last.ckpt"]
    assert load_checked(tmp_path / "checkpoints" / "last.ckpt")["global_step"] == 2


def test_lightning_itself_refuses_a_damaged_file_with_our_text(tmp_path: Path) -> None:
    checkpoint = SafeCheckpoint(tmp_path)
    fit(checkpoint, max_steps=2)
    content = checkpoint.last_path.read_bytes()
    checkpoint.last_path.write_bytes(content[: len(content) // 2])
    trainer = tiny_trainer(enable_checkpointing=True, callbacks=[SafeCheckpoint(tmp_path / "new")])
    with pytest.raises(CheckpointError, match="is truncated"):
        trainer.fit(TinyModule(), TinyLoader(), TinyBatches(), ckpt_path=checkpoint.last_path)
    with pytest.raises(CheckpointError, match="there is no checkpoint"):
        trainer.fit(TinyModule(), TinyLoader(), TinyBatches(), ckpt_path=tmp_path / "no.ckpt")


def test_lightnings_own_checkpoints_are_taken_too(tmp_path: Path) -> None:
    plain = tiny_trainer(max_steps=2)
    plain.fit(TinyModule(), TinyLoader(), TinyBatches())
    plain.save_checkpoint(tmp_path / "plain.ckpt", weights_only=False)
    trainer = tiny_trainer(enable_checkpointing=True, max_steps=4, callbacks=[SafeCheckpoint(tmp_path / "new")])
    trainer.fit(TinyModule(), TinyLoader(), TinyBatches(), ckpt_path=tmp_path / "plain.ckpt")
    assert trainer.global_step == 4


def test_fast_dev_run_leaves_nothing(tmp_path: Path) -> None:
    fit(SafeCheckpoint(tmp_path, every_n_steps=1, monitor="val/loss"), fast_dev_run=2)
    assert not (tmp_path / "checkpoints").exists()


def test_objects_that_a_safe_load_refuses_are_named_when_saving(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    module = TinyModule()
    module.hparams["root"] = Path("x")
    fit(SafeCheckpoint(tmp_path), module=module, max_steps=1)
    assert "the checkpoint holds hyper_parameters/root (PosixPath), which a safe load refuses" in caplog.text
    assert unsafe_entries({"a": [1, {"b": (None, torch.zeros(1))}]}) == []


@pytest.mark.parametrize("every", [1, 2, 3])
def test_a_step_is_in_the_metrics_before_its_checkpoint_is_written(
    tmp_path: Path, every: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A kill between the two would lose the line for good: whoever resumes goes on after that step."""
    real, seen = torch.save, []

    def save(content: Any, file: Any) -> None:
        seen.append((content["global_step"], [line["step"] for line in read_metrics(tmp_path)]))
        real(content, file)

    monkeypatch.setattr(torch, "save", save)
    callbacks = [SafeCheckpoint(tmp_path, every_n_steps=every, monitor="val/loss")]
    trainer = tiny_trainer(
        max_steps=14,
        enable_checkpointing=True,
        callbacks=callbacks,
        logger=[JsonlLogger(tmp_path)],
        val_check_interval=4,
        check_val_every_n_epoch=None,
        accumulate_grad_batches=2,
    )
    trainer.fit(TinyModule(), TinyLoader(), TinyBatches())
    assert len(seen) >= 14 // every
    for step, logged in seen:
        assert logged == list(range(step)), f"the checkpoint of step {step}"
    lines = [line for line in read_jsonl(tmp_path / "metrics.jsonl") if "train/loss" in line]
    assert [line["step"] for line in lines] == list(range(14)), "and once only"
