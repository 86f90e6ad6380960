"""Host-placed blocks that are stepped in backward: what then waits, and what is refused."""

import pytest
import torch
from torch import Tensor, nn

from baoc.errors import BadInputError
from baoc.optim import BeforeStep, BlockwiseOptimizer
from baoc.optim.offload import streaming
from tests.support.optimizing import Gradients, assert_same, build, make_params, values
from tests.support.placing import SHAPES, Twins, rings, states_of
from tests.support.releasing import backward


@pytest.mark.parametrize("spec", ["adamw_int8+split8", "lion_int8"])
def test_release_and_stepping_in_backward(spec: str) -> None:
    """One after the other, or what there is of it: gradients that are not final wait, and a NaN is left out."""
    with rings(piece_bytes=1500):
        pair = Twins(spec)
        released = Twins(spec, release=True)
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
    pair = Twins("adamw_int8")
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
    load = streaming.StagingPipeline.load
    monkeypatch.setattr(streaming.StagingPipeline, "load", lambda ring, piece: loads.append(piece) or load(ring, piece))
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
        num = len(host.registry.backends[0].pieces)  # pyright: ignore[reportAttributeAccessIssue]
        travelling = [live.block.name for live in host.registry.host_blocks()]
    assert travelling == order and num > 6
    assert counts[0] > counts[1] == num + 4 and counts[2:] == [num, num]  # the four that were fetched ahead come again
    assert_same(values(plain), values(params))
    assert_same(states_of(device), states_of(host))
