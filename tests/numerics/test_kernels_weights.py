"""bf16 weights with an int8 correction: error bounds of METHODS 3, exact cases, and small steps that add up."""

import pytest
import torch
from torch import Tensor

from baoc.codecs.base import lanes
from baoc.kernels import merge_weights, split_weights_

FLOAT32 = torch.float32


def round_trip(values: Tensor) -> Tensor:
    near = torch.empty_like(values, dtype=torch.bfloat16)
    correction = torch.empty_like(values, dtype=torch.int8)
    split_weights_(near, correction, values=values)
    assert torch.equal(near, values.to(torch.bfloat16)), "the bf16 part must be the nearest bf16 number"
    return merge_weights(near, correction)


@pytest.mark.parametrize("power", [-30, -12, 0, 8, 30])
def test_error_is_at_most_a_254th_of_half_a_unit(power: int):
    values = torch.randn(100_000, generator=torch.Generator().manual_seed(0)) * 10.0**power
    error = ((round_trip(values) - values) / values).abs().max()
    assert 1e-6 < error < 1.6e-5
    alone = ((values.to(torch.bfloat16).to(FLOAT32) - values) / values).abs().max()
    assert alone > 200 * error


def test_bf16_numbers_come_back_exactly():
    numbers = torch.arange(-(2**15), 2**15, dtype=torch.int32).to(torch.int16).view(torch.bfloat16)
    numbers = numbers[numbers.isfinite()].to(FLOAT32)
    assert torch.equal(round_trip(numbers), numbers)


def test_powers_of_two_from_below_stay_within_the_correction():
    """Just below 2^k the nearest bf16 number may be 2^k, whose unit is twice that of the numbers below it."""
    values = torch.exp2(torch.arange(-100, 100, dtype=FLOAT32)) * (1 - 2.0**-10)
    torch.testing.assert_close(round_trip(values), values, rtol=1.6e-5, atol=0.0)


def test_small_steps_add_up():
    """N5: bf16 alone stays near 0.9 when 300 steps of 1e-4 are taken off. The correction is 1.5e-5 apart there, so to
    nearest it would be 8 % off after steps of 1e-4, and deaf to steps of 7e-6; by thresholds it is exact on average."""
    for size in (1e-4, 7e-6):
        start = torch.full((40,), 0.9)
        near, correction = start.to(torch.bfloat16), torch.zeros(40, dtype=torch.int8)
        split_weights_(near, correction, values=start)
        alone = near.clone()
        for step in range(300):
            thresholds = lanes(step, torch.device("cpu"))
            split_weights_(near, correction, values=merge_weights(near, correction) - size, thresholds=thresholds)
            alone = (alone.to(FLOAT32) - size).to(torch.bfloat16)
        torch.testing.assert_close(merge_weights(near, correction), start - 300 * size, rtol=0.0, atol=6e-5)
        assert (alone > 0.89).all()
