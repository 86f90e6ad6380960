"""The fused steps of rules that see a matrix equal the eager ones, run by Triton's interpreter on the CPU."""

import gc
import weakref

import pytest
import torch

from baoc.kernels import LaunchConfig
from baoc.kernels.usable import usable
from tests.support.fused_step import fused_step, launch
from tests.support.matrix_cases import MEANS, MatrixCase, MatrixTwin, check_close, few_cases

SMALL = ((3, 160, False), (9, 7, False), (8, 6, True))
SOME = ("adamw_shared_in", "adamw_shared_out", "adafactor_momentum", "foam_l2", "foam_l3")


pytestmark = [pytest.mark.slow, pytest.mark.usefixtures("interpreted")]


@pytest.mark.parametrize("case", few_cases(), ids=lambda case: case.name)
def test_one_step_equals_eager(case: MatrixCase):
    """Two parameter groups, every awkward shape, a tensor without gradient in the second step."""
    twin = MatrixTwin(case)
    for idle in ((), (0,)):
        twin.new_gradients(idle=idle)
        sums = twin.step()
        check_close(twin)
    assert sums is not None and sums[-1].item() == pytest.approx(twin.square.item(), rel=1e-5)


@pytest.mark.parametrize("rule", ["adafactor", "adafactor_momentum", "adamw_shared_in", "adamw_shared_out"])
def test_long_and_many_lines_are_summed_in_parts(rule: str, monkeypatch: pytest.MonkeyPatch):
    """Sizes at which a program sums a part are made small: lines too long to be held, several blocks of lines."""
    from baoc.kernels.triton import means_plan

    for name, value in {"LONGEST": 64, "ROWS": 32, "COLUMNS": 32, "PIECE": 64, "JOB_LENGTH": 32}.items():
        monkeypatch.setattr(means_plan, name, value)
    shapes = ((40, 130, False), (5, 64, False), (40, 36, True), (70, 3, False))
    twin = MatrixTwin(MatrixCase(rule=rule, shapes=shapes))
    for _ in range(2):
        twin.new_gradients()
        twin.params[0].grad[3:6, 100:] = 2.0**48
        twin.step()
        check_close(twin)


@pytest.mark.parametrize("rule", SOME)
def test_left_out_elements_count_in_no_mean(rule: str):
    """Non-finite and marked elements; whole rows, columns and folds of them keep their averages."""
    twin = MatrixTwin(MatrixCase(rule=rule, shapes=SMALL))
    twin.new_gradients()
    twin.step()
    twin.new_gradients()
    for index, (param, where) in enumerate(zip(twin.params, ((0, 5), (2, 3), (0, 1)), strict=True)):
        param.grad[where] = (float("inf"), float("nan"), 2.0**48)[index]
        param.grad[1] = -0.0
        param.grad[:, 2] = -0.0
    before = [param.detach().clone() for param in twin.eager[0]]
    twin.step(marked=True)
    check_close(twin)
    assert twin.table.num_nonfinite.tolist() == [1, 1, 1]
    lost = [~usable(param.grad) | ((param.grad == 0) & param.grad.signbit()) for param in twin.params]
    assert all(torch.equal(p[left], b[left]) for p, b, left in zip(twin.params, before, lost, strict=True))
    assert twin.table.num_skipped.tolist() == [int(left.sum()) for left in lost]


def test_means_of_nothing_are_kept():
    """In the first step too, where averages are zero and would be divided by."""
    for rule in MEANS:
        twin = MatrixTwin(MatrixCase(rule=rule, shapes=((4, 96, False), (3, 160, False))))
        twin.new_gradients()
        twin.params[0].grad[1] = float("nan")
        twin.params[1].grad[:] = float("nan")
        twin.step()
        check_close(twin)
        assert all(param.isfinite().all() for param in twin.params)
        states = (state for state in twin.states[1].values())
        assert all(not state.any() for state in states)


@pytest.mark.parametrize("rule", SOME)
def test_measuring_changes_nothing_and_factors_multiply(rule: str):
    twin = MatrixTwin(MatrixCase(rule=rule, shapes=SMALL))
    twin.new_gradients()
    twin.step()
    twin.new_gradients()
    twin.load(twin.eager)
    measured = fused_step(twin.table, options=twin.case.options, thresholds=[0.5] * 32, mode="measure", track=True)
    assert measured is not None
    measured = measured.clone()
    assert all(torch.equal(own, other) for own, other in zip(twin.params, twin.eager[0], strict=True))
    for own, other in zip(twin.states, twin.eager[1], strict=True):
        assert all(torch.equal(own[key], other[key]) for key in own)
    sums = twin.step(factors=[0.5, 2.0, 0.0])
    check_close(twin)
    assert sums is not None and torch.equal(sums, measured)


@pytest.mark.parametrize("rule", SOME)
def test_a_repair_adds_what_a_factor_lacked(rule: str):
    whole, parts = (MatrixTwin(MatrixCase(rule=rule, shapes=SMALL)) for _ in range(2))
    for twin in (whole, parts):
        twin.new_gradients()
    whole.step(factors=[2.0, 1.0, 3.0])
    parts.step(factors=[0.5, 1.0, 3.0])
    parts.table.repair.copy_(torch.tensor([1.5, 0.0, 0.0]))
    launch(parts.table, mode="repair")
    assert torch.equal(parts.params[1], whole.params[1]) and torch.equal(parts.params[2], whole.params[2])
    torch.testing.assert_close(parts.params[0], whole.params[0], rtol=1e-6, atol=1e-7)
    for own, other in zip(parts.states, whole.states, strict=True):
        assert all(torch.equal(own[key], other[key]) for key in own)


def test_cuts_agree_bit_for_bit():
    for rule in ("adamw_shared_in", "adamw_shared_out", "foam_l1"):
        results = []
        for config in (LaunchConfig(chunk=256, warps=1, repeat=3), LaunchConfig(chunk=512, warps=2, vector=8)):
            shapes = ((5, 320, False), (9, 7, False))
            twin = MatrixTwin(MatrixCase(rule=rule, storage="int8", shapes=shapes, config=config))
            twin.new_gradients()
            twin.step()
            results.append([*twin.params, *(t for state in twin.states for key, t in state.items() if "m" in key)])
        torch.testing.assert_close(results[0], results[1], rtol=1e-6, atol=1e-7)


def test_a_table_that_is_dropped_is_freed():
    twin = MatrixTwin(MatrixCase(rule="adafactor", shapes=SMALL))
    twin.new_gradients()
    twin.step()
    table = weakref.ref(twin.table)
    del twin
    gc.collect()
    assert table() is None
