"""The fused elementwise step equals the eager rules and codecs, run by Triton's interpreter on the CPU."""

import pytest
import torch

from baoc.kernels import FusedTable, Kind, LaunchConfig
from baoc.kernels.usable import usable
from baoc.optim.codecs import lanes
from tests.support.fused_step import fused_step, launch
from tests.support.kernel_cases import Case, Options, Twin, check_equal, few_elementwise_cases

FLOAT32, BFLOAT16 = torch.float32, torch.bfloat16
SMALL = (1, 33, 256, 300)


pytestmark = [pytest.mark.slow, pytest.mark.usefixtures("interpreted")]


@pytest.mark.parametrize("case", few_elementwise_cases(), ids=lambda case: case.name)
def test_one_step_equals_eager(case: Case):
    """Two parameter groups, every awkward size, a tensor without gradient in the second step."""
    twin = Twin(case)
    for idle in ((), (3,)):
        twin.new_gradients(idle=idle)
        twin.step()
        check_equal(twin)


@pytest.mark.parametrize("storage", ["fp32", "int8"])
def test_nonfinite_elements_keep_their_own(storage: str):
    twin = Twin(Case(rule="adamw", storage=storage, sizes=SMALL))
    twin.new_gradients()
    twin.step()
    twin.new_gradients()
    for index, value in ((0, float("nan")), (1, float("inf")), (3, -1e20)):
        twin.params[index].grad[-1] = value
    before = [param.detach().clone() for param in twin.eager[0]]
    states = [{key: tensor.clone() for key, tensor in state.items()} for state in twin.eager[1]]
    twin.step()
    check_equal(twin)
    assert twin.table.num_nonfinite.tolist() == [1, 1, 0, 1]
    assert all(torch.equal(twin.params[i][-1], before[i][-1]) for i in (0, 1, 3))
    assert not torch.equal(twin.params[1][0], before[1][0])
    assert torch.equal(twin.states[0]["m"], states[0]["m"]) and torch.equal(twin.states[0]["v"], states[0]["v"])


def test_marked_gradients_equal_nonfinite_ones():
    twin = Twin(Case(rule="lion", storage="int8", sizes=SMALL))
    twin.new_gradients()
    grad, bad = twin.params[3].grad, torch.tensor([0, 31, 257, 299])
    grad[bad] = torch.tensor([float("nan"), float("inf"), -float("inf"), -(2.0**48)])
    grad[1] = -0.0  # a true one
    before = twin.params[3].detach().clone()
    engine = twin.engine
    engine.mark()
    assert not grad[bad].any() and grad[bad].signbit().all() and not grad[1].signbit()
    engine.mark(first=False)  # nothing more to find
    twin.step(marked=True)
    check_equal(twin)
    assert torch.equal(twin.params[3][bad], before[bad]) and (twin.params[3] != before).sum() > 200
    assert twin.table.num_nonfinite.tolist() == [0, 0, 0, 4]


@pytest.mark.parametrize("dtype", [FLOAT32, BFLOAT16])
def test_marking_looks_at_every_gradient(dtype: torch.dtype):
    twin = Twin(Case(rule="sign", param=dtype, grad=dtype, sizes=(1, 5000, 300, 7)))
    twin.new_gradients(idle=(2,))
    twin.params[1].grad[[0, 2047, 2048, 4999]] = torch.tensor([float("inf"), 2.0**48, -1e20, float("nan")], dtype=dtype)
    twin.params[3].grad = torch.full((14,), float("nan"), dtype=dtype)[::2]
    expected = [None if p.grad is None else torch.where(usable(p.grad), p.grad, 0.0) for p in twin.params]
    twin.engine.mark()
    twin.engine.read_num_nonfinite()
    assert twin.table.num_nonfinite.tolist() == [0, 4, 0, 7]
    assert all(p.grad is None or torch.equal(p.grad, e) for p, e in zip(twin.params, expected, strict=True))


@pytest.mark.parametrize("rule", ["rmsprop", "lion", "sign"])
def test_factors_multiply_and_sums_are_of_the_own_update(rule: str):
    twin = Twin(Case(rule=rule, sizes=SMALL))
    twin.new_gradients()
    options = twin.case.options
    measured = fused_step(twin.table, options=options, mode="measure", track=True).clone()
    assert torch.equal(twin.table.steps, torch.zeros(4)) and torch.equal(twin.params[2].detach(), twin.eager[0][2])
    sums = twin.step(factors=[0.5, 2.0, 0.0, 1.0])
    check_equal(twin)
    assert sums is not None and torch.equal(sums, measured)
    assert sums[3].item() == pytest.approx(twin.square.item(), rel=1e-5)
    decay = 1 - options[0].lr * options[0].weight_decay
    torch.testing.assert_close(twin.params[2].detach(), Twin(twin.case).params[2].detach() * decay)


@pytest.mark.parametrize("rule", ["rmsprop", "lion", "signum", "sign"])
def test_a_repair_adds_what_a_factor_lacked(rule: str):
    whole, parts = (Twin(Case(rule=rule, sizes=(33, 1300))) for _ in range(2))
    for _ in range(2):  # from states that are not zero
        for twin in (whole, parts):
            twin.new_gradients()
        whole.step(factors=[2.0, 1.0])
        parts.step(factors=[0.5, 1.0])
        parts.table.repair.copy_(torch.tensor([1.5, 0.0]))
        launch(parts.table, mode="repair")
        assert torch.equal(parts.params[1], whole.params[1])
        torch.testing.assert_close(parts.params[0], whole.params[0], rtol=1e-5, atol=1e-7)
        for own, other in zip(parts.states, whole.states, strict=True):
            assert all(torch.equal(own[key], other[key]) for key in own)
        parts.eager = parts.copy()
        whole.eager = whole.copy()


@pytest.mark.parametrize("weights", ["native", "split8"])
def test_chunks_with_an_odd_element_step_the_others_as_plain_chunks_do(weights: str):
    """To the last bit: one element without a finite gradient sends its chunk another way."""
    dtype = FLOAT32 if weights == "native" else BFLOAT16
    plain, odd = (Twin(Case(rule="adamw", weights=weights, param=dtype, grad=dtype, sizes=(512,))) for _ in "ab")
    for _ in range(2):
        for twin in (plain, odd):
            twin.new_gradients()
            twin.params[0].grad[twin.params[0].grad == 0] = 1e-3  # no weight stays
    others = torch.arange(512) != 77
    odd.params[0].grad[77] = float("inf")
    before = odd.params[0].detach().clone()
    for twin in (plain, odd):
        twin.step(track=False)
    assert odd.table.num_nonfinite.tolist() == [1] and torch.equal(odd.params[0][77], before[77])
    for own, other in zip(
        (odd.params[0], *odd.states[0].values()), (plain.params[0], *plain.states[0].values()), strict=True
    ):
        assert torch.equal(own[others], other[others]) if own.numel() == 512 else torch.equal(own, other)
    check_equal(plain)
    check_equal(odd)


def test_sums_do_not_depend_on_the_run():
    twins = [Twin(Case(rule="rmsprop", storage="int8", sizes=(5000,))) for _ in range(2)]
    for twin in twins:
        twin.new_gradients()
    first, second = (twin.step().clone() for twin in twins)
    assert first is not None and torch.equal(first, second)


def test_backends_may_alternate():
    """Ten steps, by turns: the states one leaves are those the other goes on from."""
    case = Case(rule="adamw", storage="int8", sizes=(300,))
    twin, alone = Twin(case), Twin(case)
    for step in range(10):
        for one in (twin, alone):
            one.new_gradients()
            one.step()
        if step % 2:
            twin.eager = twin.copy()
    steps = torch.linalg.vector_norm(alone.eager[0][0] - twin.eager[0][0]) / torch.linalg.vector_norm(twin.eager[0][0])
    assert steps < 1e-4


@pytest.mark.parametrize("power", [-12, 8])
@pytest.mark.parametrize("storage", ["int8", "int8_root"])
def test_gradient_scale_does_not_matter(storage: str, power: int):
    twin = Twin(Case(rule="adamw", storage=storage, sizes=(300,), options=(Options(eps=1e-30),)))
    for _ in range(2):
        twin.new_gradients()
        grad = twin.params[0].grad
        grad.copy_(torch.where(grad == 0, 1e-3, grad) * 10.0**power)
        twin.step()
        check_equal(twin)
    assert (twin.states[0]["v"] > 0).all()


def test_positive_v_never_becomes_zero_and_zero_stays():
    for storage in ("int8", "int8_root"):
        twin = Twin(Case(rule="rmsprop", storage=storage, sizes=(64,)))
        grad = torch.zeros(64)
        grad[:32] = torch.logspace(-9, 0, 32)
        twin.params[0].grad = grad
        before = twin.params[0].detach().clone()
        twin.case.options = (Options(weight_decay=0.0),)
        twin.step()
        check_equal(twin)
        assert (twin.states[0]["v"][:32] > 0).all() and (twin.states[0]["v"][32:] == 0).all()
        assert torch.equal(twin.params[0][32:], before[32:])


def test_cuts_agree_bit_for_bit():
    results = []
    for config in (
        LaunchConfig(chunk=256, warps=1),
        LaunchConfig(chunk=1024, warps=4),
        LaunchConfig(chunk=512, warps=2, vector=8),
    ):
        twin = Twin(Case(rule="adamw", storage="int8", sizes=(1, 300, 1025), config=config))
        twin.new_gradients()
        twin.step()
        results.append([*twin.params, *(t for state in twin.states for t in state.values())])
    for other in results[1:]:
        assert all(torch.equal(a, b) for a, b in zip(results[0], other, strict=True))


def test_moved_gradients_and_outside_steps_are_noticed():
    twin = Twin(Case(rule="adamw", sizes=SMALL))
    twin.new_gradients()
    twin.step()
    seen = twin.table.grad_ptrs.clone()
    twin.eager[2][0] = 100  # load() writes it to the table's steps, as a checkpoint would
    twin.new_gradients(idle=(1,))
    twin.step()
    check_equal(twin)
    assert twin.table.steps.tolist() == [101, 1, 2, 2]
    assert twin.table.grad_ptrs[1] == 0 and not torch.equal(seen, twin.table.grad_ptrs)


def test_gradients_may_have_other_strides():
    twin = Twin(Case(rule="adamw", sizes=(64,)))
    twin.new_gradients()
    twin.params[0].grad = torch.randn(128)[::2]
    for _ in range(2):
        twin.params[0].grad.mul_(0.5)
        twin.step()
        check_equal(twin)


def test_wrong_thresholds_are_seen():
    """The comparison can fail: rounding by another phase gives other codes."""
    twin = Twin(Case(rule="rmsprop", storage="int8", sizes=(1300,)))
    twin.new_gradients()
    twin.step()
    twin.load((*Twin(twin.case).copy()[:2], torch.zeros(1)))
    fused_step(twin.table, options=twin.case.options, thresholds=lanes(7, torch.device("cpu")))
    with pytest.raises(AssertionError, match="of the codes differ"):
        check_equal(twin)


def test_what_no_table_takes_is_refused():
    param = torch.zeros(4, 8).t()
    with pytest.raises(ValueError, match="a table takes contiguous"):
        FusedTable([param], kind=Kind(rule="sign"), states=[{}])
    param = torch.zeros(64)
    with pytest.raises(ValueError, match=r"state m.scale of tensor 0"):
        state = {"m": torch.zeros(64, dtype=torch.int8), "m.scale": torch.zeros(1, dtype=BFLOAT16)}
        FusedTable([param], kind=Kind(rule="lion", m="softsign8"), states=[state])
    with pytest.raises(ValueError, match="no kernel for rule 'shampoo'"):
        Kind(rule="shampoo")
