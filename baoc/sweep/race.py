"""Runs a race: each of its runs is a trial of one study in the race's folder, under the study's workers and storage.

`baoc.racing.course` says which runs come next from the scores so far. Those of a stage are appended to the
study as fixed overrides, and `run_study` works until they have ended; so retries, hangs, GPUs, kills and several
processes are the study's. The same command goes on with a race that was killed: the course asks for the same runs
again, and finds those that had ended in the storage.
"""

import math
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import optuna
import yaml
from optuna.trial import FrozenTrial, TrialState
from rich.table import Column

from baoc.cli.jobs import RACE_SETUP_FILE
from baoc.config.from_hydra import from_plain, to_conf
from baoc.config.schema import RunConfig
from baoc.core.recipes import RECIPES, find_recipe, recipe_node
from baoc.errors import BadInputError, BudgetBreachedError, InfeasibleBudgetError, TrainingFailedError
from baoc.frontier.build import build_report
from baoc.frontier.page import race_table
from baoc.frontier.runs import INCIDENTAL, quote
from baoc.models import family_of
from baoc.parallel import refuse_several_processes
from baoc.racing import records
from baoc.racing.course import (
    DIVERGED,
    DONE,
    FAILED,
    NO_FIT,
    Course,
    OutOfTimeError,
    RaceOutcome,
    RaceSettings,
    Run,
    RunEnd,
    course,
)
from baoc.racing.entrants import ENTRANTS_FILE, Racer, RaceTarget, read_target
from baoc.racing.records import EPOCHS_APART, RaceScale, epochs, stage_name
from baoc.sweep.early_stopping import violates_constraint
from baoc.sweep.gpu_slots import find_gpus
from baoc.sweep.storage import differences, setting_text
from baoc.sweep.study import make_study_folder, run_study
from baoc.sweep.study_config import StudyConfig
from baoc.sweep.trial_process import COMMAND, TrialProcess, preload
from baoc.tracking import files
from baoc.tracking.console import figures, make_console, make_table, say
from baoc.tracking.files import read_json, write_json, write_text
from baoc.types import to_plain
from baoc.units import format_bytes

TAKEN_FILE = "taken.json"  # the earlier race that a run took, where nothing was raced before it
SEEDS, FRESH_SEEDS = 100, 200  # added to the run's own seed
TIMED = "timed"  # stage of runs that only tell seconds
TIMED_STEPS = 40  # of a run that is only timed
LEAST_STEPS = 100  # of a race's last rung, where it is shorter than the run
CHECKED = 6  # runs between two looks at the clock, under a cap
FEW = 2  # entrants left at the end
RETRIES = 3  # of a run that was killed: no entrant is to leave for the machine's sake
_MAY_CHANGE = ("workers", "per_gpu", "cap_s", "library")  # settings with which a race may go on
# What a race sets itself, or decides; all other overrides of the command hold for its runs too
_OWN = (
    "mode", "resume", "seed", "name", "race", "recipe", "allocator", "objective", "checkpoint", "logger",
    "trainer.max_steps", "trainer.max_epochs", "trainer.val_check_interval", "trainer.check_val_every_n_epoch",
    "optim.lr", "model.size", "budget.schedule", "trainer.devices", "trainer.strategy",
)  # fmt: skip
_QUIET = (
    "mode=train", "name=race", "logger=jsonl", "checkpoint.export=false", "trainer.enable_progress_bar=false",
    "trainer.max_epochs=null", "trainer.check_val_every_n_epoch=null", f"trainer.val_check_interval={10**9}",
)  # fmt: skip


def _sets_budget(word: str) -> bool:
    return word.lstrip("+").startswith(("budget=", "budget."))


def run_race(
    config: RunConfig,
    *,
    overrides: Sequence[str],
    folder: Path,
    command: str,
    code: str = COMMAND,
    cap_s: float | None = None,
) -> Mapping[str, Any] | None:
    """Races the candidates for `config` in `folder`; the content of race.json, or None where nothing was raced, as the
    time does not suffice.

    Args:
        overrides: of the command.
        cap_s: seconds that the race may take; None where nothing limits it.

    Raises:
        BadInputError: settings that no race can be held with, another race in the folder, or one of several ranks.
        InfeasibleBudgetError: no candidate fits the budget.
        TrainingFailedError: no uniform has trained to a finite score.
    """
    refuse_several_processes("race")
    return RaceRun(config, overrides=overrides, folder=make_study_folder(folder), command=command, code=code).run(cap_s)


def race_command(config: RunConfig, *, overrides: Sequence[str], folder: Path, command: str) -> None:
    """mode=race."""
    if run_race(config, overrides=overrides, folder=folder, command=command, cap_s=config.race.cap_s) is None:
        raise BadInputError(
            f"nothing was raced within race={config.race.cap_s:g}, and the lines above say why: where time is short, "
            "give race=SECONDS more, or leave it out, which is without a cap"
        )


def race_before_run(
    config: RunConfig, *, overrides: Sequence[str], folder: Path, command: str, code: str = COMMAND
) -> RunConfig:
    """`race=auto|SECONDS`: the configuration with what a race within its cap has chosen, or the measured recipe of the
    library where there is no time for one; as it was where there is neither. What it cost is said."""
    result = run_race(config, overrides=overrides, folder=folder, command=command, code=code, cap_s=config.race.cap_s)
    if result is not None:
        return records.apply_choice(config, result)
    kept = folder / TAKEN_FILE
    if not kept.is_file():  # a resumed run takes what it took before, whatever was raced since
        size = read_target(folder / ENTRANTS_FILE).size
        try:
            found = records.find_race(config, size=size, library=Path(config.race.library))
        except BadInputError:
            found = None
        write_json(kept, {"schema": 1, "race": found})
    found = read_json(kept)["race"]
    if found is None:
        say(f"no race of this family is known either: the run goes on by risk={config.risk.name}")
        return config
    say(f"taken from an earlier race: {found['told']}")
    return records.apply_choice(config, found)


def inherited_overrides(overrides: Sequence[str]) -> list[str]:
    """The overrides of a command that hold for the runs of its race."""
    kept = []
    for word in overrides:
        key = word.lstrip("+~").partition("=")[0]
        if not word.startswith("hydra") and not any(key == own or key.startswith(f"{own}.") for own in _OWN):
            kept.append(word)
    return kept


class RaceRun:
    """One race: `asked` are its runs and their overrides by trial number."""

    def __init__(self, config: RunConfig, *, overrides: Sequence[str], folder: Path, command: str, code: str):
        self.config, self.overrides, self.folder = config, list(overrides), folder
        self.command, self.code = command, code
        self.asked: list[tuple[Run, tuple[str, ...]]] = []
        self.study: optuna.Study | None = None
        self.field: RaceTarget
        self.pace = (0.0, 0.0)  # seconds of a step, and of a run's start and end
        self.began, self.plan_s = time.time(), 0.0  # seconds of the plan that found the entrants
        self._earlier_s = 0.0  # of them those of a process that was killed
        self._fixed = (*_QUIET, *(word for word in inherited_overrides(overrides) if not _sets_budget(word)))

    # -- the course ---------------------------------------------------------------------------------------------------

    def run(self, cap_s: float | None) -> Mapping[str, Any] | None:
        race, allocator = self.config.race, self.config.allocator.name
        if allocator.startswith("uniform_"):
            raise BadInputError(
                f"allocator={allocator} says what every block runs, and a race chooses it: leave one out; race.recipes "
                "has recipes such as adamw"
            )
        trainer = self.config.trainer
        if trainer.strategy == "fsdp" or (self.config.mode == "race" and trainer.devices > 1):
            told = "trainer.strategy=fsdp" if trainer.strategy == "fsdp" else f"trainer.devices={trainer.devices}"
            raise BadInputError(
                f"a race trains each of its runs on one device, and {told} was given: leave it out; race.workers run "
                "at once, one on each GPU"
            )
        self.field = self._find_field()
        self.check_setup()
        auto = self.config.mode != "race" and race.first == "auto"
        if cap_s is not None or auto:
            planned = self.within(cap_s)
            if planned is None:
                return None
            measured, racers, rates, cap_s = planned
            self.field = replace(self.field, racers=tuple(racers))
        else:
            measured, racers, rates = self._own_size(), self.field.racers, race.rates
        if told := self._repeats_more(measured):
            say(f"warning: the race {told}; what is best in few epochs is often what overfits first in many")
        steps = self._equal_seconds(racers, measured) if self.config.objective == "throughput" else {}
        measured = replace(measured, equal_seconds=bool(steps), one_rate=len(rates) == 1)
        settings = RaceSettings(
            rates=rates,
            rungs=race.rungs if cap_s is None else self._rungs(len(racers), rates=len(rates)),
            seeds=tuple(self.config.seed + SEEDS + i for i in range(race.seeds)),
            fresh_seeds=tuple(self.config.seed + FRESH_SEEDS + i for i in range(race.confirm_seeds)),
            steps={one.name: steps.get(one.name, measured.steps) for one in racers},
            margin=race.margin,
            level=race.level,
        )
        where = f"{self.config.model.name} {measured.size} ({measured.num_params:,} parameters)"
        seen = f", {epochs(measured.steps, self.field):.1f} epochs" if self.field.num_train else ""
        say(
            f"race of {len(racers)} recipes on {where}, {self.field.data}, budget {self.config.budget.name}: "
            f"{measured.steps:,} steps{seen}, {len(rates)} rates, {race.seeds} + {race.confirm_seeds} seeds"
        )
        if not any(one.entrant.control for one in racers):
            say("no permutation races as a control: blocks of equal shapes run one spec in the plan, or time is short")
        try:
            outcome = self.drive(course([one.entrant for one in racers], settings=settings), measured, racers, cap_s)
        except OutOfTimeError:
            say("nothing is raced: the first stage alone would not end in time")
            return None
        content = records.record(
            outcome,
            config=self.config,
            field=self.field,
            measured=measured,
            seconds=self.spent_s(),
            command=self.command,
        )
        records.keep(content, folder=self.folder, library=Path(race.library))
        show(content)
        self._page(outcome, content)
        return content

    def drive(self, going: Course, measured: RaceScale, racers: Sequence[Racer], cap_s: float | None) -> RaceOutcome:
        """Lets the course go, stage by stage, until it ends or a stage would not end within the cap."""
        by_name = {one.name: one for one in racers}
        try:
            asked = next(going)
            while True:
                if asked:
                    entrants = len({run.entrant for run in asked})
                    say(f"stage {stage_name(asked[0].stage)}: {len(asked)} runs, entrants {entrants}")
                sent = {}
                many = max(len(asked), 1) if cap_s is None else CHECKED * self.config.race.workers
                for at in range(0, len(asked), many):
                    runs = asked[at : at + many]
                    if not self._has_time(runs, stage=asked[at:], cap_s=cap_s):
                        say(f"{len(asked) - at} more runs would not end within the cap of {cap_s:.0f} s")
                        asked = going.throw(OutOfTimeError())
                        break
                    sent |= self._train([(run, self.words_of(by_name[run.entrant], run, measured)) for run in runs])
                    files.write_csv(self.folder / records.RUNS_FILE, self._rows())
                else:
                    if sent and all(end.status == FAILED for end in sent.values()):
                        told = list(sent.values())[-1].message
                        raise TrainingFailedError(f"all {len(sent)} runs of the race's stage failed; the last: {told}")
                    asked = going.send(sent)
        except StopIteration as ended:
            return ended.value

    def _train(self, runs: Sequence[tuple[Run, tuple[str, ...]]]) -> dict[Run, RunEnd]:
        """Trains runs as the next trials of the study; returns how each of them ended."""
        first = len(self.asked)
        self.asked += runs
        race = self.config.race
        config = StudyConfig(
            name=f"race_{self.folder.parent.name}_{self.folder.name}",
            objectives={"quality": "maximize" if self.field.higher_is_better else "minimize"},
            space=(),
            fixed=self._fixed,
            baselines=tuple(words[len(self._fixed) :] for _, words in self.asked),
            sampler="random",
            n_trials=len(self.asked),
            workers=race.workers,
            retries=RETRIES,
            storage=race.storage,
            per_gpu=race.per_gpu,
        )
        self.study = run_study(config, folder=self.folder, code=self.code)
        for number in range(first, len(self.asked)):  # hundreds of runs would fill the disk
            for checkpoint in (self.folder / f"{number:04d}").rglob("*.ckpt"):
                checkpoint.unlink()
        trials = self.study.get_trials(deepcopy=False)[first : len(self.asked)]  # a resumed study may have later ones
        return {run: self._ended(trial) for (run, _), trial in zip(runs, trials, strict=True)}

    def _ended(self, trial: FrozenTrial) -> RunEnd:
        text = str(trial.user_attrs.get("text", ""))
        if trial.state is not TrialState.COMPLETE:
            return RunEnd(status=FAILED, message=text.removeprefix("failed: "))
        if trial.constraints.get("budget", 0.0) > 0:
            return RunEnd(status=NO_FIT, message=text)
        if violates_constraint(trial):
            return RunEnd(status=DIVERGED, score=math.inf, message=text)
        return RunEnd(status=DONE, score=trial.values[0] * (-1 if self.field.higher_is_better else 1))

    # -- who races, and where -----------------------------------------------------------------------------------------

    def _find_field(self) -> RaceTarget:
        """The entrants at the budget, by a process that plans on the device and ends, so that its memory is free."""
        file = self.folder / ENTRANTS_FILE
        if not file.is_file():
            race = self.config.race
            for name in race.recipes:
                find_recipe(name)  # what is typed wrong is told before a plan is made
            own = [f"race.recipes=[{','.join(map(quote, race.recipes))}]"] if race.recipes else []
            own += [word for word in self.overrides if word.startswith(("model.size=", "optim.lr=", "trainer.max_"))]
            preload(self._fixed)  # the first process starts the server
            process = TrialProcess(
                [*inherited_overrides(self.overrides), *own, "mode=plan", "race=auto", f"seed={self.config.seed}"],
                folder=self.folder / "plan",
                threads=1,
            )
            try:
                while (outcome := process.poll()) is None:
                    process.process.join(1.0)
            finally:
                process.stop(patience_s=5.0)
            if outcome.exit_code:
                kind = {2: BadInputError, 4: BudgetBreachedError}.get(outcome.exit_code, TrainingFailedError)
                if outcome.exit_code == InfeasibleBudgetError.exit_code:
                    raise InfeasibleBudgetError(outcome.message, budget_bytes=0, least_feasible_bytes=0)
                raise kind(outcome.message)
            write_json(file, read_json(self.folder / "plan" / ENTRANTS_FILE))
        found = read_target(file)
        for one in found.racers:
            known = RECIPES.get(one.name)
            if known is None or replace(one.recipe, share=None) != replace(known, share=None):
                text = yaml.safe_dump(recipe_node(one.recipe), sort_keys=False)
                write_text(self.folder / "recipes" / f"{one.name}.yaml", text)
        return found

    def check_setup(self) -> None:
        """Keeps what the race is made of, or compares it with what the folder's race was made of."""
        own, file = made_of(to_plain(to_conf(self.config))), self.folder / RACE_SETUP_FILE
        if not file.is_file():
            self.plan_s = time.time() - self.began
            write_json(file, {"schema": 1, "words": self.overrides, "settings": own, "plan_s": self.plan_s})
            return
        kept = read_json(file)
        self.plan_s = self._earlier_s = kept.get("plan_s", 0.0)
        try:
            changes = differences(made_of(kept["settings"]), own)
        except BadInputError as error:
            raise BadInputError(
                f"{self.folder} holds a race of another version of baoc, whose settings this one does not take "
                f"({error}): give another folder (hydra.run.dir=PATH)"
            ) from error
        if changes:
            told = ", ".join(f"{path}={setting_text(old)}" for path, old, _ in changes)
            raise BadInputError(
                f"{self.folder} holds a race with {told}, and runs of both cannot be compared: give the settings it "
                "has, or another folder (hydra.run.dir=PATH)"
            )

    def _own_size(self) -> RaceScale:
        """The network and the horizon that were asked for: the run's own, or `race.size` at as many samples a
        parameter."""
        race, found = self.config.race, self.field
        size = race.size or found.size
        own = RaceScale(size=size, num_params=found.num_params, steps=race.steps or found.steps)
        if size == found.size:
            return own
        sizes = family_of(self.config.model.name).sizes
        if size not in sizes:
            raise BadInputError(f"race.size={size}: {self.config.model.name} has {', '.join(sizes)}")
        return self.sibling_of(size)[0]

    def sibling_of(self, size: str) -> tuple[RaceScale, tuple[float, float]]:
        """A named size at the run's number of samples a parameter, with the seconds of a step and of a run's start."""
        if self.config.objective == "throughput":
            raise BadInputError(
                "objective=throughput judges at equal seconds, which are those of the network itself: leave race.size "
                "out"
            )
        number, result = self._timed(size)
        steps = self.config.race.steps or max(round(self.field.steps * result["num_params"] / self.field.num_params), 4)
        return RaceScale(size=size, num_params=result["num_params"], steps=steps), self._pace(number, result)

    def _repeats_more(self, measured: RaceScale) -> str:
        """How much more often the run sees its data than the race would; empty where it does not, or by little."""
        run, raced = epochs(self.field.steps, self.field), epochs(measured.steps, self.field)
        if run <= 1 or run <= raced * EPOCHS_APART:
            return ""
        return f"sees its data {raced:.1f} times and the run {run:.1f} times"

    # -- time ---------------------------------------------------------------------------------------------------------

    def within(self, cap_s: float | None) -> tuple[RaceScale, Sequence[Racer], tuple[float, ...], float] | None:
        """The largest network and horizon, and the most entrants and rates, with which a race is predicted to end
        within the cap; None where there is none, which is said."""
        race, found = self.config.race, self.field
        rivals = [one.name for one in found.racers if not one.entrant.control]
        if len(rivals) == 1 and self.config.mode != "race":  # which finds the rate of one recipe too
            say(f"nothing is raced: {rivals[0]} alone fits the budget")
            return None
        pace = self._pace(*self._timed(found.size))
        run_s = found.steps * pace[0]
        if cap_s is None:
            if run_s < race.least_run_s:
                say(f"nothing is raced before a run of {run_s:.0f} s (race.least_run_s={race.least_run_s:g})")
                return None
            cap_s = race.share * run_s
        least = math.inf
        races: Iterable[tuple[RaceScale, tuple[float, float]]] = self._smaller_races(pace, cap_s=cap_s)
        middle = race.rates[len(race.rates) // 2]  # of rising ones: for all entrants, where time allows no more
        for rates in (race.rates, (middle,)):
            seen: list[tuple[RaceScale, tuple[float, float]]] = []
            for measured, (step_s, start_s) in races:
                seen.append((measured, (step_s, start_s)))
                for racers in self._smaller_fields():
                    runs = self._runs(len(racers), rates=len(rates))
                    predicted = sum(
                        predict_seconds(
                            [round(share * measured.steps)] * n, pace=(step_s, start_s), workers=race.workers
                        )
                        for share, n in runs
                    )
                    least = min(least, predicted)
                    if self.plan_s + self._ran_s() + predicted <= cap_s:
                        self.pace = (step_s, start_s)
                        return measured, racers, rates, cap_s
            races = seen  # narrower networks are timed once
        told = "" if math.isinf(least) else f", and the smallest race is predicted to take {least:.0f} s"
        spent_s = self.plan_s + self._ran_s()
        say(f"nothing is raced within {cap_s:.0f} s: planning and timing took {spent_s:.0f} s{told}")
        return None

    def _smaller_races(
        self, pace: tuple[float, float], *, cap_s: float
    ) -> Iterator[tuple[RaceScale, tuple[float, float]]]:
        """Networks and horizons in order of worth, with seconds of a step and of a run's start: the run's own, narrower
        networks of the family, then the network itself at half the steps and half again. `pace`: of the run's own."""
        race, found = self.config.race, self.field
        own = RaceScale(size=found.size, num_params=found.num_params, steps=race.steps or found.steps)
        names = list(family_of(self.config.model.name).sizes)
        narrower = names[: names.index(found.size)][::-1] if found.size in names else []
        sizes = [found.size, *narrower] if race.size is None else [race.size]
        for size in sizes if self.config.objective != "throughput" else sizes[:1]:
            if size != found.size and race.size is None and self.plan_s + self._ran_s() > cap_s / 4:
                break
            measured, its_pace = (own, pace) if size == found.size else self.sibling_of(size)
            if size != found.size and race.size is None and (told := self._repeats_more(measured)):
                say(f"not raced on {measured.size} for {measured.steps:,} steps: it {told}")
            else:
                yield measured, its_pace
        shorter = replace(own, steps=own.steps // 2)
        while race.steps is None and race.size is None and shorter.steps >= LEAST_STEPS:
            yield shorter, pace
            shorter = replace(own, steps=shorter.steps // 2)

    def _smaller_fields(self) -> list[Sequence[Racer]]:
        """All entrants, or the first few of the candidates, which come in order of merit."""
        few = [[one for one in self.field.racers if not one.entrant.control][:most] for most in (6, 4, 3, 2)]
        return [self.field.racers, *(some for some in few if any(one.entrant.uniform for one in some))]

    def _rungs(self, entrants: int, *, rates: int) -> tuple[float, ...]:
        """Of two entrants none leaves before the last rung, as few seeds do not tell: an earlier one is for rates."""
        rungs = self.config.race.rungs
        first = rungs[:1] if rates > 1 else ()
        return rungs if entrants > FEW else tuple(dict.fromkeys((*first, rungs[-1])))

    def _runs(self, entrants: int, *, rates: int) -> list[tuple[float, int]]:
        """Shares of the steps, and how many runs have them, of a race of which half the entrants leave at each rung."""
        race, (first, *later) = self.config.race, self._rungs(entrants, rates=rates)
        runs = [(first, entrants * race.seeds * rates)]
        for rung in later:
            entrants = max(math.ceil(entrants / 2), 2)
            runs.append((rung, entrants * race.seeds))
        if entrants > FEW:  # of so few the rungs decide, where there is no time for more seeds
            runs.append((1.0, entrants * race.confirm_seeds))
        return runs

    def _predicted_s(self, runs: Sequence[Run]) -> float:
        """Seconds of a stage."""
        raced = [(run.steps, self._seconds(at)) for at, (run, _) in enumerate(self.asked) if not is_timed(run)]
        steps, workers = [run.steps for run in runs], self.config.race.workers
        return predict_seconds(steps, pace=self.pace, ran=raced, workers=workers)

    def _has_time(self, runs: Sequence[Run], *, stage: Sequence[Run], cap_s: float | None) -> bool:
        """Whether what is left of a stage ends within the cap, or the next runs of it had ended before a kill."""
        if cap_s is None:
            return True
        assert self.study is not None
        trials = self.study.get_trials(deepcopy=False)[len(self.asked) : len(self.asked) + len(runs)]
        had_ended = len(trials) == len(runs) and all(trial.state.is_finished() for trial in trials)
        return had_ended or self.spent_s() + self._predicted_s(stage) <= cap_s

    def _ran_s(self, *, until: float = math.inf) -> float:
        """Seconds of the runs so far, or of those that had ended by then: the same after a kill."""
        assert self.study is not None
        trials = self.study.get_trials(deepcopy=False)[: len(self.asked)]
        ended = [trial.datetime_complete for trial in trials]
        own = [self._seconds(at) for at, when in enumerate(ended) if when is not None and when.timestamp() < until]
        return sum(own) / self.config.race.workers

    def spent_s(self) -> float:
        """Seconds on the clock since the race began; of processes that were killed those of their plan and runs."""
        return self._earlier_s + self._ran_s(until=self.began) + time.time() - self.began

    def _seconds(self, number: int) -> float:
        assert self.study is not None
        duration = self.study.get_trials(deepcopy=False)[number].duration
        return 0.0 if duration is None else duration.total_seconds()

    def _timed(self, size: str) -> tuple[int, Mapping[str, Any]]:
        """The trial number and the result of a short run of the first uniform, for its seconds: the quicker of two, as
        the first one imports and compiles what others find."""
        uniform = next(one for one in self.field.racers if one.entrant.uniform)
        return min(self._time([uniform], size=size, seeds=2), key=lambda timed: self._seconds(timed[0]))

    def _time(self, racers: Sequence[Racer], *, size: str, seeds: int = 1) -> list[tuple[int, Mapping[str, Any]]]:
        measured, first = RaceScale(size=size, num_params=0, steps=TIMED_STEPS), self.config.seed + SEEDS
        runs = {
            Run(entrant=one.name, rate=1.0, seed=seed, stage=f"{TIMED} {size}", steps=TIMED_STEPS): one
            for one in racers
            for seed in range(first, first + seeds)
        }
        before = len(self.asked)
        ended = self._train([(run, self.words_of(one, run, measured)) for run, one in runs.items()])
        for run, end in ended.items():
            if end.status not in (DONE, DIVERGED):
                raise TrainingFailedError(f"{run.entrant} could not be timed: {end.message}")
        numbers = range(before, len(self.asked))
        return [(number, read_json(self.folder / f"{number:04d}" / "result.json")) for number in numbers]

    def _pace(self, number: int, result: Mapping[str, Any]) -> tuple[float, float]:
        """Seconds of a step, and of a run's start and end."""
        step_s = float(result["step_ms"]) / 1e3 if result["step_ms"] else self._seconds(number) / TIMED_STEPS
        return step_s, max(self._seconds(number) - TIMED_STEPS * step_s, 0.0)

    def _equal_seconds(self, racers: Sequence[Racer], measured: RaceScale) -> dict[str, int]:
        """Steps of each entrant in the seconds that the fastest one's steps take."""
        say(f"objective=throughput: {len(racers)} recipes are timed, and judged at equal seconds")
        timed = self._time(racers, size=measured.size)
        seconds = {one.name: self._pace(*entry)[0] for one, entry in zip(racers, timed, strict=True)}
        fastest = min(seconds.values())
        return {name: max(round(measured.steps * fastest / own), 4) for name, own in seconds.items()}

    # -- overrides and results ----------------------------------------------------------------------------------------

    def words_of(self, racer: Racer, run: Run, measured: RaceScale) -> tuple[str, ...]:
        """The overrides of one run, which repeat it by themselves."""
        same = measured.size == self.field.size
        budget = [word for word in inherited_overrides(self.overrides) if _sets_budget(word)]
        if not same:  # its own budget says nothing of a narrower network; who fits was found on the target
            budget = ["budget=unlimited"]
        gpus = find_gpus("auto") if self.config.race.per_gpu > 1 and self.config.budget.memory_bytes is None else ()
        if gpus and not racer.recipe.blocks:  # trials share a GPU by their memory budgets
            share = min(gpu.total_bytes for gpu in gpus) // self.config.race.per_gpu // 2**20
            budget = [f"budget={share}mb", f"micro_batch={self.config.micro_batch_size}"]
        file = self.folder / "recipes" / f"{racer.name}.yaml"
        recipe = [f"recipe={quote(str(file)) if file.is_file() else racer.name}"]
        if racer.recipe.blocks and not same:  # blocks of another network: its plan is made anew at the same share
            budget, recipe = [f"budget=state_{100 * racer.entrant.state_bytes / self.field.state_bytes_adamw:.4g}"], []
        sizes = family_of(self.config.model.name).sizes
        lr = run.rate * (self.field.lr if same or self.config.optim.lr is not None else sizes[measured.size].lr)
        own = [f"optim.lr={lr:.6g}", f"seed={run.seed}", f"trainer.max_steps={run.steps}"]
        return (*self._fixed, *budget, f"model.size={measured.size}", *recipe, *own)

    def _rows(self) -> list[dict[str, Any]]:
        """race.csv: one row a run."""
        assert self.study is not None
        trials = self.study.get_trials(deepcopy=False)
        state = {one.name: one.entrant.state_bytes for one in self.field.racers}
        rows = []
        for number, (run, words) in enumerate(self.asked):
            end = self._ended(trials[number])
            value = end.score * (-1 if self.field.higher_is_better else 1) if math.isfinite(end.score) else None
            lr = next(word for word in words if word.startswith("optim.lr=")).partition("=")[2]
            rows.append(
                {
                    "entrant": run.entrant, "rate": run.rate, "lr": lr, "seed": run.seed,
                    "stage": stage_name(run.stage), "steps": run.steps, "value": value, "status": end.status,
                    "seconds": round(self._seconds(number), 2), "state_bytes": state[run.entrant],
                    "folder": f"{number:04d}", "message": " ".join(end.message.split()),
                }
            )  # fmt: skip
        return rows

    def _page(self, outcome: RaceOutcome, content: Mapping[str, Any]) -> None:
        """frontier.html of the race's last runs, each entrant at its best rate."""
        last = {outcome.rung, *(stage for stage in outcome.scores if isinstance(stage, str))}
        runs = [
            self.folder / f"{number:04d}"
            for number, (run, _) in enumerate(self.asked)
            if run.stage in last and run.rate == outcome.rates.get(run.entrant)
        ]
        runs = [run for run in runs if (run / "result.json").is_file()]
        page = find_spec("plotly") is not None  # the run that comes after the race is not to end for want of a page
        build_report(runs, out=self.folder, show=False, page=page, race=content)
        where = f"compare its runs in {self.folder / 'frontier.html'}" if page else "frontier.html needs plotly"
        say(f"{where}; one row a run in {self.folder / records.RUNS_FILE}")


def made_of(settings: Mapping[str, Any]) -> dict[str, Any]:
    """What of a run's settings a race is made of; they may be those of an earlier version of baoc. Raises BadInputError
    for what is no setting any more."""
    # of fsdp, which no race has; it was true by default
    trainer = {key: value for key, value in settings["trainer"].items() if key != "reshard_after_forward"}
    found = to_plain(to_conf(from_plain({**settings, "trainer": trainer})))
    race = {key: value for key, value in found["race"].items() if key not in _MAY_CHANGE}
    return {key: found[key] for key in found if key not in INCIDENTAL or key == "seed"} | {"race": race}


def is_timed(run: Run) -> bool:
    """Whether a run only tells seconds."""
    return str(run.stage).startswith(TIMED)


def predict_seconds(
    steps: Sequence[int], *, pace: tuple[float, float], ran: Sequence[tuple[int, float]] = (), workers: int = 1
) -> float:
    """Seconds of runs of about equal lengths, `workers` at once, wave by wave: by `pace`, seconds of a step and of a
    start, times how much slower `ran`, steps and seconds of others, were than that. Runs of equal steps alone do not
    tell starts and steps apart."""
    step_s, start_s = pace
    expected = sum(start_s + step_s * many for many, _ in ran)
    slower = sum(seconds for _, seconds in ran) / expected if expected else 1.0
    each = sum(start_s + step_s * many for many in steps) / max(len(steps), 1)
    return slower * each * math.ceil(len(steps) / workers)


def show(content: Mapping[str, Any]) -> None:
    """Prints the table of a race, the verdict and the claim."""
    told = race_table(content)
    words = Column("", overflow="fold", ratio=1, min_width=24)
    columns = (Column("recipe", no_wrap=True), *figures(*told["head"][1:-1]), words)
    table = make_table(f"Race by {content['quality']}, mean (sd) over seeds", *columns)
    for cells in told["rows"]:
        table.add_row(*cells, style="bold" if cells[0] == content["choice"] else None)
    make_console().print(table)
    for line in told["lines"]:
        say(line)
    state_bytes = next(row["state_bytes"] for row in content["entrants"] if row["name"] == content["choice"])
    say(f"the race took {content['seconds']:.0f} s for {format_bytes(state_bytes)} of state")
