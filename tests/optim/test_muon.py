"""The orthogonalization of Muon by itself: singular values, stacks, precision; the rule is in test_rules_reference."""

import pytest
import torch
from torch import Tensor

from baoc.optim.rules.muon import orthogonalized
from tests.support.tolerances import MUON_BF16


def normal(*shape: int) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(0))


@pytest.mark.parametrize("shape", [(16, 60), (60, 16), (1, 9), (9, 1)])
def test_singular_values_come_near_one_and_singular_vectors_stay(shape: tuple[int, int]) -> None:
    matrix = normal(*shape) * torch.logspace(0, -1, shape[1])
    out = orthogonalized(matrix)
    found = torch.linalg.svdvals(out)
    assert ((found > 0.65) & (found < 1.25)).all()
    left, _, right = torch.linalg.svd(matrix, full_matrices=False)
    turned = left.mT @ out @ right.mT
    assert (turned - torch.diag(turned.diagonal())).abs().max() < 1e-4
    assert (turned.diagonal() > 0.65).all()


def test_a_stack_is_its_matrices() -> None:
    stack = normal(3, 12, 20)
    kept = stack.clone()
    out = orthogonalized(stack)
    assert torch.equal(stack, kept)
    for one, of_stack in zip(stack, out, strict=True):
        torch.testing.assert_close(orthogonalized(one), of_stack, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("size", [1e-30, 1e-12, 1e30])
def test_size_does_not_matter(size: float) -> None:
    torch.testing.assert_close(
        orthogonalized(size * normal(12, 20)), orthogonalized(normal(12, 20)), rtol=1e-4, atol=1e-5
    )


def test_zeros_stay_zeros() -> None:
    stack = torch.stack([torch.zeros(4, 6), normal(4, 6)])
    assert not orthogonalized(stack)[0].any() and orthogonalized(stack)[1].any()


@pytest.mark.parametrize("shape", [(9, 37), (64, 80), (300, 100)])
def test_products_in_bf16_are_as_near_as_said(shape: tuple[int, int]) -> None:
    exact, rounded = orthogonalized(normal(*shape)), orthogonalized(normal(*shape), dtype=torch.bfloat16)
    assert rounded.dtype is torch.float32
    error = float((exact - rounded).square().sum() / exact.square().sum())
    assert MUON_BF16.nmse / 30 < error < MUON_BF16.nmse
    assert float(torch.cosine_similarity(exact.flatten(), rounded.flatten(), dim=0)) > MUON_BF16.cosine
