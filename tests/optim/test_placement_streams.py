"""What waits for what when states are streamed: every order that marks allow gives the same bits, all are needed."""

import gc
import sys
import weakref
from collections.abc import Iterable
from itertools import permutations
from random import Random

import pytest
import torch
from torch import Tensor

from baoc import BaocOptimizer
from baoc.config.schema import ReallocationConfig
from baoc.kernels.streams import IN, MAIN, OUT, STEP
from baoc.optim import BlockwiseOptimizer
from baoc.optim.backends import HostedBackend, StepInputs
from baoc.optim.offload import Streams, streaming
from baoc.planning.planner import PlannerSettings
from baoc.profiling import GradientProfiler
from baoc.training.session import SessionSettings
from tests.support.optimizing import Gradients, assert_same, build, make_params, run_steps, twin_of, values
from tests.support.placing import HERE, LateStreams, rings

SHAPES = {f"w{index}": (9, 32) for index in range(7)}
ORDERS = list(permutations((MAIN, IN, STEP, OUT)))
MIXED = {"w0": (9, 32), "w1": (2, 32), "w2": (70, 32), "w3": (3, 32), "w4": (9, 32), "w5": (21, 32), "w6": (50, 32)}
STEPS = 3
Run = tuple[list[dict[str, Tensor]], dict[str, Tensor]]


def on_the_device(spec: str, *, shapes: dict[str, tuple[int, ...]] = SHAPES) -> Run:
    """Weights after each step, and the states after the last, without any streams."""
    params = make_params(shapes)
    optimizer, gradients, seen = build(params, spec), Gradients(params), []
    for _ in range(STEPS):
        run_steps(optimizer, params, gradients=gradients, steps=1)
        seen.append({name: value.clone() for name, value in values(params).items()})
    return seen, states_of(optimizer)


def states_of(optimizer: BlockwiseOptimizer) -> dict[str, Tensor]:
    saved = optimizer.state_dict()["state"]
    return {f"{name}.{key}": value.clone() for name, state in saved.items() for key, value in state.items()}


def streamed(
    streams: Streams, spec: str, order: tuple[str, ...], *, shapes: dict[str, tuple[int, ...]] = SHAPES
) -> Run:
    """The same where backward, forward and what follows run in the caller's stream, which is as late as the others."""
    params = make_params(shapes)
    gradients, seen = Gradients(params), []
    for param in params.values():
        param.grad = torch.zeros_like(param)
    with rings(streams=streams, piece_bytes=2000):
        optimizer = build(params, f"{spec}@streamed")
        for _ in range(STEPS):
            grads = gradients.next()

            def backward(grads: dict[str, Tensor] = grads) -> None:
                for name, param in params.items():
                    assert param.grad is not None
                    param.grad.copy_(grads[name])

            def forward() -> None:
                seen.append({name: value.clone() for name, value in values(params).items()})
                for param in params.values():
                    assert param.grad is not None
                    param.grad.fill_(7.0)  # as its memory would be, once it is used for something else

            streams.run(MAIN, backward)
            optimizer.step()
            streams.run(MAIN, forward)
        if isinstance(streams, LateStreams):
            streams.drain(order)
        return seen, states_of(optimizer)


def agree(a: Run, b: Run) -> bool:
    try:
        for one, other in zip(a[0], b[0], strict=True):
            assert_same(one, other)
        assert_same(a[1], b[1])
    except AssertionError:
        return False
    return True


@pytest.mark.slow
def test_every_order_that_the_marks_allow_gives_the_same_bits() -> None:
    spec = "adamw_int8+split8"
    expected = on_the_device(spec)
    for order in ORDERS:
        assert agree(streamed(LateStreams(), spec, order), expected), order


@pytest.mark.slow
def test_large_pieces_come_and_go_in_chunks_among_small_ones() -> None:
    expected = on_the_device("adamw_int8", shapes=MIXED)
    for order in ORDERS:
        assert agree(streamed(LateStreams(), "adamw_int8", order, shapes=MIXED), expected), order
    found = [
        agree(streamed(LateStreams(deaf=[(IN, OUT)]), "adamw_int8", order, shapes=MIXED), expected) for order in ORDERS
    ]
    assert not all(found)


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(2))
def test_pieces_may_come_in_any_order_and_some_not_at_all(monkeypatch: pytest.MonkeyPatch, seed: int) -> None:
    """As in a backward whose order is not known yet, and where some parameters get no gradient."""
    chance = Random(seed)
    turns = [chance.sample(range(7), k=chance.choice((7, 7, 4))) for _ in range(6)]
    given = iter(turns)

    def call(backend: HostedBackend, inputs: StepInputs) -> None:
        for index in next(given):
            if index < len(backend.pieces):
                backend.step(index, inputs)

    monkeypatch.setattr(HostedBackend, "__call__", call)
    monkeypatch.setattr(sys.modules[__name__], "STEPS", len(turns))
    expected = streamed(Streams(), "adamw_int8", (), shapes=MIXED)
    for deaf in ((), ((IN, OUT),)):
        found = []
        for order in ORDERS:
            given = iter(turns)
            run = streamed(LateStreams(deaf=deaf), "adamw_int8", order, shapes=MIXED)
            found.append(agree(run, expected))
        assert all(found) is not bool(deaf)


def test_no_chunk_comes_before_what_was_in_its_place_has_left(monkeypatch: pytest.MonkeyPatch) -> None:
    """Where it takes into account only its piece's own copies out, some order is wrong."""
    expected = on_the_device("adamw_int8", shapes=MIXED)
    place = streaming.StagingPipeline.place

    def alone(ring: streaming.StagingPipeline, parts: list) -> list[streaming.Piece]:
        pieces = place(ring, parts)
        for chunk in (chunk for piece in pieces for chunk in piece.chunks[1:]):
            ring.overlapping_chunks[chunk] = []
        return pieces

    monkeypatch.setattr(streaming.StagingPipeline, "place", alone)
    found = [agree(streamed(LateStreams(), "adamw_int8", order, shapes=MIXED), expected) for order in ORDERS]
    assert not all(found)


@pytest.mark.slow
@pytest.mark.parametrize("pair", [(STEP, MAIN), (STEP, IN), (IN, OUT), (OUT, STEP), (MAIN, STEP)])
def test_without_any_one_of_the_waits_some_order_is_wrong(pair: tuple[str, str]) -> None:
    expected = on_the_device("adamw_int8")
    streams = [LateStreams(deaf=[pair]) for _ in ORDERS]
    found = [agree(streamed(late, "adamw_int8", order), expected) for late, order in zip(streams, ORDERS, strict=True)]
    assert all(pair in late.heard for late in streams) and not all(found)


@pytest.mark.parametrize("deaf", [(), ((STEP, OUT),)])
def test_states_that_stay_in_the_buffer_are_not_stepped_before_they_have_been_copied_out(deaf: tuple) -> None:
    """One piece: it is never loaded again, and the step after waits for the copy out of the one before."""
    found = [copied_out(LateStreams(deaf=deaf), order) for order in ORDERS]
    assert all(len(seen) == STEPS for seen in found)
    assert all(len(set(seen)) == STEPS for seen in found) is not bool(deaf)


def copied_out(streams: LateStreams, order: tuple[str, ...]) -> list[float]:
    """What each copy out brought, as one number."""
    params = make_params({"w": (9, 32)})
    params["w"].grad = torch.ones(9, 32)
    seen: list[float] = []
    with rings(streams=streams, piece_bytes=10**6):
        optimizer = build(params, "adamw@streamed")
        for _ in range(STEPS):
            optimizer.step()
            streams.run(OUT, lambda: seen.append(float(optimizer.registry.state[params["w"]]["m"].sum())))
        streams.drain(order)
    return seen


def test_a_checkpoint_waits_for_states_on_their_way_home() -> None:
    found = {}
    for deaf in ((), ((HERE, OUT), (HERE, IN))):  # what is fetched for the next step waits for what goes home, too
        streams, params = LateStreams(deaf=deaf), make_params(SHAPES)
        twins = twin_of(params)
        plain = build(twins, "adamw_int8")
        with rings(streams=streams, piece_bytes=2000):
            optimizer = build(params, "adamw_int8@streamed")
            Gradients(params).give(params, twins)
            optimizer.step()
            plain.step()
            saved, expected = states_of(optimizer), states_of(plain)
            found[deaf] = all(torch.equal(saved[key], value) for key, value in expected.items())
    assert list(found.values()) == [True, False]


def test_gradients_that_are_released_are_kept_for_the_lane_that_reads_them() -> None:
    streams, params = LateStreams(), make_params(SHAPES)
    with rings(streams=streams, piece_bytes=2000):
        optimizer = build(params, "adamw@streamed", release=True)
        torch.stack([param.sum() for param in params.values()]).sum().backward()
        optimizer.step()
    assert [stream for _, stream in streams.kept] == [STEP] * len(SHAPES)
    assert {tuple(tensor.shape) for tensor, _ in streams.kept} == {(9, 32)}


def test_gradients_that_are_released_do_not_gather_before_a_slow_link() -> None:
    """One piece may be on its way when the next one's gradients come, however far backward could run ahead."""

    class Counting(LateStreams):
        def record_use(self, tensors: Iterable[Tensor], *, name: str) -> None:
            left.append(self.given.get(STEP, 0) - self.done.get(STEP, 0))
            super().record_use(tensors, name=name)

    left: list[int] = []
    streams, params = Counting(), make_params({name: (9, 32) for name in "abcdef"})
    with rings(streams=streams, piece_bytes=2000):
        optimizer = build(params, "adamw@streamed", release=True)
        torch.stack([param.sum() for param in params.values()]).sum().backward()
        optimizer.step()
    waits = 2  # of the stream, that each step is given beside its work
    assert len(left) == 6 and max(left) <= 2 * (1 + waits)


def test_a_sample_is_put_together_when_released_gradients_are_gone(monkeypatch: pytest.MonkeyPatch) -> None:
    left: list[int] = []
    streams, params = LateStreams(), make_params({name: (9, 32) for name in "abcdef"})

    def finish(profiler: GradientProfiler) -> None:
        left.append(streams.given[STEP] - streams.done.get(STEP, 0))

    monkeypatch.setattr(GradientProfiler, "end_step", finish)
    with rings(streams=streams, piece_bytes=2000):
        settings = SessionSettings(
            planner=PlannerSettings(specs=("adamw@streamed",), keep_fp32_roles=()),
            reallocation=ReallocationConfig(mode="once"),
            release=True,
        )
        optimizer = BaocOptimizer(params.items(), budget="state_50", settings=settings)
        for _ in range(3):
            torch.stack([param.sum() for param in params.values()]).sum().backward()
            optimizer.step()
    assert left[0] > 0 and left[1:] == [0, 0], "the first step is never sampled"


def test_a_ring_that_goes_waits_for_what_is_on_its_way() -> None:
    streams = LateStreams()
    with rings(streams=streams, piece_bytes=2000):
        optimizer = build(make_params(SHAPES), "adamw@streamed")
        params = [param for group in optimizer.param_groups for param in group["params"]]
        for param in params:
            param.grad = torch.ones_like(param)
        optimizer.step()
        (backend,) = optimizer.registry.backends
        assert isinstance(backend, HostedBackend) and not streams.finished
        pieces = [weakref.ref(piece) for piece in backend.pieces]
        streams.drain(ORDERS[0])
        del backend
        gc.disable()  # its memory may be needed by the ring after it at once
        try:
            optimizer.registry.drop_backends()
            assert streams.finished and not any(piece() for piece in pieces)
        finally:
            gc.enable()
