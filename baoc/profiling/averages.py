"""Running sums over sampled gradients, per piece of the slices, and GradientStats per block made of them.

Sums over elements are added over a block's pieces. Ratios per matrix are averaged, weighted by numbers of parameters.
"""

from collections.abc import Mapping
from math import nan

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
from baoc.types import Axis, Block, GradientStats

# Per piece, float64. Averages with decay beta1: energy ||g||^2, update ||u||^2. Sums over samples: descent <g, u>, and
# signal and noise of pairs of consecutive steps, and of folds.
SUMS = ("energy", "update", "descent", "signal", "noise", "fold_total")
BUFFERS = 2  # of the size of the slices: the averages of g and of g^2
BYTES_PER_PIECE = 8 * (len(SUMS) + 2 * len(FOLD_LEVELS))


class Averages:
    """AdamW's averages m and v of the sampled gradients, and sums of what is derived from them."""

    def __init__(self, slices: Slices, *, betas: tuple[float, float], eps: float, device: torch.device):
        self._slices, self._betas, self._eps = slices, betas, eps
        num_pieces = len(slices.pieces)
        self.tensors = {name: torch.zeros(num_pieces, dtype=torch.float64, device=device) for name in SUMS}
        self.tensors["folds"] = torch.zeros((num_pieces, 2 * len(FOLD_LEVELS)), dtype=torch.float64, device=device)
        self.tensors |= {"m": slices.new(device), "v": slices.new(device)}
        self.count = {"samples": 0}

    @property
    def nbytes(self) -> int:
        return sum(tensor.nbytes for tensor in self.tensors.values())

    def sample(self, grad: Tensor) -> None:
        """Adds the gradient in the buffer `grad`."""
        self.count["samples"] += 1
        (beta1, beta2), samples = self._betas, self.count["samples"]
        held, slices = self.tensors, self._slices
        square = grad * grad
        held["m"].lerp_(grad, 1 - beta1)
        held["v"].lerp_(square, 1 - beta2)
        root = held["v"].sqrt().div_((1 - beta2**samples) ** 0.5).add_(self._eps)
        update = (held["m"] / root).div_(1 - beta1**samples)  # AdamW's, on the sampled stream
        held["energy"].lerp_(slices.sums(square), 1 - beta1)
        held["descent"] += slices.dots(grad, update)
        held["update"].lerp_(slices.sums(update.square_()), 1 - beta1)
        del square, root, update  # which are as large as all that is sampled
        for batch in slices.batches:
            matrices = batch.view(grad)
            pieces = slice(batch.first, batch.first + batch.count)
            held["fold_total"][pieces] += energies(matrices)
            folds = (fold_residuals(matrices), fold_residuals(matrices.transpose(1, 2)))
            held["folds"][pieces] += torch.cat(folds, dim=1)

    def pair(self, a: Tensor, c: Tensor) -> None:
        """Gradients of two consecutive steps: E <a, c> = ||E g||^2, E ||a - c||^2 / 2 = tr Cov(g)."""
        self.tensors["signal"] += self._slices.dots(a, c)
        self.tensors["noise"] += self._slices.sums((a - c).square_()) / 2

    def statistics(self) -> dict[str, GradientStats]:
        """By block; empty before two samples."""
        if self.count["samples"] < 2:
            return {}
        return summarise(self._slices, sums=self.tensors, count=self.count, betas=self._betas)


def summarise(
    slices: Slices,
    *,
    sums: Mapping[str, Tensor],
    count: Mapping[str, int],
    betas: tuple[float, float],
) -> dict[str, GradientStats]:
    """Statistics by block name after `count["samples"]` >= 2 samples, from the tensors of `Averages`."""
    m, v = sums["m"], sums["v"]
    samples = count["samples"]
    start1 = 1 - betas[0] ** samples  # v is taken as it is: what is told of it does not change with its scale
    held = {name: slices.block_sums(values) for name, values in sums.items() if name not in ("m", "v")}
    sizes = slices.block_sums(_per_piece(slices, [piece.numel for piece in slices.pieces], like=sums["energy"]))
    logs = _log_statistics(slices, v)
    columns = {
        "grad_rms": (held["energy"] / start1 / sizes).sqrt(),
        "coherence": coherence(slices.block_sums(slices.dots(m, m)), held["energy"], beta=betas[0], samples=samples),
        "noise": noise_ratio(held["noise"], held["signal"]),
        "update_rms": (held["update"] / start1 / sizes).sqrt(),
        "anisotropy": logs[0],
        "spread": logs[1],
        **_matrix_statistics(slices, v),
    }
    values = {name: column.tolist() for name, column in columns.items()}
    shares = _descent_shares(slices, sums["descent"])
    folds = _fold_residuals(slices, total=held["fold_total"], folds=held["folds"])
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
    whole = [slices.block_sums(slices.group_sums(part)) for part in groups]
    spreads = spread_of(*groups) / 2
    known = ~spreads.isnan()
    total = slices.block_sums(slices.group_sums(torch.where(known, spreads, 0.0)))
    num = slices.block_sums(slices.group_sums(known.double()))
    return spread_of(whole[0], whole[1], whole[2]), total / num  # 0 / 0 is NaN, as it should be


def _matrix_statistics(slices: Slices, v: Tensor) -> dict[str, Tensor]:
    """SNR along both axes and factor residual per block: means over its matrices, weighted by parameters."""
    names = ("snr_fan_in", "snr_fan_out", "factor_residual")
    found = torch.full((len(slices.pieces), len(names)), nan, dtype=torch.float64, device=v.device)
    for batch in slices.batches:
        at_once = max(1, BAND // batch.padded)
        for start, second in enumerate(batch.view(v).split(at_once)):
            columns = (signal_to_noise(second), signal_to_noise(second.transpose(1, 2)), factor_residual(second))
            first = batch.first + start * at_once
            found[first : first + len(second)] = torch.stack(columns, dim=1)
    weights = _per_piece(slices, [piece.param.numel for piece in slices.pieces], like=v).unsqueeze(1)
    known = ~found.isnan()
    total = slices.block_sums(torch.where(known, found, 0.0) * weights)
    means = total / slices.block_sums(known * weights)
    return {name: means[:, index] for index, name in enumerate(names)}


def _descent_shares(slices: Slices, descent: Tensor) -> list[float]:
    """Each block's share of <g, u_ref> over the whole network, a piece standing for all of its parameter.

    A block that AdamW moves uphill has share 0; all shares are NaN if there is no descent at all.
    """
    scale = [piece.param.numel / piece.numel for piece in slices.pieces]
    gains = slices.block_sums(descent * _per_piece(slices, scale, like=descent)).clamp_(min=0.0)
    total = gains.sum()
    return (gains / total).tolist()


def _fold_residuals(slices: Slices, *, total: Tensor, folds: Tensor) -> list[dict[str, float]]:
    """Per block "axis:level" -> ||R||^2 / ||G||^2, for the levels whose folds fit on the axis of all its matrices."""
    keys = [(axis, level) for axis in (Axis.FAN_IN, Axis.FAN_OUT) for level in FOLD_LEVELS]
    ratios = (folds / total.unsqueeze(1)).tolist()
    return [
        {
            f"{axis}:{level}": ratios[index][k]
            for k, (axis, level) in enumerate(keys)
            if 2**level <= _shortest(block, axis) and ratios[index][k] == ratios[index][k]
        }
        for index, block in enumerate(slices.blocks)
    ]


def _shortest(block: Block, axis: Axis) -> float:
    """Length of the shortest axis of that kind among the block's matrices; 0 without matrices."""
    lengths = [p.matrix_shape[axis is Axis.FAN_IN] for p in block.params if p.matrix_shape is not None]
    return min(lengths, default=0)
