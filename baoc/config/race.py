"""Settings of a race: recipes tried on short paired runs, as a command of its own or before a run."""

import re
from dataclasses import dataclass
from typing import Annotated, Literal

from baoc.config.validate import OFF, Allowed, at_least, require
from baoc.errors import BadInputError

_SECONDS_PER_UNIT = {"": 1, "s": 1, "m": 60, "min": 60, "h": 3600}
_DURATION = re.compile(r"(\d+(?:\.\d+)?)(s|m|min|h)?")
_CONFIRM_SEEDS = "2 to 100 fresh seeds, or 0 for no confirmation, after which no mixed plan is taken"
RACE_OPTIONS = ("off", "auto")  # of the group `race`, which takes durations too


@dataclass(frozen=True, slots=True, kw_only=True)
class RaceConfig:
    """Settings of `race=off|auto|SECONDS` and `mode=race`.

    Attributes:
        first: Race before training. `auto` spends `share` of the predicted training time, and does not race if training
            is shorter than `least_run_s`. `capped` spends `cap_s` seconds.
        cap_s: Seconds that a race may take, in mode=race too; null is no cap.
        recipes: Names or files of the entrants; empty means the candidates that fit the budget.
        rates: Multiples of optim.lr. Each entrant keeps its best one after the first rung.
        rungs: Steps of each rung as shares of the last rung's. Each is a run with a complete learning-rate decay.
        seeds: Runs of each entrant in a rung.
        confirm_seeds: Runs with fresh seeds that confirm a mixed plan; 0: no mixed plan is taken.
        margin: Share of the best uniform recipe's score within which the entrant with fewer bytes wins.
        level: Probability of the claim.
        size: Size of the raced network; null: the run's own, or a narrower one to keep to the cap.
        steps: Optimizer steps of the last rung; null: as many samples per parameter as in the run.
        workers: Runs at once, `per_gpu` of them on one GPU.
        storage: Storage of the race's studies.
        library: Folder with results of races, which recipe=raced reads.
    """

    first: Annotated[Literal["off", "auto", "capped"], OFF] = "off"
    cap_s: Annotated[float, Allowed("more than 0 seconds, or null", gt=0)] | None = None
    share: Annotated[float, Allowed("a share of the run between 0 and 1, such as 0.05", gt=0, lt=1)] = 0.05
    least_run_s: Annotated[float, Allowed("zero or more seconds", ge=0)] = 1200.0
    recipes: tuple[str, ...] = ()
    rates: tuple[float, ...] = (0.3, 1.0, 3.0)
    rungs: tuple[float, ...] = (0.25, 0.5, 1.0)
    seeds: Annotated[int, Allowed("2 to 100, as one seed says nothing of the spread", ge=2, le=100)] = 3
    confirm_seeds: Literal[0] | Annotated[int, Allowed(_CONFIRM_SEEDS, ge=2, le=100)] = 6
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
        unique = len(set(self.recipes)) == len(self.recipes)
        require(unique, "race.recipes", list(self.recipes), "a list in which each recipe stands once")
        rates = list(self.rates)
        valid = bool(rates) and rates == sorted(set(rates)) and rates[0] > 0
        require(valid, "race.rates", rates, "rising multiples of optim.lr above 0, such as [0.3,1,3]")
        rungs = list(self.rungs)
        valid = bool(rungs) and rungs == sorted(set(rungs)) and rungs[0] > 0 and rungs[-1] == 1
        require(valid, "race.rungs", rungs, "rising shares of the last rung, which is 1, such as [0.25,0.5,1]")


def parse_seconds(option: str) -> float | None:
    """Seconds of `race=600`, `600s`, `10min` or `1h`; None for `off` and `auto`. Raises BadInputError for any other."""
    if option in RACE_OPTIONS:
        return None
    match = _DURATION.fullmatch(option)
    if match is None or not float(match[1]):
        raise BadInputError(
            f"race={option}: allowed are off, auto (a twentieth of the run) or how long the race may take, such as "
            "race=600, race=10min or race=1h"
        )
    return float(match[1]) * _SECONDS_PER_UNIT[match[2] or ""]
