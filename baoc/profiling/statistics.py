"""The formulas of gradient statistics, each a function of tensors (docs/methods.md#statistics).

A matrix argument is a batch [count, fan_out, fan_in]; where an axis is meant, it is the last one, so callers transpose.
"""

from collections.abc import Iterator

import torch
from torch import Tensor

from baoc.core.catalogue import GROUP

FOLD_LEVELS = (1, 2, 3, 8)  # 8: of folds that no rule uses any more; profilers in checkpoints hold its sums
BAND = 2**15  # elements converted to float64 at a time: a copy of all would be the largest tensor of a run
SNR_CEILING = 1e6  # reached if v does not vary at all
NOISE_CEILING = 1e6  # reached if the two gradients have nothing in common


def coherence(ema_square: Tensor, mean_square: Tensor, *, beta: float, samples: int) -> Tensor:
    """kappa = ||EMA(g)||^2 / EMA(||g||^2), both averages corrected for their start.

    Pure noise gives (1 - beta) / (1 + beta) after many samples, more after few; a constant direction gives 1.
    `ema_square` is the squared norm of the uncorrected EMA, `mean_square` the uncorrected EMA of the squared norm.
    """
    return _ratio(ema_square, mean_square * (1 - beta**samples)).clamp_(max=1.0)


def noise_ratio(noise: Tensor, signal: Tensor) -> Tensor:
    """N = tr Cov(g) / ||E g||^2 of sums of unbiased estimates of both, at most NOISE_CEILING."""
    return _ratio(noise, torch.maximum(signal, noise / NOISE_CEILING))


def fold_residuals(matrices: Tensor) -> Tensor:
    """||G - E F(G)||^2 per matrix and level, [count, levels], F the mean of 2^level neighbours along the last axis.

    As in FOAM (arXiv 2512.07112), the axis is zero-padded to a multiple of the fold. A fold of n = 2^level elements,
    with sum s and k of them not padding, contributes sum(g^2) - s^2 (2/n - k/n^2). An axis shorter than a fold is one
    fold of its own length.
    """
    length = matrices.shape[-1]
    total = energies(matrices)
    sums, level = matrices, 0
    residuals: list[Tensor] = []
    for next_level in FOLD_LEVELS:
        sums = _fold_sums(sums, times=next_level - level)
        level = next_level
        size = min(2**level, length)
        squares = sums.square().sum(1, dtype=torch.float64)  # [count, folds]
        real = length - (squares.shape[1] - 1) * size  # elements of the last fold that are not padding
        explained = squares.sum(1) / size + squares[:, -1] * (1 / size - real / size**2)
        residuals.append((total - explained).clamp_(min=0.0))
    return torch.stack(residuals, dim=1)


def energies(matrices: Tensor) -> Tensor:
    """||G||^2 per matrix, float64 [count]."""
    return matrices.square().sum((1, 2), dtype=torch.float64)


def signal_to_noise(second: Tensor) -> Tensor:
    """SNR_K = E_{K'}[(E_K V)^2 / Var_K V] per matrix of second moments V, K the last axis (SlimAdam, arXiv 2503.01843).

    Lines without any gradient are left out; NaN if all are. An estimate of V from n independent Gaussian
    samples cannot show more than about n / 2.
    """
    ratios: list[Tensor] = []
    for lines in _scaled(second):
        mean = lines.mean(-1)
        square = mean.square()
        snr = square / (lines.var(-1) + square / SNR_CEILING)
        ratios.append(torch.where(mean > 0, snr, torch.nan))
    return torch.cat(ratios, dim=1).nanmean(-1)


def factor_residual(second: Tensor) -> Tensor:
    """||V - rank1(V)|| / ||V|| per matrix; rank1 is the outer product of row and column means over the mean."""
    rows: list[Tensor] = []
    col = second.new_zeros((len(second), 1, second.shape[2]), dtype=torch.float64)
    for band in _scaled(second):
        rows.append(band.mean(2, keepdim=True))
        col += band.sum(1, keepdim=True)
    col /= second.shape[1]
    col /= torch.cat(rows, dim=1).mean(1, keepdim=True)
    residual, total = (second.new_zeros(len(second), dtype=torch.float64) for _ in range(2))
    for row, band in zip(rows, _scaled(second), strict=True):
        residual += (row * col).sub_(band).square_().sum((1, 2))
        total += band.square_().sum((1, 2))
    return _ratio(residual.sqrt(), total.sqrt())


def log_groups(second: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """(count, sum, sum of squares) of log v over the positive elements of each group of 32: float64 [groups] each."""
    count, total, squares = (second.new_empty(len(second) // GROUP, dtype=torch.float64) for _ in range(3))
    for start in range(0, len(count), BAND // GROUP):
        part = slice(start, start + BAND // GROUP)
        groups = second.view(-1, GROUP)[part]
        positive = groups > 0
        logs = torch.where(positive, groups, 1.0).double().log_()
        count[part], total[part], squares[part] = positive.sum(1), logs.sum(1), logs.square_().sum(1)
    return count, total, squares


def spread_of(count: Tensor, total: Tensor, squares: Tensor) -> Tensor:
    """Standard deviation of log v from its (count, sum, sum of squares); NaN for fewer than two elements."""
    variance = (squares / count - (total / count).square()).clamp_(min=0.0)
    return torch.where(count > 1, variance.sqrt_(), torch.nan)


def _fold_sums(sums: Tensor, *, times: int) -> Tensor:
    """Sums of 2^times neighbours along the last axis, which is zero-padded."""
    size = 2**times
    missing = -sums.shape[-1] % size
    if missing:
        sums = torch.nn.functional.pad(sums, (0, missing))
    return sums.unflatten(-1, (-1, size)).sum(-1)


def _scaled(second: Tensor) -> Iterator[Tensor]:
    """Bands of rows, float64, of each matrix over its largest element: squares of small second moments would vanish."""
    largest = second.amax((1, 2), keepdim=True).clamp_(min=torch.finfo(torch.float32).tiny)
    for band in second.split(max(1, BAND // (len(second) * second.shape[2])), dim=1):
        yield (band / largest).double()


def _ratio(numerator: Tensor, denominator: Tensor) -> Tensor:
    """The quotient; NaN for 0/0."""
    return torch.where(denominator > 0, numerator / denominator, torch.nan)
