"""The table of exit codes in docs/troubleshooting.md is what happens: each of its rows at each command."""

import errno
import json
import os
import signal
import subprocess
import sys
from collections.abc import Callable, Iterable
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

from baoc import __main__ as package
from baoc.cli.main import main
from baoc.core import own_code
from baoc.errors import (
    BadInputError,
    BudgetBreachedError,
    CheckpointError,
    InfeasibleBudgetError,
    PreemptedError,
    TrainingFailedError,
)
from baoc.frontier import report
from baoc.sweep import status
from tests.support.commands import start
from tests.support.paths import ROOT

pytestmark = [pytest.mark.slow, pytest.mark.usefixtures("own_logging")]

_ROWS = [row.rsplit("|", 2) for row in (ROOT / "docs/troubleshooting.md").read_text().splitlines() if row[:2] == "| "]
CODES = {text.strip("| "): int(code) for text, code, _ in _ROWS if code.strip().isdigit()}  # of endings

# What befalls a command in the midst of its work, by the first words of its row.
BEFALLS: dict[str, Callable[[], BaseException]] = {
    "a bug": lambda: ZeroDivisionError("oops"),
    "a wrong value": lambda: BadInputError("no"),
    "a path": lambda: CheckpointError("torn"),
    "a package": lambda: ModuleNotFoundError("x", name="wandb"),
    "a full disk": lambda: OSError(errno.ENOSPC, "No space left on device", "x"),
    "an infeasible": lambda: InfeasibleBudgetError("least is 2", budget_bytes=1, least_feasible_bytes=2),
    "a budget breached": lambda: BudgetBreachedError("held more"),
    "memory that": lambda: MemoryError(),
    "training that": lambda: TrainingFailedError("the loss is nan"),
    "Ctrl-C": KeyboardInterrupt,
    "a signal": lambda: PreemptedError("SIGTERM"),
    "a reader": lambda: BrokenPipeError(errno.EPIPE, "Broken pipe"),
}
# Each of these is refused by one command only, and tested there or in a test of its own.
APART = {"done", "a fault of your own code", "another process"}
SOME = ("an infeasible", "Ctrl-C")
DOORS: dict[str, tuple[str, list[str], Iterable[str]]] = {  # what raises, the command's words, and what is tried there
    "run.py": ("run", [], BEFALLS),
    "mode=plan": ("run", ["mode=plan"], SOME),
    "mode=eval": ("run", ["mode=eval", "resume=old"], SOME),
    "mode=race": ("baoc.sweep.race.race_command", ["mode=race"], SOME),
    "-m": ("run", ["-m", "seed=3"], (*SOME, "a reader")),
    "sweeps": (
        "baoc.sweep.study.run_study",
        ["-m", "sweeps=frontier_vision", "hydra.sweep.dir=study"],
        (*SOME, "a reader"),
    ),
    "list": ("baoc.cli.main.list_lines", ["--list", "specs"], BEFALLS),
}
COMMANDS: dict[str, tuple[str, Callable[..., int]]] = {
    "report": ("baoc.frontier.report.build_report", report.main),
    "status": ("baoc.sweep.status.load_study", status.main),
}


def code_of(ending: str) -> int:
    (code,) = {code for text, code in CODES.items() if text.startswith(ending) or f", or {ending} (" in text}
    return code


def test_each_row_is_tried():
    tried = [*BEFALLS, *APART]
    assert all(any(text.startswith(words) for words in tried) for text in CODES) and len(CODES) > 12
    assert {code_of(ending) for ending in tried} == {0, 1, 2, 3, 4, 5, 130}


@pytest.fixture
def befalling(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Callable[[str, BaseException], None]:
    """`befalling(name, error)`: what bears the name raises the error. Runs in tmp_path, where `old` is a run."""
    (tmp_path / "old").mkdir()
    monkeypatch.chdir(tmp_path)
    training = ModuleType("baoc.training.run")
    monkeypatch.setattr(training, "run", None, raising=False)
    monkeypatch.setitem(sys.modules, "baoc.training.run", training)
    monkeypatch.setattr(os, "dup2", lambda *_: None)  # the reader of the tests' output is still there
    own_code.forget_used()

    def install(name: str, error: BaseException) -> None:
        def body(*_: Any, **__: Any) -> None:
            raise error

        (tmp_path / "study").mkdir(exist_ok=True)  # which goes with what befell it, as nothing was done
        (tmp_path / "study" / "study.json").write_text("{}")  # its space was checked when it began
        if name == "run":
            monkeypatch.setattr(training, name, body)
        else:
            monkeypatch.setattr(name, body)

    return install


@pytest.mark.parametrize("door", DOORS)
def test_what_befalls_a_run_or_a_study(door: str, befalling: Callable[..., None], capsys: pytest.CaptureFixture[str]):
    name, words, endings = DOORS[door]
    for at, ending in enumerate(endings):
        error = BEFALLS[ending]
        befalling(name, error())
        folder = [] if {"-m", "--list"} & {*words} else [f"hydra.run.dir=run{at}"]
        assert main([*words, *folder]) == code_of(ending), ending
        assert ("Traceback" in capsys.readouterr().err) == (ending == "a bug"), ending
        if name != "run" or "-m" in words:
            continue
        kept = json.loads(Path(f"run{at}", "error.json").read_text())
        assert (kept["kind"], kept["exit_code"]) == (type(error()).__name__, code_of(ending))


@pytest.mark.parametrize("name", COMMANDS)
def test_what_befalls_another_command(name: str, befalling: Callable[..., None], capsys: pytest.CaptureFixture[str]):
    inside, command = COMMANDS[name]
    for ending, error in BEFALLS.items():
        befalling(inside, error())
        if ending == "a bug":  # Python shows the traceback and ends with 1
            with pytest.raises(ZeroDivisionError):
                command(["x"])
            continue
        assert command(["x"]) == code_of(ending), ending
        shown = capsys.readouterr().err
        assert shown.startswith("baoc: ") == (ending != "a reader") and shown.count("\n") <= 2, ending


def test_what_is_refused_at_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]):
    monkeypatch.chdir(tmp_path)
    for words in (
        "optim.lr=abc", "model=vitt", "resume=nowhere", "mode=eval resume=nowhere",
        "mode=train budget=lots", "mode=rice", "recipe=nowhere.yaml", "sweeps=frontier_vision", "-m sweeps=nothing",
        "-m sweeps=frontier_vision hydra.sweeper.workers=0", "-m sweeps=frontier_vision optim.lr=abc", "--list specz",
    ):  # fmt: skip
        monkeypatch.setattr(sys, "argv", ["baoc", *words.split()])
        assert package.main() == code_of("a wrong value") == code_of("a path"), words
    assert report.main(["nowhere"]) == status.main(["nowhere"]) == code_of("a path")
    assert "Traceback" not in capsys.readouterr().err
    for command in (report.main, status.main):
        with pytest.raises(SystemExit, match=str(code_of("a wrong value"))):
            command(["--nothing"])


@pytest.mark.parametrize("words", [["mode=plan"], ["mode=race"]], ids=str)
def test_a_budget_that_no_plan_meets(words: list[str], tmp_path: Path):
    code, told = start(*words, "budget=1kb", "model.size=tiny", "device=cpu", folder=tmp_path, cwd=tmp_path).done()
    assert code == code_of("an infeasible") and "budget 1kb" in told and "Traceback" not in told, told


def test_full_output_and_a_reader_that_has_gone(run_python):
    full = "import os, sys\nos.dup2(os.open('/dev/full', os.O_WRONLY), 1)\n"
    gone = "import os, sys\nreading, writing = os.pipe()\nos.close(reading)\nos.dup2(writing, 1)\n"
    for words in (["--list", "specs"], ["--version"]):
        body = f"import runpy\nsys.argv = ['x', *{words}]\nrunpy.run_module('baoc', run_name='__main__')\n"
        done = run_python(full + body)
        assert done.returncode == code_of("a full disk") and done.stderr == (
            "baoc: error: no space left for what the command prints or a file beside it: free space where its standard "
            "output goes, or send that (>FILE) and what it writes (hydra.run.dir=PATH) elsewhere\n"
        )
        done = run_python(gone + body)
        assert (done.returncode, done.stderr) == (code_of("a reader"), "")


def test_a_status_that_is_shown_again_and_again_ends_at_ctrl_c(monkeypatch: pytest.MonkeyPatch):
    shown: list[str] = []
    monkeypatch.setattr(status, "load_study", lambda *_, **__: (None, {}, 3))

    def show(*_: Any, **__: Any) -> status.Status:
        shown.append("once more")
        if len(shown) == 3:
            signal.raise_signal(signal.SIGINT)
        zero = dict.fromkeys(("done", "violated", "pruned", "failed", "on_front"), 0)
        return status.Status(total=3, running=3, remaining_s=None, best=(), **zero)

    monkeypatch.setattr(status, "show", show)
    before = signal.signal(signal.SIGINT, signal.default_int_handler)  # a shell's background jobs ignore it
    try:
        assert status.main(["x", "--every", "0.01"]) == code_of("Ctrl-C")
    finally:
        signal.signal(signal.SIGINT, before)


@pytest.mark.parametrize("closed", [">&-", "<&- >&- 2>&-", "2>/dev/full"])
@pytest.mark.parametrize(
    ("words", "ending"), [("baoc --list specs", "done"), ("baoc.frontier.report nowhere", "a path")]
)
def test_a_command_without_standard_streams_ends_as_with_them(words: str, ending: str, closed: str, tmp_path: Path):
    shell = f"exec {sys.executable} -m {words} {closed}"
    done = subprocess.run(["sh", "-c", shell], cwd=tmp_path, env={**os.environ, "PYTHONPATH": str(ROOT)}, check=False)
    assert done.returncode == code_of(ending)
