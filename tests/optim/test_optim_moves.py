"""Which blocks a migration touches, in what order, what is refused, and what memory it takes."""

import pytest
import torch
from torch import Tensor

from baoc.errors import BadInputError
from baoc.optim import BlockwiseOptimizer
from baoc.profiling.tracker import MemoryTracker
from tests.support.optimizing import (
    Gradients,
    assert_same,
    build,
    info,
    make_params,
    one_block,
    run_steps,
    state_tensors,
    trained,
)


def test_only_blocks_that_change_are_touched() -> None:
    params, optimizer, _ = trained({"a": (8, 16), "b": (8, 16)}, {"a": "adamw_int8", "b": "adamw"}, steps=3)
    before = dict(optimizer.state[params["a"]])
    moves = optimizer.migrate({"a": "adamw_int8", "b": "lion_int8"})
    assert [move.block for move in moves] == ["b"]
    assert all(optimizer.state[params["a"]][key] is value for key, value in before.items())
    assert optimizer.specs == {"a": "adamw_int8", "b": "lion_int8"}
    assert optimizer.migrate(optimizer.specs) == []


def test_what_is_built_and_moved_without_gradients_to_come_trains_on() -> None:
    params = make_params({"w": (8, 16)})
    with torch.inference_mode():
        optimizer = build(params, "adamw")
        optimizer.migrate({"w": "lion_int8"})
    run_steps(optimizer, params, gradients=Gradients(params), steps=2)
    assert params["w"].isfinite().all()


def test_moves_come_in_the_order_of_blocks() -> None:
    params = make_params({name: (8, 16) for name in "abc"})
    optimizer = build(params, {"a": "sign", "b": "adamw", "c": "adamw"})
    moves = optimizer.migrate({"c": "sign", "a": "adamw", "b": "lion"})
    assert [move.block for move in moves] == ["a", "b", "c"]


@pytest.mark.parametrize(
    ("specs", "text"),
    [
        ({"a": "sign", "x": "sign"}, "no block 'x'"),
        ({"a": "sign", "b": "adamm"}, "no optimizer spec is called 'adamm'"),
        ({"a": "sign", "b": "foam_l1"}, "block b cannot run foam_l1"),
    ],
)
def test_nothing_changes_if_one_move_is_refused(specs: dict[str, str], text: str) -> None:
    _, optimizer, _ = trained({"a": (8, 16), "b": (8,)}, steps=2)
    before = {name: value.clone() for name, value in state_tensors(optimizer).items()}
    with pytest.raises(BadInputError, match=text):
        optimizer.migrate(specs)
    assert optimizer.specs == {"a": "adamw", "b": "adamw"}
    assert_same(state_tensors(optimizer), before)


def held_bytes(optimizer: BlockwiseOptimizer, params: dict[str, Tensor]) -> int:
    """States and weights."""
    return optimizer.state_bytes() + sum(param.nbytes for param in params.values())


@pytest.mark.parametrize("weights", ["native", "split8"])
def test_memory_stays_below_the_larger_plan_and_one_block(weights: str) -> None:
    """Blocks of several tensors, whose old slab goes when the block has moved."""
    numel, per_block, count = 64 * 256, 4, 6
    params = make_params({f"b{i}.{j}": (64, 256) for i in range(count) for j in range(per_block)})
    blocks = [one_block(f"b{i}", [info(f"b{i}.{j}", (64, 256)) for j in range(per_block)]) for i in range(count)]
    cheap = "sign" if weights == "native" else f"lion_int8+{weights}"
    plans = [{f"b{i}": ("adamw" if i % 2 == odd else cheap) for i in range(count)} for odd in (0, 1)]
    optimizer = build(params, plans[0], blocks=blocks)
    run_steps(optimizer, params, gradients=Gradients(params), steps=1)
    for param in params.values():
        param.grad = None
    before = held_bytes(optimizer, params)
    largest = max(optimizer.block_state_bytes().values()) + 4 * numel * per_block
    tracker = MemoryTracker().count_existing(
        optimizer.state, params, [live.match for live in optimizer.registry.live.values()]
    )
    assert tracker.current_bytes == before
    with tracker:
        optimizer.migrate(plans[1])
    after = held_bytes(optimizer, params)
    assert tracker.current_bytes == after
    one_tensor = 6 * 4 * numel  # the numbers that a tensor's states and weights are computed in
    assert max(before, after) < tracker.peak_bytes <= max(before, after) + largest + one_tensor


def test_memory_stays_below_the_larger_plan_and_one_tensors_needs() -> None:
    numel, count = 64 * 256, 12
    params = make_params({f"p{i:02}": (64, 256) for i in range(count)})
    half = {name: ("adamw" if i % 2 else "sign") for i, name in enumerate(params)}
    other = {name: ("sign" if i % 2 else "adamw") for i, name in enumerate(params)}
    optimizer = build(params, half)
    run_steps(optimizer, params, gradients=Gradients(params), steps=1)
    for param in params.values():
        param.grad = None
    larger = optimizer.state_bytes()
    tracker = MemoryTracker().count_existing(optimizer.state, params)
    held = tracker.current_bytes
    with tracker:
        optimizer.migrate(other)
    assert optimizer.state_bytes() == larger == 8 * numel * count // 2 + 4 * count // 2 + 8 * count // 2
    assert tracker.peak_bytes - held <= 3 * 4 * numel + 1024  # one tensor's states, and the numbers they come from
