"""Runs a race: each of its runs is a trial of a study in the race's folder.

`baoc.racing.course` yields the runs of the next stage from the scores so far. They become baselines of the study, and
`run_study` works until they have ended; so retries, hangs, GPUs, kills and several workers are the study's. The same
command continues a race that was killed: the course yields the same runs again, and those that had ended are read from
the storage.
"""

import math
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from importlib.util import find_spec
from pathlib import Path
from typing import Any, NamedTuple

import optuna
import yaml
from optuna.trial import FrozenTrial, TrialState
from rich.table import Column

from baoc.cache import json_sha256
from baoc.cli.jobs import RACE_SETUP_FILE
from baoc.config.from_hydra import from_plain, to_conf
from baoc.config.schema import RunConfig
from baoc.core.compared import COMPARED
from baoc.core.recipes import RECIPES, find_recipe, recipe_node
from baoc.errors import BadInputError, BudgetBreachedError, InfeasibleBudgetError, TrainingFailedError
from baoc.frontier.build import build_report
from baoc.frontier.page import race_table
from baoc.frontier.runs import NUMBER, quote
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
from baoc.racing.entrants import ENTRANTS_FILE, Racer, RaceTarget, read_target, say_left_out
from baoc.racing.records import MAX_EPOCH_RATIO, RaceScale, num_epochs, stage_name
from baoc.sweep.early_stopping import violates_constraint
from baoc.sweep.gpu_slots import find_gpus
from baoc.sweep.storage import differences, explain_storage_errors, open_study, seconds_of, setting_text, stored_name
from baoc.sweep.study import make_study_folder, run_study
from baoc.sweep.study_config import MESSAGE_KEY, StudyConfig
from baoc.sweep.trial_process import COMMAND, TrialProcess, preload
from baoc.tracking import files
from baoc.tracking.console import make_console, make_table, number_columns, say
from baoc.tracking.files import read_json, read_record, write_json, write_text
from baoc.types import to_plain
from baoc.units import MIB, format_bytes

TARGET_PLAN_FOLDER = "plan"  # of the process that finds the entrants
REUSED_RACE_FILE = "taken.json"  # the earlier race whose choice a run took, since it raced nothing itself
SEED_OFFSET, FRESH_SEED_OFFSET = 100, 200  # added to the run's own seed
TIMING_STAGE = "timed"  # of runs that are trained for their seconds alone
TIMING_STEPS = 40
MIN_STEPS = 4  # of a race whose number of steps is computed
MIN_LAST_RUNG_STEPS = 100  # of a race that is shorter than the run
RUNS_PER_CHECK = 6  # per worker: runs between two comparisons of the clock with the cap
MIN_ENTRANTS = 2  # that a race is predicted to end with
RETRIES = 3  # of a run that was killed: a fault of the machine must not drop an entrant
# Settings that a race sets or decides itself; all other overrides of the command hold for its runs too
_SET_BY_RACE = (
    "mode", "resume", "seed", "name", "race", "recipe", "allocator", "objective", "checkpoint", "logger",
    "trainer.max_steps", "trainer.max_epochs", "trainer.val_check_interval", "trainer.check_val_every_n_epoch",
    "optim.lr", "model.size", "budget.schedule", "trainer.devices", "trainer.strategy",
)  # fmt: skip
_RUN_OVERRIDES = (
    "mode=train", "name=race", "logger=jsonl", "checkpoint.export=false", "trainer.enable_progress_bar=false",
    "trainer.max_epochs=null", "trainer.check_val_every_n_epoch=null", f"trainer.val_check_interval={10**9}",
)  # fmt: skip


class Pace(NamedTuple):
    """Seconds of a step, and of a run's start and end together."""

    step_s: float
    overhead_s: float

    def run_s(self, steps: float) -> float:
        return self.overhead_s + self.step_s * steps


class RacePlan(NamedTuple):
    """What is raced, and the seconds that the race may take (None: any)."""

    scale: RaceScale
    racers: Sequence[Racer]
    rates: tuple[float, ...]
    cap_s: float | None


def run_race(
    config: RunConfig,
    *,
    overrides: Sequence[str],
    folder: Path,
    command: str,
    code: str = COMMAND,
    cap_s: float | None = None,
) -> Mapping[str, Any] | None:
    """Races recipes for the run that `config` describes; the content of race.json, or None if the time is too short.

    Args:
        overrides: of the command.
        cap_s: seconds that the race may take; None for no limit.

    Raises:
        BadInputError: settings that no race can be held with, another race in the folder, or one of several ranks.
        InfeasibleBudgetError: no candidate fits the budget.
        TrainingFailedError: no uniform has trained to a finite score.
    """
    refuse_several_processes("race")
    folder = make_study_folder(folder)
    return RaceRun(config, overrides=overrides, folder=folder, command=command, code=code).run(cap_s)


def race_command(config: RunConfig, *, overrides: Sequence[str], folder: Path, command: str) -> None:
    if run_race(config, overrides=overrides, folder=folder, command=command, cap_s=config.race.cap_s) is None:
        raise BadInputError(
            f"nothing was raced within race={config.race.cap_s:g}, and the lines above say why: where time is short, "
            "give race=SECONDS more, or leave it out, which is without a cap"
        )


def race_before_run(
    config: RunConfig, *, overrides: Sequence[str], folder: Path, command: str, code: str = COMMAND
) -> RunConfig:
    """`race=auto|SECONDS`: the configuration with the choice of a race within its cap. If there is no time for a race,
    with the choice of the newest one of this family in the library; if there is none, unchanged."""
    result = run_race(config, overrides=overrides, folder=folder, command=command, code=code, cap_s=config.race.cap_s)
    if result is not None:
        return records.apply_choice(config, result)
    file = folder / REUSED_RACE_FILE
    if not file.is_file():  # a resumed run keeps the choice that it began with, whatever was raced since
        size = read_target(folder / ENTRANTS_FILE).size
        try:
            earlier = records.find_race(config, size=size, library=Path(config.race.library))
        except BadInputError:
            earlier = None
        write_json(file, {"schema": 1, "race": earlier})
    earlier = records.read_taken_race(file)
    if earlier is None:
        say(f"no race of this family is known either: the run goes on by risk={config.risk.name}")
        return config
    say(f"taken from an earlier race: {earlier['told']}")
    return records.apply_choice(config, earlier)


def inherited_overrides(overrides: Sequence[str]) -> list[str]:
    """The overrides of a command that hold for the runs of its race."""
    inherited = []
    for override in overrides:
        key = override.lstrip("+~").partition("=")[0]
        is_set_by_race = any(key == name or key.startswith(f"{name}.") for name in _SET_BY_RACE)
        if not override.startswith("hydra") and not is_set_by_race:
            inherited.append(override)
    return inherited


def _sets_budget(override: str) -> bool:
    return override.lstrip("+").startswith(("budget=", "budget."))


class RaceRun:
    """One race. `runs` are its runs with their overrides, by trial number."""

    def __init__(self, config: RunConfig, *, overrides: Sequence[str], folder: Path, command: str, code: str):
        self.config, self.overrides, self.folder = config, list(overrides), folder
        self.command, self.code = command, code
        self.runs: list[tuple[Run, tuple[str, ...]]] = []
        self.study: optuna.Study | None = None
        self.target: RaceTarget
        self.pace = Pace(0.0, 0.0)  # at the size that is raced
        self.started = time.monotonic()  # of this process; the machine's clock may be set during a race
        self.plan_s = 0.0  # seconds of the plan that found the entrants
        self._earlier_plan_s = 0.0  # the same, if a process that was killed made that plan
        self._ended_before: frozenset[int] = frozenset()  # trials that had ended before this process began
        self._fixed = (*_RUN_OVERRIDES, *(word for word in inherited_overrides(overrides) if not _sets_budget(word)))

    # -- the main path ------------------------------------------------------------------------------------------------

    def run(self, cap_s: float | None) -> Mapping[str, Any] | None:
        """Finds the entrants, chooses what to race, trains it, and writes the files; see `run_race`."""
        self._refuse_settings()
        self.target = self._find_target()
        self.check_setup()
        race = self.config.race
        if cap_s is not None or (self.config.mode != "race" and race.first == "auto"):  # auto has a cap of its own
            plan = self.fit_cap(cap_s)
        else:
            plan = RacePlan(self._target_scale(), self.target.racers, race.rates, None)
        if plan is None:
            return None
        scale, racers, rates, cap_s = plan
        waiting = [racer.name for racer in self.target.racers if racer not in racers and not racer.entrant.control]
        if waiting:
            say(f"not raced, as there is no time for it: {', '.join(waiting)}")
        self.target = replace(self.target, racers=tuple(racers))
        if warning := self._epochs_warning(scale):
            say(f"warning: the race {warning}; what is best in few epochs is often what overfits first in many")
        steps = self._steps_at_equal_seconds(racers, scale) if self.config.objective == "throughput" else {}
        scale = replace(scale, equal_seconds=bool(steps), one_rate=len(rates) == 1)
        settings = RaceSettings(
            rates=rates,
            rungs=race.rungs if cap_s is None else self._rungs(len(racers), num_rates=len(rates)),
            seeds=tuple(self.config.seed + SEED_OFFSET + i for i in range(race.seeds)),
            fresh_seeds=tuple(self.config.seed + FRESH_SEED_OFFSET + i for i in range(race.confirm_seeds)),
            steps={racer.name: steps.get(racer.name, scale.steps) for racer in racers},
            margin=race.margin,
            level=race.level,
        )
        self._announce(plan, scale)
        try:
            stages = course([racer.entrant for racer in racers], settings=settings)
            outcome = self.run_course(stages, scale, racers, cap_s)
        except OutOfTimeError:
            say("nothing is raced: the first stage alone would not end in time")
            return None
        content = records.race_content(
            outcome, config=self.config, target=self.target, scale=scale, seconds=self.elapsed_s(), command=self.command
        )
        records.write_race(content, folder=self.folder, library=Path(race.library))
        print_race(content)
        self._write_page(outcome, content)
        return content

    def _refuse_settings(self) -> None:
        allocator, trainer, size = self.config.allocator.name, self.config.trainer, self.config.race.size
        if size is not None and size not in (sizes := family_of(self.config.model.name).sizes):
            raise BadInputError(f"race.size={size}: {self.config.model.name} has {', '.join(sizes)}")
        if allocator.startswith("uniform_"):
            raise BadInputError(
                f"allocator={allocator} says what every block runs, and a race chooses it: leave one out; race.recipes "
                "has recipes such as adamw"
            )
        if trainer.strategy == "fsdp" or (self.config.mode == "race" and trainer.devices > 1):
            setting = "trainer.strategy=fsdp" if trainer.strategy == "fsdp" else f"trainer.devices={trainer.devices}"
            raise BadInputError(
                f"a race trains each of its runs on one device, and {setting} was given: leave it out; race.workers "
                "run at once, one on each GPU"
            )

    def _announce(self, plan: RacePlan, scale: RaceScale) -> None:
        race, target = self.config.race, self.target
        where = f"{self.config.model.name} {scale.size} ({scale.num_params:,} parameters)"
        epochs = f", {num_epochs(scale.steps, target):.1f} epochs" if target.num_train else ""
        say(
            f"race of {len(plan.racers)} recipes on {where}, {target.data}, budget {self.config.budget.name}: "
            f"{scale.steps:,} steps{epochs}, {len(plan.rates)} rates, {race.seeds} + {race.confirm_seeds} seeds"
        )
        if not any(racer.entrant.control for racer in plan.racers):
            say("no permutation races as a control: blocks of equal shapes run one spec in the plan, or time is short")

    def run_course(self, stages: Course, scale: RaceScale, racers: Sequence[Racer], cap_s: float | None) -> RaceOutcome:
        """Trains stage by stage until the course ends. Raises OutOfTimeError if the first stage would pass the cap."""
        racer_of = {racer.name: racer for racer in racers}
        try:
            runs = next(stages)
            while True:
                if runs:
                    num_entrants = len({run.entrant for run in runs})
                    say(f"stage {stage_name(runs[0].stage)}: {len(runs)} runs, entrants {num_entrants}")
                ended: dict[Run, RunEnd] = {}
                count = max(len(runs), 1) if cap_s is None else RUNS_PER_CHECK * self.config.race.workers
                for start in range(0, len(runs), count):
                    next_runs = runs[start : start + count]
                    if not self._has_time(next_runs, stage=runs[start:], cap_s=cap_s):
                        say(f"{len(runs) - start} more runs would not end within the cap of {cap_s:.0f} s")
                        runs = stages.throw(OutOfTimeError())
                        break
                    ended |= self._train_runs(
                        [(run, self.overrides_of(racer_of[run.entrant], run, scale)) for run in next_runs]
                    )
                    files.write_csv(self.folder / records.RUNS_FILE, self._rows())
                else:
                    if ended and all(end.status == FAILED for end in ended.values()):
                        message = list(ended.values())[-1].message
                        raise TrainingFailedError(
                            f"all {len(ended)} runs of the race's stage failed; the last: {message}"
                        )
                    runs = stages.send(ended)
        except StopIteration as returned:
            return returned.value

    def _train_runs(self, runs: Sequence[tuple[Run, tuple[str, ...]]]) -> dict[Run, RunEnd]:
        """Trains runs as the next trials of the study; returns how each of them ended."""
        first = len(self.runs)
        self.runs += runs
        race = self.config.race
        # races of several folders of one name may share a storage, and a folder may be moved
        default = f"race_{self.folder.parent.name}_{self.folder.name}_{json_sha256(str(self.folder))[:8]}"
        with explain_storage_errors(race.storage, folder=self.folder):
            study = self.study
            name = study.study_name if study else stored_name(race.storage, folder=self.folder, default=default)
        config = StudyConfig(
            name=name,
            objectives={"quality": "maximize" if self.target.higher_is_better else "minimize"},
            space=(),
            fixed=self._fixed,
            baselines=tuple(overrides[len(self._fixed) :] for _, overrides in self.runs),
            sampler="random",
            n_trials=len(self.runs),
            workers=race.workers,
            retries=RETRIES,
            storage=race.storage,
            per_gpu=race.per_gpu,
        )
        begun = None
        if self.study is None:
            with explain_storage_errors(config.storage, folder=self.folder):
                trials = (begun := open_study(config, folder=self.folder)).get_trials(deepcopy=False)
            self._ended_before = frozenset(trial.number for trial in trials if trial.state.is_finished())
        self.study = run_study(config, folder=self.folder, code=self.code, study=begun)
        for number in range(first, len(self.runs)):  # checkpoints of hundreds of runs would fill the disk
            for checkpoint in (self.folder / f"{number:04d}").rglob("*.ckpt"):
                checkpoint.unlink()
        trials = self._trials()[first : len(self.runs)]  # a resumed study may have later ones
        return {run: self._run_end(trial) for (run, _), trial in zip(runs, trials, strict=True)}

    def _run_end(self, trial: FrozenTrial) -> RunEnd:
        text = str(trial.user_attrs.get(MESSAGE_KEY, ""))
        if trial.state is not TrialState.COMPLETE:
            return RunEnd(status=FAILED, message=text.removeprefix("failed: "))
        if trial.constraints.get("budget", 0.0) > 0:
            return RunEnd(status=NO_FIT, message=text)
        if violates_constraint(trial):
            return RunEnd(status=DIVERGED, score=math.inf, message=text)
        return RunEnd(status=DONE, score=trial.values[0] * (-1 if self.target.higher_is_better else 1))

    # -- entrants and network -----------------------------------------------------------------------------------------

    def _find_target(self) -> RaceTarget:
        """The entrants at the budget. A process of its own plans on the device and ends, so that its memory is free
        again. Writes a recipe file for each entrant that is not in the catalogue of recipes."""
        file = self.folder / ENTRANTS_FILE
        if not file.is_file():
            for name in self.config.race.recipes:
                find_recipe(name)  # refuses a mistyped name before anything is planned
            self._plan_in_process()
            write_json(file, read_json(self.folder / TARGET_PLAN_FOLDER / ENTRANTS_FILE))
        target = read_target(file)
        say_left_out(target.left_out)
        for racer in target.racers:
            builtin = RECIPES.get(racer.name)
            if builtin is None or replace(racer.recipe, share=None) != replace(builtin, share=None):
                text = yaml.safe_dump(recipe_node(racer.recipe), sort_keys=False)
                write_text(self.folder / "recipes" / f"{racer.name}.yaml", text)
        return target

    def _plan_in_process(self) -> None:
        """Runs mode=plan race=auto for the target; raises what ended it."""
        race = self.config.race
        own = [f"race.recipes=[{','.join(map(quote, race.recipes))}]"] if race.recipes else []
        own += [word for word in self.overrides if word.startswith(("model.size=", "optim.lr=", "trainer.max_"))]
        preload(self._fixed)  # before the first process, which starts the fork server
        process = TrialProcess(
            [*inherited_overrides(self.overrides), *own, "mode=plan", "race=auto", f"seed={self.config.seed}"],
            folder=self.folder / TARGET_PLAN_FOLDER,
            threads=1,
        )
        try:
            while (outcome := process.poll()) is None:
                process.process.join(1.0)
        finally:
            process.stop(patience_s=5.0)
        if outcome.exit_code == InfeasibleBudgetError.exit_code:
            raise InfeasibleBudgetError(outcome.message, budget_bytes=0, least_feasible_bytes=0)
        if outcome.exit_code:
            errors = {error.exit_code: error for error in (BadInputError, BudgetBreachedError)}
            raise errors.get(outcome.exit_code, TrainingFailedError)(outcome.message)

    def check_setup(self) -> None:
        """Writes the settings that the race's runs share, or raises BadInputError if the folder's race has others."""
        settings, file = comparable_settings(to_plain(to_conf(self.config))), self.folder / RACE_SETUP_FILE
        if not file.is_file():
            self.plan_s = time.monotonic() - self.started
            write_json(file, {"schema": 1, "words": self.overrides, "settings": settings, "plan_s": self.plan_s})
            return
        setup = read_record(file, {"settings.trainer": dict, "settings.race": dict})
        plan_s = setup.get("plan_s")
        self.plan_s = self._earlier_plan_s = float(plan_s) if isinstance(plan_s, int | float) else 0.0
        setup["settings"]["race"].setdefault("cap_s", settings["race"]["cap_s"])  # not kept by earlier versions
        try:
            earlier_settings = comparable_settings(setup["settings"])
        except BadInputError as error:
            raise BadInputError(
                f"{self.folder} holds a race of another version of baoc, whose settings this one does not take "
                f"({error}): give another folder (hydra.run.dir=PATH)"
            ) from error
        words = setup.get("words")
        typed = isinstance(words, list) and any(str(word).startswith("blocks") for word in words)
        blocks = earlier_settings["blocks"]
        if settings["blocks"]["by"] == "auto" and blocks["by"] == "layer_role" and not typed:
            blocks["by"] = "auto"  # the default of earlier versions had this effect
        if changes := differences(earlier_settings, settings):
            earlier = ", ".join(f"{path}={setting_text(old)}" for path, old, _ in changes)
            raise BadInputError(
                f"{self.folder} holds a race with {earlier}, and runs of both cannot be compared: give the settings it "
                "has, or another folder (hydra.run.dir=PATH)"
            )

    def _target_scale(self) -> RaceScale:
        """The target's own network and steps, or those of `race.size` and `race.steps`."""
        race, target = self.config.race, self.target
        size = race.size or target.size
        if size == target.size:
            return RaceScale(size=size, num_params=target.num_params, steps=race.steps or target.steps)
        return self.scale_of_size(size)[0]

    def scale_of_size(self, size: str) -> tuple[RaceScale, Pace]:
        """Another size of the network at the target's number of samples per parameter, and its pace (timed by runs)."""
        if self.config.objective == "throughput":
            raise BadInputError(
                "objective=throughput judges at equal seconds, which are those of the network itself: leave race.size "
                "out"
            )
        number, result = self._time_size(size)
        ratio = result["num_params"] / self.target.num_params
        steps = self.config.race.steps or max(round(self.target.steps * ratio), MIN_STEPS)
        return RaceScale(size=size, num_params=result["num_params"], steps=steps), self._pace(number, result)

    def _epochs_warning(self, scale: RaceScale) -> str:
        """A clause if the target runs for far more epochs than the race would; else empty."""
        run, raced = num_epochs(self.target.steps, self.target), num_epochs(scale.steps, self.target)
        if run <= 1 or run <= raced * MAX_EPOCH_RATIO:
            return ""
        return f"sees its data {raced:.1f} times and the run {run:.1f} times"

    # -- fitting a race into its time ---------------------------------------------------------------------------------

    def fit_cap(self, cap_s: float | None) -> RacePlan | None:
        """The largest race that is predicted to end within the cap: all rates before one, the largest network and most
        steps before fewer, all entrants before a few. None, with a printed reason, if not even the smallest fits. Sets
        `pace`."""
        race, target = self.config.race, self.target
        rivals = [racer.name for racer in target.racers if not racer.entrant.control]
        if len(rivals) == 1 and self.config.mode != "race":  # mode=race finds the rate of a single recipe too
            say(f"nothing is raced: {rivals[0]} alone fits the budget")
            return None
        pace = self._pace(*self._time_size(target.size))
        run_s = target.steps * pace.step_s
        if cap_s is None:
            if run_s < race.least_run_s:
                say(f"nothing is raced before a run of {run_s:.0f} s (race.least_run_s={race.least_run_s:g})")
                return None
            cap_s = race.share * run_s
        least_s = math.inf
        scales: Iterable[tuple[RaceScale, Pace]] = self._candidate_scales(pace, cap_s=cap_s)
        middle = race.rates[len(race.rates) // 2]  # rates rise
        for rates in (race.rates, (middle,)):
            timed_scales: list[tuple[RaceScale, Pace]] = []
            for scale, scale_pace in scales:
                timed_scales.append((scale, scale_pace))
                for racers in self._racer_subsets():
                    predicted_s = sum(
                        predict_seconds([round(share * scale.steps)] * n, pace=scale_pace, workers=race.workers)
                        for share, n in self._planned_runs(len(racers), num_rates=len(rates))
                    )
                    least_s = min(least_s, predicted_s)
                    if self.plan_s + self._training_s(range(len(self.runs))) + predicted_s <= cap_s:
                        self.pace = scale_pace
                        return RacePlan(scale, racers, rates, cap_s)
            scales = timed_scales  # narrower networks are timed once
        smallest = "" if math.isinf(least_s) else f", and the smallest race is predicted to take {least_s:.0f} s"
        spent_s = self.plan_s + self._training_s(range(len(self.runs)))
        say(f"nothing is raced within {cap_s:.0f} s: planning and timing took {spent_s:.0f} s{smallest}")
        return None

    def _candidate_scales(self, pace: Pace, *, cap_s: float) -> Iterator[tuple[RaceScale, Pace]]:
        """Networks and steps that may be raced, the most informative first: the target's own (`pace` is its), narrower
        networks of the family, then the own network for half the steps, a quarter and so on. Times the narrower ones,
        unless a quarter of the cap is spent."""
        race, target = self.config.race, self.target
        own = RaceScale(size=target.size, num_params=target.num_params, steps=race.steps or target.steps)
        names = list(family_of(self.config.model.name).sizes)
        narrower = names[: names.index(target.size)][::-1] if target.size in names else []
        sizes = [target.size, *narrower] if race.size is None else [race.size]
        for size in sizes if self.config.objective != "throughput" else sizes[:1]:
            is_optional = size != target.size and race.size is None
            if is_optional and self.plan_s + self._training_s(range(len(self.runs))) > cap_s / 4:
                break
            scale, scale_pace = (own, pace) if size == target.size else self.scale_of_size(size)
            if is_optional and (warning := self._epochs_warning(scale)):
                say(f"not raced on {scale.size} for {scale.steps:,} steps: it {warning}")
            else:
                yield scale, scale_pace
        if race.steps is None and race.size is None:
            shorter = replace(own, steps=own.steps // 2)
            while shorter.steps >= MIN_LAST_RUNG_STEPS:
                yield shorter, pace
                shorter = replace(own, steps=shorter.steps // 2)

    def _racer_subsets(self) -> list[Sequence[Racer]]:
        """All racers, or the first few without controls, as long as one is a uniform; they come in order of merit."""
        candidates = [racer for racer in self.target.racers if not racer.entrant.control]
        subsets = [candidates[:most] for most in (6, 4, 3, 2)]
        return [self.target.racers, *(some for some in subsets if any(racer.entrant.uniform for racer in some))]

    def _rungs(self, num_entrants: int, *, num_rates: int) -> tuple[float, ...]:
        """The rungs of a race under a cap. With two entrants none is dropped before the last rung, since few seeds do
        not separate them: an earlier rung serves to choose rates only."""
        rungs = self.config.race.rungs
        first = rungs[:1] if num_rates > 1 else ()
        return rungs if num_entrants > MIN_ENTRANTS else tuple(dict.fromkeys((*first, rungs[-1])))

    def _planned_runs(self, num_entrants: int, *, num_rates: int) -> list[tuple[float, int]]:
        """(share of the steps, number of runs) of each stage, if half of the entrants are dropped at each rung."""
        race, (first, *later) = self.config.race, self._rungs(num_entrants, num_rates=num_rates)
        runs = [(first, num_entrants * race.seeds * num_rates)]
        for rung in later:
            num_entrants = max(math.ceil(num_entrants / 2), MIN_ENTRANTS)
            runs.append((rung, num_entrants * race.seeds))
        if num_entrants > MIN_ENTRANTS:  # the rungs decide between two, if there is no time for more seeds
            runs.append((1.0, num_entrants * race.confirm_seeds))
        return runs

    def _has_time(self, runs: Sequence[Run], *, stage: Sequence[Run], cap_s: float | None) -> bool:
        """Whether the rest of a stage ends within the cap, or its next `runs` had ended already before a kill."""
        if cap_s is None:
            return True
        trials = self._trials()[len(self.runs) : len(self.runs) + len(runs)]
        had_ended = len(trials) == len(runs) and all(trial.state.is_finished() for trial in trials)
        return had_ended or self.elapsed_s() + self._predict_stage_s(stage) <= cap_s

    def _predict_stage_s(self, runs: Sequence[Run]) -> float:
        """Predicted seconds of runs, corrected by the seconds that earlier runs took."""
        measured = [
            (run.steps, self._trial_s(number))
            for number, (run, _) in enumerate(self.runs)
            if not str(run.stage).startswith(TIMING_STAGE)
        ]
        workers = self.config.race.workers
        return predict_seconds([run.steps for run in runs], pace=self.pace, measured=measured, workers=workers)

    def elapsed_s(self) -> float:
        """Seconds since the race began. Of processes that were killed, the seconds of their plan and runs count."""
        earlier_s = self._training_s(self._ended_before & {*range(len(self.runs))})
        return self._earlier_plan_s + earlier_s + time.monotonic() - self.started

    def _training_s(self, numbers: Iterable[int]) -> float:
        """Seconds of runs, by trial number, divided by the workers."""
        return sum(map(self._trial_s, numbers)) / self.config.race.workers

    def _trials(self) -> list[FrozenTrial]:
        assert self.study is not None
        return self.study.get_trials(deepcopy=False)

    def _trial_s(self, number: int) -> float:
        return seconds_of(self._trials()[number]) or 0.0

    def _time_size(self, size: str) -> tuple[int, Mapping[str, Any]]:
        """The trial number and result of a short run of the first uniform at a size of the network. Two runs are
        trained, and the quicker one counts: the first one imports and compiles what the second one reuses."""
        uniform = next(racer for racer in self.target.racers if racer.entrant.uniform)
        return min(self._time_racers([uniform], size=size, seeds=2), key=lambda timed: self._trial_s(timed[0]))

    def _time_racers(
        self, racers: Sequence[Racer], *, size: str, seeds: int = 1
    ) -> list[tuple[int, Mapping[str, Any]]]:
        """Trial number and result of a short run of each racer and seed."""
        scale, first_seed = RaceScale(size=size, num_params=0, steps=TIMING_STEPS), self.config.seed + SEED_OFFSET
        stage = f"{TIMING_STAGE} {size}"
        runs = {
            Run(entrant=racer.name, rate=1.0, seed=seed, stage=stage, steps=TIMING_STEPS): racer
            for racer in racers
            for seed in range(first_seed, first_seed + seeds)
        }
        first = len(self.runs)
        ended = self._train_runs([(run, self.overrides_of(racer, run, scale)) for run, racer in runs.items()])
        for run, end in ended.items():
            if end.status not in (DONE, DIVERGED):
                raise TrainingFailedError(f"{run.entrant} could not be timed: {end.message}")
        numbers = range(first, len(self.runs))
        fields = {"step_ms": NUMBER, "num_params": int}
        return [(number, read_record(self.folder / f"{number:04d}" / "result.json", fields)) for number in numbers]

    def _pace(self, number: int, result: Mapping[str, Any]) -> Pace:
        trial_s = self._trial_s(number)
        step_s = float(result["step_ms"]) / 1e3 if result["step_ms"] else trial_s / TIMING_STEPS
        return Pace(step_s, max(trial_s - TIMING_STEPS * step_s, 0.0))

    def _steps_at_equal_seconds(self, racers: Sequence[Racer], scale: RaceScale) -> dict[str, int]:
        """Steps of each entrant in the seconds that the steps of the fastest one take."""
        say(f"objective=throughput: {len(racers)} recipes are timed, and judged at equal seconds")
        timed = self._time_racers(racers, size=scale.size)
        step_s = {racer.name: self._pace(*entry).step_s for racer, entry in zip(racers, timed, strict=True)}
        fastest_s = min(step_s.values())
        return {name: max(round(scale.steps * fastest_s / own_s), MIN_STEPS) for name, own_s in step_s.items()}

    # -- overrides and results ----------------------------------------------------------------------------------------

    def overrides_of(self, racer: Racer, run: Run, scale: RaceScale) -> tuple[str, ...]:
        """All overrides of one run; `python run.py` with them repeats it."""
        is_target_size = scale.size == self.target.size
        file = self.folder / "recipes" / f"{racer.name}.yaml"
        recipe = [f"recipe={quote(str(file)) if file.is_file() else racer.name}"]
        budget = [word for word in inherited_overrides(self.overrides) if _sets_budget(word)]
        if not is_target_size:  # the target's budget says nothing of a narrower network; its plan found the entrants
            budget = ["budget=unlimited"]
        gpus = find_gpus("auto") if self.config.race.per_gpu > 1 and self.config.budget.memory_bytes is None else ()
        if gpus and not racer.recipe.blocks:  # trials share a GPU by their memory budgets
            share_mib = min(gpu.total_bytes for gpu in gpus) // self.config.race.per_gpu // MIB
            budget = [f"budget={share_mib}mb", f"micro_batch={self.config.micro_batch_size}"]
        if racer.recipe.blocks and not is_target_size:  # its blocks are another network's: allocate at the same share
            percent = 100 * racer.entrant.state_bytes / self.target.state_bytes_adamw
            budget, recipe = [f"budget=state_{percent:.4g}" if percent < 100 else "budget=unlimited"], []
        sizes = family_of(self.config.model.name).sizes
        keeps_lr = is_target_size or self.config.optim.lr is not None
        lr = run.rate * (self.target.lr if keeps_lr else sizes[scale.size].lr)
        own = [f"optim.lr={lr:.6g}", f"seed={run.seed}", f"trainer.max_steps={run.steps}"]
        return (*self._fixed, *budget, f"model.size={scale.size}", *recipe, *own)

    def _rows(self) -> list[dict[str, Any]]:
        trials = self._trials()
        state_bytes = {racer.name: racer.entrant.state_bytes for racer in self.target.racers}
        rows = []
        for number, (run, overrides) in enumerate(self.runs):
            end = self._run_end(trials[number])
            value = end.score * (-1 if self.target.higher_is_better else 1) if math.isfinite(end.score) else None
            lr = next(word for word in overrides if word.startswith("optim.lr=")).partition("=")[2]
            rows.append(
                {
                    "entrant": run.entrant, "rate": run.rate, "lr": lr, "seed": run.seed,
                    "stage": stage_name(run.stage), "steps": run.steps, "value": value, "status": end.status,
                    "seconds": round(self._trial_s(number), 2), "state_bytes": state_bytes[run.entrant],
                    "folder": f"{number:04d}", "message": " ".join(end.message.split()),
                }
            )  # fmt: skip
        return rows

    def _write_page(self, outcome: RaceOutcome, content: Mapping[str, Any]) -> None:
        """Writes frontier.html of the race's last runs, each entrant at its best rate; without it if plotly is absent,
        since the run that follows the race must go on."""
        last_stages = {outcome.rung, *(stage for stage in outcome.scores if isinstance(stage, str))}
        folders = [
            self.folder / f"{number:04d}"
            for number, (run, _) in enumerate(self.runs)
            if run.stage in last_stages and run.rate == outcome.rates.get(run.entrant)
        ]
        folders = [folder for folder in folders if (folder / "result.json").is_file()]
        page = find_spec("plotly") is not None
        build_report(folders, out=self.folder, show=False, page=page, race=content)
        where = f"compare its runs in {self.folder / 'frontier.html'}" if page else "frontier.html needs plotly"
        say(f"{where}; one row a run in {self.folder / records.RUNS_FILE}")


def comparable_settings(settings: Mapping[str, Any]) -> dict[str, Any]:
    """The settings that runs of one race share. `settings` may be those of an earlier version of baoc. Raises
    BadInputError for a key that is no setting any more."""
    # true by default in earlier versions, and without effect in a race
    trainer = {key: value for key, value in settings["trainer"].items() if key != "reshard_after_forward"}
    # The record has no mode, and a run may resume after its race.
    plain = to_plain(to_conf(from_plain({**settings, "trainer": trainer, "mode": "race", "resume": None})))
    race = {key: value for key, value in plain["race"].items() if key not in COMPARED["race"].not_race}
    return {key: value for key, value in plain.items() if COMPARED[key].race} | {"race": race}


def predict_seconds(
    steps: Sequence[int], *, pace: Pace, measured: Sequence[tuple[int, float]] = (), workers: int = 1
) -> float:
    """Seconds of runs of `steps` steps each, `workers` at once. Runs of about equal length go in waves of `workers`.

    Args:
        measured: (steps, seconds) of earlier runs; how much slower they were than `pace` is a factor of the result.
            Runs of equal steps do not separate steps from overhead, so `pace` itself is kept.
    """
    expected_s = sum(pace.run_s(n) for n, _ in measured)
    slowdown = sum(seconds for _, seconds in measured) / expected_s if expected_s else 1.0
    mean_s = sum(map(pace.run_s, steps)) / max(len(steps), 1)
    return slowdown * mean_s * math.ceil(len(steps) / workers)


def print_race(content: Mapping[str, Any]) -> None:
    table = race_table(content)
    text_column = Column("", overflow="fold", ratio=1, min_width=24)
    columns = (Column("recipe", no_wrap=True), *number_columns(*table["head"][1:-1]), text_column)
    printed = make_table(f"Race by {content['quality']}, mean (sd) over seeds", *columns)
    for cells in table["rows"]:
        printed.add_row(*cells, style="bold" if cells[0] == content["choice"] else None)
    make_console().print(printed)
    for line in table["lines"]:
        say(line)
    state_bytes = next(row["state_bytes"] for row in content["entrants"] if row["name"] == content["choice"])
    say(f"the race took {content['seconds']:.0f} s for {format_bytes(state_bytes)} of state")
