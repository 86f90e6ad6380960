"""Gradients as they come, non-finite, strided, of other types, late: the fused backend does what the eager one does."""

import copy
import logging

import pytest
import torch
from torch import Tensor, nn

from baoc.errors import BadInputError, TrainingFailedError
from baoc.optim import BeforeStep
from baoc.optim.backends import choose_backend
from baoc.optim.backends.fused import FusedBackend
from tests.support.fused_pair import MIXED, SMALL, Pair, dump, poison
from tests.support.optimizing import build, make_params

pytestmark = [pytest.mark.slow, pytest.mark.usefixtures("interpreted")]


@pytest.mark.parametrize("explicit", [False, True])
def test_excluded_elements_keep_their_own(explicit: bool) -> None:
    pair = Pair(MIXED)
    pair.run(3)
    before = dump(pair.fused, pair.params[0])
    pair.give()
    for params in pair.params:
        poison(params, value=2.0**48)
        params["b"].grad[0] = -0.0  # a true one is no mark
    if explicit:
        assert pair.fused.mask_nonfinite() is None and pair.eager.mask_nonfinite() == 9
        norms = [nn.utils.clip_grad_norm_(params.values(), 10.0) for params in pair.params]
        assert torch.equal(norms[0], norms[1])
        assert pair.fused.mask_nonfinite() is None  # a second look forgets nothing
    pair.step()
    pair.check()
    now = dump(pair.fused, pair.params[0])
    assert torch.equal(now["a"][0, ::5], before["a"][0, ::5]) and now["c"][1, 3] == before["c"][1, 3]
    assert torch.equal(now["a.m"][0, ::5], before["a.m"][0, ::5]) and now["b"][0] != before["b"][0]
    assert pair.fused.num_nonfinite == pair.eager.num_nonfinite == 9
    assert pair.fused.last_nonfinite == pair.eager.last_nonfinite == {"a": 8, "c": 1}
    pair.run(3)
    pair.check()


def test_it_does_not_matter_which_value_was_bad_nor_who_looked() -> None:
    ends = []
    for value, explicit in ((float("nan"), False), (float("inf"), False), (-1e20, True)):
        pair = Pair(MIXED)
        pair.run(2)
        pair.give()
        poison(pair.params[0], value=value)
        if explicit:
            pair.fused.mask_nonfinite()
        pair.fused.step()
        pair.give()
        pair.fused.step()
        ends.append(dump(pair.fused, pair.params[0]))
    for end in ends[1:]:
        assert all(torch.equal(end[key], ends[0][key]) for key in end)


def test_marks_end_with_their_gradients() -> None:
    pair = Pair("adamw", SMALL)
    for params in pair.params:
        for param in params.values():
            param.grad = torch.full_like(param, float("nan"))
    for optimizer in (pair.fused, pair.eager):
        optimizer.mask_nonfinite()
        optimizer.zero_grad()
    pair.give()
    for params in pair.params:
        params["a"].grad.zero_().neg_()  # true -0.0
    before = pair.params[0]["a"].detach().clone()
    pair.step()
    pair.check()
    torch.testing.assert_close(pair.params[0]["a"].detach(), before * (1 - 1e-2 * 0.1))


def test_an_observer_sees_no_bad_numbers() -> None:
    pair, seen = Pair("adamw", SMALL), []
    pair.give()
    pair.params[0]["a"].grad[0] = float("nan")
    pair.fused.before_step.append(BeforeStep(call=lambda: seen.append(bool(pair.params[0]["a"].grad.isfinite().all()))))
    pair.fused.step()
    assert seen == [True] and pair.fused.num_nonfinite == 37


def test_counts_are_logged_when_they_arrive_and_survive_changes(caplog: pytest.LogCaptureFixture) -> None:
    pair = Pair("adamw", SMALL)
    pair.give()
    pair.params[0]["a"].grad[0, 0] = float("nan")
    with caplog.at_level(logging.INFO):
        pair.fused.step()
        assert caplog.text == ""
        pair.fused.step()
    assert (
        "1 gradient element(s) are NaN, infinite or beyond 2^48 before step 2: a (1); policy: skip_element"
        in caplog.text
    )
    pair.fused.migrate({"a": "lion"})
    pair.fused.step()
    assert pair.fused.num_nonfinite == 3 and copy.deepcopy(pair.fused).num_nonfinite == 3


@pytest.mark.parametrize("explicit", [False, True])
def test_skip_step_leaves_all_as_it_is(explicit: bool) -> None:
    pair = Pair(MIXED, nonfinite="skip_step")
    pair.run(2)
    before = dump(pair.fused, pair.params[0])
    pair.give()
    poison(pair.params[0])
    if explicit:
        assert pair.fused.mask_nonfinite() == 9
    pair.fused.step()
    now = dump(pair.fused, pair.params[0])
    assert all(torch.equal(now[key], before[key]) for key in now)
    assert pair.fused.num_skipped_steps == 1 and pair.fused.num_nonfinite == 9
    pair.run(2)
    pair.check()
    assert pair.fused.num_skipped_steps == 1


def test_raise_names_the_parameters() -> None:
    pair = Pair(MIXED, nonfinite="raise")
    pair.run(1)
    before = dump(pair.fused, pair.params[0])
    pair.give()
    poison(pair.params[0])
    with pytest.raises(TrainingFailedError, match=r"9 gradient element\(s\) .* in step 2: a \(8\), c \(1\)\. Lower"):
        pair.fused.step()
    now = dump(pair.fused, pair.params[0])
    assert all(torch.equal(now[key], before[key]) for key in now)


# -- layouts and types ----------------------------------------------------------------------------------------


def test_strided_gradients_are_read_and_marked_where_they_lie() -> None:
    pair = Pair("adamw_int8", SMALL)
    for bad in (False, True, False):
        pair.give()
        for params in pair.params:
            wide = torch.zeros(37, 9)
            wide.copy_(params["a"].grad.t())
            params["a"].grad = wide.t()
            if bad:
                params["a"].grad[2, 2] = float("nan")
        pair.fused.mask_nonfinite()
        pair.step()
        pair.check()
    assert pair.fused.num_nonfinite == 1


def test_gradients_of_other_types() -> None:
    """Together in one table, then alone."""
    if not hasattr(Tensor, "grad_dtype"):
        return
    ends = []
    for backend in ("fused", "eager"):
        params = make_params(SMALL, dtype=torch.bfloat16)
        with pytest.warns(UserWarning, match="16-bit weights"):
            optimizer = build(params, "adamw", backend=backend)
        params["a"].grad_dtype = torch.float32
        generator = torch.Generator().manual_seed(0)
        for _ in range(4):
            params["a"].grad = torch.randn(9, 37, generator=generator)
            params["b"].grad = torch.randn(40, generator=generator).to(torch.bfloat16)
            optimizer.step()
        params["b"].grad = None
        optimizer.step()
        ends.append(dump(optimizer, params))
    for key, value in ends[0].items():
        torch.testing.assert_close(value, ends[1][key], rtol=1e-2, atol=1e-3, msg=key)


def test_what_has_no_kernel_is_eager_beside_it(caplog: pytest.LogCaptureFixture) -> None:
    shapes = {"a": (9, 37), "b": (40,), "t": (8, 6)}
    pair = Pair({"a": "lion", "b": "adamw", "t": "adamw"}, shapes)
    for params in pair.params:
        params["t"].data = params["t"].data.t().contiguous().t()
    for optimizer in (pair.fused, pair.eager):
        for key in ("m", "v"):
            optimizer.state[pair.params[optimizer is pair.eager]["t"]][key] = torch.zeros(6, 8).t()
        optimizer.registry.refresh(optimizer.param_groups)
    pair.run(4)
    for params in pair.params:
        params["t"].grad[0, 0] = params["a"].grad[0, 0] = float("nan")
    pair.step()
    pair.check()
    choices = {block: choice.backend for block, choice in pair.fused.registry.choices.items()}
    assert choices == {"a": "fused", "b": "fused", "t": "eager"}
    assert "t (fused: t: not contiguous float32 or bfloat16)" in caplog.text
    assert pair.fused.last_nonfinite.keys() <= {"a", "t"} and pair.fused.num_nonfinite == 2


def test_a_sparse_gradient_is_refused() -> None:
    pair = Pair("adamw", SMALL)
    pair.params[0]["a"].grad = torch.zeros(9, 37).to_sparse()
    with pytest.raises(BadInputError, match="a has a sparse gradient: build its layer with sparse=False"):
        pair.fused.step()


def test_a_parameter_that_moved_is_noticed() -> None:
    pair = Pair("rmsprop_int8", {"a": (9, 37), "b": (40,), "c": (33,)})
    pair.run(3)
    for params in pair.params:
        for name in ("a", "c"):
            params[name].data = params[name].data.clone()
    pair.run(3)
    pair.check()
    (backend,) = pair.fused.registry.backends
    assert isinstance(backend, FusedBackend) and backend.engine is not None, "one was made for where they are now"


def test_a_backend_that_is_not_asked_for_is_not_taken() -> None:
    live = Pair("adamw", SMALL).eager.registry.live["a"]
    assert choose_backend(live, name="eager").backend == "eager"
    assert choose_backend(live, name="auto").backend == "fused"
