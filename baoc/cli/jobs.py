"""One job of a command: its folder, its run, and what is kept of a failure, which never disturbs other jobs.

`run_job` is what Hydra calls, in this process or in a launcher's, so what it has to tell goes into the job's folder.
"""

import json
import shlex
import shutil
import sys
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from hydra.core.hydra_config import HydraConfig
from hydra.experimental.callback import Callback
from hydra.types import RunMode
from omegaconf import DictConfig

from baoc.cli.failures import INTERRUPTED, Failure, failure_of, report
from baoc.cli.run_lock import FolderInUseError, claimed
from baoc.config.from_hydra import from_hydra, write_config
from baoc.config.schema import RunConfig
from baoc.errors import BadInputError
from baoc.parallel import refuse_ranks

ERROR_FILE = "error.json"
_OWN_FILES = (".hydra", "baoc.log", ERROR_FILE)  # what a job leaves that never got as far as its configuration


@dataclass(slots=True, kw_only=True)
class Session:
    """What this process saw of its command: set by `begin`, filled while Hydra runs."""

    argv: tuple[str, ...] = ()
    failures: list[Failure] = field(default_factory=list)
    sweep_dir: Path | None = None


SESSION = Session()


class RememberMultirun(Callback):
    """Hydra's callback that tells where a multirun's folder is; only the parent process sees it."""

    def on_multirun_start(self, config: DictConfig, **kwargs: Any) -> None:
        SESSION.sweep_dir = Path(config.hydra.sweep.dir)


def begin(argv: Sequence[str]) -> None:
    """Forget an earlier command of this process."""
    SESSION.argv, SESSION.failures, SESSION.sweep_dir = tuple(argv), [], None


def run_job(config: DictConfig) -> None:
    """Run one composed configuration. Failures are reported and kept, not raised; only an interrupt is."""
    hydra = HydraConfig.get()
    run_dir = Path(hydra.runtime.output_dir)
    alone = hydra.mode == RunMode.RUN
    overrides = list(hydra.overrides.task)
    if not alone:
        print(f"\n--- run {hydra.job.num}: {' '.join(overrides) or 'defaults'}", flush=True)
    try:
        if alone and (study := hydra.runtime.choices.get("sweeps")):
            raise BadInputError(
                f"sweeps={study} is a study of many runs: start it with -m, as in python run.py -m sweeps={study}"
            )
        refuse_ranks("run")  # before one of them finds another at work in their folder
        with claimed(run_dir):
            run_config = _prepare(config, run_dir=run_dir)
            _train(run_config, run_dir=run_dir, command=command_of(overrides))
    except (Exception, SystemExit, KeyboardInterrupt) as error:
        failure = failure_of(error)
        if failure.exit_code == 0:
            return
        SESSION.failures.append(failure)
        if not isinstance(error, FolderInUseError):
            _keep(failure, run_dir=run_dir, alone=alone)
        if failure.exit_code == INTERRUPTED:
            raise KeyboardInterrupt(_how_to_go_on(run_dir, failure=failure)) from None
        report(failure, where="" if alone else f"run {hydra.job.num}: ")


def command_of(overrides: Sequence[str]) -> str:
    """The command that makes a job again by itself."""
    return shlex.join(["python", "run.py", *overrides])


def failed_jobs(sweep_dir: Path) -> list[Failure]:
    """Failures of a multirun's jobs in the order of their numbers, whichever process ran them."""
    found = []
    for file in sweep_dir.glob(f"*/{ERROR_FILE}"):
        number = file.parent.name.split("_")[0]
        kept = json.loads(file.read_text(encoding="utf-8"))
        failure = Failure(kind=kept["kind"], message=kept["message"], exit_code=kept["exit_code"])
        found.append((int(number) if number.isdigit() else sys.maxsize, file.parent.name, failure))
    return [failure for *_, failure in sorted(found, key=lambda entry: entry[:2])]


def _how_to_go_on(run_dir: Path, *, failure: Failure) -> str:
    if any(run_dir.rglob("*.ckpt")):
        why = f" ({failure.message})" if failure.kind == "PreemptedError" else ""
        return f"interrupted; resume={run_dir} goes on from the newest checkpoint{why}"
    return "interrupted before the first checkpoint"


def _prepare(config: DictConfig, *, run_dir: Path) -> RunConfig:
    """Check the configuration and begin the run's folder: nothing of an earlier run is overwritten."""
    run_config = from_hydra(config)
    if run_config.resume is None and any((run_dir / name).exists() for name in ("result.json", "metrics.jsonl")):
        raise BadInputError(
            f"{run_dir} holds a run already, which is never overwritten: choose another folder with "
            "hydra.run.dir=PATH, remove it, or go on with it by resume=PATH"
        )
    (run_dir / ERROR_FILE).unlink(missing_ok=True)
    write_config(run_config, path=run_dir / "config.yaml")
    return run_config


def _train(config: RunConfig, *, run_dir: Path, command: str) -> None:
    from baoc.cli.light import import_metrics
    from baoc.config.environment import write_environment

    import_metrics()
    from baoc.training.run import run

    write_environment(run_dir / "env.json", command=command, argv=SESSION.argv, device=config.device)
    run(config, run_dir=run_dir, command=command)


def _keep(failure: Failure, *, run_dir: Path, alone: bool) -> None:
    """`error.json` in the job's folder; a folder that holds nothing else than what Hydra wrote goes again."""
    try:
        if alone and all(entry.name in _OWN_FILES for entry in run_dir.iterdir()):
            shutil.rmtree(run_dir)
            return
        text = json.dumps({"schema": 1, **asdict(failure)}, indent=2)
        (run_dir / ERROR_FILE).write_text(text + "\n", encoding="utf-8")
    except OSError:
        return  # the disk may be what failed; the failure itself is reported all the same
