"""Small parameter sets, gradients and loops that tests of rules, codecs and the optimizer share."""

import io
from collections.abc import Iterable, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from baoc.core.catalogue import SPECS
from baoc.optim import BlockwiseOptimizer
from baoc.optim.rules import RULES
from baoc.types import Block, ParamInfo, Role

MATRICES = {"linear": (17, 64), "position": (1, 17, 64), "conv": (8, 3, 3, 5), "odd": (9, 37), "large": (65, 67)}
VECTORS = {"one": (1,), "bias": (7,), "v255": (255,), "v256": (256,), "v257": (257,), "v9991": (9991,), "empty": (0,)}
SHAPES = {**MATRICES, **VECTORS}


def shapes_for(spec: str) -> dict[str, tuple[int, ...]]:
    """Every shape that a spec can run on."""
    return MATRICES if RULES[SPECS[spec].rule].info.needs_matrix else SHAPES


def make_params(
    shapes: dict[str, tuple[int, ...]], *, seed: int = 0, dtype: torch.dtype = torch.float32
) -> dict[str, Tensor]:
    """Named parameters with normal values; the same seed gives the same values."""
    generator = torch.Generator().manual_seed(seed)
    return {n: nn.Parameter(torch.randn(s, generator=generator).to(dtype)) for n, s in shapes.items()}


def build(params: dict[str, Tensor], specs: object = "adamw", **settings: object) -> BlockwiseOptimizer:
    """An optimizer over named parameters."""
    return BlockwiseOptimizer([{"params": list(params.items())}], specs, **settings)  # pyright: ignore


def info(name: str, shape: Sequence[int], *, transposed: bool = False, role: Role = Role.OTHER) -> ParamInfo:
    return ParamInfo(name=name, shape=tuple(shape), dtype="float32", role=role, transposed=transposed)


def one_block(name: str, infos: Iterable[ParamInfo]) -> Block:
    return Block(name=name, params=tuple(infos), role=Role.OTHER)


class Gradients:
    """A seeded stream of gradients: noise around a fixed direction, with a scale of its own per element."""

    def __init__(self, params: dict[str, Tensor], *, seed: int = 1, signal: float = 0.3, spread: float = 0.5):
        self.generator = torch.Generator().manual_seed(seed)
        self.scale = {n: torch.exp(spread * self._normal(p)) for n, p in params.items()}
        self.mean = {n: signal * self._normal(p) for n, p in params.items()}

    def _normal(self, like: Tensor) -> Tensor:
        return torch.randn(like.shape, generator=self.generator)

    def next(self) -> dict[str, Tensor]:
        return {name: scale * (self._normal(scale) + self.mean[name]) for name, scale in self.scale.items()}

    def give(self, *params: dict[str, Tensor]) -> dict[str, Tensor]:
        """Draws once and sets `.grad` of each set of parameters to it."""
        grads = self.next()
        for named in params:
            for name, param in named.items():
                param.grad = grads[name].to(param.dtype).clone()
        return grads


def run_steps(optimizer: torch.optim.Optimizer, params: dict[str, Tensor], *, gradients: Gradients, steps: int) -> None:
    for _ in range(steps):
        gradients.give(params)
        optimizer.step()


def run_alike(
    optimizers: Sequence[torch.optim.Optimizer],
    params: Sequence[dict[str, Tensor]],
    *,
    gradients: Gradients,
    steps: int,
) -> None:
    """Steps all on the same gradients."""
    for _ in range(steps):
        gradients.give(*params)
        for optimizer in optimizers:
            optimizer.step()


def trained(
    shapes: dict[str, tuple[int, ...]],
    specs: object = "adamw",
    *,
    steps: int,
    dtype: torch.dtype = torch.float32,
    **settings: object,
) -> tuple[dict[str, Tensor], BlockwiseOptimizer, Gradients]:
    """Parameters, their optimizer after some steps, and where the next gradients come from."""
    params = make_params(shapes, dtype=dtype)
    optimizer = build(params, specs, **settings)
    gradients = Gradients(params)
    run_steps(optimizer, params, gradients=gradients, steps=steps)
    return params, optimizer, gradients


def state_tensors(optimizer: BlockwiseOptimizer) -> dict[str, Tensor]:
    """Every tensor the optimizer keeps, found without its own accounting."""
    found = {}
    for index, state in enumerate(optimizer.state.values()):
        found |= {f"{index}.{key}": value for key, value in state.items()}
    for name, live in optimizer.registry.live.items():
        if live.match is not None:
            found[f"{name}.match"] = live.match
    return found


def assert_same(a: dict[str, Tensor], b: dict[str, Tensor]) -> None:
    """Bit for bit, dtypes included."""
    assert a.keys() == b.keys()
    for name, value in a.items():
        assert value.dtype == b[name].dtype and torch.equal(value, b[name]), name


def states_by_name(saved: dict[str, Any]) -> dict[str, dict[str, Tensor]]:
    """The states of a checkpoint, which has them by index."""
    names = [name for group in saved["param_groups"] for name in group["param_names"]]
    return {names[index]: state for index, state in saved["state"].items()}


def through_file(state: dict[str, Any]) -> dict[str, Any]:
    """Written and read as the strictest loader does: tensors and plain values only."""
    buffer = io.BytesIO()
    torch.save(state, buffer)
    buffer.seek(0)
    return torch.load(buffer, weights_only=True)


def twin_of(params: dict[str, Tensor]) -> dict[str, Tensor]:
    return {name: nn.Parameter(p.detach().clone()) for name, p in params.items()}


def values(params: dict[str, Tensor]) -> dict[str, Tensor]:
    return {name: p.detach() for name, p in params.items()}
