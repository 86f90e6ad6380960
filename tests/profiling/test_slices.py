"""Which elements are sampled: all where they fit, row bands and prefixes where not, in groups that the codecs share."""

import pytest
import torch
from torch import Tensor

from baoc.profiling.slices import Slices
from baoc.types import Block, ParamInfo, Role

CPU = torch.device("cpu")


def block(name: str, *shapes: tuple[int, ...], transposed: bool = False) -> Block:
    params = tuple(
        ParamInfo(name=f"{name}.{i}", shape=s, dtype="float32", role=Role.MLP, transposed=transposed and len(s) > 1)
        for i, s in enumerate(shapes)
    )
    return Block(name=name, params=params, role=Role.MLP)


def numbers(blocks: list[Block]) -> dict[str, Tensor]:
    """Every element its own number, so that a sampled one can be told from any other."""
    found: dict[str, Tensor] = {}
    start = 1
    for param in (p for b in blocks for p in b.params):
        found[param.name] = torch.arange(start, start + param.numel, dtype=torch.float32).view(param.shape)
        start += param.numel
    return found


def gathered(slices: Slices, grads: dict[str, Tensor]) -> dict[str, Tensor]:
    buffer = slices.buffer(CPU)
    slices.gather_(buffer, grads=grads)
    return {p.param.name: buffer.flat[p.offset : p.offset + p.numel].view(p.shape) for p in slices.pieces}


def test_all_elements_where_they_fit():
    blocks = [block("a", (5, 7), (7,)), block("b", (1, 3, 4))]
    grads = numbers(blocks)
    found = gathered(Slices(blocks, max_elements=1000, device=CPU), grads)
    for name, values in found.items():
        assert values.flatten().tolist() == grads[name].flatten().tolist()


@pytest.mark.parametrize("max_elements", [500, 2_000, 20_000])
def test_no_more_elements_than_allowed_and_small_blocks_whole(max_elements: int):
    blocks = [block("big", (300, 64), (64, 300)), block("small", (40,)), block("middle", (64, 64))]
    slices = Slices(blocks, max_elements=max_elements, device=CPU)
    assert sum(piece.numel for piece in slices.pieces) <= max_elements
    assert {piece.param.name: piece.numel for piece in slices.pieces}["small.0"] == 40


def test_row_bands_are_whole_rows_in_runs_of_eight():
    blocks = [block("a", (256, 32))]
    (piece,) = Slices(blocks, max_elements=64 * 32, device=CPU).pieces
    assert piece.shape == (64, 32)
    assert piece.rows is not None
    rows = piece.rows.tolist()
    assert len(set(rows)) == 64
    starts = rows[::8]
    assert all(
        start % 8 == 0 and rows[i * 8 : i * 8 + 8] == list(range(start, start + 8)) for i, start in enumerate(starts)
    )
    assert max(rows) >= 240, "the last rows of a fused projection are seen too"


def test_sampled_rows_hold_the_gradient_s_own_numbers():
    blocks = [block("a", (256, 32), (999,))]
    grads = numbers(blocks)
    slices = Slices(blocks, max_elements=3000, device=CPU)
    found = gathered(slices, grads)
    rows = next(piece.rows for piece in slices.pieces if piece.is_matrix)
    matrix, vector = grads["a.0"], grads["a.1"]
    assert rows is not None
    assert torch.equal(found["a.0"], matrix[rows])
    assert torch.equal(found["a.1"], vector[: len(found["a.1"])])


def test_a_tiny_share_keeps_a_matrix_a_matrix():
    slices = Slices([block("a", (4096, 4096)), block("b", (2, 50_000))], max_elements=600, device=CPU)
    for piece in slices.pieces:
        assert piece.sampled.matrix_shape is not None
        assert piece.numel <= 300


def test_parameters_are_passed_over_rather_than_exceeding_the_share():
    slices = Slices([block("a", *[(64, 64)] * 40)], max_elements=512, device=CPU)
    assert 1 <= len(slices.pieces) <= 8
    assert sum(piece.numel for piece in slices.pieces) <= 512


def test_other_strides_give_the_same_numbers():
    blocks = [block("conv", (16, 8, 3, 3)), block("lin", (64, 64))]
    grads = numbers(blocks)
    conv, lin = grads["conv.0"], grads["lin.0"]
    strided = {"conv.0": conv.contiguous(memory_format=torch.channels_last), "lin.0": lin.t().contiguous().t()}
    slices = Slices(blocks, max_elements=2500, device=CPU)
    plain, other = gathered(slices, grads), gathered(slices, strided)
    assert all(torch.equal(plain[name], other[name]) for name in plain)


def test_a_missing_gradient_is_left_as_it_is_and_an_empty_parameter_has_no_place():
    blocks = [block("a", (4, 4), (0,)), block("b", (3,))]
    found = gathered(Slices(blocks, max_elements=100, device=CPU), {"a.1": torch.ones(0), "b.0": torch.ones(3)})
    assert set(found) == {"a.0", "b.0"}
    assert found["a.0"].abs().sum() == 0


def test_pieces_start_with_a_group_and_sums_are_per_piece_and_block():
    blocks = [block("a", (5, 7), (3,)), block("b", (5, 7)), block("empty", (0,))]
    slices = Slices(blocks, max_elements=1000, device=CPU)
    assert all(piece.offset % 32 == 0 for piece in slices.pieces)
    buffer = slices.buffer(CPU)
    slices.gather_(buffer, grads=numbers(blocks))
    expected = {"a": sum(range(1, 39)), "b": sum(range(39, 74)), "empty": 0}
    assert slices.block_sums(slices.sums(buffer.flat)).tolist() == list(expected.values())


def test_batches_are_views_of_equal_shapes_turned_to_fan_out_by_fan_in():
    blocks = [block("a", (6, 4), (9,), (6, 4)), block("t", (6, 4), transposed=True)]
    slices = Slices(blocks, max_elements=1000, device=CPU)
    buffer = slices.buffer(CPU)
    slices.gather_(buffer, grads=numbers(blocks))
    views = {(batch.transposed, batch.count): batch.view(buffer.flat) for batch in slices.batches}
    assert {key: tuple(view.shape) for key, view in views.items()} == {(False, 2): (2, 6, 4), (True, 1): (1, 4, 6)}
    assert views[True, 1][0, 0, :2].tolist() == [58.0, 62.0], "element (fan_out 0, fan_in 1) is stored in row 1"
    views[False, 2].zero_()
    assert slices.sums(buffer.flat)[:2].sum() == 0, "a batch is a view, not a copy"
