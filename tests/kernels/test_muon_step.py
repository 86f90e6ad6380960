"""The fused Muon step against the eager one, by Triton's interpreter on the CPU.

The eager step multiplies in fp32 there and the fused one in fp16; momentum, and whatever does not pass through a
product, agrees as other fused steps do.
"""

from itertools import pairwise
from typing import Any

import pytest
import torch
from torch import Tensor

from baoc.core.catalogue import SPECS
from baoc.kernels import Engine, Shape, polar
from baoc.kernels.triton import muon_plan
from baoc.kernels.triton.table import FusedTable
from baoc.optim.backends import fused
from baoc.optim.rules.muon import orthogonalized
from tests.support.fused_pair import Pair, poison
from tests.support.interpreting import interpreted
from tests.support.tolerances import MUON_BF16, MUON_FP16

SHAPES = {"a": (9, 37), "a2": (9, 37), "tall": (44, 12), "d": (6, 5, 7, 1), "bias": (40,)}
LR = 1e-2


def specs(name: str) -> dict[str, str]:
    plus, weights = name.partition("+")[1:]
    return {key: name if len(shape) > 1 else f"adamw{plus}{weights}" for key, shape in SHAPES.items()}


def agree(found: Tensor, expected: Tensor, *, what: str) -> None:
    top = expected.double().abs().max().clamp(min=1e-300)
    found, expected = found.double().flatten() / top, expected.double().flatten() / top
    error = float((found - expected).square().sum() / expected.square().sum())
    cosine = float(torch.cosine_similarity(found, expected, dim=0))
    # Twice, for both sides are rounded where weights are, and a matrix of few lines has few numbers to average.
    assert error <= 2 * MUON_BF16.nmse and cosine >= MUON_BF16.cosine, f"{what}: NMSE {error:.1e}, cosine {cosine:.5f}"


class Steps(Pair):
    """Compares what each step does to the weights, both starting from the same."""

    def __init__(self, spec: str, *, only: tuple[str, ...] = tuple(SHAPES), **settings: object):
        shapes = {name: SHAPES[name] for name in only}
        super().__init__({name: specs(spec)[name] for name in only}, shapes, lr=LR, weight_decay=0.0, **settings)

    def step_and_check(self) -> None:
        before = self.fused.export_weights()
        self.step()
        after, twins = self.fused.export_weights(), self.eager.export_weights()
        for name, param in self.params[0].items():
            if len(SHAPES[name]) > 1 and param.grad is not None:
                agree(after[name] - before[name], twins[name] - before[name], what=name)
                agree(self.momentum(0, name), self.momentum(1, name), what=f"m of {name}")
        self.fused.load_weights(twins)
        self.eager.load_weights(twins)
        for block, live in self.fused.registry.live.items():
            match = self.eager.registry.live[block].match
            if match is not None:
                torch.testing.assert_close(live.match, match, rtol=0.05, atol=1e-6)
                match.copy_(live.match)

    def momentum(self, which: int, name: str) -> Tensor:
        optimizer = (self.fused, self.eager)[which]
        (slot,) = optimizer.registry.live[name].slots
        return slot.states[0].decode(optimizer.state[slot.param])


def test_batches_hold_one_shape_and_no_more_than_there_is_room(monkeypatch: pytest.MonkeyPatch) -> None:
    shapes = [Shape(numel=r * c, rows=r, cols=c) for r, c in ((8, 16), (16, 8), (8, 16), (64, 64), (8, 16))]
    shapes.append(Shape(numel=128, rows=16, cols=8, transposed=True))  # lies as [8, 16]
    assert list(muon_plan.batches(shapes)) == [[0, 2, 4, 5], [1], [3]]
    monkeypatch.setattr(muon_plan, "BATCH_BYTES", 2 * polar.workspace_bytes(1, 16, 16))  # as they are padded
    found = list(muon_plan.batches(shapes))
    assert found == [[0, 2], [4, 5], [1], [3]]
    assert muon_plan.temporary_bytes(shapes) == polar.workspace_bytes(1, 64, 64)  # one matrix, however large
    assert muon_plan.temporary_bytes(shapes[:3]) == polar.workspace_bytes(2, 16, 16)
    assert muon_plan.temporary_bytes([]) == 0
    monkeypatch.setattr(muon_plan, "BATCH_BYTES", 3 * polar.workspace_bytes(1, 16, 16))
    assert list(map(len, muon_plan.batches(shapes[:1] * 4))) == [2, 2]  # not three and one


def test_a_room_holds_what_the_products_need_and_no_part_overlaps() -> None:
    parts = polar.workspace_spans(3, 16, 48)
    assert [end - begin for begin, end in parts] == [2 * 3 * 16 * 48] * 2 + [2 * 3 * 16 * 16] * 3
    assert all(end <= begin for (_, end), (begin, _) in pairwise(parts))
    assert parts[-1][1] <= polar.workspace_bytes(3, 16, 48) < parts[-1][1] + 256


def test_a_plan_is_told_of_the_room_and_that_bytes_do_not_tell_its_seconds() -> None:
    params = [torch.empty(64, 3, 8, 8), torch.empty(192, 64), torch.empty(64)]
    assert fused.temporary_bytes(SPECS["muon_int8"], params=params) == polar.workspace_bytes(1, 192, 64)
    assert fused.temporary_bytes(SPECS["muon"], params=[*params, *params]) == polar.workspace_bytes(2, 192, 64)
    assert fused.temporary_bytes(SPECS["adamw_int8"], params=params) == 0
    assert fused.is_bandwidth_bound(SPECS["lion"]) and not fused.is_bandwidth_bound(SPECS["muon"])


@interpreted
@pytest.mark.parametrize(("lines", "length"), [(16, 48), (48, 16), (80, 96), (16, 16), (144, 80)])
def test_a_batch_is_its_matrices_whichever_side_is_shorter(lines: int, length: int) -> None:
    from baoc.kernels.triton.orthogonal import orthogonalize

    random = torch.Generator().manual_seed(0)
    stack = torch.randn(2, lines, length, generator=random)
    stack[1, lines // 2 :, :] = 0.0  # singular values that are 0
    stack /= torch.linalg.matrix_norm(stack, keepdim=True)
    room = torch.zeros(polar.workspace_bytes(2, lines, length), dtype=torch.uint8)
    room[: 2 * stack.numel()] = stack.to(torch.float16).flatten().view(torch.uint8)
    out = orthogonalize(room, num=2, lines=lines, length=length)
    for index in range(2):
        expected = orthogonalized(stack[index])
        error = float((out[index] - expected).square().sum() / expected.square().sum())
        assert error < MUON_FP16.nmse, f"{lines} x {length}: {error:.1e}"


@interpreted
def test_small_singular_values_are_not_lost_to_large_ones() -> None:
    """Over three decades, where five steps on X X^T alone would end far off."""
    from baoc.kernels.triton.orthogonal import orthogonalize

    random = torch.Generator().manual_seed(0)
    left, right = (torch.linalg.qr(torch.randn(64, 64, generator=random))[0] for _ in range(2))
    matrix = (left * torch.logspace(0, -3, 64)) @ right
    matrix /= torch.linalg.matrix_norm(matrix)
    room = torch.zeros(polar.workspace_bytes(1, 64, 64), dtype=torch.uint8)
    room[: 2 * 64 * 64] = matrix.to(torch.float16).flatten().view(torch.uint8)
    out, expected = orthogonalize(room, num=1, lines=64, length=64)[0].float(), orthogonalized(matrix)
    assert float((out - expected).square().sum() / expected.square().sum()) < 2 * MUON_FP16.nmse


@interpreted
@pytest.mark.parametrize("spec", ["muon_int8", "muon_bf16+split8"])
def test_it_follows_the_eager_step(spec: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(muon_plan, "BATCH_BYTES", polar.workspace_bytes(1, 16, 48))  # several batches
    pair = Steps(spec)
    for _ in range(2):
        pair.give()
        pair.step_and_check()
    stepped = {choice.backend for choice in pair.fused.registry.choices.values()}
    assert stepped == {"fused"}


@interpreted
@pytest.mark.parametrize("matching", [True, False])
def test_missing_gradients_and_elements_that_are_not_finite(matching: bool) -> None:
    pair = Steps("muon", rms_matching=matching)
    for step in range(3):
        pair.give()
        for params in pair.params:
            if step:
                poison(params, other="a2")
                params["tall"].grad = None
        kept = {name: param.detach().clone() for name, param in pair.params[0].items()}
        bad = {n: ~p.grad.isfinite() for n, p in pair.params[0].items() if p.grad is not None}
        if step == 2:
            pair.fused.mask_nonfinite()
        params, before = pair.params[0], kept
        pair.step()
        for name, where in bad.items():
            assert torch.equal(params[name].detach()[where], before[name][where])
        if "tall" not in bad:
            assert torch.equal(params["tall"], before["tall"])
        for name in bad:
            if len(SHAPES[name]) > 1:
                agree(params[name].detach() - before[name], pair.params[1][name].detach() - before[name], what=name)
            params[name].detach().copy_(pair.params[1][name].detach())
    assert pair.fused.num_nonfinite == pair.eager.num_nonfinite > 0


@interpreted
def test_a_surge_is_held_to_one_learning_rate_in_the_step_itself() -> None:
    """A gradient of one direction makes small updates; one of all of them after it would make large ones."""
    pair = Steps("muon")
    for step in range(3):
        pair.give()
        for params in pair.params:
            if step == 0:
                for param in params.values():
                    if param.ndim > 1:
                        flat = torch.zeros(len(param), param.numel() // len(param))
                        flat[:, 0] = 1.0
                        param.grad.copy_(flat.view(param.shape))
        pair.step_and_check()


@interpreted
@pytest.mark.parametrize("size", [1e-30, 1e12])
def test_the_size_of_gradients_does_not_matter(size: float) -> None:
    pair = Steps("muon", rms_matching=False)
    pair.give()
    for params in pair.params:
        for param in params.values():
            param.grad *= size
    pair.step_and_check()


def stepped(pair: Steps) -> tuple[Engine, FusedTable]:
    """The engine after a first step, and its table of matrices."""
    pair.give()
    pair.step()
    engine = pair.fused.registry.backends[0].engine  # pyright: ignore[reportAttributeAccessIssue]
    (table,) = [table for table in engine.tables if table.kind.rule == "muon"]
    return engine, table


@interpreted
def test_the_room_is_given_back_and_where_it_lies_tells_graphs_apart(monkeypatch: pytest.MonkeyPatch) -> None:
    pair = Steps("muon", only=("a", "a2"))
    engine, table = stepped(pair)
    assert table.workspace is None
    taken: list[Tensor] = []
    keys: list[object] = []
    empty = torch.empty
    monkeypatch.setattr(torch, "empty", lambda *a, **k: taken.append(empty(*a, **k)) or taken[-1])
    graphs = engine.graphs
    monkeypatch.setattr(graphs, "on", True)
    monkeypatch.setattr(graphs, "run", lambda key, launch: keys.append(key) or launch())
    for _ in range(2):  # the first keeps its room, so that the second is elsewhere
        pair.give()
        pair.fused.step()
    assert [room.numel() for room in taken] == [muon_plan.temporary_bytes(table.shapes)] * 2
    assert table.workspace is None and keys[0] != keys[1]


@interpreted
def test_where_memory_has_gaps_batches_are_halved_for_good(monkeypatch: pytest.MonkeyPatch) -> None:
    pair = Steps("muon", only=("a", "a2"))
    _, table = stepped(pair)
    whole, most = muon_plan.temporary_bytes(table.shapes), [0]
    empty, asked = torch.empty, list[int]()

    def held(*size: Any, **given: Any) -> Tensor:
        if given.get("dtype") is torch.uint8:
            asked.append(size[0])
            if size[0] > most[0]:
                raise torch.OutOfMemoryError("no place")
        return empty(*size, **given)

    monkeypatch.setattr(torch, "empty", held)
    most[0] = whole - 1
    for _ in range(2):
        pair.give()
        pair.step_and_check()
    assert asked == [whole, asked[1], asked[1]] and asked[1] < whole  # not tried anew in the second step
    most[0] = 0
    pair.give()
    with pytest.raises(torch.OutOfMemoryError, match="no place"):
        pair.fused.step()
    assert asked[-1] == polar.workspace_bytes(
        1, *muon_plan.whole_sides(max(map(muon_plan.stored, table.shapes)), ranks=1)
    )
