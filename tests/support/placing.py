"""Rings of a size that suits small tensors; streams whose work comes as late and as badly ordered as marks allow."""

from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any
from unittest import mock

import torch
from torch import Tensor

from baoc.optim import BlockwiseOptimizer
from baoc.optim.offload import StagingPipeline, Streams
from tests.support.optimizing import Gradients, assert_same, build, make_params, twin_of, values

SHAPES = {"a": (33, 64), "b": (64,), "c": (48, 40), "d": (257,), "e": (16, 16, 3)}
HERE = "here"  # the calling thread, which waits too


@contextmanager
def rings(*, piece_bytes: int = 6000, num_buffers: int = 2, streams: Streams | None = None) -> Iterator[None]:
    """Pipelines that are built inside have these."""
    build = StagingPipeline.__init__

    def init(self: Any, *args: Any, **kwargs: Any) -> None:
        build(self, *args, **{**kwargs, "piece_bytes": piece_bytes, "num_buffers": num_buffers, "streams": streams})

    with mock.patch.object(StagingPipeline, "__init__", init):
        yield


class LateStreams(Streams):
    """Nothing is done before somebody waits for it; `drain` then does all that may be done, `first` streams first.

    `deaf`: pairs of streams of which the first does not wait for the second, to see what then goes wrong.
    """

    def __init__(self, *, deaf: Iterable[tuple[str, str]] = ()):
        self._queues: dict[str, deque[Any]] = {}
        self.given: dict[str, int] = {}
        self.done: dict[str, int] = {}
        self._deaf = set(deaf)
        self.kept: list[tuple[Tensor, str]] = []
        self.finished = False
        self.heard: set[tuple[str, str]] = set()  # pairs that waited

    def _give(self, name: str, task: Any) -> None:
        self._queues.setdefault(name, deque()).append(task)
        self.given[name] = self.given.get(name, 0) + 1

    def run(self, name: str, work: Callable[[], object]) -> None:
        self._give(name, work)

    def mark(self, name: str) -> tuple[str, int]:
        return name, self.given.get(name, 0)

    def wait(self, name: str, mark: tuple[str, int] | None) -> None:
        if mark is not None and self._hears(name, mark[0]):
            self._give(name, mark)

    def wait_on_host(self, mark: tuple[str, int] | None) -> None:
        if mark is not None and self._hears(HERE, mark[0]):
            self._reach(*mark)

    def record_use(self, tensors: Iterable[Tensor], *, name: str) -> None:
        self.kept += [(tensor, name) for tensor in tensors]

    def finish(self) -> None:
        self.finished = True

    def _hears(self, name: str, other: str) -> bool:
        self.heard.add((name, other))
        return (name, other) not in self._deaf

    def _reach(self, name: str, count: int) -> None:
        """Does what the stream's first `count` tasks need, and nothing else."""
        while self.done.get(name, 0) < count:
            task = self._queues[name][0]
            if isinstance(task, tuple):
                self._reach(*task)
            self._do(name)

    def _do(self, name: str) -> None:
        task = self._queues[name].popleft()
        if not isinstance(task, tuple):
            with torch.no_grad():
                task()
        self.done[name] = self.done.get(name, 0) + 1

    def drain(self, first: Sequence[str]) -> None:
        while name := next((name for name in first if self._may(name)), None):
            self._do(name)
        assert not any(self._queues.values()), "streams wait for each other"

    def _may(self, name: str) -> bool:
        queue = self._queues.get(name)
        if not queue:
            return False
        return not isinstance(queue[0], tuple) or self.done.get(queue[0][0], 0) >= queue[0][1]


def states_of(optimizer: BlockwiseOptimizer) -> dict[str, Tensor]:
    saved = optimizer.state_dict()["state"]
    return {f"{name}.{key}": value for name, state in saved.items() for key, value in state.items()}


class Twins:
    """The same parameters under a plan on the device and under the same plan on the host."""

    def __init__(self, spec: str, *, shapes: dict[str, tuple[int, ...]] = SHAPES, **settings):
        self.params = make_params(shapes)
        self.twins = twin_of(self.params)
        self.gradients = Gradients(self.params)
        self.device = build(self.params, spec, **{k: v for k, v in settings.items() if k != "release"})
        self.host = build(self.twins, f"{spec}@streamed", **settings)

    def step(self, *, steps: int = 1) -> None:
        for _ in range(steps):
            self.gradients.give(self.params, self.twins)
            self.device.step()
            self.host.step()

    def check(self) -> None:
        assert_same(values(self.params), values(self.twins))
        assert_same(states_of(self.device), states_of(self.host))
