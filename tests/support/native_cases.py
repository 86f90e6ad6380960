"""The native step held against the eager one: the same optimizer twice, and what may differ between them.

What differs, and why. torch takes the roots of most tensors with MKL, which is off by a unit in the last place for one
number in six; so a step's update is off by about as much, and a code of v (of m, in int8_root) by one where a number
lies that near to the boundary between two: for a share of about codes x 1e-7, and as much again for the logarithms.
Sums of more than a few numbers (shared v, FOAM's means, the RMS of an update) are added up in another order. All else
is the same bits: m in every storage but int8_root, v in fp32 and bf16, scales but for a share of 2^-16.
"""

from collections.abc import Mapping

import torch
from torch import Tensor

from baoc.core.catalogue import SPECS
from baoc.optim import BlockwiseOptimizer
from baoc.optim.backends.native import native_refusal
from baoc.optim.weights import master
from baoc.types import Placement
from tests.support.optimizing import Gradients, build, make_params, shapes_for

LR = 1e-2
ODD_CODES = 1e-3  # share of codes and scales that may differ in one step, and at least one
RTOL = 2e-6  # of numbers that are added up in another order
UPDATE = 1e-5  # of a learning rate: what an update may differ by
SETTINGS = {"lr": LR, "weight_decay": 0.1}


def stepped(weights: str) -> list[str]:
    """Specs of these weights that have a native step and keep their states where the parameters are."""
    here = [(name, spec) for name, spec in SPECS.items() if spec.placement == Placement.DEVICE]
    return [name for name, spec in here if spec.weights == weights and not native_refusal(spec)]


class Pair:
    """The native optimizer and its eager twin, on gradients that are the same for both."""

    def __init__(
        self, spec: object, shapes: Mapping[str, tuple[int, ...]], *, dtype: torch.dtype = torch.float32, **more
    ):
        self.params = make_params(dict(shapes), dtype=dtype), make_params(dict(shapes), dtype=dtype)
        settings = {**SETTINGS, **more}
        self.native, self.eager = (
            build(params, spec, backend=name, **settings)
            for params, name in zip(self.params, ("native", "eager"), strict=True)
        )
        assert {choice.backend for choice in self.native.registry.choices.values()} == {"native"}
        self.gradients = Gradients(self.params[0], spread=1.0)

    def give(self) -> None:
        self.gradients.give(*self.params)

    def step(self) -> None:
        self.native.step()
        self.eager.step()

    @torch.no_grad()
    def level(self) -> None:
        """Makes the native one what the eager one is, so that the next step starts from equal states."""
        for name, own in self.params[0].items():
            other = self.params[1][name]
            own.copy_(other)
            for key, tensor in self.native.state[own].items():
                tensor.copy_(self.eager.state[other][key])
        for name, live in self.native.registry.live.items():
            match = self.eager.registry.live[name].match
            if live.match is not None and match is not None:
                live.match.copy_(match)

    def check(self) -> None:
        """What one step from equal states may differ by."""
        for name in self.params[0]:
            check_states(self.state(0, name), self.state(1, name), name=name)
            own, other = self.weights(0, name), self.weights(1, name)
            if self.params[0][name].dtype is torch.float32:
                assert ((own - other).abs() <= 2.4e-7 * other.abs() + UPDATE * LR).all(), name
            else:
                assert differing(own, other) <= allowed(own), name
                assert ((own - other).abs() <= 2**-7 * other.abs() + UPDATE * LR).all(), name
        for name, live in self.native.registry.live.items():
            match = self.eager.registry.live[name].match
            if live.match is not None and match is not None:
                torch.testing.assert_close(live.match, match, rtol=1e-5, atol=0)

    def state(self, which: int, name: str) -> dict[str, Tensor]:
        optimizer: BlockwiseOptimizer = (self.native, self.eager)[which]
        return dict(optimizer.state[self.params[which][name]])

    def weights(self, which: int, name: str) -> Tensor:
        """The numbers that the parameter stands for."""
        return master(self.params[which][name].detach(), self.state(which, name)).float()


def check_states(own: Mapping[str, Tensor], other: Mapping[str, Tensor], *, name: str) -> None:
    assert own.keys() == other.keys()
    for key, tensor in own.items():
        where = f"{name}: {key}"
        if key == "step":
            assert torch.equal(tensor, other[key]), where
        elif tensor.dtype is torch.float32:
            size = float(other[key].abs().max()) if tensor.numel() else 0.0  # sums of both signs cancel
            torch.testing.assert_close(tensor, other[key], rtol=RTOL, atol=RTOL * size, msg=where)
        elif key == "correction" and tensor.dtype is torch.int16:
            pass  # one unit of fp32: `check` compares the weights
        else:
            assert differing(tensor, other[key]) <= allowed(tensor), where


def differing(own: Tensor, other: Tensor) -> int:
    return int((own != other).sum())


def allowed(tensor: Tensor) -> int:
    """Of codes, and of numbers of 16 bits."""
    return max(1, int(ODD_CODES * tensor.numel()))


def shapes_of(spec: str) -> dict[str, tuple[int, ...]]:
    return shapes_for(spec)
