"""One job of a command: its folder, its run, and the record of its failure, which never disturbs other jobs.

Hydra calls `run_job` in this process or in a launcher's, so failures are recorded in the job's folder.
"""

import json
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
from omegaconf import DictConfig, OmegaConf

from baoc import __version__
from baoc.cli.failures import Failure, failure_of, report
from baoc.cli.ranks import is_nonzero_rank, leave, serve, with_all_ranks
from baoc.cli.run_lock import FolderInUseError, lock_folder
from baoc.config.from_hydra import from_hydra, write_config
from baoc.config.nodes import own_code_option
from baoc.config.schema import RunConfig
from baoc.core import own_code
from baoc.core.commands import INTERRUPTED
from baoc.core.own_code import CONFIG_GROUPS
from baoc.errors import BadInputError

ERROR_FILE = "error.json"
RACES = "baoc.sweep.race"  # named, not imported: a stage above this one runs races as studies
RACE_SETUP_FILE = "race_setup.json"  # what a race that was cut goes on with
_EARLY_FILES = (".hydra", "baoc.log", ERROR_FILE)  # files of a job that failed before its configuration was read


@dataclass(slots=True, kw_only=True)
class CommandState:
    """What this process knows of its command: reset by `reset_state`, filled while Hydra runs."""

    argv: tuple[str, ...] = ()
    failures: list[Failure] = field(default_factory=list)
    sweep_dir: Path | None = None


STATE = CommandState()


class RememberMultirun(Callback):
    """Hydra callback that records a multirun's folder; only the parent process sees it."""

    def on_multirun_start(self, config: DictConfig, **kwargs: Any) -> None:
        STATE.sweep_dir = Path(config.hydra.sweep.dir)


def reset_state(argv: Sequence[str]) -> None:
    """Forgets an earlier command of this process."""
    STATE.argv, STATE.failures, STATE.sweep_dir = tuple(argv), [], None
    own_code.forget_used()


def run_job(config: DictConfig) -> None:
    """Runs one composed configuration. Failures are reported and recorded, not raised, except an interrupt.

    Of a job of several ranks (submitit with tasks_per_node or nodes) the first does that, and others take part in it.
    """
    if HydraConfig.get().mode == RunMode.RUN:
        _run_job(config)
        return
    if is_nonzero_rank():
        serve()  # what became of it, the first one tells
        return
    failed = len(STATE.failures)
    try:
        _run_job(config)
    finally:
        leave(STATE.failures[failed].exit_code if len(STATE.failures) > failed else 0)


def _run_job(config: DictConfig) -> None:
    hydra = HydraConfig.get()
    run_dir = Path(hydra.runtime.output_dir)
    is_single_run = hydra.mode == RunMode.RUN
    overrides = overrides_as_typed(hydra.overrides.task, config=config)
    if not is_single_run:
        print(f"\n--- run {hydra.job.num}: {' '.join(overrides) or 'defaults'}", flush=True)
    try:
        if is_single_run and (study := hydra.runtime.choices.get("sweeps")):
            raise BadInputError(
                f"sweeps={study} is a study of many runs: start it with -m, as in python run.py -m sweeps={study}"
            )
        with lock_folder(run_dir):
            run_config = _begin_folder(config, run_dir=run_dir)
            _work(run_config, run_dir=run_dir, overrides=overrides)
    except (Exception, SystemExit, KeyboardInterrupt) as error:
        failure = failure_of(error)
        if failure.exit_code == 0:
            return
        STATE.failures.append(failure)
        if not isinstance(error, FolderInUseError):
            _record_failure(failure, run_dir=run_dir, is_single_run=is_single_run)
        if failure.exit_code == INTERRUPTED:
            raise KeyboardInterrupt(_resume_hint(run_dir, failure=failure)) from None
        report(failure, where="" if is_single_run else f"run {hydra.job.num}: ")


def with_race_command(words: Sequence[str]) -> list[str]:
    """A command line in which `mode=race resume=FOLDER` is the race's own command in its own folder; what is given
    beside it, such as race.workers, takes the place of what that had."""
    given: dict[str, str] = {key: value for key, equals, value in (word.partition("=") for word in words) if equals}
    folder = Path(given.get("resume", "")).expanduser()
    if given.get("mode") != "race" or "resume" not in given or not (folder / RACE_SETUP_FILE).is_file():
        return list(words)
    before = json.loads((folder / RACE_SETUP_FILE).read_text(encoding="utf-8"))["words"]
    kept = [word for word in before if word.partition("=")[0] not in given]
    own = [word for word in words if not word.startswith(("resume=", "hydra.run.dir="))]
    return [*kept, *own, f"hydra.run.dir={folder}"]


def overrides_as_typed(overrides: Sequence[str], *, config: DictConfig) -> list[str]:
    """Overrides with the user's own code as it was named, in place of the options that were made of it."""
    names = {group: OmegaConf.select(config, f"{group}.name") for group in CONFIG_GROUPS}
    made = {
        f"{group}={own_code_option(str(name))}": f"{group}={name}" for group, name in names.items() if name is not None
    }
    return [made.get(word, word) for word in overrides]


def read_failures(sweep_dir: Path) -> list[Failure]:
    """Failures of a multirun's jobs by job number, whichever process ran them."""
    failures = []
    for file in sweep_dir.glob(f"*/{ERROR_FILE}"):
        number = file.parent.name.split("_")[0]
        record = json.loads(file.read_text(encoding="utf-8"))
        failure = Failure(kind=record["kind"], message=record["message"], exit_code=record["exit_code"])
        failures.append((int(number) if number.isdigit() else sys.maxsize, file.parent.name, failure))
    return [failure for *_, failure in sorted(failures, key=lambda entry: entry[:2])]


def _resume_hint(run_dir: Path, *, failure: Failure) -> str:
    if (run_dir / RACE_SETUP_FILE).is_file():
        return f"interrupted; mode=race resume={run_dir} goes on with the race"
    if (run_dir / "race" / RACE_SETUP_FILE).is_file() and not (run_dir / "metrics.jsonl").is_file():
        return f"interrupted before training; the same command with resume={run_dir} goes on with its race"
    if any(run_dir.rglob("*.ckpt")):
        why = f" ({failure.message})" if failure.kind == "PreemptedError" else ""
        return f"interrupted; resume={run_dir} goes on from the newest checkpoint{why}"
    return "interrupted before the first checkpoint"


def _begin_folder(config: DictConfig, *, run_dir: Path) -> RunConfig:
    """Checks the configuration and writes config.yaml. Raises BadInputError rather than overwrite an earlier run."""
    run_config = from_hydra(config, folder=Path(HydraConfig.get().runtime.cwd))
    if run_config.resume is None and any((run_dir / name).exists() for name in ("result.json", "metrics.jsonl")):
        raise BadInputError(
            f"{run_dir} holds a run already, which is never overwritten: choose another folder with "
            "hydra.run.dir=PATH, remove it, or go on with it by resume=PATH"
        )
    (run_dir / ERROR_FILE).unlink(missing_ok=True)
    write_config(run_config, path=run_dir / "config.yaml")
    return run_config


def _work(config: RunConfig, *, run_dir: Path, overrides: Sequence[str]) -> None:
    """The race, the run, or one after the other."""
    from baoc.cli.fast_import import import_torchmetrics
    from baoc.config.environment import write_environment

    command = shlex.join(["python", "run.py", *overrides])  # which repeats this job
    import_torchmetrics()
    from baoc.racing.records import resolve_raced_recipe
    from baoc.training.run import run

    write_environment(run_dir / "env.json", baoc=__version__, command=command, argv=STATE.argv, device=config.device)
    if config.mode == "race":
        import_module(RACES).race_command(config, overrides=overrides, folder=run_dir, command=command)
        return
    settled = resolve_raced_recipe(config)
    if config.mode == "train" and config.race.first != "off":
        folder = run_dir / "race"
        if config.resume not in (None, "auto") and (Path(config.resume) / "race" / RACE_SETUP_FILE).is_file():
            folder = Path(config.resume) / "race"
            if not (Path(config.resume) / "metrics.jsonl").is_file():
                settled = replace(settled, resume=None)  # it had not begun to train
        settled = import_module(RACES).race_before_run(settled, overrides=overrides, folder=folder, command=command)
    if settled != config:
        write_config(settled, path=run_dir / "config.yaml")
    with with_all_ranks(settled, command=command) as of_all:
        run(of_all, run_dir=run_dir, command=command)


def _record_failure(failure: Failure, *, run_dir: Path, is_single_run: bool) -> None:
    """Writes `error.json` into the job's folder; removes a single run's folder that holds only Hydra's files."""
    try:
        if is_single_run and all(entry.name in _EARLY_FILES for entry in run_dir.iterdir()):
            shutil.rmtree(run_dir)
            return
        text = json.dumps({"schema": 1, **asdict(failure)}, indent=2)
        (run_dir / ERROR_FILE).write_text(text + "\n", encoding="utf-8")
    except OSError:
        return  # the disk may be what failed; the failure itself is still reported
