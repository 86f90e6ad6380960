"""The command: `python run.py ...` and the console script `baoc`, which are the same. Imports nothing heavy."""

import os
import shutil
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

import hydra

import baoc
from baoc.cli import jobs, usage
from baoc.cli.failures import INTERRUPTED, failure_of, report
from baoc.cli.listing import LISTS, lines
from baoc.config import assets
from baoc.config.compose import VERSION_BASE
from baoc.config.nodes import register, with_recipe_files
from baoc.core.budgets import parse_budget
from baoc.errors import BadInputError
from baoc.parallel import refuse_ranks

# What one command may ask Hydra for
_WAYS = (("-m", "--multirun"), ("-r", "--run"), ("-c", "--cfg"), ("-i", "--info"), ("-sc", "--shell-completion"))
_FULL_ERROR = "HYDRA_FULL_ERROR"  # with it, Hydra raises its errors instead of printing them and exiting with 1


def main(argv: Sequence[str] | None = None, *, single: bool = False) -> int:
    """Run a command line and return its exit code (docs/troubleshooting.md).

    `single`: it is one run, as a trial's is.
    """
    given = list(sys.argv[1:] if argv is None else argv)
    jobs.begin(given)
    try:
        if not _answer(given):
            _refuse_two_ways(given)
            if not _shows(given):
                refuse_ranks("study" if any(word.startswith("sweeps=") for word in given) else "run")
            register(_overrides(given))
            given = with_recipe_files(given)
            if single:
                with _composed_once():
                    _run_hydra(given)
            else:
                _run_hydra(given)
        sys.stdout.flush()
        code = 0
    except BrokenPipeError:  # the reader went away, as in `--list specs | head`
        os.dup2(os.open(os.devnull, os.O_WRONLY), 1)
        return INTERRUPTED
    except (Exception, SystemExit, KeyboardInterrupt) as error:
        failure = failure_of(error)
        report(failure)
        code = failure.exit_code
    return _close(code)


def _answer(given: Sequence[str]) -> bool:
    """Answer what needs no Hydra run: --list, --version, --help. False if `given` asks for none of them."""
    if any(word.split("=")[0] == "--list" for word in given):
        print("\n".join(lines(_list_name(given))))
    elif "--version" in given:
        print(f"baoc {baoc.__version__}")
    elif "--help" in given or "-h" in given:
        print(usage.text(_overrides(given)))
    else:
        return False
    return True


def _refuse_two_ways(given: Sequence[str]) -> None:
    """Hydra's own refusal is a ValueError, which would be told as a bug."""
    flags = [word.split("=")[0] for word in given if word.startswith("-")]
    ways = {names: flag for flag in reversed(flags) for names in _WAYS if _spells(flag, *names)}
    found = [ways[names] for names in _WAYS if names in ways]
    if len(found) > 1:
        shown = "python run.py sweeps=NAME --cfg hydra -p hydra.sweeper"
        rest = f"; what a sweep is made of is shown without -m: {shown}" if _WAYS[0] in ways else ""
        raise BadInputError(f"{' and '.join(found)} exclude each other: leave one out{rest}")


def _shows(given: Sequence[str]) -> bool:
    """Whether Hydra is asked to tell something, and nothing is run."""
    return any(_spells(word.split("=")[0], *names) for word in given for names in _WAYS[2:] if word.startswith("-"))


def _spells(flag: str, short: str, long: str) -> bool:
    """Whether Hydra's parser takes `flag` for this one: the beginning of a long name will do, and -cjob for -c job."""
    begun = len(flag) > 2 and long.startswith(flag)
    return begun or flag == short or (short == "-c" and flag.removeprefix(short) in ("job", "hydra", "all"))


def _close(code: int) -> int:
    """After a multirun, show its frontier. The exit code is the command's, else that of its first failed job."""
    sweep_dir = jobs.SESSION.sweep_dir
    study = sweep_dir is not None and (sweep_dir / "study.lock").exists()  # it has told its failures itself
    failures = jobs.SESSION.failures if sweep_dir is None else [] if study else jobs.failed_jobs(sweep_dir)
    if sweep_dir is not None and sweep_dir.is_dir():
        if study and code == BadInputError.exit_code:
            pass  # refused; what is there already would hide why
        elif study or any(entry.is_dir() for entry in sweep_dir.iterdir()):
            _show_frontier(sweep_dir)
        else:  # refused before its first job
            shutil.rmtree(sweep_dir)
    return code or next((failure.exit_code for failure in failures), 0)


def _show_frontier(sweep_dir: Path) -> None:
    if any(sweep_dir.glob("*/plan.json")):
        from baoc.frontier.planned import planned_frontier

        print(f"compare them in {planned_frontier(sweep_dir)}")
        return
    if not any(found for depth in ("*", "*/*") for found in sweep_dir.glob(f"{depth}/result.json")):  # seeds of a trial
        print("no run has finished, so there is no frontier", file=sys.stderr)
        return
    try:
        from baoc.frontier.folders import frontier_of
        from baoc.frontier.picture import picture_of
        from baoc.frontier.wandb_frontier import log_frontier

        found = frontier_of(sweep_dir)
        print(f"compare them in {sweep_dir / 'frontier.html'}")
        if (sweep_dir / "study.lock").exists():  # a multirun is looked at; a study is mailed around in the morning
            picture_of(sweep_dir / "frontier.html")
        log_frontier(sweep_dir, found)
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
    """The words of a command line that are overrides; while a shell completes one, its words instead."""
    if "COMP_LINE" in os.environ:
        words = os.environ["COMP_LINE"].split()
        return [word for word in words if not word.startswith("budget=") or _reads_as_budget(word)]
    return [word for word in argv if not word.startswith("-")]


def _reads_as_budget(word: str) -> bool:
    try:
        parse_budget(word.removeprefix("budget="))
    except BadInputError:
        return False
    return True


@contextmanager
def _composed_once() -> Iterator[None]:
    """Hydra composes every command line twice, the first time to read hydra.mode alone: a sixth of a second of each
    trial. Without an answer it goes by the command line, which asks for one run."""
    from hydra._internal.hydra import Hydra

    get_mode = Hydra.get_mode
    Hydra.get_mode = lambda *_, **__: None
    try:
        yield
    finally:
        Hydra.get_mode = get_mode


def _run_hydra(argv: Sequence[str]) -> None:
    """Hydra on `argv` as the process's command line, raising its errors; both are put back."""
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
