"""A signal that asks a run to end: the step is finished, checkpoint and log are written, the job is queued again."""

import json
import os
import signal
import stat
from pathlib import Path
from typing import Any

import lightning as L
import pytest
import torch

from baoc.callbacks.checkpoint import SafeCheckpoint
from baoc.callbacks.generators import RngState
from baoc.callbacks.preemption import Preemption, is_preempted, requeue
from baoc.errors import PreemptedError
from baoc.tracking.checkpoints import load_checked, resolve_resume
from baoc.tracking.jsonl import JsonlLogger
from baoc.tracking.metrics import read_metrics
from tests.support.commands import start
from tests.support.tiny import TinyBatches, TinyLoader, TinyModule, tiny_trainer
from tests.support.waiting import wait_until

pytestmark = pytest.mark.slow
STEPS = 14  # of 6 batches per epoch


class Sender(L.Callback):
    """Sends a signal to this process when batch number `at` (from 0) begins its forward pass."""

    def __init__(self, number: int, *, at: int):
        self.number, self.left = number, at

    def on_before_backward(self, *_: Any) -> None:
        if self.left == 0:
            os.kill(os.getpid(), self.number)
        self.left -= 1


def fit(run_dir: Path, *, sender: L.Callback | None = None, resume: bool = False, **options: Any) -> TinyModule:
    L.seed_everything(99 if resume else 0, verbose=False)
    module, checkpoint = TinyModule(), SafeCheckpoint(run_dir, every_n_steps=options.pop("every", None))
    preemption = Preemption(checkpoint)
    callbacks: list[L.Callback] = [RngState(), preemption, checkpoint, *([sender] if sender else [])]
    options = {"max_steps": STEPS, "enable_checkpointing": True} | options
    trainer = tiny_trainer(**options, callbacks=callbacks, logger=[JsonlLogger(run_dir)])
    path = resolve_resume("auto", run_root=run_dir) if resume else None
    with preemption.listening():
        trainer.fit(module, TinyLoader(), TinyBatches(), ckpt_path=path)
    return module


@pytest.mark.parametrize(
    ("name", "at", "options"),
    [
        ("SIGTERM", 3, {}),
        ("SIGUSR1", 5, {}),
        ("SIGUSR2", 8, {"accumulate_grad_batches": 2}),
        ("SIGTERM", 2, {"every": 1}),
    ],
)
def test_the_step_is_finished_saved_and_logged(
    tmp_path: Path, name: str, at: int, options: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    """At 5 a validation follows the step; at 8 the step has a second micro-batch to come."""
    monkeypatch.delenv("SLURM_JOB_ID", raising=False)
    number = getattr(signal, name)
    handler = signal.getsignal(number)
    step = at // options.get("accumulate_grad_batches", 1) + 1
    with pytest.raises(
        PreemptedError, match=rf"{name} ended the run after step {step}, whose checkpoint is .*last"
    ) as e:
        fit(tmp_path / "cut", sender=Sender(number, at=at), **options)
    assert e.value.exit_code == 130
    assert signal.getsignal(number) == handler, "handlers are put back"
    content = load_checked(tmp_path / "cut" / "checkpoints" / "last.ckpt")
    assert content["global_step"] == step
    assert [line["step"] for line in read_metrics(tmp_path / "cut")] == list(range(step))
    whole = fit(tmp_path / "whole", **options)
    resumed = fit(tmp_path / "cut", resume=True, **options)
    assert all(torch.equal(a, b) for a, b in zip(whole.parameters(), resumed.parameters(), strict=True))
    logs = [
        [{k: v for k, v in line.items() if k != "time_s"} for line in read_metrics(tmp_path / run)]
        for run in ("whole", "cut")
    ]
    assert logs[0] == logs[1], "no step and no validation is missing or done twice"


@pytest.mark.parametrize("hook", ["on_fit_start", "on_sanity_check_start", "on_train_start"])
def test_a_signal_before_the_first_step_lets_that_step_be_saved(tmp_path: Path, hook: str) -> None:
    early = L.Callback()
    setattr(early, hook, lambda *_: os.kill(os.getpid(), signal.SIGTERM))
    with pytest.raises(PreemptedError, match="after step 1"):
        fit(tmp_path, sender=early, num_sanity_val_steps=1)


def test_a_signal_in_the_last_step_changes_nothing(tmp_path: Path) -> None:
    fit(tmp_path, sender=Sender(signal.SIGTERM, at=STEPS - 1))
    assert load_checked(tmp_path / "checkpoints" / "last.ckpt")["global_step"] == STEPS


# -- Slurm ------------------------------------------------------------------------------------------------------------


def scontrol(folder: Path, *, exit_code: int = 0, ends: str = "") -> Path:
    """A stand-in for Slurm's command that writes down what it was asked, and first does what `ends` says."""
    folder.mkdir(parents=True, exist_ok=True)
    script = folder / "scontrol"
    script.write_text(f'#!/bin/sh\n{ends}\necho "$@" >> {folder}/asked\necho "no such job" >&2\nexit {exit_code}\n')
    script.chmod(script.stat().st_mode | stat.S_IXUSR)
    return folder / "asked"


def test_slurm_is_asked_to_run_the_job_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    asked = scontrol(tmp_path / "bin")
    monkeypatch.setenv("PATH", str(tmp_path / "bin"))  # alone: a machine of a cluster has the real one
    assert requeue({}) == ""
    assert requeue({"SLURM_JOB_ID": "7"}) == "; Slurm queued job 7 again"
    array = {"SLURM_JOB_ID": "9", "SLURM_ARRAY_JOB_ID": "8", "SLURM_ARRAY_TASK_ID": "3"}
    assert requeue(array) == "; Slurm queued job 8_3 again"
    assert asked.read_text().splitlines() == ["requeue 7", "requeue 8_3"]
    scontrol(tmp_path / "bin", exit_code=1)
    assert requeue({"SLURM_JOB_ID": "7"}) == "; Slurm did not queue job 7 again (no such job): submit it again"
    (tmp_path / "bin" / "scontrol").unlink()
    assert "job 7 is not queued again" in requeue({"SLURM_JOB_ID": "7"})


@pytest.mark.parametrize(("when", "expected"), [("2026-11-28T22:06:16", True), ("None", False)])
def test_slurm_is_asked_whether_it_preempts(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, when: str, expected: bool
) -> None:
    """What Slurm 22.05 says of a job within its GraceTime, and of one that was cancelled."""
    asked = scontrol(tmp_path / "bin", ends=f"echo JobId=7 PreemptEligibleTime=2026-11-28T22:06:12 PreemptTime={when}")
    monkeypatch.setenv("PATH", str(tmp_path / "bin"))
    assert is_preempted({"SLURM_JOB_ID": "7"}) is expected
    assert asked.read_text() == "show job -o 7\n"
    assert not is_preempted({})
    (tmp_path / "bin" / "scontrol").unlink()
    assert not is_preempted({"SLURM_JOB_ID": "7"})


def in_slurm(folder: Path) -> dict[str, str]:
    """The variables of a job with number 42 and the `scontrol` of `folder`."""
    return {"SLURM_JOB_ID": "42", "PATH": f"{folder}{os.pathsep}{os.environ['PATH']}"}


def wait_for_metrics(run_dir: Path) -> None:
    metrics = run_dir / "metrics.jsonl"
    wait_until(lambda: metrics.exists() and metrics.stat().st_size > 0, what="a first metric")


def test_a_preempted_command_is_queued_again(tmp_path: Path) -> None:
    asked = scontrol(tmp_path / "bin", ends="kill -TERM $PPID")  # as Slurm 22.05 does with a job that it queues again
    run_dir = tmp_path / "day" / "run"
    words = ("trainer.max_steps=4000", "budget=state_25", f"hydra.run.dir={run_dir}")
    command = start(*words, folder=tmp_path / "command", **in_slurm(tmp_path / "bin"))
    wait_for_metrics(run_dir)
    command.signal(signal.SIGUSR1)
    code, told = command.done()
    assert code == 130 and "interrupted" in told and not (run_dir / "result.json").exists(), told
    assert "goes on from the newest checkpoint (SIGUSR1 ended the run after step" in told
    assert "Slurm queued job 42 again" in told and asked.read_text() == "requeue 42\n"
    step = load_checked(run_dir / "checkpoints" / "last.ckpt")["global_step"]
    assert [line["step"] for line in read_metrics(run_dir)][-1] <= step - 1


def test_a_job_of_submitit_is_queued_again_and_goes_on_in_its_folder(tmp_path: Path) -> None:
    """Its worker takes USR2, by which Slurm tells that time is up, for itself: within a run we answer it."""
    asked, run_dir = scontrol(tmp_path / "bin"), tmp_path / "sweep" / "job"
    words = ["seed=0", "budget=state_25", "resume=auto"]
    launched = ["-m", *words, "trainer.max_steps=4000", "hydra/launcher=submitit_local"]
    launched += [f"hydra.sweep.dir={run_dir.parent}", "hydra.sweep.subdir=job"]
    command = start(*launched, folder=tmp_path / "first", **in_slurm(tmp_path / "bin"))
    wait_for_metrics(run_dir)
    worker = json.loads((run_dir / "budget.json").read_text())["pid"]
    assert worker != command.pid
    os.kill(worker, signal.SIGUSR2)
    assert command.done()[0] != 0
    assert asked.read_text() == "requeue 42\n"
    step = load_checked(run_dir / "checkpoints" / "last.ckpt")["global_step"]
    again = [*words, f"trainer.max_steps={step + 10}", f"hydra.run.dir={run_dir}"]
    code, told = start(*again, folder=tmp_path / "again", **in_slurm(tmp_path / "bin")).done()
    assert code == 0, told
    assert [line["step"] for line in read_metrics(run_dir) if "train/loss" in line] == list(range(9, step + 10, 10))
