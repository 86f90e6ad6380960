"""The command: `python run.py ...` and the console script `baoc`, which are the same. Imports nothing heavy."""

import os
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

import hydra

import baoc
from baoc.config import assets, jobs, usage
from baoc.config.compose import VERSION_BASE
from baoc.config.failures import failure_of, report
from baoc.config.listing import LISTS, lines
from baoc.config.nodes import register
from baoc.errors import BadInputError

_FULL_ERROR = "HYDRA_FULL_ERROR"  # with it, Hydra raises its errors instead of printing them and exiting with 1


def main(argv: Sequence[str] | None = None) -> int:
    """Run a command line and return its exit code (README, "Exit codes")."""
    given = list(sys.argv[1:] if argv is None else argv)
    jobs.begin(given)
    try:
        if any(word.split("=")[0] == "--list" for word in given):
            print("\n".join(lines(_list_name(given))))
            return 0
        if "--version" in given:
            print(f"baoc {baoc.__version__}")
            return 0
        if "--help" in given or "-h" in given:
            print(usage.text(_overrides(given)))
            return 0
        register(_overrides(given))
        with _as_command(given):
            hydra.main(config_path=str(assets.conf()), config_name="config", version_base=VERSION_BASE)(jobs.run_job)()
        code = 0
    except (Exception, SystemExit, KeyboardInterrupt) as error:
        failure = failure_of(error)
        report(failure)
        code = failure.exit_code
    return _close(code)


def _close(code: int) -> int:
    """After a multirun, show its frontier. The exit code is the command's own, else that of the first failed job."""
    sweep_dir = jobs.SESSION.sweep_dir
    failures = jobs.failed_jobs(sweep_dir) if sweep_dir is not None else jobs.SESSION.failures
    if sweep_dir is not None and sweep_dir.is_dir():
        _show_frontier(sweep_dir)
    return code or next((failure.exit_code for failure in failures), 0)


def _show_frontier(sweep_dir: Path) -> None:
    if not any(sweep_dir.glob("*/result.json")):
        print("no run has finished, so there is no frontier", file=sys.stderr)
        return
    from baoc.sweep import frontier_of

    try:
        frontier_of(sweep_dir)
    except Exception as error:
        report(failure_of(error), where="frontier: ")


def _list_name(argv: Sequence[str]) -> str:
    for at, word in enumerate(argv):
        if word.startswith("--list="):
            return word.removeprefix("--list=")
        if word == "--list" and at + 1 < len(argv):
            return argv[at + 1]
    raise BadInputError(f"--list of what? allowed: {', '.join(LISTS)}")


def _overrides(argv: Sequence[str]) -> list[str]:
    return [word for word in argv if not word.startswith("-")]


@contextmanager
def _as_command(argv: Sequence[str]) -> Iterator[None]:
    """Inside, `argv` is the process's command line and Hydra raises its errors; both are put back."""
    old_argv, old_flag = sys.argv, os.environ.get(_FULL_ERROR)
    sys.argv, os.environ[_FULL_ERROR] = [old_argv[0], *argv], "1"
    try:
        yield
    finally:
        sys.argv = old_argv
        if old_flag is None:
            del os.environ[_FULL_ERROR]
        else:
            os.environ[_FULL_ERROR] = old_flag
