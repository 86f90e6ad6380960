"""Settings of a race: recipes tried on short paired runs, as a command of its own or before a run."""

import re
from dataclasses import dataclass
from typing import Annotated, Literal

from baoc.config.validate import OFF, Allowed, at_least, require
from baoc.errors import BadInputError

_SECONDS = {"": 1, "s": 1, "m": 60, "min": 60, "h": 3600}
_DURATION = re.compile(r"(\d+(?:\.\d+)?)(s|m|min|h)?")
_CONFIRM = "2 to 100 fresh seeds, or 0 for no confirmation, after which no mixed plan is taken"
RACE_OPTIONS = ("off", "auto")  # the options of the group `race` beside durations


@dataclass(frozen=True, slots=True, kw_only=True)
class RaceConfig:
    """`race=off|auto|SECONDS` and its settings.

    `first`: a race goes before training, under a cap: `auto` takes `share` of the predicted training and races nothing
    where that is shorter than `least_run_s`; `capped` takes `cap_s` seconds (mode=race keeps to it too; null: no cap).
    `recipes` are raced (names or files; empty: the candidates that fit). `rates` are multiples of optim.lr, of which
    each entrant keeps its best one after the first rung. `rungs` are shares of the last rung's steps; each is a run of
    its own with a whole decay. `seeds` runs each decide who leaves, `confirm_seeds` others whether a mixed plan is
    taken (0: no mixed plan is). `margin`: share of the best uniform's score within which fewer bytes decide. `level`:
    probability of the claim. `size` and `steps` of the raced network; null: the run's own, or a narrower size where
    the cap asks for one. `workers` runs at once, `per_gpu` of them on one GPU. `library`: where results are kept for
    recipe=raced.
    """

    first: Annotated[Literal["off", "auto", "capped"], OFF] = "off"
    cap_s: Annotated[float, Allowed("more than 0 seconds, or null", gt=0)] | None = None
    share: Annotated[float, Allowed("a share of the run between 0 and 1, such as 0.05", gt=0, lt=1)] = 0.05
    least_run_s: Annotated[float, Allowed("zero or more seconds", ge=0)] = 1200.0
    recipes: tuple[str, ...] = ()
    rates: tuple[float, ...] = (0.3, 1.0, 3.0)
    rungs: tuple[float, ...] = (0.25, 0.5, 1.0)
    seeds: Annotated[int, Allowed("2 to 100, as one seed says nothing of the spread", ge=2, le=100)] = 3
    confirm_seeds: Literal[0] | Annotated[int, Allowed(_CONFIRM, ge=2, le=100)] = 6
    margin: Annotated[float, Allowed("a share of the score from 0 to below 1", ge=0, lt=1)] = 0.01
    level: Annotated[float, Allowed("a probability from 0.5 to below 1", ge=0.5, lt=1)] = 0.9
    size: str | None = None
    steps: Annotated[int, at_least(4, " optimizer steps, or null")] | None = None
    workers: Annotated[int, at_least(1, " runs at once")] = 1
    per_gpu: Annotated[int, at_least(1, " runs on a GPU")] = 1
    storage: str | None = None
    library: str = "outputs/races"

    def __post_init__(self) -> None:
        if self.first == "capped" and self.cap_s is None:
            raise BadInputError("race.first=capped needs seconds: give race=SECONDS, such as race=600")
        doubled = len(set(self.recipes)) < len(self.recipes)
        require(not doubled, "race.recipes", list(self.recipes), "a list in which each recipe stands once")
        rates = list(self.rates)
        good = bool(rates) and rates == sorted(set(rates)) and rates[0] > 0
        require(good, "race.rates", rates, "rising multiples of optim.lr above 0, such as [0.3,1,3]")
        rungs = list(self.rungs)
        good = bool(rungs) and rungs == sorted(set(rungs)) and rungs[0] > 0 and rungs[-1] == 1
        require(good, "race.rungs", rungs, "rising shares of the last rung, which is 1, such as [0.25,0.5,1]")


def parse_seconds(option: str) -> float | None:
    """Seconds of `race=600`, `race=600s`, `race=10min` or `race=1h`; None for the names of options.

    Raises:
        BadInputError: for any other text.
    """
    if option in RACE_OPTIONS:
        return None
    found = _DURATION.fullmatch(option)
    if found is None or not float(found[1]):
        raise BadInputError(
            f"race={option}: allowed are off, auto (a twentieth of the run) or how long the race may take, such as "
            "race=600, race=10min or race=1h"
        )
    return float(found[1]) * _SECONDS[found[2] or ""]
