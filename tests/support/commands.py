"""The command in a process of its own, forked from a server that has imported what runs need: a start costs a tenth of
a fresh interpreter's. What is to be shown of a fresh one has the fixture `run_python`."""

import os
import sys
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from multiprocessing.context import ForkServerProcess
from pathlib import Path

from baoc.cli.main import main
from baoc.sweep import forkserver
from tests.support.waiting import PATIENCE_S


def with_server() -> None:
    """Has the server of this process, if it is still to start, import what trials need."""
    forkserver.preload(forkserver.PRELOAD)


@dataclass(frozen=True, kw_only=True)
class Command:
    process: ForkServerProcess
    log: Path

    @property
    def pid(self) -> int:
        assert self.process.pid is not None
        return self.process.pid

    def signal(self, number: int) -> None:
        os.kill(self.pid, number)

    def done(self) -> tuple[int, str]:
        """(exit code, what it printed), when it has ended."""
        self.process.join(PATIENCE_S)
        code = self.process.exitcode
        if code is None:
            self.process.kill()
        told = self.log.read_text()
        assert code is not None, f"it does not end: {told}"
        return code, told


def start(*words: str, folder: Path, cwd: Path | None = None, **variables: str) -> Command:
    """`python run.py WORDS` with these variables besides the environment's; its log and lock lie in `folder`."""
    with_server()
    folder.mkdir(parents=True, exist_ok=True)
    log = folder / "command.log"
    process = forkserver.start(
        partial(_run, main, words, cwd or Path.cwd()),
        log=log,
        lock=folder / "command.lock",
        arguments=words,
        variables={"OMP_NUM_THREADS": "1", "WANDB_MODE": "disabled", **variables},
    )
    return Command(process=process, log=log)


def _run(command: Callable[..., int], words: tuple[str, ...], cwd: Path) -> None:
    os.chdir(cwd)
    sys.exit(command(words))
