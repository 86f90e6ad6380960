"""NaN, infinity and too large gradients: excluded elements keep their weight and states, and no one else sees them."""

import copy
import logging

import pytest
import torch
from torch import Tensor

from baoc.core.catalogue import NATIVE
from baoc.errors import TrainingFailedError
from baoc.optim import BlockwiseOptimizer
from baoc.optim.codecs import CODEC_IMPLS
from baoc.optim.nonfinite import all_finite
from baoc.optim.rules import RULES, RuleContext
from baoc.types import StateLayout
from tests.support.optimizing import (
    MATRICES,
    Gradients,
    assert_same,
    build,
    make_params,
    run_steps,
    shapes_for,
    state_tensors,
    trained,
)

BAD = (torch.nan, -torch.inf, 1e20)  # the last one is finite, its square is not
ELEMENTWISE = ("adamw", "rmsprop", "lion", "signum", "sign", "adamw_bf16", "rmsprop_bf16", "lion_bf16")


def poison(params: dict[str, Tensor], *, value: float) -> dict[str, Tensor]:
    """Makes some elements of each gradient bad; returns where the gradient is finite."""
    finite = {}
    for name, param in params.items():
        assert param.grad is not None
        mask = torch.ones(param.shape, dtype=torch.bool)
        mask.view(-1)[::11] = False
        param.grad.masked_fill_(~mask, value)
        finite[name] = mask
    return finite


def snapshot(optimizer: BlockwiseOptimizer) -> dict[str, Tensor]:
    return {name: tensor.clone() for name, tensor in state_tensors(optimizer).items()}


@pytest.mark.parametrize("spec", NATIVE)
def test_excluded_elements_keep_weight_and_states_and_the_rest_goes_on(spec: str) -> None:
    params, optimizer, gradients = trained(MATRICES, spec, lr=1e-2, weight_decay=0.1, steps=5)
    before = {name: p.detach().clone() for name, p in params.items()}
    old = {n: [k.decode(optimizer.state[p]).clone() for k in _kept(optimizer, n)] for n, p in params.items()}
    gradients.give(params)
    finite = poison(params, value=torch.nan)
    optimizer.step()
    for name, param in params.items():
        now, mask = param.detach(), finite[name]
        assert now.isfinite().all()
        assert torch.equal(now[~mask], before[name][~mask])
        assert (now[mask] != before[name][mask]).double().mean() > 0.9
        for kept, previous in zip(_kept(optimizer, name), old[name], strict=True):
            values = kept.decode(optimizer.state[param])
            assert values.isfinite().all()
            if kept.decl.layout is StateLayout.FULL and kept.codec.info.name == "fp32":
                assert torch.equal(values[~mask], previous[~mask])
            elif kept.decl.layout is StateLayout.FULL:  # re-encoded, perhaps under another scale: a neighbouring code
                gap = float(previous.max()) * (0.02 if kept.codec.info.bits > 4 else 0.27)
                torch.testing.assert_close(values[~mask], previous[~mask], rtol=0.15, atol=gap)


def _kept(optimizer: BlockwiseOptimizer, name: str) -> tuple:
    return next(slot.states for live in optimizer.registry.live.values() for slot in live.slots if slot.name == name)


@pytest.mark.slow
@pytest.mark.parametrize("spec", NATIVE)
def test_it_does_not_matter_which_value_was_bad(spec: str) -> None:
    ends = []
    for value in BAD:
        params, optimizer, gradients = trained(shapes_for(spec), spec, lr=1e-2, weight_decay=0.1, steps=5)
        gradients.give(params)
        poison(params, value=value)
        optimizer.step()
        run_steps(optimizer, params, gradients=gradients, steps=2)
        ends.append({**{n: p.detach() for n, p in params.items()}, **snapshot(optimizer)})
    assert_same(ends[0], ends[1])
    assert_same(ends[0], ends[2])


@pytest.mark.parametrize("spec", ELEMENTWISE)
def test_other_elements_are_bit_for_bit_those_of_a_healthy_step(spec: str) -> None:
    ends = []
    for bad in (False, True):
        params, optimizer, gradients = trained(MATRICES, spec, lr=1e-2, rms_matching=False, steps=3)
        gradients.give(params)
        finite = poison(params, value=torch.nan if bad else 0.5)
        optimizer.step()
        ends.append({name: p.detach()[finite[name]] for name, p in params.items()})
    assert_same(ends[0], ends[1])


@pytest.mark.parametrize("spec", NATIVE)
def test_bit_for_bit_the_step_in_which_they_were_excluded(spec: str) -> None:
    """The step again by hand: decode, run the rule with the mask, put the old numbers back, encode."""
    params = make_params({"w": (9, 37)})
    optimizer = build(params, spec, lr=1e-2, weight_decay=0.1, rms_matching=False)
    gradients, weight = Gradients(params), params["w"]
    run_steps(optimizer, params, gradients=gradients, steps=4)
    gradients.give(params)
    finite = poison(params, value=torch.inf)["w"]
    assert weight.grad is not None
    clean = weight.grad.masked_fill(~finite, 0.0)
    state = {key: value.clone() for key, value in optimizer.state[weight].items()}
    rule = RULES[NATIVE[spec].rule]
    ctx = RuleContext(step=5 if rule.info.counts_steps else 0, finite=finite, matrix=(9, 37))
    states, expected = {}, weight.detach().clone()
    for kept in _kept(optimizer, "w"):
        states[kept.decl.name] = CODEC_IMPLS[kept.codec.info.name].decode(kept.codec_tensors(state), kept.shape).clone()
    old = {name: value.clone() for name, value in states.items()}
    direction = rule.direction(clean, states=states, ctx=ctx)
    moved = expected * (1 - 1e-2 * 0.1)
    if direction.denominator is None:
        moved.add_(direction.numerator, alpha=-(1e-2 / direction.divisor))
    else:
        moved.addcdiv_(direction.numerator, direction.denominator, value=-(1e-2 / direction.divisor))
    for kept in _kept(optimizer, "w"):
        name = kept.decl.name
        values = torch.where(finite, states[name], old[name]) if kept.is_full else states[name]
        kept.encode_(state, values, phase=5, new=finite)
    optimizer.step()
    assert torch.equal(weight.detach(), torch.where(finite, moved, expected))
    if rule.info.counts_steps:
        state["step"] += 1
    assert_same(optimizer.state[weight], state)


CODED = [name for name, spec in NATIVE.items() if spec.rule == "adamw" and spec.storage not in ("fp32", "bf16")]


@pytest.mark.parametrize("spec", CODED)
def test_the_excluded_keep_their_codes_and_take_no_part_in_the_scale(spec: str) -> None:
    """Scales and all other codes are those of a step with any small gradient there; own codes stay with the scale."""
    ends, payloads = [], []
    for bad in (False, True):
        params = make_params({"w": (96, 128)})
        optimizer = build(params, spec, lr=1e-2)
        gradients, weight = Gradients(params), params["w"]
        for step in range(40):
            gradients.give(params)
            assert weight.grad is not None
            weight.grad.view(-1)[5::32] *= 1e-3  # never the largest of their groups
            if step == 39:
                payloads.append({key: value.clone() for key, value in optimizer.state[weight].items()})
                weight.grad.view(-1)[5::32] = torch.nan if bad else 0.0
            optimizer.step()
        ends.append(optimizer.state[weight])
    excluded = torch.zeros(96 * 128, dtype=torch.bool)
    excluded[5::32] = True
    for name in ("m", "v"):
        scale, kept_scale = ends[1][f"{name}.scale"], payloads[1][f"{name}.scale"]
        assert torch.equal(scale, ends[0][f"{name}.scale"]), "the excluded moved a scale"
        codes = [nibbles(state[name]) for state in (*ends, payloads[1])]
        assert torch.equal(codes[0][~excluded], codes[1][~excluded])
        still = (scale == kept_scale).repeat_interleave(len(excluded) // len(scale))
        assert torch.equal(codes[1][excluded & still], codes[2][excluded & still]), "a code moved under its old scale"
        assert (excluded & still).sum() > (0 if name == "m" else 50)


def nibbles(payload: Tensor) -> Tensor:
    """The codes of a payload, of 8 or 4 bits, flat."""
    flat = payload.reshape(-1)
    return flat if len(flat) == 96 * 128 else torch.stack((flat & 15, flat >> 4), dim=1).view(-1)


def test_a_scale_is_never_too_small_for_what_is_kept() -> None:
    params = make_params({"w": (64,)})
    optimizer = build(params, "adamw_int8", lr=1e-2)
    weight = params["w"]
    weight.grad = torch.full((64,), 1e-3)
    weight.grad[5] = 1.0  # the largest of its group by far
    optimizer.step()
    scales = optimizer.state[weight]["m.scale"].clone()
    weight.grad = torch.full((64,), 1e-3)
    weight.grad[5] = torch.inf
    optimizer.step()
    assert optimizer.state[weight]["m.scale"][0] == scales[0]  # the value it had, neither infinite nor gone
    assert optimizer.state[weight]["m.scale"][1] > scales[1]


@pytest.mark.parametrize("spec", ["adamw", "sign", "adafactor", "foam_l3_int8"])
def test_a_gradient_that_is_bad_altogether_moves_nothing(spec: str) -> None:
    params, optimizer, gradients = trained(MATRICES, spec, lr=1e-2, weight_decay=0.1, steps=5)
    before = {name: p.detach().clone() for name, p in params.items()}
    gradients.give(params)
    for param in params.values():
        assert param.grad is not None
        param.grad.fill_(torch.nan)
    optimizer.step()
    assert_same({name: p.detach() for name, p in params.items()}, before)
    run_steps(optimizer, params, gradients=gradients, steps=2)
    assert all(p.isfinite().all() for p in params.values())


class TestMaskingBeforeClipping:
    def test_masks_are_remembered_for_the_step(self) -> None:
        ends = []
        for explicit in (False, True):
            params, optimizer, gradients = trained(MATRICES, "adamw", lr=1e-2, weight_decay=0.1, steps=5)
            gradients.give(params)
            finite = poison(params, value=torch.nan)
            if explicit:
                assert optimizer.mask_nonfinite() == sum(int((~mask).sum()) for mask in finite.values())
                norm = torch.nn.utils.clip_grad_norm_(params.values(), 1e9)
                assert norm.isfinite()
                assert optimizer.mask_nonfinite() == 0  # a second look forgets nothing
            optimizer.step()
            ends.append({name: p.detach() for name, p in params.items()})
        assert_same(ends[0], ends[1])

    def test_two_looks_add_up(self) -> None:
        params, optimizer, gradients = trained({"w": (4, 8)}, "adamw", lr=1e-2, weight_decay=0.1, steps=5)
        gradients.give(params)
        before, grad = params["w"].detach().clone(), params["w"].grad
        assert grad is not None
        for index in (3, 4):  # in two micro-batches, say
            grad[0, index] = torch.nan
            assert optimizer.mask_nonfinite() == 1
        optimizer.step()
        assert ((params["w"].detach() == before).nonzero() == torch.tensor([[0, 3], [0, 4]])).all()

    def test_masks_are_for_one_step_only(self) -> None:
        params, optimizer, gradients = trained(MATRICES, "adamw", lr=1e-2, weight_decay=0.1, steps=5)
        gradients.give(params)
        poison(params, value=torch.nan)
        optimizer.mask_nonfinite()
        optimizer.step()
        before = {name: p.detach().clone() for name, p in params.items()}
        run_steps(optimizer, params, gradients=gradients, steps=1)
        assert all((p.detach() != before[name]).all() for name, p in params.items())

    @pytest.mark.parametrize(
        ("dtype", "spec"),
        [
            (torch.float32, "adafactor_momentum"),
            (torch.float64, "foam_l2"),
            (torch.bfloat16, "adamw_shared_in_int8+split8"),
        ],
    )
    def test_numbers_count_as_infinite_from_two_to_the_48_on(self, dtype: torch.dtype, spec: str) -> None:
        """Of all numbers below it the step makes finite states, whose next step is an ordinary one."""
        params = make_params({"w": (4, 8)}, dtype=dtype)
        largest = 2.0**48 * (1 - torch.finfo(dtype).eps / 2)
        params["w"].grad = torch.full((4, 8), largest, dtype=dtype)
        optimizer = build(params, spec)
        assert optimizer.mask_nonfinite() == 0
        before = params["w"].detach().clone()
        optimizer.step()
        assert (params["w"].detach() != before).any()
        assert all(tensor.isfinite().all() for tensor in state_tensors(optimizer).values())
        params["w"].grad = torch.tensor([[largest] * 7 + [-(2.0**48)]] * 4, dtype=dtype)
        assert optimizer.mask_nonfinite() == 4


class TestPolicies:
    def test_elements_are_counted_and_named(self, caplog: pytest.LogCaptureFixture) -> None:
        params, optimizer, gradients = trained({"good": (4, 8), "bad": (4, 8)}, "adamw", lr=1e-2, steps=5)
        for _ in range(2):
            gradients.give(params)
            assert params["bad"].grad is not None
            params["bad"].grad[0, :3] = torch.inf
            with caplog.at_level(logging.INFO):
                optimizer.step()
        assert optimizer.num_nonfinite == 6 and optimizer.last_nonfinite == {"bad": 3}
        assert (
            "3 gradient element(s) are NaN, infinite or beyond 2^48 in step 6: bad (3); policy: skip_element"
            in caplog.text
        )
        assert [record.levelname for record in caplog.records] == ["WARNING", "INFO"]

    @pytest.mark.parametrize("policy", ["skip_element", "skip_step"])
    def test_steps_in_a_row_are_warned_of_again(self, policy: str, caplog: pytest.LogCaptureFixture) -> None:
        """A loop of one's own has nobody else who would end or tell it; run.py ends after as many losses."""
        params, optimizer, gradients = trained({"w": (4, 8)}, "adamw", lr=1e-2, steps=2, nonfinite=policy)
        for finite in (*[False] * 5, True, *[False] * 20):
            gradients.give(params)
            if not finite:
                poison(params, value=torch.nan)
            assert "in a row" not in caplog.text
            optimizer.step()
        assert "the gradients of 20 steps in a row held elements that are not finite (policy: " in caplog.text
        assert "lower the learning rate, or set nonfinite=raise to end" in caplog.text
        assert [record.levelname for record in caplog.records].count("WARNING") == 2

    def test_of_many_tensors_the_worst_are_named(self, caplog: pytest.LogCaptureFixture) -> None:
        params, optimizer, gradients = trained({f"w{i}": (2, 3) for i in range(10)}, "adamw", lr=1e-2, steps=5)
        gradients.give(params)
        poison(params, value=torch.nan)
        params["w9"].grad.fill_(torch.nan)  # pyright: ignore
        optimizer.step()
        assert len(optimizer.last_nonfinite) == 10
        assert ": w9 (6), w0 (1)," in caplog.text and "w6 (1) and 2 more; policy" in caplog.text

    def test_skip_step_leaves_all_as_it_is(self) -> None:
        params, optimizer, gradients = trained(MATRICES, "adamw_int8", nonfinite="skip_step", steps=2)
        before, states = {n: p.detach().clone() for n, p in params.items()}, snapshot(optimizer)
        gradients.give(params)
        poison(params, value=torch.nan)
        ends: list[int] = []
        optimizer.after_step.append(lambda: ends.append(optimizer.num_steps))
        optimizer.step()
        assert_same({n: p.detach() for n, p in params.items()}, before)
        assert_same(state_tensors(optimizer), states)
        assert optimizer.num_skipped_steps == 1 and ends == [2]
        run_steps(optimizer, params, gradients=gradients, steps=1)
        assert optimizer.num_skipped_steps == 1 and not torch.equal(params["conv"], before["conv"])

    def test_raise_names_the_parameters(self) -> None:
        params = make_params({"good": (4, 8), "bad": (4, 8)})
        optimizer = build(params, nonfinite="raise")
        Gradients(params).give(params)
        params["bad"].grad = torch.full((4, 8), torch.nan)
        before = params["good"].detach().clone()
        with pytest.raises(TrainingFailedError, match=r"32 gradient element\(s\) .* bad \(32\)\. Lower the learning"):
            optimizer.step()
        assert torch.equal(params["good"].detach(), before)


@pytest.mark.parametrize("spec", [s for s in NATIVE if not s.startswith("foam")])
def test_a_coordinate_without_gradient_does_not_move(spec: str) -> None:
    """FOAM mixes coordinates by design, so it is left out."""
    params = make_params({"w": (8, 40)})
    optimizer = build(params, spec, lr=1e-2, weight_decay=0.0)
    weight, generator = params["w"], torch.Generator().manual_seed(0)
    before = weight.detach().clone()
    for _ in range(150):
        weight.grad = torch.randn(8, 40, generator=generator)
        weight.grad[:, 7] = 0
        weight.grad[3] = 0
        optimizer.step()
    assert torch.equal(weight.detach()[:, 7], before[:, 7]) and torch.equal(weight.detach()[3], before[3])
    assert (weight.detach()[0, :7] != before[0, :7]).any()


def test_an_optimizer_that_an_earlier_version_pickled_goes_on(caplog: pytest.LogCaptureFixture) -> None:
    params, optimizer, _ = trained(MATRICES, "adamw", lr=1e-2, weight_decay=0.1, steps=2)
    attributes = vars(optimizer.finite_check)
    for name in set(attributes) & {"_last_attempt", "_num_in_a_row"}:  # that version did not have them
        del attributes[name]
    params, optimizer = copy.deepcopy((params, optimizer))
    for param in params.values():
        param.grad = torch.full_like(param, torch.nan)
    optimizer.step()
    assert "policy: skip_element" in caplog.text


def test_processes_decide_together() -> None:
    """`vote` is asked once per step, found or not, and what another process found counts as found here."""
    for policy in ("skip_step", "raise"):
        params = make_params({"w": (4, 8)})
        optimizer = build(params, "adamw", nonfinite=policy)
        asked: list[bool] = []
        optimizer.finite_check.vote = lambda found, asked=asked: bool(asked.append(found)) or len(asked) == 2
        before = params["w"].detach().clone()
        Gradients(params).give(params)
        optimizer.step()
        after = params["w"].detach().clone()
        assert asked == [False] and not torch.equal(before, after)
        Gradients(params).give(params)
        if policy == "raise":
            with pytest.raises(TrainingFailedError, match="another process found non-finite gradients in step 2"):
                optimizer.step()
        else:
            optimizer.step()
            assert optimizer.num_skipped_steps == 1
        assert asked == [False, False] and torch.equal(params["w"].detach(), after)


class TestAWeightTypeChangesBetweenLookAndStep:
    """`migrate` casts a gradient with its weights, which makes it another tensor; what was masked stays so."""

    @pytest.mark.parametrize(
        ("source", "target"),
        [
            ("adamw", "adamw+split8"),
            ("adamw", "adamw_int8+split8"),
            ("adamw", "adamw+bf16_sr"),
            ("adamw+split8", "adamw"),
        ],
    )
    def test_a_masked_element_stays_where_it_is(self, source: str, target: str) -> None:
        params, optimizer, gradients = trained({"w": (17, 64), "other": (8, 8)}, source, lr=1e-2, steps=5)
        gradients.give(params)
        grad = params["w"].grad
        assert grad is not None
        grad[3, 5] = torch.nan
        assert optimizer.mask_nonfinite() == 1
        optimizer.migrate({"w": target})
        before = optimizer.export_weights()["w"]
        optimizer.step()
        moved = optimizer.export_weights()["w"] != before
        assert not moved[3, 5] and moved.float().mean() > 0.5

    def test_a_step_that_is_to_be_skipped_is_skipped(self) -> None:
        params, optimizer, gradients = trained({"w": (17, 64)}, "adamw", nonfinite="skip_step", steps=2)
        gradients.give(params)
        params["w"].grad[0, 0] = torch.nan  # pyright: ignore[reportOptionalSubscript]
        optimizer.mask_nonfinite()
        optimizer.migrate({"w": "adamw+split8"})
        before = optimizer.export_weights()["w"]
        optimizer.step()
        assert torch.equal(optimizer.export_weights()["w"], before) and optimizer.num_skipped_steps == 1


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("numel", [1, 31, 257, 200_003])
def test_one_element_that_is_not_usable_is_found_anywhere(dtype: torch.dtype, numel: int) -> None:
    others = [torch.full((5,), 2.0**45, dtype=dtype), torch.zeros(0, dtype=dtype)]
    tensor = torch.randn(numel).to(dtype)
    assert finite([*others, tensor])
    for place in {0, numel // 2, numel - 1}:
        for bad in (torch.nan, -torch.nan, torch.inf, -torch.inf, 2.0**48, -1e20):
            holed = tensor.clone()
            holed[place] = bad
            assert not finite([*others, holed]), (place, bad)


def test_one_is_found_whatever_the_type_and_the_strides() -> None:
    for grad in (torch.zeros(3, dtype=torch.float64), torch.zeros(3, 2).t(), torch.zeros(3, device="meta")):
        assert finite([grad])
    for grad in (torch.zeros(3, dtype=torch.float64), torch.zeros(3, 2).t()):
        grad[1] = torch.nan
        assert not finite([grad])


def finite(grads: list[Tensor]) -> bool:
    """The finite check of gradients of parameters like them."""
    params = [torch.empty_like(grad) for grad in grads]
    for param, grad in zip(params, grads, strict=True):
        param.grad = grad
    return all_finite(params, names={})
