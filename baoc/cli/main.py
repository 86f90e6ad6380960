"""The command `python run.py ...`, also installed as the console script `baoc`. Imports nothing heavy."""

import os
import shutil
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

import hydra
from hydra._internal.utils import get_args_parser

import baoc
from baoc.cli import jobs, ranks, usage
from baoc.cli.failures import failure_of, report
from baoc.cli.listing import LISTS, list_lines
from baoc.cli.waiting import sleep_where_shared
from baoc.config import assets
from baoc.config.compose import VERSION_BASE
from baoc.config.nodes import register, with_option_names
from baoc.core.budgets import parse_budget
from baoc.core.commands import open_missing_streams
from baoc.errors import BadInputError
from baoc.parallel import current_rank, refuse_several_processes
from baoc.units import GIB, format_bytes

# Python, torch and SciPy map 1.2 to 1.5 GB before training, with torch 2.13 for CPUs. With less, imports fail in many
# ways and OpenBLAS waits for ever.
_MIN_ADDRESS_SPACE = 2 * GIB
_FULL_ERROR = "HYDRA_FULL_ERROR"  # makes Hydra raise its errors instead of exiting with 1


def main(argv: Sequence[str] | None = None, *, single: bool = False) -> int:
    """Runs a command line and returns its exit code (docs/troubleshooting.md).

    `single`: the command is one run, such as a trial, so that Hydra need compose only once.
    """
    open_missing_streams()
    argv = list(sys.argv[1:] if argv is None else argv)
    jobs.reset_state(argv)
    if "torch" not in sys.modules:
        sleep_where_shared()
    try:
        if not _print_information(argv):
            _check_address_space()
            argv = jobs.with_race_command(argv)
            if (rank := current_rank()) is not None and _is_run(argv) and ranks.join(rank):
                return ranks.serve()
            register(_overrides(argv))
            argv = with_option_names(argv)
            if single:
                with _composed_once():
                    _run_hydra(argv)
            else:
                _run_hydra(argv)
        sys.stdout.flush()
        code = 0
    except (Exception, SystemExit, KeyboardInterrupt) as error:
        failure = failure_of(error)
        report(failure)
        code = failure.exit_code
    code = _finish(code)
    ranks.leave(code)
    return code


def _check_address_space() -> None:
    try:
        import resource
    except ImportError:  # Windows
        return
    limit, _ = resource.getrlimit(resource.RLIMIT_AS)
    if 0 <= limit < _MIN_ADDRESS_SPACE:  # RLIM_INFINITY is -1
        raise BadInputError(
            f"the address space is limited to {format_bytes(limit)} (ulimit -v), and Python with torch maps up to "
            f"{format_bytes(_MIN_ADDRESS_SPACE)} before anything is trained: raise the limit, best with `ulimit -v "
            "unlimited`; budget=SIZE limits what a run holds"
        )


def _print_information(argv: Sequence[str]) -> bool:
    """Handles --list, --version and --help, which need no Hydra. Returns False if none of them is in `argv`."""
    if any(word.split("=")[0] == "--list" for word in argv):
        print("\n".join(list_lines(_list_name(argv))))
    elif "--version" in argv:
        print(f"baoc {baoc.__version__}")
    elif "--help" in argv or "-h" in argv:
        print(usage.help_text(_overrides(argv)))
    else:
        return False
    return True


def _is_run(argv: Sequence[str]) -> bool:
    """Whether a command of several ranks is a run, not one for which Hydra only prints. Raises BadInputError for a
    study or multirun: a launcher of ranks can start one run only."""
    flags, _ = get_args_parser().parse_known_args(argv)
    if flags.cfg or flags.info or flags.shell_completion:
        return False
    if any(word.startswith("sweeps=") for word in argv):
        refuse_several_processes("study")
    if flags.multirun:
        refuse_several_processes("multirun")
    return True


def _finish(code: int) -> int:
    """Reports the frontier of a multirun. Returns the command's exit code, else that of its first failed job, else that
    of a frontier that cannot be written."""
    sweep_dir, frontier_code = jobs.STATE.sweep_dir, 0
    # A folder that could not be made or is gone tells nothing; `Path.is_dir` raises for a name that is too long.
    if sweep_dir is None or not os.path.isdir(sweep_dir):
        failures = jobs.STATE.failures
    else:
        is_study = (sweep_dir / "study.lock").exists()
        failures = [] if is_study else jobs.read_failures(sweep_dir)  # a study has reported its failures itself
        if is_study and code == BadInputError.exit_code:
            pass  # refused; a frontier of earlier trials would hide the message
        elif is_study or any(entry.is_dir() for entry in sweep_dir.glob("*")):
            frontier_code = _report_frontier(sweep_dir)
        else:  # refused before its first job
            shutil.rmtree(sweep_dir)
    return code or next((failure.exit_code for failure in failures), frontier_code)


def _report_frontier(sweep_dir: Path) -> int:
    """Writes the frontier and prints where it is. Returns 0, or the exit code of the error, which it reports. What
    fails once the frontier is written, such as W&B, does not fail the command."""
    is_written = False
    try:
        if any(sweep_dir.glob("*/plan.json")):
            from baoc.frontier.planned import write_planned_frontier

            print(f"compare them in {write_planned_frontier(sweep_dir)}")
            return 0
        # Repeats of a trial are one folder deeper.
        if not any(sweep_dir.glob("*/result.json")) and not any(sweep_dir.glob("*/*/result.json")):
            print("no run has finished, so there is no frontier", file=sys.stderr)
            return 0
        from baoc.frontier.build import write_frontier
        from baoc.frontier.picture import render_picture
        from baoc.frontier.wandb_frontier import log_frontier

        frontier = write_frontier(sweep_dir)
        is_written = True
        print(f"compare them in {sweep_dir / 'frontier.html'}")
        if (sweep_dir / "study.lock").exists():  # studies run unattended, and their picture is sent around
            render_picture(sweep_dir / "frontier.html")
        log_frontier(sweep_dir, frontier)
        return 0
    except Exception as error:
        failure = failure_of(error)
        report(failure, where="frontier: ")
        return 0 if is_written else failure.exit_code


def _list_name(argv: Sequence[str]) -> str:
    """NAME of `--list NAME` or `--list=NAME`. Raises BadInputError without one."""
    for index, word in enumerate(argv):
        if word.startswith("--list="):
            return word.removeprefix("--list=")
        if word == "--list" and index + 1 < len(argv):
            return argv[index + 1]
    raise BadInputError(f"--list of what? allowed: {', '.join(LISTS)}")


def _overrides(argv: Sequence[str]) -> list[str]:
    """The overrides of a command line; during shell completion, those of the line that is being completed."""
    if "COMP_LINE" in os.environ:
        argv = os.environ["COMP_LINE"].split()
        return [word for word in argv if not word.startswith("budget=") or _is_budget(word)]
    return [word for word in argv if not word.startswith("-")]


def _is_budget(word: str) -> bool:
    try:
        parse_budget(word.removeprefix("budget="))
    except BadInputError:
        return False
    return True


@contextmanager
def _composed_once() -> Iterator[None]:
    """Keeps Hydra from composing a first time for hydra.mode alone, which takes a sixth of a second per trial. Without
    that mode Hydra follows the command line, which asks for one run."""
    from hydra._internal.hydra import Hydra

    get_mode = Hydra.get_mode
    Hydra.get_mode = lambda *_, **__: None
    try:
        yield
    finally:
        Hydra.get_mode = get_mode


def _run_hydra(argv: Sequence[str]) -> None:
    """Runs Hydra with `argv` as the process's command line; raises its errors and restores sys.argv and the flag."""
    old_argv, old_flag = sys.argv, os.environ.get(_FULL_ERROR)
    sys.argv, os.environ[_FULL_ERROR] = [old_argv[0], *argv], "1"
    try:
        hydra.main(config_path=str(assets.conf()), config_name="config", version_base=VERSION_BASE)(jobs.run_job)()
    finally:
        sys.argv = old_argv
        if old_flag is None:
            del os.environ[_FULL_ERROR]
        else:
            os.environ[_FULL_ERROR] = old_flag
