"""The memory that a move takes while it goes on."""

from baoc.planning.reallocation.migration_cost import CONVERSION_FLOATS, migration_peak
from tests.support.planners import planner, uniform


def test_the_memory_of_a_move_counts_old_and_new_side_by_side() -> None:
    of = planner("unlimited")
    sizes = {block.name: block.numel for block in of.blocks}
    largest = {block.name: max(param.numel for param in block.params) for block in of.blocks}
    block = max(sizes, key=lambda name: sizes[name])
    now, then = uniform(of, "adamw"), uniform(of, "adamw", **{block: "adamw_bf16"})
    way = migration_peak(of, current=now, target=then)
    assert way is not None
    new = next(c for c in of.candidates(risk="prior", profile=None)[block] if c.spec == "adamw_bf16").cost.state_bytes
    beside = new + 4 * CONVERSION_FLOATS * largest[block]
    assert way.peak_bytes == 1_900_000 + now.allocation.state_bytes + beside
    assert way.without_gradients_bytes == way.peak_bytes - 900_000
    still = migration_peak(of, current=now, target=now)
    assert still is not None and still.peak_bytes == 1_900_000 + now.allocation.state_bytes


def test_blocks_that_shrink_make_room_for_those_that_grow() -> None:
    of = planner("unlimited")
    names = [block.name for block in of.blocks if block.numel > 1000]
    now = uniform(of, "adamw", **{names[0]: "sign"})
    swap = migration_peak(of, current=now, target=uniform(of, "adamw", **{names[1]: "sign"}))
    grow = migration_peak(of, current=now, target=uniform(of, "adamw"))
    assert swap is not None and grow is not None and swap.peak_bytes < grow.peak_bytes
