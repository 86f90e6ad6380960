"""Every statistic against gradients for which its value is known."""

from math import isnan, log, sqrt

import pytest
import torch

from baoc.profiling.statistics import (
    NOISE_CEILING,
    SNR_CEILING,
    factor_residual,
    fold_residuals,
    signal_to_noise,
)
from tests.support.gradients import Stream, make_block, normal, signs, stats_of

NOISE_FLOOR = 0.1 / 1.9  # (1 - b1) / (1 + b1) at b1 = .9


def test_coherence_of_pure_noise_and_of_a_constant_direction():
    noise = stats_of((64, 64), lambda i: normal(64, 64, seed=i), samples=60)
    assert noise.coherence == pytest.approx(NOISE_FLOOR, rel=0.1)
    constant = stats_of((64, 64), lambda i: normal(64, 64, seed=0))
    assert constant.coherence == pytest.approx(1.0, abs=1e-5)


def test_coherence_of_a_mixture_lies_where_the_shares_put_it():
    """g = s + n of equal power: half of it keeps its direction, so kappa = 1/2 + 1/2 * floor."""
    direction = normal(64, 64, seed=0)
    stats = stats_of((64, 64), lambda i: direction + normal(64, 64, seed=i + 1), samples=60)
    assert stats.coherence == pytest.approx(0.5 + 0.5 * NOISE_FLOOR, rel=0.05)


@pytest.mark.parametrize("scale", [0.5, 1.0, 4.0])
def test_noise_from_consecutive_steps_is_tr_cov_over_squared_mean(scale: float):
    direction = normal(64, 64, seed=0)
    stats = stats_of((64, 64), lambda i: direction + scale * normal(64, 64, seed=i + 1))
    expected = scale**2 * 64 * 64 / float(direction.square().sum())
    assert stats.noise == pytest.approx(expected, rel=0.1)


def test_noise_of_pure_noise_is_capped_and_of_a_constant_gradient_zero():
    direction = normal(16, 16, seed=0)
    flips = stats_of((16, 16), lambda i: direction * (-1) ** i)  # <a, c> < 0 at every pair
    assert flips.noise == pytest.approx(NOISE_CEILING, rel=1e-6)
    assert stats_of((16, 16), lambda i: direction).noise == 0


def test_anisotropy_is_the_spread_of_log_v():
    """g^2 = e^(2 s z) exactly, z standard normal: log v has standard deviation 2 s."""
    scale = (0.7 * normal(128, 64, seed=0)).exp()
    stats = stats_of((128, 64), lambda i: scale * signs(128, 64, seed=i + 1))
    assert stats.anisotropy == pytest.approx(2 * 0.7, rel=0.03)
    flat = stats_of((32, 32), lambda i: signs(32, 32, seed=i))
    assert flat.anisotropy == pytest.approx(0.0, abs=1e-6)


def test_spread_is_within_groups_of_32_and_in_storage_order():
    """v is constant inside each group and differs between groups; then the other way round."""
    between = (2 * normal(64, 1, seed=0)).exp().expand(64, 32)
    assert stats_of((64, 32), lambda i: between * signs(64, 32, seed=i)).spread == pytest.approx(0.0, abs=1e-5)
    within = (0.8 * normal(1, 32, seed=0)).exp().expand(64, 32)
    expected = float((0.8 * normal(1, 32, seed=0)).std(correction=0))
    assert stats_of((64, 32), lambda i: within * signs(64, 32, seed=i)).spread == pytest.approx(expected, rel=1e-3)
    stored_in_out = stats_of((64, 32), lambda i: within * signs(64, 32, seed=i), transposed=True)
    assert stored_in_out.spread == pytest.approx(expected, rel=1e-3)


def test_signal_to_noise_of_known_lines():
    """Lines (1, 3): mean 2, variance 2 (unbiased), SNR 2. Lines (1, 1): no variance at all."""
    varying = torch.tensor([[[1.0, 3.0], [10.0, 30.0]]])
    assert signal_to_noise(varying).item() == pytest.approx(2.0, rel=1e-4)
    assert signal_to_noise(torch.ones(1, 3, 4)).item() == pytest.approx(SNR_CEILING, rel=1e-6)
    half_idle = torch.tensor([[[1.0, 3.0], [0.0, 0.0]]])
    assert signal_to_noise(half_idle).item() == pytest.approx(2.0, rel=1e-4)
    assert isnan(signal_to_noise(torch.zeros(1, 3, 4)).item())


@pytest.mark.parametrize("transposed", [False, True])
def test_snr_tells_the_axes_apart_also_when_stored_the_other_way(transposed: bool):
    """v depends on the row (fan-out) only: sharing along fan-in loses nothing, sharing along fan-out does."""
    rows = normal(32, 1, seed=0).exp()
    by_row = rows.expand(32, 24)
    scale = by_row.t().contiguous() if transposed else by_row
    stats = stats_of(tuple(scale.shape), lambda i: scale * signs(*scale.shape, seed=i), transposed=transposed)
    v = rows.square().squeeze()
    assert stats.snr_fan_in == pytest.approx(SNR_CEILING, rel=0.5)
    assert stats.snr_fan_out == pytest.approx(float(v.mean() ** 2 / v.var()), rel=1e-3)


def test_factor_residual_is_zero_for_rank_one_and_known_otherwise():
    rank1 = normal(32, 1, seed=0).exp() * normal(1, 48, seed=1).exp()
    stats = stats_of((32, 48), lambda i: rank1 * signs(32, 48, seed=i))
    assert stats.factor_residual == pytest.approx(0.0, abs=1e-5)
    checkerboard = torch.tensor([[[2.0, 0.0], [0.0, 2.0]]])  # rank1 is all ones
    assert factor_residual(checkerboard).item() == pytest.approx(2 / sqrt(8))


def brute_fold(matrix: torch.Tensor, level: int) -> float:
    """||G - E F(G)||^2 as FOAM writes it: pad with zeros, mean, repeat, cut."""
    size = 2**level
    missing = -matrix.shape[1] % size
    padded = torch.nn.functional.pad(matrix.double(), (0, missing)).unflatten(1, (-1, size))
    residual = (padded - padded.mean(2, keepdim=True)).flatten(1)[:, : matrix.shape[1]]
    return float(residual.square().sum())


@pytest.mark.parametrize("cols", [256, 257, 300, 512, 263])
def test_fold_residuals_equal_the_definition(cols: int):
    matrices = torch.stack([normal(3, cols, seed=s) + s for s in range(2)])
    found = fold_residuals(matrices)
    for index in range(2):
        for k, level in enumerate((1, 2, 3, 8)):
            assert found[index, k].item() == pytest.approx(brute_fold(matrices[index], level), rel=1e-5)


def test_fold_residual_of_smooth_and_rough_gradients():
    """Constant along fan-in nothing is lost, rough along it (1 - 2^-l) of the energy is."""
    rough = stats_of((16, 512), lambda i: normal(1, 512, seed=i).expand(16, 512))
    for level in (1, 2, 3, 8):
        assert rough.fold_residual[f"fan_in:{level}"] == pytest.approx(1 - 2.0**-level, rel=0.05)
    stats = stats_of((512, 16), lambda i: normal(512, 1, seed=i).expand(512, 16))
    assert stats.fold_residual["fan_in:2"] == pytest.approx(0.0, abs=1e-6)
    assert "fan_in:8" not in stats.fold_residual, "256 neighbours do not fit on an axis of 16"


def test_descent_shares_go_by_gradient_and_size():
    """Constant gradients: AdamW's update is 1 everywhere, so <g, u> is |g| x elements."""
    blocks = [make_block("a", (16, 16)), make_block("b", (16, 16)), make_block("c", (64,))]
    stream = Stream(blocks)
    for _ in range(5):
        stream.feed(
            {"a.0": torch.full((16, 16), 0.1), "b.0": torch.full((16, 16), -0.2), "c.0": torch.full((64,), 0.4)}
        )
    stats = stream.profile().stats
    gains = {"a": 25.6, "b": 51.2, "c": 25.6}
    for name, gain in gains.items():
        assert stats[name].descent_share == pytest.approx(gain / sum(gains.values()), rel=1e-4)


def test_a_slice_stands_for_its_whole_parameter_in_descent_shares():
    blocks = [make_block("large", (512, 64)), make_block("small", (16, 16))]
    stream = Stream(blocks, max_bytes=40_000)
    assert stream.profiler.nbytes <= 40_000
    for _ in range(5):
        stream.feed({"large.0": torch.full((512, 64), 0.1), "small.0": torch.full((16, 16), 0.1)})
    stats = stream.profile().stats
    assert stats["large"].descent_share == pytest.approx(512 * 64 / (512 * 64 + 256), rel=1e-4)


@pytest.mark.parametrize("exponent", [-12, -8, 0, 8])
def test_ratios_do_not_depend_on_the_scale_of_gradients(exponent: int):
    def gradient(i: int) -> torch.Tensor:
        return (normal(32, 32, seed=0) + normal(32, 32, seed=i + 1)) * 10.0**exponent

    stats, reference = (stats_of((32, 32), g, eps=1e-30) for g in (gradient, lambda i: gradient(i) / 10.0**exponent))
    for name in ("coherence", "noise", "anisotropy", "snr_fan_in", "factor_residual", "spread"):
        assert getattr(stats, name) == pytest.approx(getattr(reference, name), rel=1e-3), name


def test_blocks_without_matrices_or_gradients_have_no_value_where_there_is_none():
    blocks = [make_block("vector", (40,)), make_block("idle", (8, 8))]
    stream = Stream(blocks)
    for i in range(4):
        stream.feed({"vector.0": normal(40, seed=i), "idle.0": torch.zeros(8, 8)})
    stats = stream.profile().stats
    assert isnan(stats["vector"].snr_fan_in) and isnan(stats["vector"].factor_residual)
    assert stats["vector"].fold_residual == {}
    assert 0 < stats["vector"].coherence <= 1
    idle = stats["idle"]
    assert [isnan(value) for value in (idle.coherence, idle.noise, idle.anisotropy, idle.spread)] == [True] * 4
    assert idle.descent_share == 0.0
    assert idle.fold_residual == {}


def test_two_samples_are_enough_and_one_is_not():
    stream = Stream([make_block("w", (8, 8))])
    assert stream.profile().stats == {}
    stream.feed({"w.0": normal(8, 8, seed=0)})
    assert stream.profile().stats == {}
    stream.feed({"w.0": normal(8, 8, seed=1)})
    stats = stream.profile().stats["w"]
    assert stats.num_samples == 2
    values = [getattr(stats, name) for name in ("coherence", "noise", "anisotropy", "snr_fan_in", "snr_fan_out")]
    assert all(value > 0 for value in values), "NaN is not"
    assert stats.anisotropy < log(1e6)


def test_pieces_of_a_block_count_together():
    """Two matrices of opposite character in one block: kappa is that of their sum, weighted by energy."""
    stream = Stream([make_block("w", (32, 32), (32, 32))])
    constant = 3 * signs(32, 32, seed=99)
    for i in range(60):
        stream.feed({"w.0": constant, "w.1": normal(32, 32, seed=i)})
    assert stream.profile().stats["w"].coherence == pytest.approx(0.9 + 0.1 * NOISE_FLOOR, rel=0.02)
