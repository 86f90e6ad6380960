"""Averages of g^2 by row and column of matrices, from which a block without state can start Adam's v.

They take rows + cols numbers per matrix, and v is their outer product over the mean (as in Adafactor).
"""

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

from baoc.profiling.slices import stored_shape
from baoc.types import Block, Moments, ParamInfo


class RowColSecondMoments:
    """Exponential averages (decay `beta`) of the row sums and column sums of g^2, for the matrices among `blocks`.

    They lie in one fp32 buffer. If `max_bytes` does not hold all, matrices with the fewest sums per element are
    averaged. A sample takes two reductions of the gradient and no copy of it. A row or column with a non-finite element
    keeps its debiased average.

    A sample runs from `begin` to `end`, and `add` may be called for some gradients at a time. Its norms are collected
    in a second buffer. With `incremental` this buffer is allocated at once, as a step's backward pass may have no room.
    """

    def __init__(
        self, blocks: Sequence[Block], *, beta: float, max_bytes: int, device: torch.device, incremental: bool = False
    ):
        self._beta = beta
        params = [param for block in blocks for param in block.params]
        self._params = _matrices_within(params, max_bytes=max_bytes // 2 if incremental else max_bytes)
        self.average = torch.zeros(sum(map(_num_sums, self._params)), dtype=torch.float32, device=device)
        self._own_norms = torch.zeros_like(self.average) if incremental else None
        self._norms = self.average  # outside of a sample, when nothing reads it
        self.num_samples = 0
        self._norms_of: dict[str, Tensor] = {}  # parameter -> view of its norms, during a sample

    @property
    def nbytes(self) -> int:
        return sum(tensor.nbytes for tensor in self.tensors())

    def tensors(self) -> list[Tensor]:
        """Every buffer that exists between samples."""
        return [self.average, *([self._own_norms] if self._own_norms is not None else [])]

    def begin(self) -> None:
        self._norms = torch.zeros_like(self.average) if self._own_norms is None else self._own_norms.zero_()
        views = self._norms.split([_num_sums(param) for param in self._params])
        self._norms_of = {param.name: view for param, view in zip(self._params, views, strict=True)}

    def add(self, grads: Mapping[str, Tensor]) -> None:
        """Adds final gradients of some parameters, by name. Gradients that are never added count as 0."""
        for name, grad in grads.items():
            if name in self._norms_of:
                torch.cat(_norms(grad), out=self._norms_of[name])

    def end(self) -> None:
        if self._params:
            sums = self._norms.square_()
            self.num_samples += 1
            debiased = self.average / max(1 - self._beta ** (self.num_samples - 1), 1e-30)
            self.average.lerp_(torch.where(sums.isfinite(), sums, debiased), 1 - self._beta)
        self._norms, self._norms_of = self.average, {}

    def moments(self) -> dict[str, Moments]:
        """Parameter name -> means of g^2 by row and column of its (fan_out, fan_in) matrix; empty before a sample."""
        if not self.num_samples:
            return {}
        moments: dict[str, Moments] = {}
        averages = self.average / (1 - self._beta**self.num_samples)
        for param, part in zip(self._params, averages.split([_num_sums(p) for p in self._params]), strict=True):
            rows, cols = stored_shape(param)
            first, second = part[:rows] / cols, part[rows:] / rows
            row, col = (second, first) if param.transposed else (first, second)
            moments[param.name] = Moments(row=row, col=col)
        return moments

    def free(self) -> None:
        self._params, self._own_norms, self._norms_of = (), None, {}
        self.average = self._norms = self.average.new_zeros(0)


def _norms(grad: Tensor) -> list[Tensor]:
    """fp32 norms of the rows, and of the columns, of a gradient as it is stored."""
    grad = grad.squeeze()  # its first dimension is then the rows of the stored matrix
    rest = tuple(range(1, grad.ndim))
    # vector_norm computes in a wider dtype than its input's on request, never in a narrower one.
    wide = torch.float64 if grad.dtype is torch.float64 else torch.float32
    rows = torch.linalg.vector_norm(grad, dim=rest, dtype=wide).to(torch.float32)
    return [rows, torch.linalg.vector_norm(grad, dim=0, dtype=wide).reshape(-1).to(torch.float32)]


def _num_sums(param: ParamInfo) -> int:
    return sum(stored_shape(param))


def _matrices_within(params: Sequence[ParamInfo], *, max_bytes: int) -> tuple[ParamInfo, ...]:
    """The matrices in order; if all need more than `max_bytes`, those that need the fewest bytes per element."""
    matrices = [param for param in params if param.matrix_shape is not None]
    remaining = max_bytes
    chosen: set[str] = set()
    for param in sorted(matrices, key=lambda p: _num_sums(p) / p.numel):
        remaining -= 4 * _num_sums(param)
        if remaining < 0:
            break
        chosen.add(param.name)
    return tuple(param for param in matrices if param.name in chosen)
