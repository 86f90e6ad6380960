"""Allocators against brute force and against each other, on random candidates."""

from itertools import count, pairwise

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from baoc.planning.allocators import ALLOCATORS, NoFeasibleAllocation
from baoc.planning.allocators.base import make_problem
from baoc.planning.allocators.feasible import find_feasible
from baoc.types import Limits
from tests.support.decision import Candidates, brute_force, extremes, random_candidates
from tests.support.examples import examples

pytestmark = pytest.mark.slow  # each allocates for many examples

EXACT, LAGRANGIAN, RANDOM = (ALLOCATORS[name] for name in ("exact", "lagrangian", "random"))
SLACK = 1e-9

seeds = st.integers(0, 10_000)
parts = st.floats(-0.05, 1.05)


def limits_at(candidates: Candidates, *, byte_part: float | None, step_part: float | None) -> Limits:
    """Limits at a part of the way from the least to the most of each total; below 0 cannot be met."""
    least, most, fastest, slowest = extremes(candidates)
    return Limits(
        state_bytes=None if byte_part is None else int(least + byte_part * (most - least)),
        step_s=None if step_part is None else fastest + step_part * (slowest - fastest),
    )


@examples(120)
@given(
    seed=seeds,
    blocks=st.integers(1, 5),
    specs=st.integers(1, 5),
    ties=st.booleans(),
    byte_part=st.none() | parts,
    step_part=st.none() | parts,
)
def test_exact_equals_brute_force_and_lagrangian_keeps_its_word(
    seed: int, blocks: int, specs: int, ties: bool, byte_part: float | None, step_part: float | None
):
    options = random_candidates(seed, blocks=blocks, specs=specs, ties=ties)
    limits = limits_at(options, byte_part=byte_part, step_part=step_part)
    best = brute_force(options, limits=limits)
    for allocator in (EXACT, LAGRANGIAN, RANDOM):
        if best is None:
            with pytest.raises(NoFeasibleAllocation):
                allocator(options, limits=limits)
            continue
        allocation = allocator(options, limits=limits, seed=seed)
        assert allocation.risk >= best * (1 - SLACK), "better than the best: a limit was broken"
        if limits.state_bytes is not None:
            assert allocation.state_bytes <= limits.state_bytes
        if allocator is EXACT:
            assert allocation.risk == pytest.approx(best, rel=1e-7, abs=1e-12)
        if allocation.gap is not None:
            bound = allocation.risk - allocation.gap * max(abs(allocation.risk), 1e-12)
            assert bound <= best * (1 + SLACK) + 1e-12, "a bound above the best"


@examples(40)
@given(seed=seeds, blocks=st.integers(1, 8), parts=st.tuples(*[st.floats(0, 1)] * 3), timed=st.booleans())
def test_more_budget_never_raises_the_exact_risk(seed: int, blocks: int, parts: tuple[float, ...], timed: bool):
    options = random_candidates(seed, blocks=blocks, specs=8, timed=timed)
    step_part = 0.5 if timed else None
    risks: list[float] = []
    for part in sorted(parts):
        try:
            limits = limits_at(options, byte_part=part, step_part=step_part)
            risks.append(EXACT(options, limits=limits).risk)
        except NoFeasibleAllocation:
            assert not risks, "feasible with less, and not with more"
    for poorer, richer in pairwise(risks):
        assert richer <= poorer * (1 + SLACK)


@examples(25)
@given(seed=seeds, byte_part=st.floats(0.05, 0.9), step_part=st.none() | st.floats(0.3, 0.9))
def test_lagrangian_on_many_blocks_is_near_its_bound(seed: int, byte_part: float, step_part: float | None):
    options = random_candidates(seed, blocks=150, specs=10)
    limits = limits_at(options, byte_part=byte_part, step_part=step_part)
    try:
        allocation = LAGRANGIAN(options, limits=limits)
    except NoFeasibleAllocation:
        with pytest.raises(NoFeasibleAllocation):
            EXACT(options, limits=limits)
        return
    assert allocation.gap is not None and allocation.gap < 0.05


def drawn(options: Candidates, *, limits: Limits, seed: int) -> list[int]:
    """What `random` describes, as plain loops: any candidate that fits, once, then dearer ones until none fits."""
    problem, rng = make_problem(options, limits=limits), np.random.default_rng(seed)
    choice, used = find_feasible(problem).tolist(), np.zeros(2)
    for number in count():
        before, used = list(choice), problem.used(np.array(choice))
        for block in rng.permutation(len(choice)).tolist():
            more = [(spent - problem.spent[:, block, choice[block]]) for spent in problem.spent[:, block].T]
            fits = [
                spec
                for spec, _ in enumerate(options[f"b{block}"])
                if (used + more[spec] <= problem.safe_limits).all() and (not number or more[spec][0] > 0)
            ]
            if fits:
                choice[block] = int(rng.choice(fits))
                used = used + more[choice[block]]
        if number and choice == before:
            return choice
    raise AssertionError


@examples(40)
@given(seed=seeds, byte_part=st.floats(0, 1), step_part=st.none() | st.floats(0.2, 1))
def test_random_is_feasible_seeded_and_leaves_nothing_that_fits(seed: int, byte_part: float, step_part: float | None):
    options = random_candidates(seed, blocks=12, specs=6, ties=seed % 2 == 1)
    limits = limits_at(options, byte_part=byte_part, step_part=step_part)
    try:
        allocation = RANDOM(options, limits=limits, seed=seed)
    except NoFeasibleAllocation:
        return
    assert allocation == RANDOM(options, limits=limits, seed=seed)
    assert [int(spec[1:]) for spec in allocation.choices.values()] == drawn(options, limits=limits, seed=seed)
    assert limits.state_bytes is not None and allocation.state_bytes <= limits.state_bytes
    for block, spec in allocation.choices.items():
        now = next(c for c in options[block] if c.spec == spec)
        for other in options[block]:
            more = other.cost.state_bytes - now.cost.state_bytes
            later = other.cost.step_s - now.cost.step_s
            fits = allocation.state_bytes + more <= limits.state_bytes and (
                limits.step_s is None or allocation.step_s + later <= limits.step_s * (1 - 1e-9)
            )
            assert not (more > 0 and fits), f"{block} could still have spent {more} bytes"
