"""Four limits at once: the exact allocator is held against all combinations, the others to the limits."""

from collections.abc import Mapping, Sequence
from itertools import product

import numpy as np
import pytest

from baoc.planning.allocators import ALLOCATORS, NoFeasibleAllocation
from baoc.types import Candidate, Limits
from tests.support.decision import Candidates, placed, share_of


def used(chosen: Sequence[Candidate]) -> tuple[float, ...]:
    costs = [c.cost for c in chosen]
    return (
        sum(c.state_bytes for c in costs),
        sum(c.step_s for c in costs),
        sum(c.host_bytes for c in costs),
        sum(c.link_s for c in costs),
    )


def within(chosen: Sequence[Candidate], limits: Limits) -> bool:
    bounds = (limits.state_bytes, limits.step_s, limits.host_bytes, limits.link_s)
    return all(b is None or value <= b * (1 + 1e-9) for value, b in zip(used(chosen), bounds, strict=True))


def best(options: Mapping[str, Sequence[Candidate]], limits: Limits) -> float | None:
    fitting = [c for c in product(*options.values()) if within(c, limits)]
    return min((sum(c.risk.total for c in chosen) for chosen in fitting), default=None)


@pytest.mark.parametrize("seed", range(12))
def test_exact_is_the_best_of_all_combinations(seed: int):
    options = placed(seed)
    limits = share_of(options, np.random.default_rng(seed).uniform(0.05, 0.7, 3).tolist())
    expected = best(options, limits)
    for name in ("exact", "lagrangian", "random"):
        if expected is None:
            with pytest.raises(NoFeasibleAllocation):
                ALLOCATORS[name](options, limits=limits)
            continue
        allocation = ALLOCATORS[name](options, limits=limits)
        chosen = [next(c for c in options[b] if c.spec == spec) for b, spec in allocation.choices.items()]
        assert within(chosen, limits)
        totals = (allocation.host_bytes, allocation.link_s)
        assert totals == pytest.approx(used(chosen)[2:])
        assert allocation.risk >= expected - 1e-9
        if name == "exact":
            assert allocation.risk == pytest.approx(expected, abs=1e-9)
        if name == "lagrangian":
            assert allocation.gap is not None and allocation.risk * (1 - allocation.gap) <= expected + 1e-9


def test_of_equal_risks_the_one_with_least_work_beside_the_device_is_taken():
    """Without a limit of seconds: all stays where it is, as far as there is room, and the rest is what is least."""
    options = placed(3)
    everything = sum(c[0].cost.state_bytes for c in options.values())
    for name in ("exact", "lagrangian"):
        assert set(ALLOCATORS[name](options, limits=Limits()).choices.values()) == {"s0"}
    limits = Limits(state_bytes=int(0.6 * everything))
    free = [
        c for c in product(*options.values()) if within(c, limits) and not sum(candidate.risk.total for candidate in c)
    ]
    least = min(sum(c.cost.link_s for c in chosen) for chosen in free)
    found = ALLOCATORS["exact"](options, limits=limits)
    assert found.risk == 0 and found.link_s == pytest.approx(least)
    other = ALLOCATORS["lagrangian"](options, limits=limits)
    assert other.risk == 0 and least * (1 - 1e-9) <= other.link_s <= 2 * least


@pytest.mark.parametrize("seed", range(12))
def test_no_choice_of_no_more_risk_in_any_block_takes_fewer_seconds_of_the_link(seed: int):
    options = placed(seed)
    limits = share_of(options, np.random.default_rng(seed).uniform(0.1, 0.7, 3).tolist())
    if best(options, limits) is None:
        return
    found = ALLOCATORS["exact"](options, limits=limits)
    risk = {b: next(c.risk.total for c in row if c.spec == found.choices[b]) for b, row in options.items()}
    no_riskier = {b: [c for c in row if c.risk.total <= risk[b]] for b, row in options.items()}
    least = min(used(c)[3] for c in product(*no_riskier.values()) if within(c, limits))
    assert found.link_s == pytest.approx(least)


def test_a_refusal_names_what_would_do_of_each():
    options = placed(5)
    limits = Limits(state_bytes=200, host_bytes=10, link_s=1.0)
    with pytest.raises(NoFeasibleAllocation) as caught:
        ALLOCATORS["exact"](options, limits=limits)
    error = caught.value
    enough = Limits(state_bytes=200, host_bytes=error.least_host_bytes, link_s=1.0)
    assert within_exact(options, enough)
    assert not within_exact(options, Limits(state_bytes=200, host_bytes=error.least_host_bytes - 1, link_s=1.0))
    assert within_exact(options, Limits(state_bytes=error.least_state_bytes, host_bytes=10, link_s=1.0))


def within_exact(options: Candidates, limits: Limits) -> bool:
    try:
        ALLOCATORS["exact"](options, limits=limits)
    except NoFeasibleAllocation:
        return False
    return True
