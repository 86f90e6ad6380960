"""Partition on random inputs: every parameter exactly once."""

from hypothesis import given
from hypothesis import strategies as st

from baoc.core.blocks import partition
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
