"""Running sums over sampled gradients, per piece of the slices; `summary` turns them into statistics per block."""

import torch
from torch import Tensor

from baoc.profiling.slices import Slices
from baoc.profiling.statistics import FOLD_LEVELS, energies, fold_residuals
from baoc.profiling.summary import summarise
from baoc.types import GradientStats

# Per piece, float64. Averages with decay beta1: energy ||g||^2, update ||u||^2. Sums over samples: descent <g, u>, and
# signal and noise of pairs of consecutive steps, of accumulation halves, and of folds.
SUMS = ("energy", "update", "descent", "signal", "noise", "half_signal", "half_noise", "fold_total")
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
        self.count = {"samples": 0, "halves": 0}

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

    def halves(self, first: Tensor, whole: Tensor, *, fraction: float) -> None:
        """The part of a step's gradient that its first `fraction` of samples gave, and the whole; writes to `first`.

        With a and c the mean gradients of the parts, E ||a - c||^2 = tr Cov(a) + tr Cov(c) = tr Cov(step) / (f - f^2).
        """
        c = (whole - first).div_(1 - fraction)
        a = first.div_(fraction)
        self.tensors["half_signal"] += self._slices.dots(a, c)
        self.tensors["half_noise"] += self._slices.sums((a - c).square_()) * fraction * (1 - fraction)
        self.count["halves"] += 1

    def statistics(self, *, lr: dict[str, float]) -> dict[str, GradientStats]:
        """By block; empty before two samples."""
        if self.count["samples"] < 2:
            return {}
        return summarise(self._slices, sums=self.tensors, count=self.count, betas=self._betas, lr=lr)
