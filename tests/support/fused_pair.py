"""The same optimizer twice, fused and eager, on one stream of gradients: what the tests of the fused backend share."""

import torch
from torch import Tensor

from baoc.optim import BlockwiseOptimizer
from tests.support.optimizing import Gradients, build, make_params

SHAPES = {"a": (9, 37), "b": (40,), "c": (4, 65), "d": (3, 5, 7), "one": (1,), "empty": (0,)}
SMALL = {"a": (9, 37), "b": (40,)}
MIXED = {
    "a": "adamw", "b": "rmsprop_int8", "c": "lion_int8", "d": "adamw_int8_root", "one": "sign", "empty": "signum",
}  # fmt: skip


class Pair:
    """The same optimizer twice, fused and eager."""

    def __init__(self, specs: object, shapes: dict[str, tuple[int, ...]] = SHAPES, **settings: object):
        self.params = make_params(shapes), make_params(shapes)
        settings = {"lr": 1e-2, "weight_decay": 0.1, **settings}
        self.fused, self.eager = (
            build(params, specs, backend=name, **settings)
            for params, name in zip(self.params, ("fused", "eager"), strict=True)
        )
        self.gradients = Gradients(self.params[0])

    def give(self) -> None:
        self.gradients.give(*self.params)

    def step(self) -> None:
        self.fused.step()
        self.eager.step()

    def run(self, steps: int) -> None:
        for _ in range(steps):
            self.give()
            self.step()

    def check(self, *, steps: float = 0.1) -> None:
        """Weights agree to a fraction of what a step moves; step counts and matching state do too.

        Codes differ rarely, by one where a number lies between two; what follows stays within a part of a step.
        """
        lr = max(group["lr"] for group in self.fused.param_groups)
        for name, own in self.params[0].items():
            gap = (own.detach() - self.params[1][name].detach()).abs()
            assert not gap.numel() or gap.max() <= steps * lr, f"{name}: {gap.max():.1e}"
            mine, other = (o.state[p[name]] for o, p in zip((self.fused, self.eager), self.params, strict=True))
            assert mine.keys() == other.keys()
            assert "step" not in mine or torch.equal(mine["step"], other["step"])
        for block, live in self.fused.registry.live.items():
            match = self.eager.registry.live[block].match
            assert (live.match is None) == (match is None)
            if match is not None:
                torch.testing.assert_close(live.match, match, rtol=1e-2, atol=1e-6)


def dump(optimizer: BlockwiseOptimizer, params: dict[str, Tensor]) -> dict[str, Tensor]:
    return {
        **{name: p.detach().clone() for name, p in params.items()},
        **{f"{n}.{k}": v.clone() for n, p in params.items() for k, v in optimizer.state[p].items()},
    }


def poison(params: dict[str, Tensor], *, value: float = float("nan"), other: str = "c") -> None:
    """Makes 8 elements of `a` and one of another parameter bad."""
    params["a"].grad[0, ::5] = value
    params[other].grad[1, 3] = -value
