"""Running sums over sampled gradients, per piece of the slices, and the GradientStats of each block.

Statistics of elements are made of sums over all pieces of a block. Statistics of matrices are averaged over a block,
weighted by numbers of parameters.
"""

from math import isnan, nan

import torch
from torch import Tensor

from baoc.profiling.slices import Slices
from baoc.profiling.statistics import (
    BAND,
    FOLD_LEVELS,
    coherence,
    energies,
    factor_residual,
    fold_residuals,
    log_groups,
    noise_ratio,
    signal_to_noise,
    spread_of,
)
from baoc.types import GradientStats

# float64 numbers per piece. Average with decay beta1: energy ||g||^2. Sums over samples: descent <g, u>, fold_total
# ||g||^2. Sums over pairs of consecutive steps: signal, noise.
SUMS = ("energy", "descent", "signal", "noise", "fold_total")
NUM_BUFFERS = 2  # of the size of the slices: the averages of g and of g^2
# With the sums that earlier versions had more: the pieces stay the same, so that their checkpoints are continued.
BYTES_PER_PIECE = 8 * (len(SUMS) + 1 + 2 * len(FOLD_LEVELS))


class Averages:
    """AdamW's averages m and v of the sampled gradients, and the sums of SUMS and of folds per piece."""

    def __init__(self, slices: Slices, *, betas: tuple[float, float], eps: float, device: torch.device):
        self._slices, self._betas, self._eps = slices, betas, eps
        num_pieces = len(slices.pieces)
        self.tensors = {name: torch.zeros(num_pieces, dtype=torch.float64, device=device) for name in SUMS}
        self.tensors["folds"] = torch.zeros((num_pieces, len(FOLD_LEVELS)), dtype=torch.float64, device=device)
        self.tensors |= {"m": slices.new(device), "v": slices.new(device)}
        self.count = {"samples": 0}

    def add_sample(self, grad: Tensor) -> None:
        self.count["samples"] += 1
        (beta1, beta2), samples = self._betas, self.count["samples"]
        sums, slices = self.tensors, self._slices
        square = grad * grad
        sums["m"].lerp_(grad, 1 - beta1)
        sums["v"].lerp_(square, 1 - beta2)
        root = sums["v"].sqrt().div_((1 - beta2**samples) ** 0.5).add_(self._eps)
        update = (sums["m"] / root).div_(1 - beta1**samples)  # AdamW's, on the sampled stream
        sums["energy"].lerp_(slices.sums(square), 1 - beta1)
        sums["descent"] += slices.dots(grad, update)
        del square, root, update  # each as large as the buffer
        for batch in slices.batches:
            matrices = batch.view(grad)
            pieces = slice(batch.first, batch.first + batch.count)
            sums["fold_total"][pieces] += energies(matrices)
            sums["folds"][pieces] += fold_residuals(matrices)

    def add_pair(self, a: Tensor, b: Tensor) -> None:
        """Adds gradients of two consecutive steps: E <a, b> = ||E g||^2, E ||a - b||^2 / 2 = tr Cov(g)."""
        self.tensors["signal"] += self._slices.dots(a, b)
        self.tensors["noise"] += self._slices.sums((a - b).square_()) / 2

    def statistics(self) -> dict[str, GradientStats]:
        """GradientStats by block name; empty before two samples."""
        sums, slices, samples = self.tensors, self._slices, self.count["samples"]
        if samples < 2:
            return {}
        m, v = sums["m"], sums["v"]  # v without bias correction, as its statistics do not depend on its scale
        by_block = {name: slices.block_sums(values) for name, values in sums.items() if name not in ("m", "v")}
        anisotropy, spread = _log_statistics(slices, v)
        energy_of_mean = slices.block_sums(slices.dots(m, m))
        columns = {
            "coherence": coherence(energy_of_mean, by_block["energy"], beta=self._betas[0], samples=samples),
            "noise": noise_ratio(by_block["noise"], by_block["signal"]),
            "anisotropy": anisotropy,
            "spread": spread,
            **_matrix_statistics(slices, v),
        }
        values = {name: column.tolist() for name, column in columns.items()}
        shares = _descent_shares(slices, sums["descent"])
        folds = _fold_residuals(slices, total=by_block["fold_total"], folds=by_block["folds"])
        return {
            block.name: GradientStats(
                num_samples=samples,
                descent_share=shares[index],
                fold_residual=folds[index],
                **{name: column[index] for name, column in values.items()},
            )
            for index, block in enumerate(slices.blocks)
        }


def _per_piece(slices: Slices, values: list[int] | list[float], *, like: Tensor) -> Tensor:
    return torch.tensor(values, dtype=torch.float64, device=like.device)


def _log_statistics(slices: Slices, v: Tensor) -> tuple[Tensor, Tensor]:
    """(anisotropy, spread) per block: std of log v over the block; mean over groups of 32 of std of log sqrt v."""
    groups = log_groups(v)
    count, total, squares = (slices.block_sums(slices.sums_of_groups(values)) for values in groups)
    spreads = spread_of(*groups) / 2
    valid = ~spreads.isnan()
    spread_sum = slices.block_sums(slices.sums_of_groups(torch.where(valid, spreads, 0.0)))
    num_valid = slices.block_sums(slices.sums_of_groups(valid.double()))
    return spread_of(count, total, squares), spread_sum / num_valid  # 0 / 0 is NaN, as it should be


def _matrix_statistics(slices: Slices, v: Tensor) -> dict[str, Tensor]:
    """SNR along both axes and factor residual per block: means over its matrices, weighted by parameters."""
    names = ("snr_fan_in", "snr_fan_out", "factor_residual")
    by_piece = torch.full((len(slices.pieces), len(names)), nan, dtype=torch.float64, device=v.device)
    for batch in slices.batches:
        chunk = max(1, BAND // batch.padded)  # matrices at a time
        for number, second in enumerate(batch.view(v).split(chunk)):
            columns = (signal_to_noise(second), signal_to_noise(second.transpose(1, 2)), factor_residual(second))
            first = batch.first + number * chunk
            by_piece[first : first + len(second)] = torch.stack(columns, dim=1)
    weights = _per_piece(slices, [piece.param.numel for piece in slices.pieces], like=v).unsqueeze(1)
    valid = ~by_piece.isnan()
    total = slices.block_sums(torch.where(valid, by_piece, 0.0) * weights)
    means = total / slices.block_sums(valid * weights)
    return {name: means[:, index] for index, name in enumerate(names)}


def _descent_shares(slices: Slices, descent: Tensor) -> list[float]:
    """Each block's share of the network's <g, u_ref>. A piece is scaled to all elements of its parameter.

    A block that AdamW moves uphill has share 0; all shares are NaN if there is no descent at all.
    """
    scale = [piece.param.numel / piece.numel for piece in slices.pieces]
    gains = slices.block_sums(descent * _per_piece(slices, scale, like=descent)).clamp_(min=0.0)
    total = gains.sum()
    return (gains / total).tolist()


def _fold_residuals(slices: Slices, *, total: Tensor, folds: Tensor) -> list[dict[str, float]]:
    """Per block, "fan_in:level" -> ||R||^2 / ||G||^2, for the levels whose folds fit on fan-in of all its matrices."""
    residuals: list[dict[str, float]] = []
    for block, ratios in zip(slices.blocks, (folds / total.unsqueeze(1)).tolist(), strict=True):
        shortest = min((p.matrix_shape[1] for p in block.params if p.matrix_shape is not None), default=0)
        levels = zip(FOLD_LEVELS, ratios, strict=True)
        residuals.append({f"fan_in:{level}": r for level, r in levels if 2**level <= shortest and not isnan(r)})
    return residuals
