"""What every update rule promises, whichever is registered; what each computes is in test_rules_reference."""

import pytest
import torch
from torch import Tensor

from baoc.core.catalogue import NATIVE
from baoc.core.rule_tags import RULE_INFOS
from baoc.optim.rules import RULES, Direction, Rule, RuleContext
from baoc.types import ParamInfo, StateKind, StateLayout
from tests.support.optimizing import info

MATRIX = info("w", (9, 37))
VECTOR = info("b", (33,))


def described(rule: str) -> ParamInfo:
    return MATRIX if RULES[rule].info.needs_matrix else VECTOR


def zero_states(rule: str, param: ParamInfo) -> dict[str, Tensor]:
    return {decl.name: torch.zeros(decl.shape(param)) for decl in RULES[rule].info.states}


def context(param: ParamInfo, *, step: int = 1, finite: Tensor | None = None) -> RuleContext:
    return RuleContext(step=step, finite=finite, matrix=param.matrix_shape)


def gradient(param: ParamInfo, *, seed: int = 0) -> Tensor:
    return torch.randn(param.shape, generator=torch.Generator().manual_seed(seed))


def run(rule: str, grad: Tensor, states: dict[str, Tensor], ctx: RuleContext) -> Tensor:
    direction = RULES[rule].direction(grad, states=states, ctx=ctx)
    return direction.update() / direction.divisor


def test_rules_of_the_catalogue_are_those_that_exist() -> None:
    assert {spec.rule for spec in NATIVE.values()} == set(RULES)
    assert {name: rule.info for name, rule in RULES.items()} == RULE_INFOS


@pytest.mark.parametrize("rule", RULES)
class TestUpdateRule:
    def test_follows_the_protocol(self, rule: str) -> None:
        assert isinstance(RULES[rule], Rule)
        assert RULES[rule].info.name == rule and RULES[rule].info.description

    def test_declares_states_that_tell_what_they_are(self, rule: str) -> None:
        declared = RULES[rule].info
        names = [decl.name for decl in declared.states]
        assert len(set(names)) == len(names) and "step" not in names
        shared = any(decl.layout is not StateLayout.FULL for decl in declared.states)
        assert not shared or declared.needs_matrix
        corrected = any(decl.bias_corrected for decl in declared.states)
        assert not corrected or declared.counts_steps  # without a count there is nothing to correct with
        for kind in StateKind:  # what one kind of state is inherited from must be told by its tags alone
            layouts = [decl.layout for decl in declared.states if decl.kind is kind]
            assert layouts in ([], [StateLayout.FULL], [StateLayout.FOLDED], *([one] for one in StateLayout)) or (
                set(layouts) == {StateLayout.PER_ROW, StateLayout.PER_COLUMN}
            )

    def test_update_has_the_shape_of_the_gradient(self, rule: str) -> None:
        param = described(rule)
        direction = RULES[rule].direction(gradient(param), states=zero_states(rule, param), ctx=context(param))
        assert isinstance(direction, Direction)
        assert direction.numerator.shape == param.shape
        assert direction.denominator is None or direction.denominator.shape == param.shape
        assert direction.divisor > 0

    def test_states_are_updated_in_place_and_stay_finite(self, rule: str) -> None:
        param = described(rule)
        states = zero_states(rule, param)
        before = dict(states)
        for step in range(1, 20):
            assert run(rule, gradient(param, seed=step), states, context(param, step=step)).isfinite().all()
        assert all(states[name] is tensor for name, tensor in before.items())
        assert all(tensor.isfinite().all() and tensor.any() for tensor in states.values())

    def test_gradient_and_numerator_are_not_written_to(self, rule: str) -> None:
        param = described(rule)
        grad = gradient(param)
        kept = grad.clone()
        direction = RULES[rule].direction(grad, states=zero_states(rule, param), ctx=context(param))
        numerator = direction.numerator.clone()
        direction.update()
        assert torch.equal(grad, kept) and torch.equal(direction.numerator, numerator)

    def test_no_gradient_no_update(self, rule: str) -> None:
        param = described(rule)
        states = zero_states(rule, param)
        for step in range(1, 4):
            assert not run(rule, torch.zeros(param.shape), states, context(param, step=step)).any()

    def test_first_update_goes_down_and_has_the_size_of_a_learning_rate(self, rule: str) -> None:
        param = described(rule)
        grad = gradient(param)
        update = run(rule, grad, zero_states(rule, param), context(param))
        assert (update * grad).sum() > 0
        assert 0.05 < update.square().mean().sqrt() < 2  # FOAM's is .08, for its learning rate of 1e-2

    @pytest.mark.parametrize("exponent", [-6, -3, 3, 6])
    def test_update_does_not_depend_on_the_scale_of_gradients(self, rule: str, exponent: int) -> None:
        param = described(rule)
        ends = []
        for factor in (1.0, 10.0**exponent):
            states = zero_states(rule, param)
            ctx = context(param)
            ctx.eps = 0.0
            ends.append([run(rule, gradient(param, seed=s) * factor, states, ctx) for s in range(3)][-1])
        assert torch.allclose(ends[0], ends[1], rtol=1e-4, atol=1e-5)

    def test_a_mask_that_excludes_nothing_changes_nothing(self, rule: str) -> None:
        param = described(rule)
        grad, all_finite = gradient(param), torch.ones(param.shape, dtype=torch.bool)
        a = run(rule, grad, zero_states(rule, param), context(param))
        b = run(rule, grad, zero_states(rule, param), context(param, finite=all_finite))
        assert torch.allclose(a, b, rtol=1e-5, atol=1e-7)

    def test_excluded_elements_leave_no_trace_in_shared_states(self, rule: str) -> None:
        """The mean of a constant is that constant, whichever elements are left out of it."""
        param = described(rule)
        finite = torch.ones(param.shape, dtype=torch.bool)
        finite.view(-1)[::5] = False
        whole, part = zero_states(rule, param), zero_states(rule, param)
        constant = torch.full(param.shape, 0.5)
        run(rule, constant, whole, context(param))
        run(rule, constant * finite, part, context(param, finite=finite))
        for decl in RULES[rule].info.states:
            if decl.layout in (StateLayout.PER_ROW, StateLayout.PER_COLUMN):
                assert torch.allclose(whole[decl.name], part[decl.name])

    def test_last_repeats_the_update_or_does_not_know(self, rule: str) -> None:
        param = described(rule)
        states = zero_states(rule, param)
        update = run(rule, gradient(param), states, context(param))
        last = RULES[rule].last(states=states, ctx=context(param))
        assert last is None or torch.equal(last.update() / last.divisor, update)
        assert last is not None or RULES[rule].info.matched  # migration asks unmatched rules for their update RMS


def test_rules_with_averages_of_gradients_and_squares_have_adamws_size_by_themselves() -> None:
    alone = {"adamw", "adamw_shared_in", "adamw_shared_out", "adafactor_momentum"}
    assert {name for name, rule in RULES.items() if not rule.info.matched} == alone
