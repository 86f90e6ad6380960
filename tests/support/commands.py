"""The command in a process of its own, forked from a server that has imported what runs need: a start costs a tenth of
a fresh interpreter's. What is to be shown of a fresh one has the fixture `run_python`."""

import os
import runpy
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from multiprocessing.context import ForkServerProcess
from pathlib import Path
from typing import Any

from baoc.cli.main import main
from baoc.models import MODELS
from baoc.sweep import forkserver
from tests.support.forked_python import fork_for_children
from tests.support.waiting import PATIENCE_S

# By runs, of which most plan and train a ViT, and by workers of studies.
NEEDED = (
    forkserver.PRELOAD, MODELS["vit"].module, *MODELS["vit"].imports, "baoc.sweep.study", "tests.support.measured_steps"
)  # fmt: skip


def with_server() -> None:
    """Has the server of this process, if it is still to start, import what runs need."""
    forkserver.preload(*NEEDED)


def take_environment(variables: Mapping[str, str]) -> None:
    """Makes them this process's environment, which a fork has from the server as that began."""
    for gone in os.environ.keys() - variables.keys():
        del os.environ[gone]
    os.environ.update(variables)


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
    return _start(partial(_run, main, words), arguments=words, folder=folder, cwd=cwd, variables=variables)


def start_script(script: Path, *arguments: str, folder: Path, cwd: Path | None = None, **variables: str) -> Command:
    """As `start`, of a script."""
    body = partial(_run, partial(runpy.run_path, run_name="__main__"), str(script))
    return _start(body, arguments=arguments, folder=folder, cwd=cwd, variables=variables)


def _start(
    body: Callable[[], None],
    *,
    arguments: Sequence[str],
    folder: Path,
    cwd: Path | None,
    variables: dict[str, str],
) -> Command:
    with_server()
    folder.mkdir(parents=True, exist_ok=True)
    log = folder / "command.log"
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "WANDB_MODE": "disabled", **variables}
    process = forkserver.start(
        partial(_within, cwd or Path.cwd(), environment, folder, body),
        log=log,
        lock=folder / "command.lock",
        arguments=arguments,
        variables=environment,
    )
    return Command(process=process, log=log)


def _within(cwd: Path, environment: dict[str, str], folder: Path, body: Callable[[], None]) -> None:
    from tests.support.training_runs import brief  # whose imports the server has made, and this process need not

    take_environment(environment)
    with brief():  # in its own forks too
        fork_for_children(folder, take_environment)
        os.chdir(cwd)
        body()


def _run(program: Callable[[Any], Any], given: Any) -> None:
    """Ends the process with what the program returns, if that is an exit code."""
    code = program(given)
    sys.exit(code if isinstance(code, int) else 0)
