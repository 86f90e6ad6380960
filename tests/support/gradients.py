"""Synthetic gradients for tests of profiling: parameters whose `.grad` is set, and a profiler that watches them."""

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from baoc.profiling import GradientProfiler
from baoc.types import Block, GradientStats, ParamInfo, Profile, Role


def make_block(name: str, *shapes: tuple[int, ...], role: Role = Role.MLP, transposed: bool = False) -> Block:
    """Parameters `<name>.0`, `<name>.1`, ... of the given shapes."""
    params = tuple(
        ParamInfo(name=f"{name}.{i}", shape=s, dtype="float32", role=role, transposed=transposed and len(s) > 1)
        for i, s in enumerate(shapes)
    )
    return Block(name=name, params=params, role=role)


def make_params(blocks: Sequence[Block]) -> dict[str, nn.Parameter]:
    return {param.name: nn.Parameter(torch.zeros(param.shape)) for block in blocks for param in block.params}


class Stream:
    """Feeds gradients step by step to a profiler of `blocks`; step 0, which is never sampled, is over at the start."""

    def __init__(self, blocks: Sequence[Block], **options: Any):
        self.blocks = tuple(blocks)
        self.params = make_params(blocks)
        self.profiler = GradientProfiler(self.blocks, self.params, **options)
        self.step = 1
        self.profiler.observe(step=0)

    def set(self, grads: Mapping[str, Tensor | None]) -> None:
        for name, grad in grads.items():
            self.params[name].grad = grad

    def feed(self, grads: Mapping[str, Tensor | None]) -> bool:
        self.set(grads)
        sampled = self.profiler.observe(step=self.step)
        self.step += 1
        return sampled

    def profile(self) -> Profile:
        return self.profiler.profile()


def stats_of(
    shape: tuple[int, ...], gradient: Callable[[int], Tensor], *, samples: int = 40, **options: Any
) -> GradientStats:
    """Statistics of a block of one parameter that sees `gradient(0)`, `gradient(1)`, ..."""
    stream = Stream([make_block("w", shape, transposed=options.pop("transposed", False))], **options)
    for index in range(samples):
        stream.feed({"w.0": gradient(index)})
    return stream.profile().stats["w"]


def normal(*shape: int, seed: int) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


def signs(*shape: int, seed: int) -> Tensor:
    """+1 and -1: a gradient made of these times s has g^2 = s^2 exactly, so v is known without sampling error."""
    return normal(*shape, seed=seed).sign()
