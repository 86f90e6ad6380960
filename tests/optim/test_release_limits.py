"""What gradient release cannot do is refused with a sentence; copies, checkpoints and successors of such optimizers."""

import copy
import gc
import pickle
from collections.abc import Callable
from math import nan
from typing import Any
from unittest.mock import Mock

import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from baoc.errors import BadInputError, CheckpointError
from baoc.optim import BeforeStep, BlockwiseOptimizer, GradientRelease
from tests.support.optimizing import Gradients, build, make_params, through_file, twin_of, values
from tests.support.releasing import assert_equal, backward

SHAPES = {"a": (8, 64), "b": (33,)}
ONES = {name: torch.ones(shape) for name, shape in SHAPES.items()}


def released(specs: Any = "adamw_int8", **settings: Any) -> tuple[dict[str, Tensor], BlockwiseOptimizer]:
    params = make_params(SHAPES)
    return params, build(params, specs, **{"release": True, "lr": 1e-2, **settings})


# -- refused -------------------------------------------------------------------------------------------------------


def test_a_second_backward_before_step_is_refused_and_step_goes_on_from_the_first() -> None:
    params, optimizer = released()
    twins, twin = released()
    for each in (params, twins):
        backward(each, ONES)
    with pytest.raises(BadInputError, match=r"got a second gradient before step\(\).*no accumulation"):
        backward(params, ONES)
    for each in (optimizer, twin):
        each.step()
    assert_equal(optimizer, params, twin, twins)


def test_a_step_that_is_refused_at_its_end_is_ended_once() -> None:
    params, optimizer = released()
    twins, twin = released()
    assert optimizer.releaser is not None
    optimizer.releaser.observer = seen = Mock()
    for each in (params, twins):
        backward(each, ONES)
    optimizer.param_groups[0]["lr"] = nan
    with pytest.raises(BadInputError, match="lr is nan"):
        optimizer.step()
    optimizer.param_groups[0]["lr"] = 1e-2
    for each in (optimizer, twin):
        each.step()
    assert_equal(optimizer, params, twin, twins)
    seen.end_step.assert_called_once_with()


def test_gradients_that_were_stepped_cannot_be_discarded() -> None:
    """As where the loss of one network runs through another, whose optimizer drops what came of it."""
    params, optimizer = released()
    optimizer.zero_grad()
    backward(params, ONES)
    with pytest.raises(BadInputError, match=r"zero_grad\(\) was called between backward and step.*releaser\.held"):
        optimizer.zero_grad()
    optimizer.step()
    optimizer.zero_grad()


def test_a_gradient_that_is_set_by_hand_after_the_backward_is_a_second_one() -> None:
    params, optimizer = released()
    backward(params, ONES)
    params["b"].grad = torch.ones(33)
    with pytest.raises(BadInputError, match=r"b got a second gradient before step\(\)"):
        optimizer.step()


def test_gradients_that_never_went_through_a_backward_are_stepped_in_step() -> None:
    params, optimizer = released()
    twins, twin = released(release=False)
    grads = torch.autograd.grad((params["a"].sum(), params["b"].sum()), list(params.values()))
    for own, other, grad in zip(params.values(), twins.values(), grads, strict=True):
        own.grad, other.grad = grad, grad.clone()
    optimizer.step()
    twin.step()
    assert_equal(optimizer, params, twin, twins)


def test_a_layer_that_reentrant_checkpointing_runs_twice_is_refused() -> None:
    layer = nn.Linear(8, 8)
    optimizer = BlockwiseOptimizer(layer, "sign", release=True)
    x = torch.randn(2, 8, requires_grad=True)
    hidden = checkpoint(layer, checkpoint(layer, x, use_reentrant=True), use_reentrant=True)
    with pytest.raises(BadInputError, match="second gradient"):
        hidden.sum().backward()
    optimizer.step()


@pytest.mark.parametrize("reentrant", [False, True])
def test_checkpointed_activations_are_fine_where_layers_run_once(reentrant: bool) -> None:
    nets = [nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 8)) for _ in range(2)]
    nets[1].load_state_dict(nets[0].state_dict())
    optimizers = [BlockwiseOptimizer(net, "adamw", release=net is nets[1]) for net in nets]
    x = torch.randn(2, 8, requires_grad=True)
    for _ in range(3):
        for net, optimizer in zip(nets, optimizers, strict=True):
            hidden = x
            for layer in net:
                hidden = checkpoint(layer, hidden, use_reentrant=reentrant)
            optimizer.zero_grad()
            hidden.square().sum().backward()
            optimizer.step()
    assert_equal(optimizers[0], dict(nets[0].named_parameters()), optimizers[1], dict(nets[1].named_parameters()))


@pytest.mark.parametrize("unscaled", [False, True])
def test_a_grad_scaler_is_refused(unscaled: bool) -> None:
    params, optimizer = released()
    scaler = torch.amp.GradScaler("cpu")
    scaler.scale(params["a"].sum() + params["b"].sum()).backward()
    if unscaled:
        scaler.unscale_(optimizer)
    with pytest.raises(BadInputError, match=r"GradScaler skips the whole step.*train in bf16"):
        scaler.step(optimizer)


def test_a_grad_scaler_that_is_off_is_fine() -> None:
    params, optimizer = released()
    scaler = torch.amp.GradScaler("cpu", enabled=False)
    scaler.scale(params["a"].sum() + params["b"].sum()).backward()
    scaler.step(optimizer)
    assert optimizer.state[params["a"]]["step"] == 1


REFUSED: dict[str, tuple[Callable[[], object], str]] = {
    "skip_step": (lambda: released(nonfinite="skip_step"), "nonfinite=skip_step.*use skip_element or raise"),
    "word": (lambda: released(release="yes"), "release='yes': give True, False, or GradientRelease"),
    "norm": (lambda: released(release=GradientRelease(clip_norm=0.0)), "clip_norm of gradient release is 0.0"),
    "value": (lambda: GradientRelease(clip_value=-1.0), "clip_value of gradient release is -1.0"),
    "zeros": (lambda: released()[1].zero_grad(set_to_none=False), "set_to_none=False.*leave it out"),
}


@pytest.mark.parametrize("case", REFUSED)
def test_what_cannot_be_is_refused(case: str) -> None:
    call, text = REFUSED[case]
    with pytest.raises(BadInputError, match=text):
        call()


def test_an_observer_of_whole_steps_is_refused() -> None:
    params, optimizer = released()
    optimizer.before_step.append(BeforeStep(call=lambda: None))
    with pytest.raises(BadInputError, match=r"set optimizer\.releaser\.observer, which sees them by parts"):
        backward(params, ONES)


def test_several_processes_are_refused_when_built_and_when_they_come_later(monkeypatch: pytest.MonkeyPatch) -> None:
    params, optimizer = released()
    monkeypatch.setattr(torch.distributed, "is_initialized", lambda: True)
    monkeypatch.setattr(torch.distributed, "get_world_size", lambda: 2)
    monkeypatch.setattr(torch.distributed, "get_rank", lambda: 1)
    with pytest.raises(BadInputError, match=r"release was asked for in rank 1 of 2 processes \(torch\.distributed\)"):
        released()
    with pytest.raises(BadInputError, match=r"release was asked for in rank 1 of 2 processes \(torch\.distributed\)"):
        backward(params, ONES)
    assert optimizer.state[params["a"]]["step"] == 0


def test_parameters_on_several_devices_are_refused() -> None:
    params = {"a": nn.Parameter(torch.ones(4)), "far": nn.Parameter(torch.ones(4, device="meta"))}
    optimizer = build(params, "sign", release=True)
    with pytest.raises(BadInputError, match="these are on cpu, meta"):
        params["a"].sum().backward()
    assert not optimizer.releaser.mid_step  # pyright: ignore


@pytest.mark.parametrize(
    ("call", "text"),
    [
        (lambda optimizer: optimizer.state_dict(), "state_dict was called between backward and step"),
        (lambda optimizer: optimizer.migrate({"a": "adamw"}), "migrate was called between backward and step"),
    ],
)
def test_the_middle_of_a_step_is_no_time_to_save_or_move(
    call: Callable[[BlockwiseOptimizer], object], text: str
) -> None:
    params, optimizer = released()
    backward(params, ONES)
    with pytest.raises(BadInputError, match=text):
        call(optimizer)
    optimizer.step()
    call(optimizer)


def test_hooks_before_step_are_told_that_gradients_are_gone(caplog: pytest.LogCaptureFixture) -> None:
    params, optimizer = released()
    optimizer.register_step_pre_hook(lambda *_: None)
    for _ in range(2):
        backward(params, ONES)
        optimizer.step()
    assert caplog.text.count("register_step_pre_hook was given finds no gradients") == 1


# -- who steps -----------------------------------------------------------------------------------------------------


def test_the_newest_optimizer_of_a_parameter_is_the_one_that_steps_it(caplog: pytest.LogCaptureFixture) -> None:
    params, old = released("adamw")
    new = build(params, "adamw", lr=1e-2)
    assert "that one has stopped" in caplog.text
    before = values({name: param.clone() for name, param in params.items()})
    backward(params, ONES)
    assert all(torch.equal(before[name], param) for name, param in params.items()), "neither releases"
    new.step()
    assert old.state[params["a"]]["step"] == 0 and new.state[params["a"]]["step"] == 1


def test_an_optimizer_that_is_gone_steps_no_more() -> None:
    params, optimizer = released()
    del optimizer
    gc.collect()
    backward(params, ONES)
    assert params["a"].grad is not None


def test_detached_it_keeps_gradients_until_step() -> None:
    params, optimizer = released(release=GradientRelease(clip_norm=1.0))
    twins, twin = released(release=GradientRelease(clip_norm=1.0))
    assert optimizer.releaser is not None
    for step in range(3):
        (optimizer.releaser.detach if step == 1 else optimizer.releaser.attach)()
        backward(params, ONES)
        backward(twins, ONES)
        assert (params["a"].grad is None) == (step != 1)
        optimizer.step()
        twin.step()
    assert_equal(optimizer, params, twin, twins)


def test_a_backward_inside_held_is_nobody_s_step() -> None:
    params, optimizer = released()
    assert optimizer.releaser is not None
    with optimizer.releaser.held():
        backward(params, ONES)
    assert params["a"].grad is not None and optimizer.state[params["a"]]["step"] == 0
    optimizer.zero_grad()
    backward(params, ONES)
    assert params["a"].grad is None and optimizer.state[params["a"]]["step"] == 1


# -- copies and checkpoints ----------------------------------------------------------------------------------------


@pytest.mark.parametrize("how", [copy.deepcopy, lambda pair: pickle.loads(pickle.dumps(pair))])
def test_copies_release_their_own_gradients_and_go_on_alike(how: Callable[[Any], Any]) -> None:
    params, optimizer = released(release=GradientRelease(clip_norm=1.0))
    backward(params, ONES)
    optimizer.step()
    copies, twin = how((params, optimizer))
    before = values({name: param.clone() for name, param in params.items()})
    backward(copies, ONES)
    assert all(param.grad is None for param in copies.values())
    assert all(torch.equal(before[name], param) for name, param in params.items()), "the original stood still"
    twin.step()
    backward(params, ONES)
    optimizer.step()
    assert_equal(optimizer, params, twin, copies)


@pytest.mark.parametrize("specs", ["adamw_int8", "lion+split8", {"a": "foam_l2_int8", "b": "adamw"}])
def test_a_resumed_run_is_the_uninterrupted_one(specs: Any) -> None:
    release = GradientRelease(clip_norm=0.5)
    params, optimizer = released(specs, release=release)
    stream = Gradients(params)
    for _ in range(3):
        backward(params, stream.next())
        optimizer.step()
    saved = through_file(optimizer.state_dict())
    resumed = twin_of(params)
    again = build(resumed, specs, release=release, lr=1e-2)
    again.load_state_dict(saved)
    assert again.releaser is not None and again.releaser.norm is not None
    for _ in range(3):
        grads = stream.next()
        for each, own in ((params, optimizer), (resumed, again)):
            backward(each, grads)
            own.step()
    assert_equal(optimizer, params, again, resumed)


def test_checkpoints_go_from_release_to_none_and_back() -> None:
    params, optimizer = released("adamw", release=GradientRelease(clip_norm=0.5))
    backward(params, ONES)
    optimizer.step()
    kept = build(twin_of(params), "adamw")
    kept.load_state_dict(through_file(optimizer.state_dict()))
    assert "release" not in kept.state_dict()
    optimizer.load_state_dict(kept.state_dict())
    assert optimizer.releaser is not None and optimizer.releaser.norm is None, "the next step is a first one"


def test_a_damaged_norm_is_said() -> None:
    _, optimizer = released()
    with pytest.raises(CheckpointError, match="norm that is no number"):
        optimizer.load_state_dict({**optimizer.state_dict(), "release": {"norm": "much"}})


def test_states_loaded_over_a_half_step_make_it_count_for_nothing() -> None:
    params, optimizer = released()
    saved = through_file(optimizer.state_dict())
    backward(params, ONES)
    optimizer.load_state_dict(saved)
    backward(params, ONES)
    optimizer.step()
    assert optimizer.state[params["a"]]["step"] == 1


def test_migration_between_steps_goes_on_in_release() -> None:
    pairs = [released(release=release) for release in (False, True)]
    for step in range(6):
        for params, optimizer in pairs:
            optimizer.zero_grad()
            backward(params, {name: torch.full(shape, 0.1 * (step + 1)) for name, shape in SHAPES.items()})
            optimizer.step()
            if step in (2, 4):
                optimizer.migrate({"a": "foam_l2" if step == 2 else "adamw_int8", "b": "adamw"})
    assert_equal(pairs[0][1], pairs[0][0], pairs[1][1], pairs[1][0])
