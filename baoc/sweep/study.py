"""One worker of a study: it samples settings by Optuna, trains each trial in its own process, and stores the results.

`storage.py` walks through a trial's life; the storage is all that workers share. The same command resumes a killed
study: trials of dead workers are taken over with their number and folder, and the total stays `n_trials`.
"""

import time
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from itertools import chain
from multiprocessing.connection import wait
from pathlib import Path

import optuna
from hydra.core.override_parser.overrides_parser import OverridesParser
from optuna.exceptions import StorageInternalError, UpdateFinishedTrialError
from optuna.trial import FrozenTrial, Trial, TrialState

from baoc.core.budgets import parse_budget
from baoc.errors import BadInputError, OutputError, TrainingFailedError
from baoc.frontier.runs import ERROR
from baoc.parallel import refuse_several_processes
from baoc.sweep.early_stopping import EarlyStopping
from baoc.sweep.gpu_slots import GpuLease, GpuSlots, find_gpus
from baoc.sweep.progress import Progress
from baoc.sweep.sampling import suggest
from baoc.sweep.signals import POLL_S, SignalHandler
from baoc.sweep.storage import (
    LOCK,
    explain_storage_errors,
    make_trial,
    next_trial,
    open_study,
    release_connections,
    setup_lock,
    storage_url,
    to_current_paths,
)
from baoc.sweep.study_config import (
    ATTEMPTS_KEY,
    BASELINE_KEY,
    DEVICES,
    MESSAGE_KEY,
    OVERRIDES_KEY,
    OWNER_KEY,
    SECONDS_KEY,
    StudyConfig,
    key_of,
)
from baoc.sweep.trial_outcome import TrialOutcome, trial_outcome
from baoc.sweep.trial_process import COMMAND, SERVER_LOST, RunOutcome, TrialProcess, preload
from baoc.sweep.workers import WorkerRegistry
from baoc.tracking.console import say
from baoc.tracking.files import write_json

TAKEOVER_POLL_S = 5.0  # between two searches for trials of dead workers
END_PATIENCE_S = 120.0  # a run that was asked to end has this long to write its checkpoint, then it is killed
STOP_PATIENCE_S = 30.0  # the same when the whole study stops; shorter than the heartbeat timeout of other workers
SERVER_LOSSES_KEY = "server_losses"  # attribute of a trial: how often its process died with the fork server
MAX_SERVER_LOSSES = 10  # that many of a trial do not count as attempts
MAX_STARTS = 3  # attempts to fork a process, since a signal may kill the fork server at that moment


def run_study(
    config: StudyConfig,
    *,
    folder: str | Path,
    extra: Sequence[str] = (),
    code: str = COMMAND,
    wait_for_others: bool = True,
    study: optuna.Study | None = None,
) -> optuna.Study:
    """Works on the study in `folder` until `n_trials` trials have ended.

    Args:
        extra: overrides of every trial, after those of `config.fixed`.
        code: the Python program of a trial; its arguments are the trial's overrides.
        wait_for_others: an idle worker waits for the others' trials, to take them over if their worker dies.
        study: the same study, if `open_study` has opened it before.

    Raises:
        BadInputError: the storage holds a study of this name with another space or other objectives.
        OutputError: the storage fails during the study (full disk, held lock, lost server). Running trials write a
            checkpoint first.
    """
    refuse_several_processes("study")
    folder = make_study_folder(folder)
    config = add_overrides(config, extra)
    with explain_storage_errors(config.storage, folder=folder):
        study = study or open_study(config, folder=folder)
    searched = [f"model={value}" for param in config.space if param.key == "model" for value in param.choices]
    preload([*searched, *chain(config.fixed, *config.baselines, *config.repeats)], code=code)  # by any may a model be
    worker = _Worker(study, config=config, folder=folder, code=code, wait_for_others=wait_for_others)
    with explain_storage_errors(config.storage, folder=folder), worker.signals.installed():
        try:
            worker.run()
        except BaseException:
            worker.stop()
            with suppress(StorageInternalError, OutputError):  # the storage may be what failed
                worker.registry.end()
            raise
        worker.registry.end()
    return study


def make_study_folder(path: str | Path) -> Path:
    """The study's folder as an absolute path, created if absent. Raises OutputError if it cannot be written."""
    folder = Path(path).absolute()
    try:
        folder.mkdir(parents=True, exist_ok=True)
        with (folder / LOCK).open("a"):
            pass
    except OSError as error:
        raise OutputError(
            f"the study's folder {folder} cannot be written ({error.strerror}): give another one, as "
            "hydra.sweep.dir=FOLDER"
        ) from error
    return folder


def raise_if_all_failed(study: optuna.Study) -> None:
    """Raises TrainingFailedError if every ended trial failed, so that the command does not exit with 0."""
    ended = [trial for trial in study.get_trials(deepcopy=False) if trial.state.is_finished()]
    if ended and all(trial.state is TrialState.FAIL for trial in ended):
        last = ended[-1].user_attrs.get(MESSAGE_KEY, "failed")
        raise TrainingFailedError(f"all {len(ended)} ended trials of study {study.study_name} failed; the last {last}")


def add_overrides(config: StudyConfig, extra: Sequence[str]) -> StudyConfig:
    """`config` with the command line's overrides appended to `fixed`; those of Hydra itself are left out.

    Raises BadInputError for an override with several values, which belongs in the space; for one that the space, a
    repeat or a baseline overrules; and for a mode that does not train.
    """
    own = tuple(word for word in extra if not word.startswith(("sweeps=", "hydra")))
    parser = OverridesParser.create()
    several = next((word for word in own if parser.parse_override(word).is_sweep_override()), None)
    if several is not None:
        raise BadInputError(
            f"{several} asks for several values beside sweeps={config.name}: put them into the study's space, as "
            "hydra.sweeper.space"
        )
    mode = next((word for word in own if word.startswith("mode=") and word != "mode=train"), None)
    if mode is not None:
        raise BadInputError(
            f"{mode} trains nothing, and the trials of sweeps={config.name} are compared by what they train: leave it "
            "out, or plan some budgets with -m budget=8gb,16gb mode=plan"
        )
    overruled_by = {param.key: "space" for param in config.space}  # setting -> the part of the study that sets it
    for part in ("repeats", "baselines"):
        overruled_by |= {key_of(word): part for words in getattr(config, part) for word in words}
    overruled = next((word for word in own if key_of(word) in overruled_by), None)
    if overruled is not None:
        key = key_of(overruled)
        part = overruled_by[key]
        where = f"hydra.sweeper.{part}"
        raise BadInputError(
            f"{overruled} is overruled by {where} of sweeps={config.name}, which sets {key}: leave it out, or change "
            + (f"'++{where}.{key}={{choices: [...]}}'" if part == "space" else where)
        )
    return replace(config, fixed=(*config.fixed, *own))


@dataclass(slots=True, kw_only=True)
class _RunningTrial:
    """A trial that this worker runs: one process after another, one for each entry of `repeats`."""

    trial: FrozenTrial
    overrides: list[str]
    gpus: GpuLease
    early_stopping: EarlyStopping
    process: TrialProcess = field(init=False)
    outcomes: list[RunOutcome] = field(default_factory=list)  # of the runs that have ended
    prune_reason: str = ""  # set by early stopping when it asks the process to end
    hang_reason: str = ""  # set when a process that writes nothing is asked to end
    end_requested_s: float = 0.0  # monotonic time of that request
    began_s: float = field(default_factory=time.monotonic)


class _Worker:
    """Keeps up to `config.workers` trials running in processes of this machine."""

    def __init__(self, study: optuna.Study, *, config: StudyConfig, folder: Path, code: str, wait_for_others: bool):
        self.study, self.config, self.folder, self.code = study, config, folder, code
        self.wait_for_others = wait_for_others
        self.running: dict[int, _RunningTrial] = {}  # by trial number
        self.registry = WorkerRegistry(study)
        self.signals = SignalHandler()
        self.progress = Progress(study, config=config)
        gpus = find_gpus(config.gpus) if code == COMMAND or config.gpus != "auto" else ()
        self.slots = GpuSlots(gpus=gpus, per_gpu=config.per_gpu, per_trial=config.gpus_per_trial)
        self.waiting_for_gpu: FrozenTrial | None = None  # a trial of this worker
        self._last_search_s = -TAKEOVER_POLL_S  # for trials of dead workers

    def run(self) -> None:
        """Starts and watches trials until none is left that this worker could run."""
        with self.progress:
            self.registry.beat(running=0)
            while True:
                self._start_trials()
                self.signals.check()
                if not self.running and self.waiting_for_gpu is None and not self._may_take_over():
                    break
                release_connections(self.study._storage)
                wait([running.process.sentinel for running in self.running.values()], timeout=POLL_S)
                self._poll_trials()

    def stop(self) -> None:
        """Asks all trials for a checkpoint and waits for their end; a second Ctrl-C kills them."""
        deadline = time.monotonic() + STOP_PATIENCE_S
        try:
            for running in self.running.values():
                running.process.ask_to_end()
            for running in self.running.values():
                running.process.stop(patience_s=max(deadline - time.monotonic(), 0.0))
        except KeyboardInterrupt:
            with self.signals.deferred():  # a third Ctrl-C must not leave a process behind
                for running in self.running.values():
                    running.process.kill()
                for running in self.running.values():
                    running.process.stop(patience_s=0.0)

    # -- which trial is next ------------------------------------------------------------------------------------------

    def _start_trials(self) -> None:
        """Starts trials until `workers` run, no trial is available, or no GPU has room."""
        while len(self.running) < self.config.workers:
            trial = self.waiting_for_gpu or self._take_over()
            if trial is None:
                acquired = next_trial(self.study, config=self.config, folder=self.folder)
                if acquired is None:
                    return
                trial = self._choose_overrides(acquired)
            self.waiting_for_gpu = None if self._start_trial(trial) else trial
            if self.waiting_for_gpu is not None:
                return

    def _choose_overrides(self, trial: Trial) -> FrozenTrial:
        """Makes this worker the trial's owner, samples its settings and stores its overrides."""
        trial.set_user_attr(OWNER_KEY, self.registry.name)
        trial.set_user_attr(OVERRIDES_KEY, [*self.config.fixed, *suggest(trial, self.config)])
        return self.study._storage.get_trial(trial._trial_id)

    def _take_over(self) -> FrozenTrial | None:
        """Makes this worker the owner of a dead worker's running trial and returns the trial; None if there is none.
        Searches the storage every TAKEOVER_POLL_S only."""
        if time.monotonic() - self._last_search_s < TAKEOVER_POLL_S:
            return None
        self._last_search_s = time.monotonic()
        url = storage_url(self.config.storage, folder=self.folder)
        trials_of_others = self._trials_of_others()
        attributes = self.study.user_attrs  # read after the trials, so that it holds the worker of each of them
        for trial in trials_of_others:
            owner = trial.user_attrs.get(OWNER_KEY)
            if not self.registry.is_dead(owner, attributes, trial=trial.number):
                continue
            with setup_lock(self.folder, url=url):
                stored = self.study._storage.get_trial(trial._trial_id)
                if stored.state is not TrialState.RUNNING or stored.user_attrs.get(OWNER_KEY) != owner:
                    continue  # another worker was faster
                Trial(self.study, trial._trial_id).set_user_attr(OWNER_KEY, self.registry.name)
            self._last_search_s = -TAKEOVER_POLL_S  # there may be more of them
            say(f"trial {trial.number} is taken over: its worker is dead")
            if OVERRIDES_KEY in stored.user_attrs:
                return stored
            return self._choose_overrides(
                make_trial(self.study, stored._trial_id, number=stored.number, config=self.config)
            )
        return None

    def _trials_of_others(self) -> list[FrozenTrial]:
        """Trials that run and are not this worker's."""
        running = self.study.get_trials(deepcopy=False, states=(TrialState.RUNNING,))
        own = {*self.running, *([self.waiting_for_gpu.number] if self.waiting_for_gpu is not None else [])}
        return [trial for trial in running if trial.number not in own]

    def _may_take_over(self) -> bool:
        """Whether a trial of another worker may still become this worker's."""
        trials, attributes = self._trials_of_others(), self.study.user_attrs
        if self.wait_for_others:
            return bool(trials)
        return any(self.registry.is_dead(t.user_attrs.get(OWNER_KEY), attributes, trial=t.number) for t in trials)

    # -- one trial ----------------------------------------------------------------------------------------------------

    def _start_trial(self, trial: FrozenTrial) -> bool:
        """Starts the trial's first process; False if no GPU has room for it now."""
        overrides = to_current_paths(trial.user_attrs[OVERRIDES_KEY], self.study, folder=self.folder)
        gpus = self.slots.acquire(_memory_budget_bytes(overrides))
        if gpus is None:
            return False
        stopping = EarlyStopping(self.study, trial, config=self.config, exempt=BASELINE_KEY in trial.user_attrs)
        self._start_process(_RunningTrial(trial=trial, overrides=overrides, gpus=gpus, early_stopping=stopping))
        return True

    def _start_process(self, running: _RunningTrial) -> None:
        """Starts the process of the first repeat that has no outcome yet."""
        folder, overrides = self.folder / f"{running.trial.number:04d}", running.overrides
        if self.config.repeats:
            repeat = len(running.outcomes)
            folder, overrides = folder / str(repeat), [*overrides, *self.config.repeats[repeat]]
        if self.config.gpus_per_trial > 1:
            overrides = [*overrides, f"{DEVICES}={self.config.gpus_per_trial}"]
        variables = {"WANDB_RUN_GROUP": self.config.name, "WANDB_JOB_TYPE": "trial"}
        if running.gpus.names:
            variables["CUDA_VISIBLE_DEVICES"] = ",".join(running.gpus.names)
        running.hang_reason = ""
        with self.signals.deferred():
            for remaining in reversed(range(MAX_STARTS)):
                try:
                    running.process = TrialProcess(
                        overrides, folder=folder, threads=self.config.threads, code=self.code, variables=variables
                    )
                    break
                except (EOFError, ConnectionError):
                    time.sleep(POLL_S)
                    if not remaining or self.signals.received:
                        raise
            self.running[running.trial.number] = running

    def _poll_trials(self) -> None:
        """Handles processes that have ended, trials that other workers own by now, early stops and hangs."""
        did_beat = self.registry.beat(running=len(self.running))
        for running in list(self.running.values()):
            outcome = running.process.poll()
            try:
                if (did_beat or outcome is not None) and not self._owns(running):
                    self._drop(running)
                elif outcome is not None:
                    self._process_ended(running, outcome)
                elif running.prune_reason or running.hang_reason:
                    if time.monotonic() - running.end_requested_s > END_PATIENCE_S:
                        running.process.kill()
                else:
                    self._end_if_dominated_or_hanging(running)
            except UpdateFinishedTrialError:  # another worker has finished it since `_owns`
                self._drop(running)
        self.progress.refresh()

    def _owns(self, running: _RunningTrial) -> bool:
        """Whether this worker still owns the trial; another one takes it over if this machine slept."""
        stored = self.study._storage.get_trial(running.trial._trial_id)
        return stored.state is TrialState.RUNNING and stored.user_attrs.get(OWNER_KEY) == self.registry.name

    def _drop(self, running: _RunningTrial) -> None:
        """Kills the process of a trial that another worker owns."""
        say(f"trial {running.trial.number} was taken over by another worker: this one missed heartbeats")
        running.process.stop(patience_s=0.0)
        self._free(running)

    def _end_if_dominated_or_hanging(self, running: _RunningTrial) -> None:
        """Asks the process to end if another trial is better in every objective, or if it writes nothing any more."""
        running.prune_reason = running.early_stopping.stop_reason(running.process.folder, repeat=len(running.outcomes))
        limit_s = self.config.stall_s
        if not running.prune_reason and limit_s and running.process.silent_s() > limit_s:
            running.hang_reason = f"it wrote nothing for {limit_s} s (hydra.sweeper.stall_s)"
        if running.prune_reason or running.hang_reason:
            text = f"ends early: {running.prune_reason}" if running.prune_reason else f"hangs: {running.hang_reason}"
            say(f"trial {running.trial.number} {text}")
            running.end_requested_s = time.monotonic()
            running.process.ask_to_end()

    def _process_ended(self, running: _RunningTrial, outcome: RunOutcome) -> None:
        """Prunes the trial, retries the run, starts the next repeat, or finishes the trial."""
        if running.prune_reason and outcome.result is None:
            text = f"ended early: {running.prune_reason}"
            error = {"schema": 1, "kind": "EndedEarly", "message": text, "exit_code": outcome.exit_code}
            write_json(running.process.folder / ERROR, error)  # replaces "interrupted" in the frontier's tables
            self._finish(running, TrialOutcome(state=TrialState.PRUNED, text=text))
        elif outcome.should_retry:
            self._retry(running, replace(outcome, message=running.hang_reason or outcome.message))
        else:
            running.outcomes.append(outcome)
            num_runs = len(self.config.repeats) or 1
            if outcome.is_conclusive and not outcome.is_infeasible and len(running.outcomes) < num_runs:
                self._start_process(running)
            else:
                self._finish(running, trial_outcome(running.outcomes, objectives=self.config.objectives))

    def _retry(self, running: _RunningTrial, outcome: RunOutcome) -> None:
        """Starts a run again that was killed or failed through a bug; after `retries` times the trial has failed."""
        stored = self.study._storage.get_trial(running.trial._trial_id)
        trial = Trial(self.study, stored._trial_id)
        losses = int(stored.user_attrs.get(SERVER_LOSSES_KEY, 0)) + 1
        if outcome.exit_code == SERVER_LOST and losses <= MAX_SERVER_LOSSES:  # not the trial's fault
            trial.set_user_attr(SERVER_LOSSES_KEY, losses)
            say(f"trial {stored.number} is begun again: the server that its process was forked from was killed")
            self._start_process(running)
            return
        attempts = int(stored.user_attrs.get(ATTEMPTS_KEY, 0)) + 1
        trial.set_user_attr(ATTEMPTS_KEY, attempts)
        if attempts > self.config.retries:
            text = f"failed: it was killed or failed {attempts} times, at last with {outcome.exit_code}: "
            self._finish(running, TrialOutcome(state=TrialState.FAIL, text=text + outcome.message))
            return
        say(f"trial {stored.number} is begun again ({outcome.message}), attempt {attempts + 1}")
        self._start_process(running)

    def _finish(self, running: _RunningTrial, outcome: TrialOutcome) -> None:
        """Stores the trial's outcome, frees its GPUs and prints a line."""
        trial = Trial(self.study, running.trial._trial_id)
        for name, value in outcome.constraints.items():
            if name not in trial.constraints:  # an earlier attempt may have been killed between here and `tell`
                trial.set_constraint(name, value)
        trial.set_user_attr(SECONDS_KEY, round(time.monotonic() - running.began_s, 3))
        if outcome.state is not None or any(outcome.constraints.values()):
            trial.set_user_attr(MESSAGE_KEY, outcome.text)
        self.study.tell(running.trial.number, outcome.values, state=outcome.state)
        self._free(running)
        settings = " ".join(running.overrides[len(self.config.fixed) :])
        self.progress.trial_ended(f"trial {running.trial.number} ({settings}): {outcome.text}")

    def _free(self, running: _RunningTrial) -> None:
        del self.running[running.trial.number]
        running.gpus.release()


def _memory_budget_bytes(overrides: Sequence[str]) -> int | None:
    """Device memory that the overrides allow the trial; None if they set no valid memory budget."""
    budgets = [word.removeprefix("budget=") for word in overrides if word.startswith("budget=")]
    try:
        return parse_budget(budgets[-1]).memory_bytes if budgets else None
    except BadInputError:
        return None  # the run itself refuses it
