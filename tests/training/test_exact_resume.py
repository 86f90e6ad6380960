"""A run stopped anywhere and resumed is, bit for bit, the run that was never stopped, with dropout on; its logs too."""

import random
from pathlib import Path
from typing import Any

import lightning as L
import numpy as np
import pytest
import torch

from baoc.callbacks import generators as resume_callbacks
from baoc.callbacks.checkpoint import SafeCheckpoint
from baoc.callbacks.generators import RngState, capture_rng, restore_rng
from baoc.tracking.checkpoints import load_checked, resolve_resume
from baoc.tracking.jsonl import JsonlLogger
from baoc.tracking.metrics import read_metrics
from tests.support.tiny import TinyBatches, TinyLoader, TinyModule, tiny_trainer

pytestmark = pytest.mark.slow  # they train and resume

STEPS = 16  # of 6 batches per epoch: two whole epochs and a part of a third


class Killed(Exception):
    """Stands for whatever ends a process."""


class KillAfter(L.Callback):
    """Ends the run when the batch that follows `step` optimizer steps begins: nothing is saved or closed in order."""

    def __init__(self, step: int):
        self.step = step

    def on_train_batch_start(self, trainer: L.Trainer, *_: Any) -> None:
        if trainer.global_step == self.step:
            raise Killed


class NoisyModule(TinyModule):
    """Draws from all three generators in every step, so that a stream which is not put back shows."""

    def training_step(self, batch: torch.Tensor, batch_idx: int) -> torch.Tensor:
        noise = random.random() + float(np.random.rand())
        return super().training_step(batch * (1 + 0.1 * noise), batch_idx)


def fit(run_dir: Path, *, kill_after: int | None = None, resume: str | None = None, **options: Any) -> TinyModule:
    """One attempt of the run in `run_dir`; seeded only if it is the first, as a resumed process starts anywhere."""
    L.seed_everything(0 if resume is None else 99, verbose=False)
    module = NoisyModule()
    every = options.pop("every_n_steps", 5)
    callbacks: list[L.Callback] = [
        RngState(),
        SafeCheckpoint(run_dir, every_n_steps=every, monitor="val/loss", keep=2, meta={"name": "tiny"}),
    ]
    if kill_after is not None:
        callbacks.insert(1, KillAfter(kill_after))
    trainer = tiny_trainer(
        **({"max_steps": STEPS, "enable_checkpointing": True} | options),
        callbacks=callbacks,
        logger=[JsonlLogger(run_dir)],
    )
    path = None if resume is None else resolve_resume(resume, run_root=run_dir, match={"name": "tiny"})
    trainer.fit(module, TinyLoader(), TinyBatches(), ckpt_path=path)
    return module


def assert_same_run(one: Path, other: Path, modules: tuple[TinyModule, TinyModule]) -> None:
    for a, b in zip(modules[0].parameters(), modules[1].parameters(), strict=True):
        assert torch.equal(a, b)
    plain = [[{k: v for k, v in line.items() if k != "time_s"} for line in read_metrics(run)] for run in (one, other)]
    assert plain[0] == plain[1]
    assert [line["step"] for line in plain[0]] == list(range(STEPS))


def killed(run_dir: Path, *steps: int, **options: Any) -> None:
    """Attempts that end one after the other, each where the one before had left a checkpoint."""
    for index, step in enumerate(steps):
        with pytest.raises(Killed):
            fit(run_dir, kill_after=step, resume="auto" if index else None, **options)


@pytest.mark.parametrize(
    ("kills", "options"),
    [
        *(((step,), {}) for step in (5, 7, 10, 12, 15)),  # at a checkpoint in mid-epoch, or back to one
        ((6, 11), {}),
        ((9,), {"every_n_steps": 2, "val_check_interval": 2}),
        ((5,), {"every_n_steps": 2, "accumulate_grad_batches": 2}),
        *(((step,), {"every_n_steps": every}) for every, step in ((6, 8), (12, 15), (3, 4))),
    ],
)
def test_killed_and_resumed_equals_uninterrupted(
    tmp_path: Path, kills: tuple[int, ...], options: dict[str, Any]
) -> None:
    whole = fit(tmp_path / "whole", **options)
    killed(tmp_path / "cut", *kills, **options)
    if "accumulate_grad_batches" in options:
        content = load_checked(tmp_path / "cut" / "checkpoints" / "last.ckpt")
        assert content["global_step"] == 4, "never in the middle of a step"
    resumed = fit(tmp_path / "cut", resume="auto", **options)
    assert_same_run(tmp_path / "whole", tmp_path / "cut", (whole, resumed))
    if options.get("every_n_steps", 5) % 3 == 0:  # at the end of an epoch, a checkpoint is written after validation
        validated = [line["step"] for line in read_metrics(tmp_path / "cut") if "val/loss" in line]
        assert validated == [5, 11], "no validation is skipped"


def test_a_finished_run_goes_on_to_more_steps(tmp_path: Path) -> None:
    whole = fit(tmp_path / "whole")
    fit(tmp_path / "cut", max_steps=8)
    resumed = fit(tmp_path / "cut", resume="auto")
    assert_same_run(tmp_path / "whole", tmp_path / "cut", (whole, resumed))


def test_a_checkpoint_of_a_gpu_goes_on_without_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Its tensors say that they lie on cuda:0, and it has that device's generator; that they do no more is said."""
    whole = fit(tmp_path / "whole")
    with monkeypatch.context() as on_a_gpu:
        on_a_gpu.setattr(torch.serialization, "location_tag", lambda storage: "cuda:0")
        device = {"cuda": torch.zeros(16, dtype=torch.uint8), "cuda_device": 0}
        on_a_gpu.setattr(resume_callbacks, "capture_rng", lambda _: {**capture_rng(), **device})
        killed(tmp_path / "cut", 7)
    if not torch.cuda.is_available():
        with pytest.raises(RuntimeError, match="on a CUDA device"):
            torch.load(tmp_path / "cut" / "checkpoints" / "last.ckpt", weights_only=True)
    resumed = fit(tmp_path / "cut", resume="auto")
    assert_same_run(tmp_path / "whole", tmp_path / "cut", (whole, resumed))
    assert "the checkpoint was written on cuda, this run is on cpu: weights and states are taken over" in caplog.text


def test_without_the_generators_the_runs_differ(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    whole = fit(tmp_path / "whole")
    killed(tmp_path / "cut", 7)
    monkeypatch.setattr(RngState, "load_state_dict", lambda self, state: None)
    resumed = fit(tmp_path / "cut", resume="auto")
    assert not all(torch.equal(a, b) for a, b in zip(whole.parameters(), resumed.parameters(), strict=True))


def test_generators_come_back_from_tensors_and_plain_values(tmp_path: Path) -> None:
    random.gauss(0, 1)  # leaves a second value behind, which is part of the state
    np.random.randn()
    torch.save(capture_rng(), tmp_path / "rng.pt")
    drawn = (random.gauss(0, 1), random.random(), np.random.randn(), np.random.rand(), torch.rand(2).tolist())
    restore_rng(torch.load(tmp_path / "rng.pt", weights_only=True))
    assert drawn == (random.gauss(0, 1), random.random(), np.random.randn(), np.random.rand(), torch.rand(2).tolist())


def test_a_state_that_was_not_used_yet_is_handed_on() -> None:
    """A resumed run that is saved before its first batch must not save its own start instead."""
    state = capture_rng()
    callback = RngState()
    callback.load_state_dict(state)
    torch.rand(3)
    assert callback.state_dict() is state
