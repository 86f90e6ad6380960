"""Which budget a refusal on a GPU names: the least within which a plan was found, by pages of torch's allocator."""

from hypothesis import assume, given, settings
from hypothesis import strategies as st

from baoc.errors import InfeasibleBudgetError
from baoc.profiling.cuda_emulation import SMALL_PAGE
from baoc.profiling.memory import least_confirmed_bytes
from baoc.units import MIB


@given(
    pages=st.integers(0, 58),  # with fewer, the step runs out of memory; for more than 58 MAX_CONFIRMATIONS are too few
    needed=st.lists(st.integers(0, 200 * MIB), min_size=1, max_size=4),  # by the step as measured, by pages modulo
    named=st.integers(0, 150 * MIB),
    offset=st.integers(0, 4 * MIB),
    allowed=st.integers(0, 40 * MIB),
)
@settings(max_examples=300, deadline=None)
def test_a_refusal_names_the_least_budget_that_is_planned_for(
    pages: int, needed: list[int], named: int, offset: int, allowed: int
):
    def pages_of(num_bytes: int) -> int:
        return (num_bytes - offset) // SMALL_PAGE

    def plan_at(num_bytes: int) -> int:
        least = needed[pages_of(num_bytes) % len(needed)]
        if pages_of(num_bytes) < pages or num_bytes < least:
            outside = max(least, num_bytes + 20 * MIB)  # of the cap it takes more
            raise InfeasibleBudgetError("no", budget_bytes=num_bytes, least_feasible_bytes=outside)
        return least

    refusal = InfeasibleBudgetError("no", budget_bytes=allowed, least_feasible_bytes=max(named, allowed + 1))
    least = least_confirmed_bytes(refusal, plan_at=plan_at, page_start=lambda n: n - (n - offset) % SMALL_PAGE)
    if least is not None:
        plan_at(least)
    if len(needed) == 1:  # what a step needs is the same in every page: then not a byte less is enough
        threshold = max(pages * SMALL_PAGE + offset, needed[0])
        assume(allowed < threshold)  # it was refused
        assert least == threshold


def test_a_refusal_with_nothing_that_is_enough_stays_as_it_was():
    def plan_at(num_bytes: int) -> int:
        raise InfeasibleBudgetError("no", budget_bytes=num_bytes, least_feasible_bytes=120)

    refusal = InfeasibleBudgetError("no", budget_bytes=90, least_feasible_bytes=100)
    assert least_confirmed_bytes(refusal, plan_at=plan_at, page_start=lambda num_bytes: num_bytes) is None
