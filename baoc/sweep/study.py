"""A study: Optuna chooses settings, each trial trains them in a process of its own, and every answer is kept at once.

The storage is the only truth. Whatever is killed, the same command goes on: trials of workers that are gone are taken
over under their number and in their folder, and the total stays `n_trials`. Any number of workers share a storage.
"""

import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from multiprocessing.connection import wait
from pathlib import Path
from typing import Any

import optuna
from hydra.core.override_parser.overrides_parser import OverridesParser
from optuna.exceptions import StorageInternalError, UpdateFinishedTrialError
from optuna.trial import FrozenTrial, Trial, TrialState

from baoc.core.budgets import parse_budget
from baoc.errors import BadInputError, OutputError, TrainingFailedError
from baoc.frontier.runs import ERROR
from baoc.models import MODELS
from baoc.parallel import refuse_ranks
from baoc.sweep import children
from baoc.sweep.answers import Answer, answer_of, infeasible
from baoc.sweep.early import Watch
from baoc.sweep.interrupts import POLL_S, Interrupts
from baoc.sweep.memory import Places, cards_here
from baoc.sweep.progress import Progress
from baoc.sweep.sampling import suggest
from baoc.sweep.storage import LOCK, next_trial, open_study, rest, setup_lock, storage_told, storage_url, trial_of
from baoc.sweep.study_config import StudyConfig
from baoc.sweep.trial import COMMAND, Outcome, TrialProcess
from baoc.sweep.workers import Register
from baoc.tracking.files import write_json

LOOK_S = 5.0  # between two looks at other workers' trials
PATIENCE_S = 120.0  # for the checkpoint and the end of a run that was asked for both; then it is killed
STOP_S = 30.0  # the same where the study ends; less than others wait for a beat
STARTS = 3  # how often a process is begun whose server of forks was killed in that moment


def run_study(
    config: StudyConfig, *, folder: str | Path, extra: Sequence[str] = (), code: str = COMMAND, stay: bool = True
) -> optuna.Study:
    """Works on the study in `folder` until it has `n_trials`; `extra` overrides come on top of `fixed`.

    `code` is the Python program of a trial, whose arguments are its overrides. With `stay`, a worker without work waits
    for the others' trials, to take them over if they are killed.

    Raises BadInputError where the storage holds a study of another space or objectives, OutputError where it fails in
    mid-study (a full disk, a lock that is not given back, a server that went away): trials are ended with a checkpoint.
    """
    refuse_ranks("study")
    folder = study_folder(folder)
    config = with_extra(config, extra)
    with storage_told(config.storage, folder=folder):
        study = open_study(config, folder=folder)
    if code == COMMAND:
        children.preload(children.PRELOAD, *modules_of(config))
    runner = _Runner(study, config=config, folder=folder, code=code, stay=stay)
    with storage_told(config.storage, folder=folder), runner.interrupts.taken():
        try:
            runner.run()
        except BaseException:
            runner.stop()
            with suppress(StorageInternalError, OutputError):  # the storage may be what failed
                runner.register.end()
            raise
        runner.register.end()
    return study


def study_folder(path: str | Path) -> Path:
    """Makes it where it is not there. Raises OutputError where it cannot be written."""
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


def refuse_all_failed(study: optuna.Study) -> None:
    """Raises TrainingFailedError where trials have ended, and all of them failed: what a command must not call done."""
    ended = [trial for trial in study.get_trials(deepcopy=False) if trial.state.is_finished()]
    if ended and all(trial.state is TrialState.FAIL for trial in ended):
        last = ended[-1].user_attrs.get("text", "failed")
        raise TrainingFailedError(f"all {len(ended)} ended trials of study {study.study_name} failed; the last {last}")


def with_extra(config: StudyConfig, extra: Sequence[str]) -> StudyConfig:
    """Command-line overrides join `fixed`. Raises BadInputError for several values, which belong into the space."""
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
    return replace(config, fixed=(*config.fixed, *own))


def modules_of(config: StudyConfig) -> list[str]:
    """What building the networks of all trials imports: a third of a second (transformers) or a whole one (diffusers)
    that each trial would pay. Only what an override names; other trials import for themselves."""
    chosen = [str(value) for param in config.space if param.key == "model" for value in param.choices]
    lists = [config.fixed, *config.baselines, *config.repeats]
    chosen += [word.removeprefix("model=") for words in lists for word in words if word.startswith("model=")]
    families = [MODELS[name] for name in dict.fromkeys(chosen) if name in MODELS]
    return [module for family in families for module in (family.module, *family.imports)]


@dataclass(slots=True, kw_only=True)
class _Running:
    """A trial at work: one process after another, one for each of its runs."""

    trial: FrozenTrial
    words: list[str]
    card: str | None
    budget_bytes: int | None
    process: TrialProcess
    watch: Watch
    outcomes: list[Outcome] = field(default_factory=list)
    ended_early: str = ""  # why; then its process has been asked to end
    stalled: str = ""  # the same, where it hung
    asked: float = 0.0  # when its process was asked to end


class _Runner:
    """Keeps up to `workers` trials running; a free place is filled at once."""

    def __init__(self, study: optuna.Study, *, config: StudyConfig, folder: Path, code: str, stay: bool):
        self.study, self.config, self.folder, self.code, self.stay = study, config, folder, code, stay
        self.running: dict[int, _Running] = {}
        self.register = Register(study)
        self.interrupts = Interrupts()
        self.progress = Progress(study, config=config)
        cards = cards_here(config.gpus) if code == COMMAND or config.gpus != "auto" else ()
        self.places = Places(cards=cards, per_card=config.per_gpu)
        self.held: Trial | FrozenTrial | None = None  # drawn, and waiting for a card with room
        self._looked = -LOOK_S

    # -- the loop ---------------------------------------------------------------------------------------------------

    def run(self) -> None:
        with self.progress:
            self.register.beat(running=0)
            while True:
                self._fill()
                self.interrupts.check()
                if not self.running and self.held is None and not self._others_work():
                    break
                rest(self.study._storage)
                wait([own.process.sentinel for own in self.running.values()], timeout=POLL_S)
                self._look_after()

    def stop(self) -> None:
        """Asks all trials for a checkpoint and an end, and waits for them; a second Ctrl-C kills them."""
        end = time.monotonic() + STOP_S
        try:
            for own in self.running.values():
                own.process.ask_to_end()
            for own in self.running.values():
                own.process.stop(patience_s=max(end - time.monotonic(), 0.0))
        except KeyboardInterrupt:
            with self.interrupts.waiting():  # a third one must not leave any of them
                for own in self.running.values():
                    own.process.kill()
                for own in self.running.values():
                    own.process.stop(patience_s=0.0)

    def _fill(self) -> None:
        while len(self.running) < self.config.workers:
            trial = self.held or self._orphan() or self._drawn()
            if trial is None:
                return
            self.held = None if self._begin(trial) else trial
            if self.held is not None:
                return

    def _drawn(self) -> FrozenTrial | None:
        trial = next_trial(self.study, config=self.config, folder=self.folder)
        return None if trial is None else self._words_for(trial)

    def _words_for(self, trial: Trial) -> FrozenTrial:
        trial.set_user_attr("worker", self.register.own.name)
        trial.set_user_attr("words", [*self.config.fixed, *suggest(trial, self.config)])
        return self.study._storage.get_trial(trial._trial_id)

    def _orphan(self) -> FrozenTrial | None:
        """A running trial whose worker is gone, now this worker's; looked for every few seconds."""
        if time.monotonic() - self._looked < LOOK_S:
            return None
        self._looked = time.monotonic()
        url = storage_url(self.config.storage, folder=self.folder)
        theirs = self._theirs()
        attributes = self.study.user_attrs  # after the trials: their workers stand in it
        for trial in theirs:
            if not self._gone(trial, attributes):
                continue
            with setup_lock(self.folder, url=url):
                now = self.study._storage.get_trial(trial._trial_id)
                if now.state is not TrialState.RUNNING or now.user_attrs.get("worker") != trial.user_attrs.get(
                    "worker"
                ):
                    continue  # somebody was faster
                Trial(self.study, trial._trial_id).set_user_attr("worker", self.register.own.name)
            self._looked = -LOOK_S  # there may be more
            self.progress.say(f"trial {trial.number} goes on: its worker is gone")
            if "words" not in now.user_attrs:
                return self._words_for(trial_of(self.study, now._trial_id, number=now.number, config=self.config))
            return now
        return None

    def _theirs(self) -> list[FrozenTrial]:
        running = self.study.get_trials(deepcopy=False, states=(TrialState.RUNNING,))
        own = {self.held.number} if self.held is not None else set()
        return [trial for trial in running if trial.number not in self.running and trial.number not in own]

    def _others_work(self) -> bool:
        """Whether a trial may still become this worker's."""
        theirs = self._theirs()
        if self.stay:
            return bool(theirs)
        attributes = self.study.user_attrs
        return any(self._gone(trial, attributes) for trial in theirs)

    def _gone(self, trial: FrozenTrial, attributes: Mapping[str, Any]) -> bool:
        return self.register.gone(trial.user_attrs.get("worker"), attributes, trial=trial.number)

    # -- one trial --------------------------------------------------------------------------------------------------

    def _begin(self, trial: Trial | FrozenTrial) -> bool:
        """Whether it begins; else no card has room for it now."""
        frozen = trial if isinstance(trial, FrozenTrial) else self.study._storage.get_trial(trial._trial_id)
        words = list(frozen.user_attrs["words"])
        budget_bytes = _memory_budget(words)
        card = self.places.take(budget_bytes)
        if card is None and self.places.cards:
            return False
        baseline = "overrides" in frozen.user_attrs
        watch = Watch(self.study, frozen, config=self.config, exempt=baseline)
        with self.interrupts.waiting():
            process = self._process(frozen.number, words, part=0, card=card)
            self.running[frozen.number] = _Running(
                trial=frozen, words=words, card=card, budget_bytes=budget_bytes, process=process, watch=watch
            )
        return True

    def _process(self, number: int, words: Sequence[str], *, part: int, card: str | None) -> TrialProcess:
        folder = self.folder / f"{number:04d}"
        own: Sequence[str] = ()
        if self.config.repeats:
            folder, own = folder / str(part), self.config.repeats[part]
        variables = {"WANDB_RUN_GROUP": self.config.name, "WANDB_JOB_TYPE": "trial"}
        if card is not None:
            variables["CUDA_VISIBLE_DEVICES"] = card
        overrides = [*words, *own]
        for left in reversed(range(STARTS)):
            try:
                return TrialProcess(
                    overrides, folder=folder, threads=self.config.threads, code=self.code, variables=variables
                )
            except (EOFError, ConnectionError):
                time.sleep(POLL_S)
                if not left or self.interrupts.came:
                    raise
        raise AssertionError("unreachable")

    def _look_after(self) -> None:
        beaten = self.register.beat(running=len(self.running))
        for number, own in list(self.running.items()):
            outcome = own.process.poll()
            try:
                if (beaten or outcome is not None) and not self._mine(own):
                    self._leave(own)
                elif outcome is not None:
                    self._ended(own, outcome)
                elif own.ended_early or own.stalled:
                    if time.monotonic() - own.asked > PATIENCE_S:
                        own.process.kill()
                else:
                    self._judge(own, number)
            except UpdateFinishedTrialError:  # it became another's a moment ago
                self._leave(own)
        self.progress.refresh()

    def _mine(self, own: _Running) -> bool:
        """Whether no other worker has taken the trial over, as one does where this machine slept."""
        now = self.study._storage.get_trial(own.trial._trial_id)
        return now.state is TrialState.RUNNING and now.user_attrs.get("worker") == self.register.own.name

    def _leave(self, own: _Running) -> None:
        """Ends this worker's part in a trial that is another's."""
        self.progress.say(f"trial {own.trial.number} is another worker's: this one gave no sign of life, and leaves it")
        own.process.stop(patience_s=0.0)
        self._free(own)

    def _judge(self, own: _Running, number: int) -> None:
        """Asks a run to end that another trial beats, or that hangs."""
        own.ended_early = own.watch.verdict(own.process.folder, part=len(own.outcomes))
        limit_s = self.config.stall_s
        if not own.ended_early and limit_s and own.process.silent_s() > limit_s:
            own.stalled = f"it wrote nothing for {limit_s} s (hydra.sweeper.stall_s)"
        if own.ended_early or own.stalled:
            told = f"ends early: {own.ended_early}" if own.ended_early else f"hangs: {own.stalled}"
            self.progress.say(f"trial {number} {told}")
            own.asked = time.monotonic()
            own.process.ask_to_end()

    def _ended(self, own: _Running, outcome: Outcome) -> None:
        """One run of the trial ended: the trial goes on, goes into another attempt, or is answered."""
        number, parts = own.trial.number, len(self.config.repeats) or 1
        if own.ended_early and outcome.result is None:
            answer = Answer(state=TrialState.PRUNED, text=f"ended early: {own.ended_early}")
            _explain(own.process.folder, answer.text, exit_code=outcome.exit_code)
            self._tell(own, answer)
            return
        if outcome.killed:
            self._again(own, replace(outcome, message=own.stalled or outcome.message))
            return
        own.outcomes.append(outcome)
        if outcome.answered and not infeasible(outcome) and len(own.outcomes) < parts:
            with self.interrupts.waiting():
                own.process = self._process(number, own.words, part=len(own.outcomes), card=own.card)
            return
        self._tell(own, answer_of(own.outcomes, objectives=self.config.objectives))

    def _again(self, own: _Running, outcome: Outcome) -> None:
        """Another attempt at a trial whose own process was killed or failed through a bug, within the limit."""
        trial = self.study._storage.get_trial(own.trial._trial_id)
        attempts = int(trial.user_attrs.get("attempts", 0)) + 1
        Trial(self.study, trial._trial_id).set_user_attr("attempts", attempts)
        if attempts > self.config.retries:
            text = f"failed: it was killed or failed {attempts} times, at last with {outcome.exit_code}: "
            self._tell(own, Answer(state=TrialState.FAIL, text=text + outcome.message))
            return
        self.progress.say(f"trial {trial.number} is begun again ({outcome.message}), attempt {attempts + 1}")
        with self.interrupts.waiting():
            own.process = self._process(trial.number, own.words, part=len(own.outcomes), card=own.card)
        own.stalled = ""

    def _tell(self, own: _Running, answer: Answer) -> None:
        trial = Trial(self.study, own.trial._trial_id)
        for name, value in answer.constraints.items():
            if name not in trial.constraints:  # a start that was killed right here has set it
                trial.set_constraint(name, value)
        if answer.state is not None or any(answer.constraints.values()):
            trial.set_user_attr("text", answer.text)
        self.study.tell(own.trial.number, answer.values, state=answer.state)
        self._free(own)
        words = " ".join(own.words[len(self.config.fixed) :])
        self.progress.told(f"trial {own.trial.number} ({words}): {answer.text}")

    def _free(self, own: _Running) -> None:
        """Its place is the next trial's."""
        del self.running[own.trial.number]
        if own.card is not None:
            self.places.give_back(own.card, own.budget_bytes)


def _explain(folder: Path, text: str, *, exit_code: int) -> None:
    """What a frontier says of the run instead of "interrupted"."""
    write_json(folder / ERROR, {"schema": 1, "kind": "EndedEarly", "message": text, "exit_code": exit_code})


def _memory_budget(words: Sequence[str]) -> int | None:
    """Bytes that the trial may hold on its card, where its overrides say so."""
    given = [word.removeprefix("budget=") for word in words if word.startswith("budget=")]
    try:
        return parse_budget(given[-1]).memory_bytes if given else None
    except BadInputError:
        return None  # the run refuses it
