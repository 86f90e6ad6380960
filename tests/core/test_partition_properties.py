"""Partition and segmentation on random inputs: every parameter exactly once, and segments as good as brute force's."""

from itertools import combinations

from hypothesis import given
from hypothesis import strategies as st

from baoc.core.blocks import partition, segment
from baoc.types import ParamInfo, Role

names = st.lists(st.text("abc.", min_size=1, max_size=6), min_size=1, max_size=20, unique=True)


@given(
    names=names,
    by=st.sampled_from(["layer_role", "layer", "role", "tensor", "model"]),
    declared=st.booleans(),
    data=st.data(),
)
def test_every_parameter_is_in_exactly_one_block(names: list[str], by: str, declared: bool, data: st.DataObject):
    params = [
        ParamInfo(
            name=name,
            shape=data.draw(st.sampled_from([(0, 3), (4,), (4, 5)])),
            dtype="float32",
            role=data.draw(st.sampled_from(Role)),
            depth=data.draw(st.none() | st.integers(0, 3)),
        )
        for name in names
    ]
    own = {f"block {i % 3}": names[i % 3 :: 3] for i in range(min(3, len(names)))} if declared else None
    patterns = [(f"from {names[0][0]}", names[0][0] + "*")] if data.draw(st.booleans()) else []
    blocks = partition(params, declared=own, patterns=patterns, by=by)
    assert sorted(p.name for block in blocks for p in block.params) == sorted(names)
    assert len({block.name for block in blocks}) == len(blocks)
    assert sum(block.numel for block in blocks) == sum(p.numel for p in params)
    assert partition(params, declared=own, patterns=patterns, by=by) == blocks


def dispersion(points: list[float], cuts: tuple[int, ...], penalty: float) -> float:
    total = 0.0
    for start, stop in zip((0, *cuts), (*cuts, len(points)), strict=True):
        mean = sum(points[start:stop]) / (stop - start)
        total += penalty + sum((x - mean) ** 2 for x in points[start:stop])
    return total


@given(points=st.lists(st.integers(-9, 9).map(float), min_size=1, max_size=8), penalty=st.floats(0.01, 50))
def test_segments_are_the_best_of_all(points: list[float], penalty: float):
    ranges = segment([(x,) for x in points], penalty=penalty)
    assert [stop for _, stop in ranges[:-1]] == [start for start, _ in ranges[1:]]
    assert (ranges[0][0], ranges[-1][1]) == (0, len(points))
    inner = range(1, len(points))
    best = min(dispersion(points, cuts, penalty) for k in range(len(points)) for cuts in combinations(inner, k))
    found = dispersion(points, tuple(start for start, _ in ranges[1:]), penalty)
    assert found <= best + 1e-9
