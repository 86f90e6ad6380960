"""Each rule, run by the optimizer at fp32 storage, against an independent float64 reference (references.py)."""

import pytest
import torch
from torch import Tensor, nn

from baoc.optim import BlockwiseOptimizer
from baoc.optim.rules import RULES
from baoc.types import ParamInfo
from tests.support.optimizing import info, one_block
from tests.support.references import REFERENCES, Reference
from tests.support.tolerances import FP32_RULE, FP32_RULE_LONG

LR, DECAY, STEPS, MANY = 1e-2, 0.1, 30, 200
SHAPES = {"linear": (17, 64), "odd": (9, 37), "conv": (8, 3, 3, 5), "position": (1, 5, 24), "tall": (300, 3)}
SIGNS = ("lion", "signum", "sign")


def test_every_rule_has_a_reference() -> None:
    assert REFERENCES.keys() == RULES.keys()


def as_rows(values: Tensor, described: ParamInfo) -> Tensor:
    """What the reference sees: [fan_out, fan_in]."""
    matrix = described.matrix_shape
    assert matrix is not None
    return values.reshape(matrix[1], matrix[0]).t() if described.transposed else values.reshape(matrix)


def gradients(shape: tuple[int, ...], *, zeros: bool, steps: int = STEPS) -> list[Tensor]:
    generator = torch.Generator().manual_seed(1)
    scale = torch.exp(torch.randn(shape, generator=generator))
    draws = [scale * torch.randn(shape, generator=generator) + 0.2 for _ in range(steps)]
    if zeros:
        for grad in draws:
            grad[0] = 0  # a row that never gets a gradient
    return draws


def build(described: ParamInfo, rule: str) -> tuple[nn.Parameter, BlockwiseOptimizer]:
    weight = nn.Parameter(torch.randn(described.shape, generator=torch.Generator().manual_seed(0)))
    optimizer = BlockwiseOptimizer(
        [("w", weight)],
        rule,
        blocks=[one_block("w", [described])],
        lr=LR,
        weight_decay=DECAY,
        rms_matching=False,
    )
    return weight, optimizer


def follow(
    described: ParamInfo, rule: str, *, bad_steps: dict[int, Tensor], zeros: bool = False, steps: int = STEPS
) -> None:
    """Steps both; `bad_steps` maps a step to the elements (True) that are made NaN in it."""
    weight, optimizer = build(described, rule)
    reference: Reference = REFERENCES[rule]()
    tolerance = FP32_RULE if steps == STEPS else FP32_RULE_LONG
    expected = as_rows(weight.detach().double(), described).clone()
    for index, grad in enumerate(gradients(described.shape, zeros=zeros, steps=steps)):
        bad = bad_steps.get(index, torch.zeros(described.shape, dtype=torch.bool))
        weight.grad = grad.masked_fill(bad, torch.nan)
        optimizer.step()
        keep = as_rows(~bad, described)
        update = reference.step(as_rows(grad.double(), described) * keep, keep)
        expected = torch.where(keep, expected * (1 - LR * DECAY) - LR * update, expected)
        actual = as_rows(weight.detach().double(), described)
        if rule in SIGNS:  # where the sign itself hangs on a rounding, two learning rates are the whole update
            close = torch.isclose(actual, expected, rtol=tolerance.rtol, atol=tolerance.atol)
            assert close.double().mean() > 0.999
        else:
            torch.testing.assert_close(actual, expected, rtol=tolerance.rtol, atol=tolerance.atol)
    assert (actual - as_rows(torch.zeros(described.shape), described)).isfinite().all()


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("rule", RULES)
def test_a_rule_is_its_reference(rule: str, shape: str) -> None:
    follow(info("w", SHAPES[shape]), rule, bad_steps={})


@pytest.mark.slow
@pytest.mark.parametrize("rule", [name for name in RULES if not name.startswith(("foam_l1", "foam_l3"))])
def test_a_rule_stays_with_its_reference_for_hundreds_of_steps(rule: str) -> None:
    follow(info("w", (9, 37)), rule, bad_steps={}, steps=MANY)


@pytest.mark.parametrize("rule", RULES)
def test_a_transposed_weight_is_read_as_fan_out_by_fan_in(rule: str) -> None:
    follow(info("w", (24, 10), transposed=True), rule, bad_steps={})


@pytest.mark.parametrize("transposed", [False, True])
@pytest.mark.parametrize("rule", RULES)
def test_excluded_elements_take_no_part_in_any_mean(rule: str, transposed: bool) -> None:
    generator = torch.Generator().manual_seed(2)
    some = torch.rand(9, 37, generator=generator) < 0.1
    row = torch.zeros(9, 37, dtype=torch.bool)
    row[3] = True
    col = torch.zeros(9, 37, dtype=torch.bool)
    col[:, 36] = True  # the last fold, alone in it at some levels
    corner = torch.zeros(9, 37, dtype=torch.bool)
    corner[8, 32:] = True
    bad_steps = {3: some, 7: row, 8: col, 15: corner | some}
    follow(info("w", (9, 37), transposed=transposed), rule, bad_steps=bad_steps)


@pytest.mark.parametrize("rule", RULES)
def test_a_row_without_gradients_is_no_trouble(rule: str) -> None:
    follow(info("w", (9, 37)), rule, bad_steps={}, zeros=True)


@pytest.mark.parametrize("rule", [name for name, rule in RULES.items() if not rule.info.needs_matrix])
def test_vectors(rule: str) -> None:
    weight = nn.Parameter(torch.zeros(257))
    optimizer = BlockwiseOptimizer([("w", weight)], rule, lr=LR, weight_decay=0.0, rms_matching=False)
    reference: Reference = REFERENCES[rule]()
    expected = torch.zeros(1, 257, dtype=torch.float64)
    for grad in gradients((257,), zeros=True):
        weight.grad = grad
        optimizer.step()
        expected -= LR * reference.step(grad.double().unsqueeze(0), torch.ones(1, 257, dtype=torch.bool))
    close = torch.isclose(weight.detach().double(), expected[0], rtol=FP32_RULE.rtol, atol=FP32_RULE.atol)
    assert close.double().mean() > (0.99 if rule in SIGNS else 1 - 1e-9)


def test_rules_differ_from_each_other() -> None:
    """A reference that agreed with every rule would prove nothing."""
    ends = {}
    for rule in RULES:
        weight, optimizer = build(info("w", (9, 37)), rule)
        for grad in gradients((9, 37), zeros=False)[:5]:
            weight.grad = grad
            optimizer.step()
        ends[rule] = weight.detach()
    names = list(ends)
    for i, a in enumerate(names):
        for b in names[i + 1 :]:
            assert not torch.allclose(ends[a], ends[b], atol=1e-4), f"{a} and {b} did the same"
