"""Combines the running sums of sampled pieces into GradientStats per block.

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
    factor_residual,
    log_groups,
    noise_ratio,
    signal_to_noise,
    spread_of,
)
from baoc.types import Axis, Block, GradientStats


def summarise(
    slices: Slices,
    *,
    sums: Mapping[str, Tensor],
    count: Mapping[str, int],
    betas: tuple[float, float],
    lr: Mapping[str, float],
) -> dict[str, GradientStats]:
    """Statistics by block name after `count["samples"]` >= 2 samples, from the tensors of `Averages`."""
    m, v = sums["m"], sums["v"]
    samples = count["samples"]
    start1 = 1 - betas[0] ** samples  # v is taken as it is: what is told of it does not change with its scale
    held = {name: slices.block_sums(values) for name, values in sums.items() if name not in ("m", "v")}
    sizes = slices.block_sums(_per_piece(slices, [piece.numel for piece in slices.pieces], like=sums["energy"]))
    pair = "half_" if count["halves"] else ""
    logs = _log_statistics(slices, v)
    columns = {
        "grad_rms": (held["energy"] / start1 / sizes).sqrt(),
        "coherence": coherence(slices.block_sums(slices.dots(m, m)), held["energy"], beta=betas[0], samples=samples),
        "noise": noise_ratio(held[f"{pair}noise"], held[f"{pair}signal"]),
        "update_rms": (held["update"] / start1 / sizes).sqrt(),
        "anisotropy": logs[0],
        "spread": logs[1],
        **_matrix_statistics(slices, v),
    }
    values = {name: column.tolist() for name, column in columns.items()}
    shares = _descent_shares(slices, sums["descent"], lr=lr)
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


def _descent_shares(slices: Slices, descent: Tensor, *, lr: Mapping[str, float]) -> list[float]:
    """Each block's share of lr <g, u_ref> over the whole network, a piece standing for all of its parameter.

    A block that AdamW moves uphill has share 0; all shares are NaN if there is no descent at all.
    """
    scale = [piece.param.numel / piece.numel * lr.get(piece.param.name, 1.0) for piece in slices.pieces]
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
