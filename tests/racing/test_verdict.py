"""Races without training: single decisions by hand, and the promised rate of wrong choices over simulated races."""

import math

import numpy as np
import pytest

from baoc.racing.verdict import Entrant, best_rate, challenger, clearly_behind, incumbent, verdict

ADAMW = Entrant(name="adamw", state_bytes=100, uniform=True)
FOAM = Entrant(name="foam8", state_bytes=7, uniform=True)
MUON = Entrant(name="muon8", state_bytes=14, uniform=True)
MIXED = Entrant(name="plan", state_bytes=10, uniform=False)
CONTROL = Entrant(name="permuted", state_bytes=10, uniform=False, control=True)
NOISE = np.random.default_rng(7)


@pytest.fixture(autouse=True)
def same_noise_in_any_order():
    NOISE.bit_generator.state = np.random.default_rng(7).bit_generator.state


def paired(gap: float, *, seeds: range, sd: float = 0.001) -> dict[int, float]:
    """Scores around 1 + gap; what a seed adds is shared by all entrants, the rest is the entrant's own."""
    return {seed: 1 + gap + 0.05 * math.sin(seed) + float(NOISE.normal(scale=sd)) for seed in seeds}


def test_the_best_rate_is_that_of_the_least_mean_and_a_divergence_never_wins():
    assert best_rate({1e-3: {1: 2.0, 2: 2.0}, 2e-3: {1: 1.0, 2: math.inf}, 4e-3: {1: 1.9, 2: 1.9}}) == 4e-3
    assert best_rate({2e-3: {1: 1.0}, 1e-3: {1: 1.0}}) == 1e-3
    with pytest.raises(ValueError, match="no learning rate has a score"):
        best_rate({})


def test_the_incumbent_is_the_best_uniform_whatever_a_mixed_plan_scores():
    scores = {"adamw": {1: 1.0}, "foam8": {1: 0.9}, "plan": {1: 0.1}}
    assert incumbent([ADAMW, FOAM, MIXED], scores) == "foam8"
    with pytest.raises(ValueError, match="a race needs a uniform entrant"):
        incumbent([MIXED], scores)


def test_before_the_last_rung_only_who_is_far_behind_leaves():
    seeds = range(3)
    scores = {"adamw": paired(0.0, seeds=seeds), "foam8": paired(0.001, seeds=seeds), "muon8": paired(0.5, seeds=seeds)}
    assert set(clearly_behind([ADAMW, FOAM, MUON], scores, last_rung=False)) == {"muon8"}
    one_seed = {name: {0: values[0]} for name, values in scores.items()}
    assert clearly_behind([ADAMW, FOAM, MUON], one_seed, last_rung=False) == {}  # nothing is known of the spread
    two = {name: {0: values[0], 1: values[1]} for name, values in scores.items() if name != "foam8"}
    assert clearly_behind([ADAMW, MUON], two, last_rung=False) == {}  # of one pair of differences too little


def test_at_the_last_rung_an_interval_decides_and_a_divergence_at_any():
    seeds = range(6)
    scores = {"adamw": paired(0.0, seeds=seeds), "foam8": paired(0.01, seeds=seeds), "plan": paired(-0.01, seeds=seeds)}
    left = clearly_behind([ADAMW, FOAM, MIXED], scores, last_rung=True)
    assert list(left) == ["foam8"] and left["foam8"].startswith("behind adamw by +0.0")
    scores["plan"] = scores["plan"] | {0: math.inf}
    assert clearly_behind([ADAMW, FOAM, MIXED], scores, last_rung=False)["plan"] == "it diverged"


def test_a_control_is_no_challenger():
    assert challenger([ADAMW, CONTROL], {"adamw": {1: 1.0}, "permuted": {1: 0.0}}) is None
    assert challenger([ADAMW, MIXED, CONTROL], {"plan": {1: 1.0}, "permuted": {1: 0.0}}) == "plan"


def test_a_mixed_plan_is_taken_if_fresh_seeds_show_it_better_than_every_uniform():
    pilot = {one.name: paired(gap, seeds=range(3)) for one, gap in ((ADAMW, 0.0), (FOAM, 0.02), (MIXED, -0.05))}
    fresh = {one.name: paired(gap, seeds=range(10, 16)) for one, gap in ((ADAMW, 0.0), (FOAM, 0.02), (MIXED, -0.05))}
    found = verdict([ADAMW, FOAM, MIXED], pilot=pilot, fresh=fresh)
    assert (found.choice, found.rival, found.margin_held) == ("plan", "adamw", 0.0)
    assert found.difference is not None and found.difference.n == 6 and found.difference.mean < -0.04
    assert found.reason.startswith("plan beats every uniform on fresh seeds, the best of them by -0.0")


def test_a_mixed_plan_that_only_the_pilot_favours_is_not_taken():
    pilot = {one.name: paired(gap, seeds=range(3)) for one, gap in ((ADAMW, 0.0), (FOAM, 0.003), (MIXED, -0.05))}
    fresh = {one.name: paired(gap, seeds=range(10, 16)) for one, gap in ((ADAMW, 0.0), (FOAM, 0.003), (MIXED, 0.0))}
    found = verdict([ADAMW, FOAM, MIXED], pilot=pilot, fresh=fresh)
    assert found.choice == "foam8" and found.is_certain  # fewest bytes within 1 % of AdamW
    assert "fewest bytes within the margin" in found.reason


def test_noise_is_said_to_be_too_large_for_the_margin():
    scores = {"adamw": {1: 1.1, 2: 0.8, 3: 1.0}, "foam8": {1: 0.9, 2: 1.0, 3: 1.05}}
    found = verdict([ADAMW, FOAM], pilot=scores, fresh={})
    assert not found.is_certain and found.margin_held > 10 * found.margin
    assert "cannot tell the uniforms apart" in found.reason


def test_a_single_uniform_is_taken():
    found = verdict([ADAMW], pilot={"adamw": {1: 1.0}}, fresh={})
    assert (found.choice, found.rival, found.margin_held) == ("adamw", None, 0.0)


def race(rng: np.random.Generator, *, noise: float, gaps: float) -> tuple[bool, bool, bool]:
    """One whole simulated race: whether its claim is wrong, a mixed plan was wrongly taken, and one was taken."""
    entrants = [Entrant(name=f"u{i}", state_bytes=int(rng.integers(5, 100)), uniform=True) for i in range(5)]
    entrants += [Entrant(name=f"m{i}", state_bytes=20, uniform=False) for i in range(3)] + [CONTROL]
    truth = {one.name: 1 + float(rng.normal(scale=gaps)) for one in entrants}

    def run(names: list[str], seeds: range, horizon: float) -> dict[str, dict[int, float]]:
        shared = {seed: float(rng.normal(scale=0.1)) for seed in seeds}
        return {
            name: {seed: truth[name] + shared[seed] + float(rng.normal(scale=noise / horizon)) for seed in seeds}
            for name in names
        }

    left, pilot = list(entrants), {}
    for horizon in (0.25, 0.5, 1.0):
        pilot = run([one.name for one in left], range(3), horizon)
        behind = clearly_behind(left, pilot, last_rung=horizon == 1.0)
        left = [one for one in left if one.name not in behind]
    best_mixed = challenger(left, pilot)
    names = [one.name for one in left if one.uniform] + ([best_mixed] if best_mixed else [])
    found = verdict(left, pilot=pilot, fresh=run(names, range(10, 16), 1.0))
    best_uniform = min(truth[one.name] for one in entrants if one.uniform)  # also of those that left
    mixed = found.choice.startswith("m")
    beyond = truth[found.choice] - best_uniform
    return beyond > max(found.margin, found.margin_held), mixed and beyond > 0, mixed


@pytest.mark.slow
@pytest.mark.parametrize(
    ("noise", "gaps"), [(0.003, 0.01), (0.01, 0.01), (0.03, 0.01), (0.01, 0.05), (0.02, 0.0), (0.1, 0.02)]
)
def test_choices_are_wrong_no_more_often_than_promised(noise: float, gaps: float):
    """Over 250 races: P(worse than the best uniform tried by more than the margin that is told) <= .10."""
    rng = np.random.default_rng(11)
    outcomes = np.array([race(rng, noise=noise, gaps=gaps) for _ in range(250)])
    wrong, wrongly_mixed, _ = outcomes.mean(0)
    assert wrong <= 0.10 and wrongly_mixed <= 0.10


def test_clear_advantages_of_a_mixed_plan_are_mostly_found():
    """The promise is no excuse for never choosing: with gaps ten times the noise a better mixed plan is found."""
    rng = np.random.default_rng(3)
    outcomes = np.array([race(rng, noise=0.005, gaps=0.05) for _ in range(150)])
    assert outcomes[:, 2].mean() > 0.25  # of 8 entrants that count, 3 are mixed
