"""Runs a study's workers as jobs of a Hydra launcher (joblib, submitit); each job takes trials from the storage."""

import multiprocessing
from collections.abc import Sequence
from dataclasses import replace
from functools import partial

import optuna
from hydra.core.plugins import Plugins
from hydra.core.utils import JobStatus
from hydra.types import HydraContext
from omegaconf import DictConfig

from baoc.config.nodes import as_typed
from baoc.errors import TrainingFailedError
from baoc.parallel import refuse_several_processes
from baoc.sweep.storage import open_storage, storage_url
from baoc.sweep.study import make_study_folder, raise_if_all_failed, run_study
from baoc.sweep.study_config import StudyConfig
from baoc.tracking.console import say


def launch_workers(study: StudyConfig, *, config: DictConfig, context: HydraContext, extra: Sequence[str]) -> None:
    """Starts `study.workers` jobs, each a worker of one trial at a time in `workers/N` of the study's folder, and waits
    for them. A failed worker is reported; its trials go to other workers or to the next start. Raises
    TrainingFailedError if all workers failed, or all trials did."""
    folder = make_study_folder(config.hydra.sweep.dir)
    body = partial(run_worker, study=replace(study, workers=1), folder=str(folder), extra=tuple(as_typed(extra)))
    launcher = Plugins.instance().instantiate_launcher(hydra_context=context, task_function=body, config=config)
    jobs = [[*extra, f"hydra.sweep.subdir=workers/{number}"] for number in range(study.workers)]
    ended = launcher.launch(jobs, initial_job_idx=0)
    failed = [number for number, job in enumerate(ended) if job.status is not JobStatus.COMPLETED]
    for number in failed:
        say(f"worker {number} failed ({ended[number]._return_value}); see {folder / 'workers' / str(number)}")
    if len(failed) == len(jobs):
        raise TrainingFailedError(f"no worker of study {study.name} could work; see {folder / 'workers'}")
    url = storage_url(study.storage, folder=folder)
    raise_if_all_failed(optuna.load_study(study_name=study.name, storage=open_storage(url)))


def run_worker(_: DictConfig, *, study: StudyConfig, folder: str, extra: tuple[str, ...]) -> None:
    """Body of a launched job: one trial after another, until none is waiting. A trial starts its own ranks."""
    refuse_several_processes("study")
    multiprocessing.set_start_method("forkserver", force=True)  # joblib has set another one
    run_study(study, folder=folder, extra=extra, wait_for_others=False)
