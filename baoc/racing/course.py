"""The course of a race as a generator: it yields runs, is sent their scores, and returns what the race found.

It trains nothing, so one course serves the command (`baoc.sweep.race` trains each run as a trial), the replay of
recorded runs (`experiments.analysis.race_replay`) and simulations. It depends on the scores alone: sent the same ones
again, as after a kill, it asks for the same runs in the same order.
"""

import math
from collections.abc import Generator, Mapping, Sequence
from dataclasses import dataclass, field

from baoc.errors import BadInputError, TrainingFailedError
from baoc.racing.rules import Entrant, Verdict, best_rate, challenger, clearly_behind, incumbent, verdict

FRESH = "fresh"  # the stage on seeds that chose nothing
DONE, DIVERGED, NO_FIT, FAILED = "done", "diverged", "does not fit", "failed"


@dataclass(frozen=True, slots=True, kw_only=True)
class Run:
    """One run. `rate` is a multiple of the learning rate; `stage` a rung's share of the last one, or FRESH."""

    entrant: str
    rate: float
    seed: int
    stage: float | str
    steps: int


@dataclass(frozen=True, slots=True, kw_only=True)
class RunEnd:
    """How a run ended. `score`: lower is better, infinite where it diverged, NaN where there is none."""

    status: str
    score: float = math.nan
    message: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class RaceSettings:
    """What a race is made of. `steps` of the last rung by entrant: the same for all, or those of equal seconds."""

    rates: tuple[float, ...]
    rungs: tuple[float, ...]
    seeds: tuple[int, ...]
    fresh_seeds: tuple[int, ...]
    steps: Mapping[str, int]
    margin: float
    level: float


@dataclass(frozen=True, slots=True, kw_only=True)
class RaceOutcome:
    """What a race found.

    Args:
        verdict: by the scores of the last stage that ended.
        rung: of that stage's steps, as a share of the last rung's.
        rates: each entrant's best multiple of the learning rate.
        dropped: why each entrant that is no longer in the race has left.
        scores: by stage, entrant and seed, at the entrant's best rate.
        ran_out_of_time: the race ended before its last stage, because its time was over.
    """

    verdict: Verdict
    rung: float
    rates: Mapping[str, float]
    dropped: Mapping[str, str]
    scores: Mapping[float | str, Mapping[str, Mapping[int, float]]]
    ran_out_of_time: bool = False


class OutOfTimeError(Exception):
    """Thrown into a course instead of scores: the runs that it asked for are too expensive."""


Course = Generator[list[Run], Mapping[Run, RunEnd], RaceOutcome]


@dataclass(slots=True)
class _State:
    entrants: Sequence[Entrant]
    settings: RaceSettings
    rates: dict[str, float] = field(default_factory=dict[str, float])
    dropped: dict[str, str] = field(default_factory=dict[str, str])
    scores: dict[float | str, dict[str, dict[int, float]]] = field(
        default_factory=dict[float | str, dict[str, dict[int, float]]]
    )

    @property
    def racing(self) -> list[Entrant]:
        return [entrant for entrant in self.entrants if entrant.name not in self.dropped]

    def runs(
        self, names: Sequence[str], *, rates: Sequence[float], seeds: Sequence[int], stage: float | str
    ) -> list[Run]:
        """Seed by seed, so that a stage that is watched fills evenly. No `rates`: each entrant's own."""
        share = 1.0 if isinstance(stage, str) else stage
        return [
            Run(entrant=name, rate=rate, seed=seed, stage=stage, steps=max(round(share * self.settings.steps[name]), 1))
            for seed in seeds
            for name in names
            for rate in (rates or (self.rates[name],))
        ]

    def drop_unfit(self, ended: Mapping[Run, RunEnd]) -> None:
        """Entrants with a run that has no score leave: it did not fit the budget, or failed."""
        for run, end in ended.items():
            if end.status in (NO_FIT, FAILED) and run.entrant not in self.dropped:
                text = f" ({end.message.splitlines()[0]})" if end.message else ""
                self.dropped[run.entrant] = f"{end.status}{text}"

    def check(self) -> None:
        """Raises unless a uniform is still in the race."""
        if any(entrant.uniform for entrant in self.racing):
            return
        told = "; ".join(f"{name}: {why}" for name, why in self.dropped.items()) or "there is none"
        if self.dropped and all(why.startswith(NO_FIT) for why in self.dropped.values()):
            raise BadInputError(f"no candidate fits the budget ({told}): give a larger one, or other race.recipes")
        raise TrainingFailedError(
            f"no uniform recipe is left in the race, which its choice is held against ({told}): lower race.rates, or "
            "name uniform recipes in race.recipes"
        )

    def drop_behind(self, stage: float) -> None:
        scores = self.scores[stage]
        best = incumbent(self.racing, scores)
        if not math.isfinite(sum(scores[best].values())):
            self.dropped |= {entrant.name: "it diverged" for entrant in self.racing if entrant.uniform}
            self.check()
        self.dropped |= clearly_behind(
            self.racing, scores, last_rung=stage == self.settings.rungs[-1], level=self.settings.level
        )


def course(entrants: Sequence[Entrant], *, settings: RaceSettings) -> Course:
    """The course of a race between `entrants`, by the rules of `baoc.racing.rules`.

    Raises:
        BadInputError: none of them fits the budget.
        TrainingFailedError: no uniform has a finite score.
        OutOfTimeError: it was thrown before a rung had ended.
    """
    state = _State(entrants, settings)
    state.check()
    reached, ran_out_of_time = 0.0, False
    for rung in settings.rungs:
        names = [one.name for one in state.racing]
        asked = state.runs(names, rates=() if state.rates else settings.rates, seeds=settings.seeds, stage=rung)
        try:
            ended = yield asked
        except OutOfTimeError:
            if not reached:
                raise
            ran_out_of_time = True
            break
        state.drop_unfit(ended)
        state.check()
        names = [one.name for one in state.racing]
        if not state.rates:
            by_rate: dict[str, dict[float, dict[int, float]]] = {name: {} for name in names}
            for run, end in ended.items():
                by_rate.setdefault(run.entrant, {}).setdefault(run.rate, {})[run.seed] = end.score
            state.rates = {name: best_rate(by_rate[name]) for name in names}
        state.scores[rung] = {
            name: {
                run.seed: end.score
                for run, end in ended.items()
                if (run.entrant, run.rate) == (name, state.rates[name])
            }
            for name in names
        }
        state.drop_behind(rung)
        reached = rung
        if len([one for one in state.racing if not one.control]) == 1:
            break  # nothing is left to tell
    pilot = state.scores[reached]
    if not ran_out_of_time and settings.fresh_seeds:
        mixed = challenger(state.racing, pilot)
        names = [one.name for one in state.racing if one.uniform or one.name == mixed]
        if len(names) > 1:
            try:
                ended = yield state.runs(names, rates=(), seeds=settings.fresh_seeds, stage=FRESH)
                state.drop_unfit(ended)
                state.dropped |= {run.entrant: "it diverged" for run, end in ended.items() if end.status == DIVERGED}
                state.check()
                names = [name for name in names if name not in state.dropped]
                state.scores[FRESH] = {
                    name: {run.seed: end.score for run, end in ended.items() if run.entrant == name} for name in names
                }
            except OutOfTimeError:
                ran_out_of_time = True
    fresh = state.scores.get(FRESH, {})
    found = verdict(state.racing, pilot=pilot, fresh=fresh, margin=settings.margin, level=settings.level)
    return RaceOutcome(
        verdict=found,
        rung=reached,
        rates=state.rates,
        dropped=state.dropped,
        scores=state.scores,
        ran_out_of_time=ran_out_of_time,
    )
