"""What fails around a run in its middle: W&B, the disk, the folder. Nothing that was written before is lost."""

import errno
import os
import shutil
from pathlib import Path

import pytest
import torch

from baoc.callbacks.checkpoint import SafeCheckpoint
from baoc.cli.failures import failure_of
from baoc.errors import OutputError
from baoc.tracking.checkpoints import load_checked
from baoc.tracking.jsonl import JsonlLogger
from baoc.tracking.metrics import read_metrics
from baoc.training import run as training
from tests.support.commands import start_script
from tests.support.processes import At
from tests.support.tiny import TinyBatches, TinyLoader, TinyModule, tiny_trainer
from tests.support.training_runs import config
from tests.support.wandb_offline import PLACES

pytestmark = pytest.mark.slow


# -- W&B --------------------------------------------------------------------------------------------------------------

JOBS = """
import os, shutil, signal, sys
from pathlib import Path
from baoc.tracking.loggers import finishing, log_plan, log_summary, make_loggers
from tests.support.processes import At, descendants
from tests.support.tiny import TinyBatches, TinyLoader, TinyModule, tiny_trainer
from tests.support.values import make_plan, make_result

def job(folder, fault):
    before = descendants()
    given = {"wandb": {"project": "p", "entity": None, "mode": "offline"}, "run_dir": folder, "name": "a", "config": {}}
    loggers = make_loggers(["wandb"], **given, say=lambda text: print(text, flush=True))
    service = [pid for pid in descendants() if pid not in before]
    assert service, "wandb runs in a process of its own"
    faults = {
        "kill": lambda: [os.kill(pid, signal.SIGKILL) for pid in service],
        "remove": lambda: shutil.rmtree(folder / "wandb"),
    }
    callbacks = [At(3, faults[fault])] if fault else []
    with finishing(loggers):
        tiny_trainer(logger=loggers, max_steps=8, callbacks=callbacks).fit(TinyModule(), TinyLoader(), TinyBatches())
        log_plan(loggers, plan=make_plan())
        log_summary(loggers, result=make_result())

root = Path(sys.argv[1])
job(root / "first", "kill")
job(root / "second", None)
job(root / "third", "remove")
"""


def test_what_wandb_loses_in_the_middle_is_told_and_nothing_else_is_lost(tmp_path: Path) -> None:
    """wandb's own process is killed at step 3 of the first job, and the folder of the third one is removed there."""
    script = tmp_path / "jobs.py"
    script.write_text(JOBS)
    places = {place: str(tmp_path / "wandb-home") for place in PLACES}
    code, text = start_script(script, str(tmp_path), folder=tmp_path, WANDB_MODE="offline", **places).done()
    assert code == 0, text
    told = [line for line in text.splitlines() if line.startswith("W&B")]
    assert [line.split("(")[0] for line in told] == ["W&B: offline ", "W&B: lost "] + 2 * ["W&B: offline "] + [
        "W&B: lost "
    ], told
    assert told[1].endswith("the run goes on without it, metrics.jsonl holds every step")
    assert told[4].endswith("was removed or moved during the run); metrics.jsonl holds every step")
    for job in ("first", "second", "third"):
        assert [line["step"] for line in read_metrics(tmp_path / job)] == list(range(8))
    (record,) = [file for file in (tmp_path / "second").glob("wandb/offline-run-*/*.wandb") if file.stat().st_size]
    assert b"train/loss" in record.read_bytes()


# -- disk and folder --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("number", "call"), [(errno.ENOSPC, 4), (errno.EDQUOT, 9), (errno.EROFS, 13), (errno.EIO, 4), (errno.ENOSPC, 9)]
)
def test_a_disk_that_fails_in_the_middle(
    tmp_path: Path, number: int, call: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The fsync that fails belongs to a line of metrics or to a checkpoint, as the count has it."""
    real, calls = os.fsync, []

    def fsync(descriptor: int) -> None:
        calls.append(descriptor)
        if len(calls) >= call:
            raise OSError(number, os.strerror(number))
        real(descriptor)

    monkeypatch.setattr(os, "fsync", fsync)
    trainer = tiny_trainer(
        callbacks=[SafeCheckpoint(tmp_path, every_n_steps=2, keep=2)],
        logger=[JsonlLogger(tmp_path)],
        enable_checkpointing=True,
        max_steps=20,
    )
    text = "no space left for" if number in (errno.ENOSPC, errno.EDQUOT) else "cannot write"
    with pytest.raises(OutputError, match=text) as error:
        trainer.fit(TinyModule(), TinyLoader(), TinyBatches())
    assert failure_of(error.value).exit_code == 2
    done = trainer.global_step
    folder = tmp_path / "checkpoints"
    kept = {path.name: load_checked(path)["global_step"] for path in folder.glob("*.ckpt")}
    assert not list(folder.glob(".*")), "no part of a file is left"
    assert max(kept.values(), default=0) in (done - 2, done - 1, done) or done <= 2
    assert [line["step"] for line in read_metrics(tmp_path)] == list(range(len(read_metrics(tmp_path))))
    assert len(read_metrics(tmp_path)) >= done - 1, "every step before the one in progress"


def test_a_run_whose_log_has_no_room_says_so(tmp_path: Path) -> None:
    run_dir = tmp_path / "day" / "full"
    run_dir.mkdir(parents=True)
    (run_dir / "metrics.jsonl").symlink_to("/dev/full")
    with pytest.raises(OutputError, match=r"no space left for metrics\.jsonl .*free space or set hydra\.run\.dir"):
        training.run(config(), run_dir=run_dir, command="python run.py")


def test_a_folder_that_becomes_unwritable(tmp_path: Path) -> None:
    """A file in the folder's place: permissions would not stop a user who is root."""
    folder = tmp_path / "checkpoints"

    def spoil() -> None:
        folder.rename(tmp_path / "moved")
        folder.write_text("in the way")

    callbacks = [At(5, spoil), SafeCheckpoint(tmp_path, every_n_steps=2)]
    trainer = tiny_trainer(callbacks=callbacks, enable_checkpointing=True)
    with pytest.raises(OutputError, match=r"cannot write .*last\.ckpt: .*make the folder writable"):
        trainer.fit(TinyModule(), TinyLoader(), TinyBatches())
    assert load_checked(tmp_path / "moved" / "last.ckpt")["global_step"] == 4
    assert torch.isfinite(trainer.callback_metrics["train/loss"])


@pytest.mark.parametrize("every", [1, 2])
def test_a_metrics_file_that_is_removed_comes_back_whole(tmp_path: Path, every: int) -> None:
    callbacks = [At(5, (tmp_path / "metrics.jsonl").unlink), SafeCheckpoint(tmp_path, every_n_steps=every)]
    logger = JsonlLogger(tmp_path)
    trainer = tiny_trainer(callbacks=callbacks, logger=[logger], enable_checkpointing=True)
    trainer.fit(TinyModule(), TinyLoader(), TinyBatches())
    assert [line["step"] for line in read_metrics(tmp_path)] == list(range(8))


@pytest.mark.parametrize("step", [2, 7])
def test_a_run_whose_folder_is_removed_ends_with_a_sentence(tmp_path: Path, step: int) -> None:
    run_dir = tmp_path / "day" / "job"
    callbacks = [At(step, lambda: shutil.rmtree(run_dir)), SafeCheckpoint(run_dir, every_n_steps=2)]
    run_dir.mkdir(parents=True)
    trainer = tiny_trainer(callbacks=callbacks, logger=[JsonlLogger(run_dir)], enable_checkpointing=True)
    with pytest.raises(OutputError, match=r"job was removed or moved while the run wrote into it") as caught:
        trainer.fit(TinyModule(), TinyLoader(), TinyBatches())
    assert failure_of(caught.value).exit_code == 2
    assert not run_dir.exists() or not list(run_dir.iterdir()), "nothing is left that looks like a run"
