"""Ranks share the samples of a step, and a position means the same sample at any number of them."""

import pytest
import torch

from baoc.data.loader import ShuffledLoader


def loaders(ranks: int, *, accumulate: int) -> list[ShuffledLoader]:
    rows, size = {"x": torch.arange(100)}, 24 // (ranks * accumulate)
    given = {"batch_size": size, "seed": 3, "accumulate": accumulate, "num_ranks": ranks}
    return [ShuffledLoader(rows, rank=rank, **given) for rank in range(ranks)]


def steps(found: list[ShuffledLoader], *, count: int) -> list[set[int]]:
    """The samples of each of the next steps, of all ranks together."""
    passes = [iter(loader) for loader in found]
    taken = found[0].accumulate
    return [{int(x) for each in passes for _ in range(taken) for x in next(each)["x"]} for _ in range(count)]


@pytest.mark.parametrize(("before", "after"), [((2, 1), (1, 1)), ((1, 4), (2, 1)), ((2, 3), (4, 2))])
def test_no_sample_is_repeated_or_skipped_at_another_number_of_ranks(
    before: tuple[int, int], after: tuple[int, int]
) -> None:
    first = loaders(before[0], accumulate=before[1])
    seen = steps(first, count=2)
    then = loaders(after[0], accumulate=after[1])
    for loader in then:
        loader.load_state_dict(first[0].state_dict())
    seen += steps(then, count=2)
    assert seen == steps(loaders(1, accumulate=1), count=4)
    assert all(len(step) == 24 for step in seen) and len(set.union(*seen)) == 96
