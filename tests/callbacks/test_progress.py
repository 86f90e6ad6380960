"""One bar for a whole run on a terminal, a few plain lines elsewhere, and none where it was switched off."""

import io
import re
import sys
from typing import Any

import lightning as L
import pytest
import torch

from baoc.callbacks.progress import RunProgress
from baoc.tracking.console import make_console
from tests.support.tiny import TinyBatches, TinyLoader, TinyModule, tiny_trainer


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


def fit(bar: Any, *others: L.Callback, module: TinyModule | None = None, **options: Any) -> None:
    trainer = tiny_trainer(callbacks=[bar, *others], enable_progress_bar=True, **options)
    trainer.fit(module or TinyModule(), TinyLoader(), TinyBatches())


def test_plain_output_has_a_line_each_tenth_of_the_run(capsys: pytest.CaptureFixture[str]) -> None:
    fit(RunProgress(), max_steps=20)
    lines = capsys.readouterr().out.splitlines()
    assert [line.split(",")[0] for line in lines] == [f"step {step}/20" for step in range(2, 21, 2)]
    # the line of step 20 is written before that epoch of 2 batches is validated
    assert re.fullmatch(r"step 20/20, \d+ s, 0 s left  train/loss \S+  val/loss \S+ \(step 18\)", lines[-1])
    assert not any("\x1b" in line for line in lines)


def test_steps_are_optimizer_steps(capsys: pytest.CaptureFixture[str]) -> None:
    fit(RunProgress(plain_lines=3), max_steps=3, accumulate_grad_batches=2)
    lines = capsys.readouterr().out.splitlines()
    assert [line.split(",")[0] for line in lines] == ["step 1/3", "step 2/3", "step 3/3"]


def test_epochs_are_turned_into_steps(capsys: pytest.CaptureFixture[str]) -> None:
    fit(RunProgress(plain_lines=1), max_steps=-1, max_epochs=2)
    assert capsys.readouterr().out.startswith("step 12/12")


def test_a_terminal_gets_one_bar_and_prints_go_above_it(monkeypatch: pytest.MonkeyPatch) -> None:
    terminal = Terminal()
    monkeypatch.setattr(sys, "stdout", terminal)
    monkeypatch.setenv("COLUMNS", "160")
    monkeypatch.setenv("TERM", "xterm")

    class Talking(L.Callback):
        def on_train_batch_end(self, trainer: L.Trainer, *_: Any) -> None:
            if trainer.global_step == 3:
                bar.print("a line of its own")

    bar = RunProgress()
    fit(bar, Talking(), max_steps=8)
    assert sys.stdout is terminal, "the bar gave stdout back"
    assert make_console() is not make_console(), "and prints go to stdout again"
    erased_is_gone = terminal.getvalue().replace("\x1b[2K", "\n")
    out = re.sub(r"\x1b\[[0-9;?]*[a-zA-Z]", "", erased_is_gone)
    assert "8/8" in out and "val/loss" in out
    assert "a line of its own" in [line.strip() for line in out.replace("\r", "\n").splitlines()]


def test_a_failure_gives_the_terminal_back(monkeypatch: pytest.MonkeyPatch) -> None:
    class Failing(TinyModule):
        def training_step(self, batch: torch.Tensor, batch_idx: int) -> torch.Tensor:
            raise RuntimeError("stop")

    terminal = Terminal()
    monkeypatch.setattr(sys, "stdout", terminal)
    with pytest.raises(RuntimeError, match="stop"):
        fit(RunProgress(), module=Failing())
    assert sys.stdout is terminal
    assert terminal.getvalue().rstrip("\n").endswith("\x1b[?25h"), "the cursor is shown again"


def test_switched_off(capsys: pytest.CaptureFixture[str]) -> None:
    bar = RunProgress()
    bar.disable()
    fit(bar)
    assert capsys.readouterr().out == ""
