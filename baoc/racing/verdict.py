"""Which entrants leave a race, which one is chosen, and what is claimed of the choice: functions of scores alone.

A race compares *entrants* (recipes) on runs that share their seeds. Scores are lower-is-better values at one rung, by
entrant and seed. How a race goes:

1. At the first rung each entrant keeps the best of its learning rates (`best_rate`).
2. At each rung the *incumbent* is the best uniform so far. An entrant leaves where it is clearly behind
   (`clearly_behind`): by three pooled standard deviations before the last rung, as scores of short runs still change
   places, and by an interval that excludes 0 at the last one. The incumbent never leaves.
3. The best mixed entrant and the remaining uniforms run once more on fresh seeds, by which no entrant was dropped.
4. `verdict` takes the mixed entrant only if it beats every uniform on the fresh seeds. Otherwise it takes the uniform
   of fewest bytes that is within the margin of the best one.

What is claimed. Let c be the choice and u the best uniform of the race. For each comparison the one-sided bound of the
mean of c - u is taken at level 1 - (1 - level) / K over all K comparisons, so that all bounds hold together with
probability `level` at least (Bonferroni). The claim is that c is worse than the best uniform by no more than
`Verdict.margin_held`. With few or noisy seeds that exceeds the margin that was asked for, and the verdict says so.
Nothing is claimed about other sizes or horizons.
"""

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from statistics import fmean

from baoc.core.statistics import DEFAULT_LEVEL, Interval, paired_difference, upper_bound

MARGIN = 0.01  # share of the incumbent's score within which fewer bytes decide
POOLED_SDS = 3.0  # an entrant that is farther behind leaves before the last rung
MIN_DEGREES = 3  # degrees of freedom of a pooled standard deviation; of fewer it is too often small by chance
Scores = Mapping[str, Mapping[int, float]]  # entrant -> seed -> score


@dataclass(frozen=True, slots=True, kw_only=True)
class Entrant:
    """A recipe in a race.

    Args:
        name: as in the scores.
        state_bytes: of its plan.
        uniform: one rule and storage for all hidden matrices, which needs no allocation. Only uniforms can be the
            incumbent that a choice is never worse than.
        control: never chosen, such as a plan whose specs are permuted over its blocks.
    """

    name: str
    state_bytes: int
    uniform: bool
    control: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class Verdict:
    """What a race chose.

    Args:
        choice: name of the chosen entrant.
        reason: one sentence with the figures.
        rival: the best other uniform; None where there was none.
        difference: choice - rival, paired by seed; None without a rival.
        margin: the one that was asked for, in the scores' unit.
        margin_held: the choice is worse than the best uniform by no more than this, with probability `level`.
        level: probability of the claim.
    """

    choice: str
    reason: str
    rival: str | None
    difference: Interval | None
    margin: float
    margin_held: float
    level: float

    @property
    def is_certain(self) -> bool:
        """Whether the seeds sufficed for the margin that was asked for."""
        return self.margin_held <= self.margin


def best_rate(by_rate: Mapping[float, Mapping[int, float]]) -> float:
    """The learning rate of least mean score; a run that diverged has an infinite score. Ties go to the lower rate."""
    if not by_rate:
        raise ValueError("no learning rate has a score: give the scores of at least one")
    return min(sorted(by_rate), key=lambda rate: _mean(by_rate[rate]))


def incumbent(entrants: Sequence[Entrant], scores: Scores) -> str:
    """The uniform of least mean score; of equal ones that of fewest bytes.

    Raises:
        ValueError: where no uniform has a score.
    """
    uniforms = [entrant for entrant in entrants if entrant.uniform and scores.get(entrant.name)]
    if not uniforms:
        raise ValueError("a race needs a uniform entrant with a score, as its choice is held against the best of them")
    return min(uniforms, key=lambda entrant: (_mean(scores[entrant.name]), entrant.state_bytes)).name


def clearly_behind(
    entrants: Sequence[Entrant], scores: Scores, *, last_rung: bool, level: float = DEFAULT_LEVEL
) -> dict[str, str]:
    """The entrants that leave at this rung, each with the reason; never the incumbent.

    A run that diverged makes its entrant leave at any rung.
    """
    best = incumbent(entrants, scores)
    finite: dict[str, Interval] = {}
    leaving: dict[str, str] = {}
    for entrant in entrants:
        own = scores.get(entrant.name, {})
        if entrant.name == best or not own:
            continue
        if not all(map(math.isfinite, own.values())):
            leaving[entrant.name] = "it diverged"
        else:
            finite[entrant.name] = paired_difference(own, scores[best], level=level)
    pooled = _pooled_sd(finite.values())
    for name, difference in finite.items():
        if last_rung and difference.low > 0:
            leaving[name] = f"behind {best} by {difference}"
        elif not last_rung and difference.mean > POOLED_SDS * pooled:
            leaving[name] = f"behind {best} by {difference.mean:.4g}, over {POOLED_SDS:g} pooled sd of {pooled:.2g}"
    return leaving


def challenger(entrants: Sequence[Entrant], scores: Scores) -> str | None:
    """The mixed entrant of least mean score, which runs on fresh seeds next; None where there is no mixed entrant."""
    mixed = [
        entrant for entrant in entrants if not entrant.uniform and not entrant.control and scores.get(entrant.name)
    ]
    return min(mixed, key=lambda entrant: (_mean(scores[entrant.name]), entrant.state_bytes)).name if mixed else None


def verdict(
    entrants: Sequence[Entrant], *, pilot: Scores, fresh: Scores, margin: float = MARGIN, level: float = DEFAULT_LEVEL
) -> Verdict:
    """The choice among the entrants that reached the last rung.

    Args:
        entrants: the remaining ones, with at least one uniform.
        pilot: scores on the seeds by which entrants were dropped; they choose between uniforms too.
        fresh: scores of the challenger and the uniforms on seeds by which none was dropped.
        margin: share of the incumbent's score within which fewer bytes decide.
        level: probability of the claim.
    """
    scores = {entrant.name: {**pilot.get(entrant.name, {}), **fresh.get(entrant.name, {})} for entrant in entrants}
    uniforms = {entrant.name: entrant for entrant in entrants if entrant.uniform and scores[entrant.name]}
    best = incumbent(entrants, scores)
    mixed = challenger(entrants, pilot)
    allowed = margin * abs(_mean(scores[best]))
    comparisons = max(len(uniforms) - 1 + (mixed is not None), 1)
    level_each = 1 - (1 - level) / comparisons  # Bonferroni
    make_verdict = partial(Verdict, margin=allowed, level=level)
    if mixed is not None and fresh.get(mixed):
        against = {name: paired_difference(fresh[mixed], fresh[name]) for name in uniforms if fresh.get(name)}
        bounds = [upper_bound(difference, level=level_each) for difference in against.values()]
        if len(against) == len(uniforms) and max(bounds) < 0:
            rival = max(against, key=lambda name: against[name].mean)
            reason = f"{mixed} beats every uniform on fresh seeds, the best of them by {against[rival]}"
            return make_verdict(choice=mixed, reason=reason, rival=rival, difference=against[rival], margin_held=0.0)
    bound_of = {name: _worst_difference(name, uniforms=uniforms, scores=scores, level=level_each) for name in uniforms}
    within = [name for name in uniforms if bound_of[name] <= allowed]
    choice = min(within, key=lambda name: (uniforms[name].state_bytes, _mean(scores[name]))) if within else best
    rivals = [name for name in uniforms if name != choice]
    rival = min(rivals, key=lambda name: _mean(scores[name]), default=None)
    difference = paired_difference(scores[choice], scores[rival]) if rival is not None else None
    bound = bound_of[choice]
    reason = _uniform_reason(choice, rival=rival, difference=difference, within=bool(within), bound=bound)
    return make_verdict(choice=choice, reason=reason, rival=rival, difference=difference, margin_held=max(bound, 0.0))


def _uniform_reason(choice: str, *, rival: str | None, difference: Interval | None, within: bool, bound: float) -> str:
    if rival is None:
        return f"{choice} is the only uniform left in the race, and no mixed recipe is shown to beat it"
    if within:
        return f"{choice} has the fewest bytes within the margin of the best uniform; against {rival}: {difference}"
    return (
        f"the seeds cannot tell the uniforms apart within the margin: {choice} has the best mean ({difference} against "
        f"{rival}), and may be worse than the best by {bound:.2g}"
    )


def _worst_difference(name: str, *, uniforms: Iterable[str], scores: Scores, level: float) -> float:
    """The most by which a uniform may be worse than another one, at `level` for each; 0 without another one."""
    differences = [paired_difference(scores[name], scores[other]) for other in uniforms if other != name]
    return max((upper_bound(difference, level=level) for difference in differences), default=0.0)


def _pooled_sd(differences: Iterable[Interval]) -> float:
    """The standard deviation of paired differences, pooled over entrants; infinite for too few pairs."""
    pooled = [difference for difference in differences if difference.n > 1]
    degrees = sum(difference.n - 1 for difference in pooled)
    if degrees < MIN_DEGREES:
        return math.inf
    return math.sqrt(sum(difference.sd**2 * (difference.n - 1) for difference in pooled) / degrees)


def _mean(scores: Mapping[int, float]) -> float:
    return fmean(scores.values())
