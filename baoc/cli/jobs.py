"""One job of a command: its folder, its race and run, and the record of its failure, which does not stop other jobs.

Hydra calls `run_job` in this process or in a launcher's, so failures are recorded in the job's folder.
"""

import shlex
import shutil
import sys
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field, replace
from importlib import import_module
from pathlib import Path
from typing import Any

from hydra.core.hydra_config import HydraConfig
from hydra.experimental.callback import Callback
from hydra.types import RunMode
from omegaconf import DictConfig

from baoc import __version__
from baoc.cli.failures import Failure, failure_of, report
from baoc.cli.ranks import is_nonzero_rank, leave, serve, with_all_ranks
from baoc.cli.run_lock import FolderInUseError, lock_folder
from baoc.config.from_hydra import from_hydra, write_config
from baoc.config.nodes import as_typed
from baoc.config.schema import RiskConfig, RunConfig, changed_keys
from baoc.core import own_code
from baoc.core.commands import INTERRUPTED
from baoc.core.recipes import choosing_nothing
from baoc.errors import BadInputError, OutputError
from baoc.tracking.files import read_record, write_json

ERROR_FILE = "error.json"
RACES = "baoc.sweep.race"  # imported by name, because it is above this stage: races run as studies
RACE_SETUP_FILE = "race_setup.json"  # the command line of a race, with which it is resumed
_EARLY_FILES = (".hydra", "baoc.log", ERROR_FILE)  # files of a job that failed before its configuration was read


@dataclass(slots=True, kw_only=True)
class CommandState:
    """State of the command that this process runs."""

    argv: tuple[str, ...] = ()
    failures: list[Failure] = field(default_factory=list)  # of jobs in this process
    sweep_dir: Path | None = None  # of a multirun


STATE = CommandState()


class RememberMultirun(Callback):
    """Hydra callback that records a multirun's folder; only the parent process sees it."""

    def on_multirun_start(self, config: DictConfig, **kwargs: Any) -> None:
        STATE.sweep_dir = Path(config.hydra.sweep.dir)


def reset_state(argv: Sequence[str]) -> None:
    """Resets STATE and `own_code` at the start of a command."""
    STATE.argv, STATE.failures, STATE.sweep_dir = tuple(argv), [], None
    own_code.forget_used()


def run_job(config: DictConfig) -> None:
    """Runs one composed configuration. Failures are reported and recorded. Only an interrupt is raised.

    If a launcher starts several ranks per job (submitit with tasks_per_node or nodes), rank 0 does this, and the other
    ranks join its run.
    """
    if HydraConfig.get().mode == RunMode.RUN:
        _run_job(config)
        return
    if is_nonzero_rank():
        serve()  # rank 0 reports failures
        return
    num_failures = len(STATE.failures)
    try:
        _run_job(config)
    finally:
        leave(STATE.failures[num_failures].exit_code if len(STATE.failures) > num_failures else 0)


def _run_job(config: DictConfig) -> None:
    hydra = HydraConfig.get()
    run_dir = Path(hydra.runtime.output_dir)
    is_single_run = hydra.mode == RunMode.RUN
    overrides = as_typed(hydra.overrides.task)
    if not is_single_run:
        print(f"\n--- run {hydra.job.num}: {' '.join(overrides) or 'defaults'}", flush=True)
    try:
        if is_single_run and (study := hydra.runtime.choices.get("sweeps")):
            raise BadInputError(
                f"sweeps={study} is a study of many runs: start it with -m, as in python run.py -m sweeps={study}"
            )
        with lock_folder(run_dir):
            run_config = _set_up_folder(config, run_dir=run_dir)
            _race_and_run(run_config, run_dir=run_dir, overrides=overrides)
    except (Exception, SystemExit, KeyboardInterrupt) as error:
        failure = failure_of(error)
        if failure.exit_code == 0:
            return
        STATE.failures.append(failure)
        if not isinstance(error, FolderInUseError):
            _record_failure(failure, run_dir=run_dir, is_single_run=is_single_run)
        if failure.exit_code == INTERRUPTED:
            raise KeyboardInterrupt(_interrupted_message(run_dir, failure=failure)) from None
        report(failure, where="" if is_single_run else f"run {hydra.job.num}: ")


def with_race_command(argv: Sequence[str]) -> list[str]:
    """Replaces `mode=race resume=FOLDER` by the command line that started the race, in FOLDER.

    Other overrides in `argv`, such as race.workers, replace those of that command line. Returns other command lines
    unchanged.
    """
    values: dict[str, str] = {key: value for key, equals, value in (word.partition("=") for word in argv) if equals}
    folder = Path(values.get("resume", "")).expanduser()
    if values.get("mode") != "race" or "resume" not in values or not (folder / RACE_SETUP_FILE).is_file():
        return list(argv)
    try:
        saved_argv = read_record(folder / RACE_SETUP_FILE, {"words": list})["words"]
    except BadInputError as error:
        raise BadInputError(f"{error}, and give the race's own command with hydra.run.dir={folder}") from error
    inherited = [word for word in map(str, saved_argv) if word.partition("=")[0] not in values]
    new = [word for word in argv if not word.startswith(("resume=", "hydra.run.dir="))]
    return [*inherited, *new, f"hydra.run.dir={folder}"]


def read_failures(sweep_dir: Path) -> list[Failure]:
    """Reads the failures of a multirun's jobs, sorted by job number, whichever process ran the jobs."""
    failures = []
    for file in sweep_dir.glob(f"*/{ERROR_FILE}"):
        number = file.parent.name.split("_")[0]
        try:
            record = read_record(file, {"kind": str, "message": str, "exit_code": int})
            failure = Failure(kind=record["kind"], message=record["message"], exit_code=record["exit_code"])
        except BadInputError as error:
            failure = failure_of(error)
            report(failure)
        failures.append((int(number) if number.isdigit() else sys.maxsize, file.parent.name, failure))
    return [failure for *_, failure in sorted(failures, key=lambda entry: entry[:2])]


def _interrupted_message(run_dir: Path, *, failure: Failure) -> str:
    if (run_dir / RACE_SETUP_FILE).is_file():
        return f"interrupted; mode=race resume={run_dir} goes on with the race"
    if (run_dir / "race" / RACE_SETUP_FILE).is_file() and not (run_dir / "metrics.jsonl").is_file():
        return f"interrupted before training; the same command with resume={run_dir} goes on with its race"
    if any(run_dir.rglob("*.ckpt")):
        reason = f" ({failure.message})" if failure.kind == "PreemptedError" else ""
        return f"interrupted; resume={run_dir} goes on from the newest checkpoint{reason}"
    return "interrupted before the first checkpoint"


def _set_up_folder(config: DictConfig, *, run_dir: Path) -> RunConfig:
    """Checks the configuration and writes config.yaml. Raises BadInputError if the folder holds an earlier run."""
    run_config = from_hydra(config, folder=Path(HydraConfig.get().runtime.cwd))
    if run_config.resume is None and any((run_dir / name).exists() for name in ("result.json", "metrics.jsonl")):
        raise BadInputError(
            f"{run_dir} holds a run already, which is never overwritten: choose another folder with "
            "hydra.run.dir=PATH, remove it, or go on with it by resume=PATH"
        )
    (run_dir / ERROR_FILE).unlink(missing_ok=True)
    write_config(run_config, path=run_dir / "config.yaml")
    return run_config


def _race_and_run(config: RunConfig, *, run_dir: Path, overrides: Sequence[str]) -> None:
    from baoc.cli.fast_import import import_torchmetrics
    from baoc.config.environment import write_environment

    command = shlex.join(["python", "run.py", *overrides])  # repeats this job
    import_torchmetrics()  # before the next lines import Lightning, which imports it more slowly
    from baoc.racing.records import resolve_raced_recipe
    from baoc.tracking.console import say
    from baoc.training.run import run

    write_environment(run_dir / "env.json", baoc=__version__, command=command, argv=STATE.argv, device=config.device)
    if config.mode == "race":
        import_module(RACES).race_command(config, overrides=overrides, folder=run_dir, command=command)
        return
    recipe, allocator = config.recipe, config.allocator.name
    if recipe is not None or allocator.startswith("uniform_"):
        for sentence in choosing_nothing(
            f"allocator={allocator}" if recipe is None else f"recipe={recipe.name}",
            idle="" if recipe is None else changed_keys(config.catalogue, path="catalogue"),
            risk=config.risk.name if config.risk.name != RiskConfig().name else "",
            objective=config.objective if config.objective != RunConfig().objective else "",
        ):
            say(sentence)
    settled = resolve_raced_recipe(config)
    if config.mode == "train" and config.race.first != "off":
        settled = _raced(settled, run_dir=run_dir, overrides=overrides, command=command)
    if settled != config:
        write_config(settled, path=run_dir / "config.yaml")
    with with_all_ranks(settled, command=command) as config_of_all:
        run(config_of_all, run_dir=run_dir, command=command)


def _raced(config: RunConfig, *, run_dir: Path, overrides: Sequence[str], command: str) -> RunConfig:
    """`config` with the choice of the race that it asks for, or of the resumed run's. Raises BadInputError for a named
    run that did not race; one that resume=auto finds goes on without, as a requeued job must."""
    from baoc.tracking.console import say
    from baoc.training.resume import locate_checkpoint

    folder, resumed = run_dir / "race", None if config.resume in (None, "auto") else Path(config.resume)
    if config.resume == "auto" and (checkpoint := locate_checkpoint(config, run_dir=run_dir)) is not None:
        resumed = checkpoint.parent.parent
    if resumed is not None and not (resumed / "race").is_dir():
        race = config.race.first if config.race.cap_s is None else f"{config.race.cap_s:g}"
        why = f"race={race} chooses what a run trains with before it begins, and"
        if config.resume != "auto":
            raise BadInputError(
                f"{why} resume={resumed} is not the folder of a run that raced: leave race or resume out"
            )
        say(f"{why} the run of {resumed} trained without a race: it goes on without")
        return config
    if resumed is not None and (resumed / "race" / RACE_SETUP_FILE).is_file():
        folder = resumed / "race"
        if not (resumed / "metrics.jsonl").is_file():
            config = replace(config, resume=None)  # training had not begun
    return import_module(RACES).race_before_run(config, overrides=overrides, folder=folder, command=command)


def _record_failure(failure: Failure, *, run_dir: Path, is_single_run: bool) -> None:
    """Writes `error.json` into the job's folder; removes a single run's folder that holds only Hydra's files."""
    try:
        if is_single_run and all(entry.name in _EARLY_FILES for entry in run_dir.iterdir()):
            shutil.rmtree(run_dir)
            return
        if run_dir.is_dir():  # one that was removed or moved is not made again
            write_json(run_dir / ERROR_FILE, {"schema": 1, **asdict(failure)})
    except (OSError, OutputError):
        return  # if the disk fails, the failure is still reported on stderr
