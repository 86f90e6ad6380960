"""The count of operations of `experiments.benchmarks.matrix_step` is that of the products which the kernel starts."""

import pytest
import torch

from baoc.kernels.polar import workspace_bytes
from experiments.benchmarks.matrix_step import operations
from tests.support.interpreting import interpreted


@interpreted
@pytest.mark.parametrize(("lines", "length"), [(16, 16), (16, 48), (48, 16), (32, 64)])
def test_operations_are_those_of_the_products_that_are_started(lines: int, length: int, monkeypatch):
    from baoc.kernels.triton import orthogonal  # after Triton, which is told at its import to interpret

    counted: list[int] = []

    def product(a: torch.Tensor, b: torch.Tensor, out: torch.Tensor, *, symmetric: bool, **_: object) -> None:
        num, rows, depth = a.shape
        assert out.shape == (num, rows, b.shape[1])
        counted.append(num * rows * b.shape[1] * depth * (1 if symmetric else 2))  # multiplied and added, or the half

    monkeypatch.setattr(orthogonal, "product", product)
    workspace = torch.zeros(workspace_bytes(1, lines, length), dtype=torch.uint8)
    orthogonal.orthogonalize(workspace, num=1, lines=lines, length=length)
    assert sum(counted) == operations(lines, length)
