"""What an earlier attempt left in a folder: nothing intact is lost to what is damaged, stale or half-written."""

import os
from pathlib import Path

import pytest

from baoc.callbacks import checkpoint
from baoc.callbacks.checkpoint import SafeCheckpoint
from baoc.tracking.checkpoints import load_checked, resolve_resume
from tests.support.tiny import TinyBatches, TinyLoader, TinyModule, tiny_trainer


def fit(run_dir: Path, *, max_steps: int, keep: int = 2, resume: Path | None = None) -> None:
    callbacks = [SafeCheckpoint(run_dir, every_n_steps=2, keep=keep)]
    trainer = tiny_trainer(max_steps=max_steps, enable_checkpointing=True, callbacks=callbacks)
    trainer.fit(TinyModule(), TinyLoader(), TinyBatches(), ckpt_path=resume)


def steps(folder: Path) -> dict[str, int]:
    return {path.name: load_checked(path)["global_step"] for path in sorted(folder.glob("*.ckpt"))}


def test_a_damaged_last_one_does_not_take_the_place_of_the_intact_one(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    fit(tmp_path, max_steps=4)
    folder = tmp_path / "checkpoints"
    last = folder / "last.ckpt"
    last.write_bytes(last.read_bytes()[:-50])
    found = resolve_resume("auto", run_root=tmp_path)
    assert found == folder / "step_00000002.ckpt"
    fit(tmp_path, max_steps=3, resume=found)
    assert steps(folder) == {"last.ckpt": 3, "step_00000002.ckpt": 2}
    assert (folder / "last.ckpt.damaged").is_file()
    assert "it is kept as last.ckpt.damaged" in caplog.text


def test_an_attempt_that_was_given_up_makes_room_for_the_one_that_goes_on(tmp_path: Path) -> None:
    fit(tmp_path, max_steps=8)
    folder = tmp_path / "checkpoints"
    fit(tmp_path, max_steps=10, resume=folder / "step_00000006.ckpt")
    assert steps(folder) == {"last.ckpt": 10, "step_00000008.ckpt": 8}
    assert resolve_resume("auto", run_root=tmp_path) == folder / "last.ckpt"


def test_a_run_goes_on_in_a_copy_and_on_a_machine_whose_clock_is_behind(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Copies lose the times of files, here to the reverse of what they were."""
    fit(tmp_path, max_steps=6, keep=3)
    folder = tmp_path / "checkpoints"
    for age, name in enumerate(("last", "step_00000004", "step_00000002")):
        os.utime(folder / f"{name}.ckpt", (1e9 + age, 1e9 + age))
    monkeypatch.setattr(checkpoint, "time", lambda: 1e9)
    found = resolve_resume("auto", run_root=tmp_path)
    assert found == folder / "last.ckpt"
    fit(tmp_path, max_steps=8, keep=3, resume=found)
    assert steps(folder) == {"last.ckpt": 8, "step_00000004.ckpt": 4, "step_00000006.ckpt": 6}
    assert resolve_resume("auto", run_root=tmp_path) == folder / "last.ckpt"


def test_what_a_kill_left_half_written_goes(tmp_path: Path) -> None:
    fit(tmp_path, max_steps=2)
    folder = tmp_path / "checkpoints"
    (folder / ".last.ckpt.0123abcd.tmp").write_bytes(b"PK")
    fit(tmp_path, max_steps=4, resume=folder / "last.ckpt")
    assert sorted(path.name for path in folder.iterdir()) == ["last.ckpt", "step_00000002.ckpt"]
