"""Averages of g^2 by row and column of whole matrices, from which a block without state can start Adam's v.

They take rows + cols numbers per matrix, and v is their outer product over the mean (as in Adafactor).
"""

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

from baoc.profiling.slices import stored_shape
from baoc.types import Block, Moments, ParamInfo


class RowColMoments:
    """Exponential averages (decay `beta`) of the row sums and column sums of g^2, for the matrices among `blocks`.

    They lie in one fp32 buffer. If `max_bytes` does not hold all, matrices with the fewest numbers per element are
    kept. A sample takes two reductions of the gradient and no copy of it. A row or column with a non-finite element
    keeps its debiased average. Norms are collected in a second buffer between `begin` and `finish`, which is kept with
    `incremental`, where the gradients of a step come a few at a time during backward.
    """

    def __init__(
        self, blocks: Sequence[Block], *, beta: float, max_bytes: int, device: torch.device, incremental: bool = False
    ):
        self._beta = beta
        params = [param for block in blocks for param in block.params]
        self._params = _chosen(params, max_bytes=max_bytes // 2 if incremental else max_bytes)
        self.average = torch.zeros(sum(map(_num_sums, self._params)), dtype=torch.float32, device=device)
        self._kept = torch.zeros_like(self.average) if incremental else None
        self._norms = self.average
        self.num_samples = 0
        self._places: dict[str, Tensor] = {}  # parameter -> its part of the norms, during a sample

    @property
    def nbytes(self) -> int:
        return sum(tensor.nbytes for tensor in self.tensors())

    def tensors(self) -> list[Tensor]:
        """Every tensor it holds."""
        return [self.average, *([self._kept] if self._kept is not None else [])]

    def begin(self) -> None:
        """A sample begins."""
        self._norms = torch.zeros_like(self.average) if self._kept is None else self._kept.zero_()
        parts = self._norms.split([_num_sums(param) for param in self._params])
        self._places = {param.name: part for param, part in zip(self._params, parts, strict=True)}

    def see(self, grads: Mapping[str, Tensor]) -> None:
        """Final gradients of some parameters, by name; what never comes counts as 0."""
        for name, grad in grads.items():
            if name in self._places:
                torch.cat(_norms(grad), out=self._places[name])

    def finish(self) -> None:
        """The gradients of the sample have all been seen."""
        if self._params:
            sums = self._norms.square_()
            self.num_samples += 1
            known = self.average / max(1 - self._beta ** (self.num_samples - 1), 1e-30)
            self.average.lerp_(torch.where(sums.isfinite(), sums, known), 1 - self._beta)
        self._norms, self._places = self.average, {}

    def moments(self) -> dict[str, Moments]:
        """Parameter name -> means of g^2 by row and column of its (fan_out, fan_in) matrix; empty before a sample."""
        if not self.num_samples:
            return {}
        found: dict[str, Moments] = {}
        averages = self.average / (1 - self._beta**self.num_samples)
        for param, part in zip(self._params, averages.split([_num_sums(p) for p in self._params]), strict=True):
            rows, cols = stored_shape(param)
            first, second = part[:rows] / cols, part[rows:] / rows
            row, col = (second, first) if param.transposed else (first, second)
            found[param.name] = Moments(row=row, col=col)
        return found

    def free(self) -> None:
        self._params, self._kept, self._places = (), None, {}
        self.average = self._norms = self.average.new_zeros(0)


def _norms(grad: Tensor) -> list[Tensor]:
    """fp32 norms of the rows and of the columns of a gradient, as stored."""
    grad = grad.squeeze()  # what is left starts with the rows of the stored matrix
    rest = tuple(range(1, grad.ndim))
    # vector_norm computes in a wider dtype than its input's on request, never in a narrower one.
    wide = torch.float64 if grad.dtype is torch.float64 else torch.float32
    rows = torch.linalg.vector_norm(grad, dim=rest, dtype=wide).to(torch.float32)
    return [rows, torch.linalg.vector_norm(grad, dim=0, dtype=wide).reshape(-1).to(torch.float32)]


def _num_sums(param: ParamInfo) -> int:
    return sum(stored_shape(param))


def _chosen(params: Sequence[ParamInfo], *, max_bytes: int) -> tuple[ParamInfo, ...]:
    """The matrices in order; if all need more than `max_bytes`, those that need the fewest bytes per element."""
    matrices = [param for param in params if param.matrix_shape is not None]
    left = max_bytes
    kept: set[str] = set()
    for param in sorted(matrices, key=lambda p: _num_sums(p) / p.numel):
        left -= 4 * _num_sums(param)
        if left < 0:
            break
        kept.add(param.name)
    return tuple(param for param in matrices if param.name in kept)
