"""What every allocator owes its callers, whatever it is after."""

import math
from collections.abc import Callable
from dataclasses import fields, replace

import pytest

from baoc.core.blocks import partition
from baoc.core.catalogue import NATIVE, select
from baoc.core.rule_tags import RULE_INFOS
from baoc.errors import BadInputError
from baoc.planning.allocators import ALLOCATORS, Allocator, NoFeasibleAllocation
from baoc.planning.candidates import build_candidates, undominated
from baoc.planning.cost import adamw_state_bytes
from baoc.planning.risk import RISKS
from baoc.types import Allocation, Candidate, LatencyTable, Limits
from tests.support.decision import Candidates, candidates, extremes, random_candidates, transformer

BLOCKS = partition(transformer(width=256))
LATENCY = LatencyTable(
    device="cpu",
    fixed_s=dict.fromkeys(NATIVE, 1e-6),
    per_element_s={spec: 1e-9 * (1 + index % 5) for index, spec in enumerate(NATIVE)},
)
EVERYTHING = build_candidates(BLOCKS, specs=NATIVE, rules=RULE_INFOS, risk=RISKS["prior"], latency=LATENCY)
PLACED = build_candidates(BLOCKS, specs=select(["adamw@*"]), rules=RULE_INFOS, risk=RISKS["prior"], latency=LATENCY)
ADAMW = adamw_state_bytes(BLOCKS)


def has_choice(allocator: Allocator) -> bool:
    """Baselines run what they are named for."""
    return not allocator.name.startswith(("uniform_", "host_", "recipe"))


def pool(allocator: Allocator) -> dict[str, tuple[Candidate, ...]]:
    if getattr(allocator, "rows", ()):
        return PLACED
    return EVERYTHING if allocator.traits.every_candidate else undominated(EVERYTHING)


def named(options: Candidates, *, allocator: Allocator) -> Candidates:
    """With the spec that a baseline runs in place of s0."""
    rows = getattr(allocator, "rows", ()) or (
        getattr(allocator, "spec", "adamw" if allocator.name == "recipe" else "s0"),
    )
    return {
        b: [replace(c, spec=rows[0]) if c.spec == "s0" else c for c in held]
        + [replace(c, spec=row) for row in rows[1:] for c in held if c.spec == "s0"]
        for b, held in options.items()
    }


def hold(allocation: Allocation, *, of: dict[str, tuple[Candidate, ...]] | Candidates, limits: Limits) -> None:
    """The totals are those of the choices, and within the limits."""
    assert list(allocation.choices) == list(of), "one choice per block, in block order"
    chosen = [next(c for c in of[b] if c.spec == spec) for b, spec in allocation.choices.items()]
    assert allocation.state_bytes == sum(c.cost.state_bytes for c in chosen)
    assert allocation.transfer_bytes == sum(c.cost.transfer_bytes for c in chosen)
    assert allocation.step_s == pytest.approx(sum(c.cost.step_s for c in chosen))
    assert allocation.risk == pytest.approx(sum(c.risk.total for c in chosen))
    if limits.state_bytes is not None:
        assert allocation.state_bytes <= limits.state_bytes
    if limits.step_s is not None:
        assert allocation.step_s <= limits.step_s * (1 + 1e-9)
    assert allocation.gap is None or allocation.gap >= 0


# Of uniform baselines, which have one allocator in common, a few; `test_allocation.py` runs the spec of each.
SOME = [name for name in ALLOCATORS if not name.startswith("uniform_")]


@pytest.fixture(params=[*SOME, "uniform_adamw8bit", "uniform_foam", "uniform_muon_matched"])
def allocator(request: pytest.FixtureRequest) -> Allocator:
    return ALLOCATORS[request.param]


def within(allocator: Allocator) -> Limits:
    """Limits that the allocator can meet: a uniform one has no choice, so what it needs itself."""
    if has_choice(allocator):
        _, _, fastest, slowest = extremes(EVERYTHING)
        return Limits(state_bytes=ADAMW // 4, step_s=fastest + 0.5 * (slowest - fastest))
    own = allocator(pool(allocator), limits=Limits())
    return Limits(state_bytes=own.state_bytes, step_s=own.step_s)


class TestAllocator:
    def test_it_describes_itself(self, allocator: Allocator):
        assert ALLOCATORS[allocator.name] is allocator
        assert allocator.description and "\n" not in allocator.description

    def test_without_limits(self, allocator: Allocator):
        allocation = allocator(pool(allocator), limits=Limits())
        hold(allocation, of=pool(allocator), limits=Limits())
        assert allocation.allocator == allocator.name

    def test_within_limits(self, allocator: Allocator):
        limits = within(allocator)
        hold(allocator(pool(allocator), limits=limits), of=pool(allocator), limits=limits)

    def test_exactly_at_what_it_uses(self, allocator: Allocator):
        """A limit that is met to the byte is met."""
        first = allocator(pool(allocator), limits=within(allocator))
        limits = Limits(state_bytes=first.state_bytes, step_s=first.step_s)
        hold(allocator(pool(allocator), limits=limits), of=pool(allocator), limits=limits)

    def test_the_same_arguments_give_the_same_answer(self, allocator: Allocator):
        limits = within(allocator)
        first, second = (allocator(pool(allocator), limits=limits, seed=3) for _ in range(2))
        assert first == second
        first, second = (allocator(pool(allocator), limits=limits, **given) for given in ({}, {"seed": 0}))
        assert first == second

    def test_one_block_with_one_candidate(self, allocator: Allocator):
        only = named(candidates([(0.5, 10, 0.0)]), allocator=allocator)
        allocation = allocator(only, limits=Limits(state_bytes=10))
        assert list(allocation.choices) == ["b0"]
        with pytest.raises(NoFeasibleAllocation) as error:
            allocator(only, limits=Limits(state_bytes=9))
        assert error.value.least_state_bytes == 10

    def test_blocks_that_hold_nothing(self, allocator: Allocator):
        empty = named(candidates([(0.0, 0, 0.0)], [(0.0, 0, 0.0), (0.0, 0, 0.0)]), allocator=allocator)
        hold(allocator(empty, limits=Limits(state_bytes=0)), of=empty, limits=Limits(state_bytes=0))

    @pytest.mark.parametrize("kind", [field.name for field in fields(Limits)])
    @pytest.mark.parametrize("num_blocks", [0, 1])
    def test_limits_of_any_number(self, allocator: Allocator, kind: str, num_blocks: int):
        """Without blocks, too; a limit that is no number is met by nothing."""
        if allocator.name.startswith("uniform_") and not num_blocks:
            with pytest.raises(BadInputError, match="applies to none of the 0 blocks"):
                allocator({}, limits=Limits())
            return
        options = named(candidates(*[[(0.5, 10, 1.0)]] * num_blocks), allocator=allocator)
        for limit in (-1, -math.inf, math.nan):
            with pytest.raises(NoFeasibleAllocation) as error:
                allocator(options, limits=Limits(**{kind: limit}))
            assert (error.value.least_state_bytes, error.value.least_step_s) == (10 * num_blocks, num_blocks)
        assert len(allocator(options, limits=Limits(**{kind: math.inf})).choices) == num_blocks

    @pytest.mark.parametrize("limit", [-1, 0])
    def test_less_than_nothing_left(self, allocator: Allocator, limit: int):
        """A memory budget below the weights leaves a negative limit."""
        least = sum(c[0].cost.state_bytes for c in pool(allocator).values())
        if least <= limit:  # what the host steps leaves nothing on the device
            hold(allocator(pool(allocator), limits=Limits(state_bytes=limit)), of=PLACED, limits=Limits(state_bytes=0))
            return
        with pytest.raises(NoFeasibleAllocation) as error:
            allocator(pool(allocator), limits=Limits(state_bytes=limit))
        assert error.value.least_state_bytes >= least

    @pytest.mark.parametrize(
        "limits", [lambda held, _: Limits(state_bytes=held - 1), lambda _, step_s: Limits(step_s=step_s * 0.99 - 1e-12)]
    )
    def test_a_refusal_names_what_would_be_enough(self, allocator: Allocator, limits: Callable[..., Limits]):
        """Refused one byte (or a hundredth of the seconds) below; met at the figures of the refusal."""
        least, _, fastest, _ = extremes(pool(allocator))
        if not has_choice(allocator):
            own = allocator(pool(allocator), limits=Limits())
            least, fastest = own.state_bytes, own.step_s
        with pytest.raises(NoFeasibleAllocation) as error:
            allocator(pool(allocator), limits=limits(least, fastest))
        assert error.value.least_state_bytes >= least
        if limits(least, fastest).step_s is None:
            enough = Limits(state_bytes=error.value.least_state_bytes)
        else:
            enough = Limits(step_s=error.value.least_step_s)
        hold(allocator(pool(allocator), limits=enough), of=pool(allocator), limits=enough)

    def test_candidates_with_ties(self, allocator: Allocator):
        tied = random_candidates(5, blocks=8, specs=5, ties=True)
        if has_choice(allocator):
            least, most, *_ = extremes(tied)
            limits = Limits(state_bytes=(least + most) // 2)
            hold(allocator(tied, limits=limits), of=tied, limits=limits)
