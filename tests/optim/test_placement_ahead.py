"""Host-placed blocks that are stepped in backward, and beside the caller: what then waits, and what is refused."""

from contextlib import nullcontext
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from baoc.errors import BadInputError
from baoc.optim import BeforeStep, BlockwiseOptimizer
from baoc.optim.offload import streaming, updating
from baoc.optim.offload.pipeline import MAIN, OUT
from tests.support.optimizing import Gradients, assert_same, build, make_params, values
from tests.support.placing import PLACES, SHAPES, LateHost, LateLanes, Twins, rings, states_of
from tests.support.releasing import backward


@pytest.mark.parametrize("place", PLACES)
@pytest.mark.parametrize("spec", ["adamw_int8+split8", "lion_int8"])
def test_release_and_stepping_in_backward(spec: str, place: str) -> None:
    """One after the other, or what there is of it: gradients that are not final wait, and a NaN is left out."""
    with rings(piece_bytes=1500):
        pair = Twins(spec, place)
        released = Twins(spec, place, release=True)
        for step in range(4):
            grads = {name: grad for name, grad in pair.gradients.next().items() if name != "b" or step != 1}
            if step == 2:
                grads["c"][5, 5] = float("inf")
            for optimizer, params in ((pair.device, pair.params), (released.host, released.twins)):
                optimizer.zero_grad()
                backward(params, grads)
                optimizer.step()
            pair.host.zero_grad()
            with pair.host.last_backward():
                backward(pair.twins, grads)
            assert pair.host.overlap.mid_step
            pair.host.step()
        pair.check()
        assert pair.host.num_nonfinite == released.host.num_nonfinite == 1
        assert_same(states_of(pair.device), states_of(released.host))
        assert_same(values(pair.params), values(released.twins))


def ready() -> tuple[BlockwiseOptimizer, dict[str, Tensor]]:
    """An optimizer whose blocks have been stepped in backward."""
    params = make_params(SHAPES)
    optimizer = build(params, "adamw@streamed")
    with optimizer.last_backward():
        backward(params, Gradients(params).next())
    return optimizer, params


def test_gradients_that_were_used_may_not_be_changed() -> None:
    optimizer, params = ready()
    nn.utils.clip_grad_norm_(list(params.values()), 1e-3)
    with pytest.raises(BadInputError, match=r"gradient of e was changed between backward .* clipped, unscaled"):
        optimizer.step()
    optimizer, params = ready()
    params["a"].grad = None
    with pytest.raises(BadInputError, match="gradient of a was dropped between backward"):
        optimizer.step()


def test_a_grad_scaler_steps_them_and_may_not_unscale_what_was_used() -> None:
    pair = Twins("adamw_int8", "streamed")
    scalers = [torch.amp.GradScaler("cpu", init_scale=64.0) for _ in range(2)]
    for step in range(4):
        grads = pair.gradients.next()
        if step == 2:
            grads["a"][1, 1] = float("inf")  # this step is skipped, whole
        sides = (pair.device, pair.params), (pair.host, pair.twins)
        for scaler, (optimizer, params) in zip(scalers, sides, strict=True):
            optimizer.zero_grad()
            loss = torch.stack([(param * grads[name]).sum() for name, param in params.items()]).sum()
            scaler.scale(loss).backward()
            scaler.step(optimizer)
            scaler.update()
    pair.check()
    assert pair.host.num_steps == 3
    pair.host.zero_grad()
    with pair.host.last_backward():
        scalers[1].scale(torch.stack([param.sum() for param in pair.twins.values()]).sum()).backward()
    with pytest.raises(BadInputError, match="a GradScaler unscales gradients, or skips the step"):
        scalers[1].step(pair.host)


def test_in_the_middle_of_a_step_much_is_refused() -> None:
    optimizer, params = ready()
    for call in (optimizer.zero_grad, optimizer.state_dict, lambda: optimizer.migrate({"a": "adamw"})):
        with pytest.raises(BadInputError, match="some host-placed blocks have been stepped in backward"):
            call()
    with pytest.raises(BadInputError, match="last_backward was entered between backward"), optimizer.last_backward():
        pass
    optimizer.step()
    params["a"].grad = None
    with (
        pytest.raises(BadInputError, match=r"got a second gradient inside optimizer\.last_backward"),
        optimizer.last_backward(),
    ):
        backward(params, Gradients(params).next())
        backward(params, Gradients(params).next())


def test_a_rate_that_is_set_late_is_said() -> None:
    optimizer, _ = ready()
    optimizer.param_groups[0]["lr"] = 0.5
    with pytest.warns(UserWarning, match="take it in the next step"):
        optimizer.step()


@pytest.mark.parametrize("settings", [{"nonfinite": "skip_step"}, {"release": True}, {"observer": True}])
def test_where_gradients_are_needed_together_nothing_is_stepped_in_backward(settings: dict) -> None:
    params = make_params(SHAPES)
    observed = settings.pop("observer", False)
    optimizer = build(params, "adamw@streamed", **settings)
    if observed:
        optimizer.before_step.append(BeforeStep(call=lambda: None))
    with optimizer.last_backward():
        backward(params, Gradients(params).next())
    assert not optimizer.overlap.mid_step
    optimizer.step()
    if observed:
        optimizer.zero_grad()
        optimizer.before_step[:] = [BeforeStep(call=lambda: None, wanted=lambda: False)]
        with optimizer.last_backward():
            backward(params, Gradients(params).next())
        assert optimizer.overlap.mid_step
        optimizer.step()


@pytest.mark.parametrize("spec", ["adamw_int8+split8", "adamw"])
def test_flushed_gradients_are_stepped_at_the_end(spec: str) -> None:
    """Those that came to the host, whole: a NaN is left out, and what the device does with its own changes nothing."""
    with rings(piece_bytes=1500):
        pair = Twins(spec, "updated")
        for step in range(3):
            grads = {name: grad for name, grad in pair.gradients.next().items() if name != "b" or step != 1}
            if step == 2:
                grads["c"][5, 5] = float("nan")
            pair.device.zero_grad()
            backward(pair.params, grads)
            pair.device.step()
            pair.host.zero_grad()
            before = values(pair.twins)["a"].clone()
            with pair.host.last_backward(flush_only=True):
                backward(pair.twins, grads)
            assert pair.host.overlap.mid_step and torch.equal(values(pair.twins)["a"], before)
            pair.host.step()
        pair.check()
        assert pair.host.num_nonfinite == 1
        pair.host.zero_grad()
        with pair.host.last_backward(flush_only=True):
            backward(pair.twins, pair.gradients.next())
        nn.utils.clip_grad_norm_(list(pair.twins.values()), 1e-3)
        with pytest.raises(BadInputError, match=r"gradient of e was changed between backward .* clipped, unscaled"):
            pair.host.step()


def test_flushed_gradients_leave_streamed_blocks_to_the_step() -> None:
    pair = Twins("adamw_int8", "streamed")
    for _ in range(2):
        grads = pair.gradients.next()
        for optimizer, params in ((pair.device, pair.params), (pair.host, pair.twins)):
            optimizer.zero_grad()
            with optimizer.last_backward(flush_only=True):
                backward(params, grads)
            assert not optimizer.overlap.mid_step
            optimizer.step()
    pair.check()


def test_gradients_are_not_masked_before_they_were_flushed() -> None:
    """The lanes of an updated ring, as late as they may be: without the caller's wait the host gets what came after."""
    found = {}
    for deaf in ((), ((MAIN, OUT),)):
        lanes = LateLanes(deaf=deaf)
        with rings(lanes=lanes):
            params = make_params({"w": (9, 32)})
            optimizer = build(params, "adamw@updated")
            (ring,) = optimizer.roster.rings
            assert isinstance(ring, updating.Updating)
            (piece,) = ring.pieces(lambda live: "")[""]
            params["w"].grad = torch.ones(9, 32)
            ring.flush(piece)
            ring.join()
            lanes.run(MAIN, params["w"].grad.zero_)
            lanes.drain((MAIN, OUT))
            found[deaf] = bool(next(iter(piece.parked.values())).all())
    assert list(found.values()) == [True, False]


# -- beside the caller ---------------------------------------------------------------------------------------------


@pytest.fixture
def late_host(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(updating, "beside", lambda device: LateHost())


def run_late(pair: Twins, *, ahead: bool = True) -> None:
    for step in range(3):
        grads = pair.gradients.next()
        if step == 1:
            grads["c"][5, 5] = float("nan")
        for optimizer, params in ((pair.device, pair.params), (pair.host, pair.twins)):
            optimizer.zero_grad()
            with optimizer.last_backward() if ahead else nullcontext():
                backward(params, grads)
            optimizer.step()


@pytest.mark.usefixtures("late_host")
def test_the_host_may_be_late() -> None:
    with rings(piece_bytes=1500):
        pair = Twins("adamw_int8", "updated")
        run_late(pair)
        pair.check()
        assert pair.host.num_nonfinite == 1


@pytest.mark.usefixtures("late_host")
def test_a_late_host_does_not_gather_gradients_that_are_released(monkeypatch: pytest.MonkeyPatch) -> None:
    """The device needs their memory for those of the next block, whatever the host takes for its step."""
    held, step = [], updating.Updating.step

    def noting(ring: updating.Updating, piece: updating.Piece, work: Any, **given: Any) -> None:
        step(ring, piece, work, **given)
        held.append((len(ring.queue), sum(len(task.piece.grads) for task in ring.queue)))

    monkeypatch.setattr(updating.Updating, "step", noting)
    with rings(piece_bytes=1500):
        released = Twins("adamw_int8", "updated", release=True)
        grads = released.gradients.next()
        for optimizer, params in ((released.device, released.params), (released.host, released.twins)):
            backward(params, grads)
            optimizer.step()
        assert_same(values(released.params), values(released.twins))
    assert held == [(1, 0)] * len(SHAPES), "the newest waits to be stepped, and its gradient has been sent for"


@pytest.mark.usefixtures("late_host")
@pytest.mark.parametrize("ahead", [True, False])
def test_masking_and_the_end_of_a_step_wait_for_it(monkeypatch: pytest.MonkeyPatch, ahead: bool) -> None:
    """The first wait of each step is left out: before gradients are masked, where blocks were stepped in backward, and
    else the only one, after which weights are read."""
    with rings(piece_bytes=1500):
        pair = Twins("adamw_int8", "updated")
        join, calls = updating.Updating.join, []

        def deaf(ring: updating.Updating) -> None:
            calls.append("join")
            if ahead and len(calls) % 2 == 0:
                join(ring)

        monkeypatch.setattr(updating.Updating, "join", deaf)
        run_late(pair, ahead=ahead)
        with pytest.raises(AssertionError):
            assert_same(values(pair.params), values(pair.twins))


@pytest.mark.usefixtures("late_host")
def test_an_error_beside_the_caller_is_raised_at_the_end_of_the_step(monkeypatch: pytest.MonkeyPatch) -> None:
    pair = Twins("adamw", "updated")

    def fails(*_: object) -> None:
        raise RuntimeError("out of something")

    pair.gradients.give(pair.twins)
    assert pair.host.roster.ready()
    monkeypatch.setattr(updating.Piece, "send", fails)
    with pytest.raises(RuntimeError, match="out of something"):
        pair.host.step()


def test_the_thread_beside_the_caller_steps_too(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(updating, "beside", lambda device: updating.ThreadPoolExecutor(max_workers=1))
    with rings(piece_bytes=1500):
        pair = Twins("adamw_int8+split8", "updated", backend="eager")
        run_late(pair)
        pair.check()


# -- the order of travel -------------------------------------------------------------------------------------------


def late_norms(num_layers: int) -> tuple[dict[str, Tensor], list[str]]:
    """Parameters as Llama lists them, and the order in which backward is done with them: norms after what they feed."""
    kinds = {"q": 16, "k": 16, "v": 16, "o": 16, "gate": 43, "up": 43, "down": 43, "norm_in": 1, "norm_out": 1}
    finals = ["down", "up", "gate", "norm_out", "o", "v", "k", "q", "norm_in"]
    shapes = {f"{layer}.{kind}": (size, 32) for layer in range(num_layers) for kind, size in kinds.items()}
    order = [f"{layer}.{kind}" for layer in reversed(range(num_layers)) for kind in finals]
    return make_params(shapes), order


def backward_in(order: list[str], params: dict[str, Tensor]) -> None:
    """A backward whose gradients become final in this order."""
    for name in order:
        params[name].sum().backward()


def test_blocks_travel_in_the_order_in_which_backward_is_done_with_them(monkeypatch: pytest.MonkeyPatch) -> None:
    """Before it is known some pieces come twice; from the second step on each comes in once, and once goes out."""
    loads = []
    load = streaming.Streaming.load
    monkeypatch.setattr(streaming.Streaming, "load", lambda ring, piece: loads.append(piece) or load(ring, piece))
    params, order = late_norms(6)
    plain = make_params({name: tuple(param.shape) for name, param in params.items()})
    device = build(plain, "adamw_int8")
    with rings(piece_bytes=5000, num_buffers=3):
        host, counts = build(params, "adamw_int8@streamed"), []
        for _ in range(4):
            for optimizer, named in ((device, plain), (host, params)):
                optimizer.zero_grad()
                with optimizer.last_backward():
                    backward_in(order, named)
                optimizer.step()
            counts.append(len(loads))
            del loads[:]
        num = len(host.roster.backends[0].pieces)  # pyright: ignore[reportAttributeAccessIssue]
        travelling = [live.block.name for live in host.roster.travelling()]
    assert travelling == order and num > 6
    assert counts[0] > counts[1] == num + 4 and counts[2:] == [num, num]  # the four that were fetched ahead come again
    assert_same(values(plain), values(params))
    assert_same(states_of(device), states_of(host))
