"""What a move costs beside its gain, and the memory that it takes while it goes on."""

import pytest

from baoc.core.rule_tags import RULE_INFOS
from baoc.planning.reallocation.move_cost import CONVERSION_FLOATS, lost_steps, migration_risk, move_peak, moved_specs
from baoc.types import Profile
from tests.support.decision import stats
from tests.support.planners import planner, uniform

RULES = RULE_INFOS


@pytest.mark.parametrize(
    ("source", "target", "steps"),
    [
        ("adamw", "adamw", 0),
        ("adamw", "sign", 0),
        ("sign", "adamw", 110),
        ("lion", "adamw", 100),
        ("adamw_shared_in", "adamw", 50),
        ("adamw", "adamw_shared_in", 0),
    ],
)
def test_what_cannot_be_taken_along_has_to_grow_again(source: str, target: str, steps: float) -> None:
    assert lost_steps(RULES[source], RULES[target]) == steps


def test_the_cost_is_that_of_the_worst_candidate_while_states_grow() -> None:
    of = planner("unlimited")
    block = of.blocks[1].name
    now, then = uniform(of, "sign"), uniform(of, "sign", **{block: "adamw"})
    assert moved_specs(now, then) == {block: ("sign", "adamw")}
    profile = Profile(stats={b.name: stats() for b in of.blocks})
    risks = {c.spec: c.risk.total for c in of.candidates(risk="prior", profile=profile)[block]}
    gap = max(risks.values()) - risks["adamw"]

    def cost(horizon: int, left: dict[str, str]) -> float:
        return migration_risk(of, now=now, then=then, profile=profile, horizon=horizon, left=left)

    assert cost(220, {}) == pytest.approx(gap / 2)
    assert cost(10, {}) == pytest.approx(gap), "no more than all of it"
    assert cost(220, {block: "adamw"}) == pytest.approx(gap), "back and forth pays twice"
    assert cost(220, {block: "lion"}) == pytest.approx(gap / 2)
    back = migration_risk(of, now=then, then=now, profile=profile, horizon=220, left={})
    assert back == 0, "giving states up costs no time"


def test_the_memory_of_a_move_counts_old_and_new_side_by_side() -> None:
    of = planner("unlimited")
    sizes = {block.name: block.numel for block in of.blocks}
    largest = {block.name: max(param.numel for param in block.params) for block in of.blocks}
    block = max(sizes, key=lambda name: sizes[name])
    now, then = uniform(of, "adamw"), uniform(of, "adamw", **{block: "adamw_bf16"})
    way = move_peak(of, now=now, then=then)
    assert way is not None
    new = next(c for c in of.candidates(risk="prior", profile=None)[block] if c.spec == "adamw_bf16").cost.state_bytes
    beside = new + 4 * CONVERSION_FLOATS * largest[block]
    assert way.peak_bytes == 1_900_000 + now.allocation.state_bytes + beside
    assert way.without_gradients_bytes == way.peak_bytes - 900_000
    still = move_peak(of, now=now, then=now)
    assert still is not None and still.peak_bytes == 1_900_000 + now.allocation.state_bytes


def test_blocks_that_shrink_make_room_for_those_that_grow() -> None:
    of = planner("unlimited")
    names = [block.name for block in of.blocks if block.numel > 1000]
    now = uniform(of, "adamw", **{names[0]: "sign"})
    swap = move_peak(of, now=now, then=uniform(of, "adamw", **{names[1]: "sign"}))
    grow = move_peak(of, now=now, then=uniform(of, "adamw"))
    assert swap is not None and grow is not None and swap.peak_bytes < grow.peak_bytes
