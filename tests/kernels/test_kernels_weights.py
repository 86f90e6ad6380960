"""bf16 weights with an int8 correction: error bounds, exact cases, and small steps that add up.

The bounds are those of docs/methods.md#weight-splitting.
"""

import pytest
import torch
from torch import Tensor

from baoc.optim.codecs import lanes
from baoc.optim.weights import merge_weights, random_bits, round_at_random_, split_weights_

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


def test_a_weight_that_does_not_change_keeps_its_bits():
    """N2: merging rounds to fp32, and 127 of one bf16 number is -127 of the next: neither may move an idle weight."""
    numbers = torch.arange(-(2**15), 2**15, dtype=torch.int32).to(torch.int16).view(torch.bfloat16)
    numbers = numbers[numbers.isfinite() & (numbers.abs() > 1e-30) & (numbers.abs() < 1e30)][::7]
    codes = torch.arange(-127, 128, dtype=torch.int8)
    near, correction = (x.reshape(-1).clone() for x in (numbers.repeat(255, 1).t(), codes.repeat(len(numbers), 1)))
    before = near.clone(), correction.clone()
    for step in range(8):
        values = merge_weights(near, correction)
        split_weights_(near, correction, values=values, thresholds=lanes(step, torch.device("cpu")))
        assert torch.equal(near, before[0]) and torch.equal(correction, before[1])


def hashed(index: int, *, seed: int, phase: int) -> int:
    """The hash in Python's integers."""
    h = (index * 0x9E3779B1 + seed + phase * 0x85EBCA77) % 2**32
    h = (h ^ h >> 16) * 0x7FEB352D % 2**32
    h = (h ^ h >> 15) * 0x846CA68B % 2**32
    return (h ^ h >> 16) & 0xFFFF


class TestRoundingAtRandom:
    def test_bits_are_the_hash_of_index_seed_and_phase(self):
        for seed, phase in ((0, 0), (-5, 1), (2**31 - 1, 123_456_789)):
            bits = random_bits(1000, seed=seed, phase=phase, device=torch.device("cpu"))
            assert bits.tolist() == [hashed(index, seed=seed, phase=phase) for index in range(1000)]

    def test_bits_are_spread_evenly_over_elements_steps_and_seeds(self):
        cpu = torch.device("cpu")
        over_elements = random_bits(2**16, seed=1, phase=1, device=cpu)
        over_steps = torch.cat([random_bits(1, seed=1, phase=step, device=cpu) for step in range(2**12)])
        over_seeds = torch.cat([random_bits(1, seed=seed * 77, phase=1, device=cpu) for seed in range(2**12)])
        for bits in (over_elements, over_steps, over_seeds):
            uniform = bits.double() / 2**16
            assert abs(float(uniform.mean()) - 0.5) < 4 * 0.29 / len(bits) ** 0.5
            counts = torch.histc(uniform, 16, min=0, max=1)
            assert float(((counts - len(bits) / 16) ** 2 / (len(bits) / 16)).sum()) < 45  # chi^2 of 15, p < 1e-4
        other = random_bits(2**16, seed=1, phase=2, device=cpu).double()
        assert abs(float(torch.corrcoef(torch.stack([over_elements.double(), other]))[0, 1])) < 0.02

    @pytest.mark.slow
    def test_the_mean_over_steps_is_the_number(self):
        values = torch.tensor([0.9, -0.9001, 1.0 + 2.0**-9, 1e-6, -3e-39, 0.0, 0.99951171875])
        total = torch.zeros(len(values), dtype=torch.float64)
        near, steps = torch.empty_like(values, dtype=torch.bfloat16), 20_000
        for phase in range(steps):
            round_at_random_(near, values=values, seed=3, phase=phase)
            total += near.double()
        ulp = values.double().abs() * 2.0**-7 + 1e-40
        assert ((total / steps - values.double()).abs() < 4 * 0.5 * ulp / steps**0.5).all()

    def test_bf16_numbers_and_what_is_not_finite_stay(self):
        numbers = torch.arange(-(2**15), 2**15, dtype=torch.int32).to(torch.int16).view(torch.bfloat16)
        near = torch.empty_like(numbers)
        round_at_random_(near, values=numbers.to(FLOAT32), seed=1, phase=9)
        torch.testing.assert_close(near, numbers, rtol=0, atol=0, equal_nan=True)
        largest = torch.full((64,), torch.finfo(FLOAT32).max)
        round_at_random_(near[:64], values=largest, seed=1, phase=9)
        assert near[:64].isfinite().all()
