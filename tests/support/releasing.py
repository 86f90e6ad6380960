"""Pairs of optimizers, one of which releases its gradients, on gradients that both get from a backward pass."""

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from baoc.optim import BlockwiseOptimizer
from tests.support.optimizing import Gradients, build, make_params, state_tensors, twin_of, values

Params = dict[str, Tensor]


def backward(params: Mapping[str, Tensor], grads: Mapping[str, Tensor]) -> None:
    """A backward pass whose gradients are `grads`; parameters that are not named there get none."""
    terms = [(params[name] * grad.to(params[name].dtype)).sum().float() for name, grad in grads.items()]
    torch.stack(terms).sum().backward()


class Pair:
    """The same parameters under the same optimizer, `kept` with gradients kept and `released` without."""

    def __init__(self, specs: Any, shapes: dict[str, tuple[int, ...]], *, release: Any = True, **settings: Any):
        self.params = make_params(shapes)
        self.twins = twin_of(self.params)
        self.gradients = Gradients(self.params)
        self.kept = build(self.params, specs, **settings)
        self.released = build(self.twins, specs, release=release, **settings)

    def step(self, grads: Mapping[str, Tensor] | None = None) -> None:
        grads = self.gradients.next() if grads is None else grads
        for optimizer, params in ((self.kept, self.params), (self.released, self.twins)):
            optimizer.zero_grad()
            backward(params, grads)
            optimizer.step()

    def check(self) -> None:
        """Weights and states bit for bit."""
        assert_equal(self.kept, self.params, self.released, self.twins)


def assert_equal(a: BlockwiseOptimizer, params: Params, b: BlockwiseOptimizer, twins: Params) -> None:
    assert a.num_steps == b.num_steps
    for mine, theirs in ((values(params), values(twins)), (state_tensors(a), state_tensors(b))):
        assert mine.keys() == theirs.keys()
        for name, value in mine.items():
            assert value.dtype == theirs[name].dtype, name
            assert torch.equal(value, theirs[name]), name
