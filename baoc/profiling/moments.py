"""Averages of g^2 by row and column of whole matrices, from which a block without state can start Adam's v.

They take rows + cols numbers per matrix, and v is their outer product over the mean (as in Adafactor).
"""

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

from baoc.profiling.slices import stored_matrix
from baoc.types import Block, Moments, ParamInfo


class RowColMoments:
    """Exponential averages (decay `beta`) of the row and column sums of g^2, for the matrices among `blocks`.

    They lie in one fp32 buffer of at most `max_bytes`; matrices with the most elements per number come first. A sample
    takes two reductions of the gradient and no copy of it. A row or column with a non-finite element keeps its average.
    """

    def __init__(
        self, blocks: Sequence[Block], *, beta: float, max_bytes: int, device: torch.device, by_parts: bool = False
    ):
        """`by_parts`: gradients of a step come a few at a time, so a second buffer keeps their norms until the end."""
        self._beta = beta
        self._params = _chosen([p for block in blocks for p in block.params], max_bytes=max_bytes // (1 + by_parts))
        self.average = torch.zeros(sum(map(_length, self._params)), dtype=torch.float32, device=device)
        self.norms = torch.zeros_like(self.average) if by_parts else None
        self.num_samples = 0
        self._places: dict[str, Tensor] = {}  # parameter -> its part of `norms`
        if self.norms is not None:
            parts = self.norms.split([_length(param) for param in self._params])
            self._places = {param.name: part for param, part in zip(self._params, parts, strict=True)}

    @property
    def nbytes(self) -> int:
        return sum(tensor.nbytes for tensor in self.tensors())

    def tensors(self) -> list[Tensor]:
        """Every tensor it holds."""
        return [self.average, *([self.norms] if self.norms is not None else [])]

    def observe(self, grads: Mapping[str, Tensor | None]) -> None:
        parts: list[Tensor] = []
        for param in self._params:
            grad = grads[param.name]
            parts += [self.average.new_zeros(_length(param))] if grad is None else _norms(grad)
        if parts:
            self._add(torch.cat(parts))

    def begin_parts(self) -> None:
        assert self.norms is not None, "built without by_parts"
        self.norms.zero_()

    def see_part(self, grads: Mapping[str, Tensor]) -> None:
        for name, grad in grads.items():
            if name in self._places:
                torch.cat(_norms(grad), out=self._places[name])

    def finish_parts(self) -> None:
        if self._params:
            assert self.norms is not None
            self._add(self.norms)

    def _add(self, norms: Tensor) -> None:
        """Adds one sample of row and column norms, which are squared in place."""
        sums = norms.square_()
        self.num_samples += 1
        known = self.average / max(1 - self._beta ** (self.num_samples - 1), 1e-30)
        self.average.lerp_(torch.where(sums.isfinite(), sums, known), 1 - self._beta)

    def moments(self) -> dict[str, Moments]:
        """Parameter name -> means of g^2 by row and column of its (fan_out, fan_in) matrix; empty before a sample."""
        if not self.num_samples:
            return {}
        found: dict[str, Moments] = {}
        averages = self.average / (1 - self._beta**self.num_samples)
        for param, part in zip(self._params, averages.split([_length(p) for p in self._params]), strict=True):
            rows, cols = _stored(param)
            first, second = part[:rows] / cols, part[rows:] / rows
            row, col = (second, first) if param.transposed else (first, second)
            found[param.name] = Moments(row=row, col=col)
        return found

    def release(self) -> None:
        self._params, self.average = (), self.average.new_zeros(0)
        self.norms = None if self.norms is None else self.average
        self._places = {}


def _norms(grad: Tensor) -> list[Tensor]:
    """fp32 norms of the rows and of the columns of a gradient, as stored."""
    grad = stored_matrix(grad)
    rest = tuple(range(1, grad.ndim))
    # vector_norm computes in a wider dtype than its input's on request, never in a narrower one.
    wide = torch.float64 if grad.dtype is torch.float64 else torch.float32
    rows = torch.linalg.vector_norm(grad, dim=rest, dtype=wide).to(torch.float32)
    return [rows, torch.linalg.vector_norm(grad, dim=0, dtype=wide).reshape(-1).to(torch.float32)]


def _stored(param: ParamInfo) -> tuple[int, int]:
    """(rows, columns) as stored."""
    matrix = param.matrix_shape
    assert matrix is not None
    return (matrix[1], matrix[0]) if param.transposed else matrix


def _length(param: ParamInfo) -> int:
    return sum(_stored(param))


def _chosen(params: Sequence[ParamInfo], *, max_bytes: int) -> tuple[ParamInfo, ...]:
    """The matrices in order; if all need more than `max_bytes`, those that need the fewest bytes per element."""
    matrices = [param for param in params if param.matrix_shape is not None]
    left = max_bytes
    kept: set[str] = set()
    for param in sorted(matrices, key=lambda p: _length(p) / p.numel):
        left -= 4 * _length(param)
        if left < 0:
            break
        kept.add(param.name)
    return tuple(param for param in matrices if param.name in kept)
