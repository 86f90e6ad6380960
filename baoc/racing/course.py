"""Which runs a race trains: a generator that yields runs, is sent how they ended, and returns the race's outcome.

It trains nothing, so that the command (`baoc.sweep.race` trains each run as a trial), the replay of recorded runs
(`experiments.analysis.race_replay`) and simulations share it. It depends on the scores alone: sent the same ones again
after a kill, it yields the same runs in the same order.
"""

import math
from collections.abc import Generator, Mapping, Sequence
from dataclasses import dataclass, field

from baoc.errors import BadInputError, TrainingFailedError
from baoc.racing.verdict import Entrant, Verdict, best_rate, challenger, clearly_behind, incumbent, verdict

FRESH = "fresh"  # the last stage, on seeds by which no entrant was dropped
DONE, DIVERGED, NO_FIT, FAILED = "done", "diverged", "does not fit", "failed"


@dataclass(frozen=True, slots=True, kw_only=True)
class Run:
    """One run. `rate`: multiple of the learning rate. `stage`: a rung, as a share of the last one's steps, or FRESH."""

    entrant: str
    rate: float
    seed: int
    stage: float | str
    steps: int


@dataclass(frozen=True, slots=True, kw_only=True)
class RunEnd:
    """How a run ended. `score`: lower is better; infinite if the run diverged, NaN if it did not fit or failed."""

    status: str
    score: float = math.nan
    message: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class RaceSettings:
    """Settings of a race. `steps` of the last rung by entrant: the same for all, or those that take equal seconds."""

    rates: tuple[float, ...]
    rungs: tuple[float, ...]
    seeds: tuple[int, ...]
    fresh_seeds: tuple[int, ...]
    steps: Mapping[str, int]
    margin: float
    level: float


@dataclass(frozen=True, slots=True, kw_only=True)
class RaceOutcome:
    """The verdict of a race, and the scores that led to it.

    Args:
        verdict: by the scores of the last stage that ended.
        rung: the last rung that ended.
        rates: the best rate of each entrant.
        dropped: entrant -> why it left the race.
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
    """Thrown into a course instead of scores: the runs that it yielded would take too long."""


Course = Generator[list[Run], Mapping[Run, RunEnd], RaceOutcome]


@dataclass(slots=True)
class _State:
    entrants: Sequence[Entrant]
    settings: RaceSettings
    rates: dict[str, float] = field(default_factory=dict)
    dropped: dict[str, str] = field(default_factory=dict)
    scores: dict[float | str, dict[str, dict[int, float]]] = field(default_factory=dict)

    @property
    def remaining(self) -> list[Entrant]:
        return [entrant for entrant in self.entrants if entrant.name not in self.dropped]

    def runs(
        self, names: Sequence[str], *, rates: Sequence[float], seeds: Sequence[int], stage: float | str
    ) -> list[Run]:
        """The runs of a stage, seed by seed. Without `rates`, each entrant runs at its best rate."""
        share = 1.0 if isinstance(stage, str) else stage
        return [
            Run(entrant=name, rate=rate, seed=seed, stage=stage, steps=max(round(share * self.settings.steps[name]), 1))
            for seed in seeds
            for name in names
            for rate in (rates or (self.rates[name],))
        ]

    def drop_unfit(self, ended: Mapping[Run, RunEnd]) -> None:
        """Drops entrants with a run that did not fit the budget or failed."""
        for run, end in ended.items():
            if end.status in (NO_FIT, FAILED) and run.entrant not in self.dropped:
                text = f" ({end.message.splitlines()[0]})" if end.message else ""
                self.dropped[run.entrant] = f"{end.status}{text}"

    def check(self) -> None:
        """Raises BadInputError or TrainingFailedError unless a uniform is still in the race."""
        if any(entrant.uniform for entrant in self.remaining):
            return
        reasons = "; ".join(f"{name}: {why}" for name, why in self.dropped.items()) or "there is none"
        if self.dropped and all(why.startswith(NO_FIT) for why in self.dropped.values()):
            raise BadInputError(f"no candidate fits the budget ({reasons}): give a larger one, or other race.recipes")
        raise TrainingFailedError(
            f"no uniform recipe is left in the race, which its choice is held against ({reasons}): lower optim.lr, "
            "of which race.rates are multiples, or name uniform recipes in race.recipes"
        )

    def drop_behind(self, stage: float) -> None:
        scores = self.scores[stage]
        best = incumbent(self.remaining, scores)
        if not math.isfinite(sum(scores[best].values())):
            self.dropped |= {entrant.name: "it diverged" for entrant in self.remaining if entrant.uniform}
            self.check()
        self.dropped |= clearly_behind(
            self.remaining, scores, last_rung=stage == self.settings.rungs[-1], level=self.settings.level
        )


def course(entrants: Sequence[Entrant], *, settings: RaceSettings) -> Course:
    """The course of a race between `entrants`, by the rules of `baoc.racing.verdict`.

    Raises:
        BadInputError: none of them fits the budget.
        TrainingFailedError: no uniform has a finite score.
        OutOfTimeError: it was thrown before a rung had ended.
    """
    state = _State(entrants, settings)
    state.check()
    reached, ran_out_of_time = 0.0, False
    for rung in settings.rungs:
        names = [entrant.name for entrant in state.remaining]
        runs = state.runs(names, rates=() if state.rates else settings.rates, seeds=settings.seeds, stage=rung)
        try:
            ended = yield runs
        except OutOfTimeError:
            if not reached:
                raise
            ran_out_of_time = True
            break
        state.drop_unfit(ended)
        state.check()
        names = [entrant.name for entrant in state.remaining]
        scores: dict[str, dict[float, dict[int, float]]] = {name: {} for name in names}  # by entrant, rate and seed
        for run, end in ended.items():
            if run.entrant in scores:
                scores[run.entrant].setdefault(run.rate, {})[run.seed] = end.score
        if not state.rates:
            state.rates = {name: best_rate(scores[name]) for name in names}
        state.scores[rung] = {name: scores[name].get(state.rates[name], {}) for name in names}
        state.drop_behind(rung)
        reached = rung
        if len([entrant for entrant in state.remaining if not entrant.control]) == 1:
            break  # there is nothing to compare any more
    pilot = state.scores[reached]
    if not ran_out_of_time and settings.fresh_seeds:
        mixed = challenger(state.remaining, pilot)
        names = [entrant.name for entrant in state.remaining if entrant.uniform or entrant.name == mixed]
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
    return RaceOutcome(
        verdict=verdict(state.remaining, pilot=pilot, fresh=fresh, margin=settings.margin, level=settings.level),
        rung=reached,
        rates=state.rates,
        dropped=state.dropped,
        scores=state.scores,
        ran_out_of_time=ran_out_of_time,
    )
