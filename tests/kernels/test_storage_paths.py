"""What storage does to whole trajectories: wide spreads inside a group, and gradients of any size (CASES N3, N4)."""

from functools import cache

import pytest
import torch
from torch import Tensor, nn

from baoc.core.catalogue import NATIVE
from tests.support.optimizing import build

pytestmark = pytest.mark.slow  # each takes many steps

LR = 1e-2
SHAPE = (64, 128)
STORED = [name for name, spec in NATIVE.items() if spec.storage != "fp32"]


@cache
def path(spec: str, *, decades: float, steps: int, size: float = 1.0) -> Tensor:
    """How far each weight went, in learning rates. Element scales are log-spaced over `decades`, shuffled."""
    generator = torch.Generator().manual_seed(0)
    order = torch.randperm(SHAPE[0] * SHAPE[1], generator=generator)
    scale = torch.logspace(0, -decades, len(order))[order].view(SHAPE) * size
    weight = nn.Parameter(torch.zeros(SHAPE))
    optimizer = build({"w": weight}, spec, lr=LR, weight_decay=0.0, eps=1e-12 * size, rms_matching=False)
    for _ in range(steps):
        weight.grad = scale * torch.randn(SHAPE, generator=generator)
        optimizer.step()
    return weight.detach() / LR


@pytest.mark.parametrize(
    ("spec", "decades", "mean", "largest"),
    [
        ("adamw_bf16", 4, 0.1, 1.0),
        ("adamw_int8_root", 4, 1.0, 8.0),
        ("rmsprop_int8_root", 4, 0.8, 8.0),
        ("adafactor_momentum_int8_root", 4, 0.2, 4.0),
        ("adamw_int8", 1, 0.5, 6.0),  # companded codes are for narrow groups: risk grows with the spread
        ("rmsprop_int8", 1, 0.5, 6.0),
        ("adamw_int4", 1, 4.5, 40.0),  # 4 bits are further off; seven sizes of m span a decade and a half
        ("adamw_int4", 4, 8.0, 130.0),
        ("rmsprop_int4", 4, 4.5, 45.0),  # the lattice of v spans four
    ],
)
def test_a_wide_spread_stays_within_a_few_learning_rates_of_fp32(
    spec: str, decades: float, mean: float, largest: float
) -> None:
    reference = path(NATIVE[spec].rule, decades=decades, steps=100)
    distance = (path(spec, decades=decades, steps=100) - reference).abs()
    assert float(reference.square().mean().sqrt()) > 5  # it went somewhere
    assert distance.mean() < mean and distance.max() < largest


@pytest.mark.parametrize("spec", [s for s in STORED if not s.startswith(("lion", "signum"))])
def test_no_storage_sends_a_weight_far_beyond_where_fp32_sends_one(spec: str) -> None:
    """Where v is too coarse its small elements are rounded up, so weights lag instead of running away."""
    reference = path(NATIVE[spec].rule, decades=4, steps=100)
    times = 3.5 if spec == "adamw_int4" else 2.0  # rounding errors of m over those of v
    assert path(spec, decades=4, steps=100).abs().max() < times * reference.abs().max()


@pytest.mark.parametrize("spec", STORED)
def test_error_does_not_grow_with_the_size_of_gradients(spec: str) -> None:
    def error(exponent: int) -> float:
        reference = path(NATIVE[spec].rule, decades=0, steps=20, size=10.0**exponent)
        stored = path(spec, decades=0, steps=20, size=10.0**exponent)
        assert stored.isfinite().all()
        return float((stored - reference).norm() / reference.norm())

    usual = error(0)
    assert 0 < usual < 0.35
    for exponent in (-12, -5, 8):
        assert error(exponent) < 1.1 * usual + 1e-3
