"""A study: Optuna chooses settings, each trial trains them in a process of its own, and every answer is kept at once.

The storage is the only truth. Whatever is killed, the same command goes on: trials that were running are begun again
under their number and in their folder, and the total stays `n_trials`.
"""

import fcntl
import os
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from itertools import product
from math import isfinite
from pathlib import Path
from typing import Any

import optuna
from optuna.study import StudyDirection
from optuna.trial import FrozenTrial, Trial, TrialState

from baoc.config.failures import BUG
from baoc.errors import BadInputError
from baoc.sweep.study_config import Param, StudyConfig
from baoc.sweep.trial import COMMAND, Outcome, TrialProcess
from baoc.tracking.console import say

WORST = 1e30  # told for a trial without a value, and for a quality that diverged
POLL_S = 0.1
_ENDED = (TrialState.COMPLETE, TrialState.FAIL, TrialState.PRUNED)


def run_study(
    config: StudyConfig, *, folder: str | Path, extra: Sequence[str] = (), code: str = COMMAND
) -> optuna.Study:
    """Runs the study in `folder` until it has `n_trials`; `extra` overrides come on top of `fixed`.

    `code` is the Python program of a trial, whose arguments are its overrides.

    Raises BadInputError where the folder holds a study of another space or objectives, or one that runs already.
    """
    folder = Path(folder).absolute()
    folder.mkdir(parents=True, exist_ok=True)
    config = _with_extra(config, extra)
    with _alone(folder):
        study = open_study(config, folder=folder)
        runner = _Runner(study, config=config, folder=folder, code=code)
        try:
            runner.run()
        except BaseException:
            runner.stop()
            raise
    return study


def open_study(config: StudyConfig, *, folder: Path) -> optuna.Study:
    """The study in the storage, new or known. Raises BadInputError if a known one is of another definition."""
    optuna.logging.set_verbosity(optuna.logging.WARNING)
    url = config.storage or f"sqlite:///{folder / 'study.db'}"
    options = {"connect_args": {"timeout": 60}} if url.startswith("sqlite") else {}
    storage = optuna.storages.RDBStorage(url, engine_kwargs=options)
    _check_definition(config, storage)
    study = optuna.create_study(
        study_name=config.name,
        storage=storage,
        directions=[StudyDirection[way.upper()] for way in config.objectives.values()],
        sampler=make_sampler(config),
        load_if_exists=True,
    )
    if "definition" not in study.user_attrs:
        queue = [({}, {"overrides": list(baseline)}) for baseline in config.baselines]
        queue += [(point, {}) for point in grid(config)]
        for params, attributes in queue[len(study.trials) :]:  # from where an earlier start was killed
            study.enqueue_trial(params, user_attrs=attributes)
        study.set_user_attr("definition", config.definition())
    return study


def grid(config: StudyConfig) -> list[dict[str, Any]]:
    """Every combination of choices for the grid sampler, the last setting changing first; else none."""
    if config.sampler != "grid":
        return []
    keys = [param.key for param in config.space]
    return [dict(zip(keys, values, strict=True)) for values in product(*(param.choices for param in config.space))]


def make_sampler(config: StudyConfig) -> optuna.samplers.BaseSampler:
    """The sampler by name; all but random and grid learn from a violated budget's constraint."""
    seed = config.seed
    if config.sampler in ("random", "grid"):  # the points of a grid are enqueued
        return optuna.samplers.RandomSampler(seed=seed)
    if config.sampler == "nsgaii":
        return optuna.samplers.NSGAIISampler(seed=seed)
    if config.sampler == "gp":
        return optuna.samplers.GPSampler(seed=seed)
    return optuna.samplers.TPESampler(seed=seed, constant_liar=config.workers > 1, multivariate=True)


def _check_definition(config: StudyConfig, storage: optuna.storages.BaseStorage) -> None:
    """Raises BadInputError if the storage has a study of this name with another space or other objectives."""
    known = {study.study_name: study.user_attrs.get("definition") for study in optuna.get_all_study_summaries(storage)}
    kept, asked = known.get(config.name) or {}, config.definition()
    for key in kept:
        if kept[key] != asked[key]:
            raise BadInputError(
                f"study {config.name} has {key} {kept[key]} and was asked for {asked[key]}: trials of both cannot be "
                "compared. Give it another hydra.sweeper.name, or the settings it has"
            )


def _with_extra(config: StudyConfig, extra: Sequence[str]) -> StudyConfig:
    """Command-line overrides join `fixed`; a sweep over several values belongs into the space."""
    own = tuple(word for word in extra if not word.startswith(("sweeps=", "hydra")))
    several = next((word for word in own if "," in word and word.split("=", 1)[1][:1] not in ("[", "{")), None)
    if several is not None:
        raise BadInputError(
            f"{several} asks for several values beside sweeps={config.name}: put them into the study's space, as "
            "hydra.sweeper.space"
        )
    return replace(config, fixed=(*config.fixed, *own))


@contextmanager
def _alone(folder: Path) -> Iterator[None]:
    """One process per study folder: two would begin each other's trials again."""
    with (folder / "study.lock").open("w") as lock:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            raise BadInputError(f"the study in {folder} runs already: wait for it, or end it first") from None
        lock.write(str(os.getpid()))
        lock.flush()
        yield


class _Runner:
    """Keeps up to `workers` trials running; a free place is filled at once."""

    def __init__(self, study: optuna.Study, *, config: StudyConfig, folder: Path, code: str):
        self.study, self.config, self.folder, self.code = study, config, folder, code
        points = grid(config)  # where it is complete, nothing is left to try
        self.total = min(config.n_trials, len(points) + len(config.baselines)) if points else config.n_trials
        self.running: dict[int, TrialProcess] = {}
        self.began = time.monotonic()
        self.told = 0

    def run(self) -> None:
        orphans = [trial for trial in self.study.get_trials(deepcopy=False) if trial.state is TrialState.RUNNING]
        while True:
            while len(self.running) < self.config.workers:
                if orphans:
                    self._retry(orphans.pop(0))
                elif not self._begin_next():
                    break
            if not self.running:
                return
            time.sleep(POLL_S)
            for number, process in list(self.running.items()):
                if (outcome := process.poll()) is not None:
                    del self.running[number]
                    self._finish(number, outcome)

    def stop(self) -> None:
        """Running trials end with a checkpoint; they stay open in the storage, and are the first to go on."""
        for process in self.running.values():
            process.stop()

    def _begin_next(self) -> bool:
        trials = self.study.get_trials(deepcopy=False)
        if sum(trial.state is not TrialState.WAITING for trial in trials) >= self.total:
            return False
        trial = self.study.ask()
        own = trial.user_attrs.get("overrides")
        words = own if own is not None else [p.override(_suggest(trial, p)) for p in self.config.space]
        trial.set_user_attr("words", [*self.config.fixed, *words])
        self._start(trial.number, trial.user_attrs["words"])
        return True

    def _start(self, number: int, words: Sequence[str]) -> None:
        folder = self.folder / f"{number:04d}"
        self.running[number] = TrialProcess(words, folder=folder, threads=self.config.threads, code=self.code)

    def _retry(self, trial: FrozenTrial) -> None:
        """Begins a trial again that was running when the study, or its own process, was killed."""
        attempts = int(trial.user_attrs.get("attempts", 0)) + 1
        words = trial.user_attrs.get("words")
        if words is None or attempts > self.config.retries:
            why = "was killed before it began" if words is None else f"was killed {attempts} times"
            self._tell(trial.number, state=TrialState.FAIL, text=f"failed: it {why}")
            return
        Trial(self.study, trial._trial_id).set_user_attr("attempts", attempts)
        say(f"trial {trial.number} goes on (attempt {attempts + 1})")
        self._start(trial.number, words)

    def _finish(self, number: int, outcome: Outcome) -> None:
        trial = self.study.get_trials(deepcopy=False)[number]
        if not outcome.answered:
            if outcome.exit_code < 0 or outcome.exit_code == BUG:  # killed, or a bug: worth another attempt
                self._retry(trial)
                return
            self._tell(number, state=TrialState.FAIL, text=f"failed: {outcome.message}")
            return
        values = [_value(outcome, name, way) for name, way in self.config.objectives.items()]
        Trial(self.study, trial._trial_id).set_constraint("budget", outcome.violated)  # at most 0 where it was met
        text = ", ".join(f"{name} {value:.6g}" for name, value in zip(self.config.objectives, values, strict=True))
        self._tell(number, values=values, text=outcome.message if outcome.violated else text)

    def _tell(
        self, number: int, *, text: str, values: list[float] | None = None, state: TrialState | None = None
    ) -> None:
        self.study.tell(number, values, state=state)
        self.told += 1
        trials = self.study.get_trials(deepcopy=False)
        done = sum(trial.state in _ENDED for trial in trials)
        failed = sum(trial.state is TrialState.FAIL for trial in trials)
        left_s = (time.monotonic() - self.began) / self.told * max(self.total - done, 0)
        words = " ".join(trials[number].user_attrs.get("words", [])[len(self.config.fixed) :])
        say(
            f"trial {number} ({words}): {text}  [{done}/{self.total} done, {failed} failed, {left_s / 60:.1f} min left]"
        )


def _suggest(trial: Trial, param: Param) -> Any:
    if param.choices:
        return trial.suggest_categorical(param.key, list(param.choices))
    if isinstance(param.low, int) and isinstance(param.high, int):
        return trial.suggest_int(param.key, param.low, param.high, log=param.log, step=int(param.step or 1))
    return trial.suggest_float(param.key, param.low, param.high, log=param.log, step=param.step)


def _value(outcome: Outcome, name: str, way: str) -> float:
    worst = WORST if way == "minimize" else -WORST
    if outcome.result is None:
        return worst
    value = outcome.result["quality"]["value"] if name == "quality" else outcome.result[name]
    return float(value) if value is not None and isfinite(value) else worst
