"""Where batches come from: samples by number, made in this process or in worker processes, always in order.

What is random about a batch follows from its own seed, never from the worker that happens to make it, so the number of
workers changes nothing but speed.
"""

from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any, Protocol, runtime_checkable

import torch
from torch import Generator, Tensor
from torch.utils.data import DataLoader, Dataset

from baoc.errors import BadInputError, TrainingFailedError

Batch = dict[str, Tensor]
Transform = Callable[[Batch], Batch]


class Source(Protocol):
    """Samples by number. `gather` takes rows (B,) int64 and gives tensors of B rows each.

    With worker processes a source is pickled once per worker: keep in it what is cheap to send, such as paths.
    """

    def __len__(self) -> int: ...

    def gather(self, rows: Tensor) -> Batch: ...


@runtime_checkable
class RandomSource(Source, Protocol):
    """A source that varies its training samples; all randomness comes from `generator`."""

    def gather_random(self, rows: Tensor, *, generator: Generator) -> Batch: ...


class TensorRows:
    """Tensors in memory, name -> (N, ...); a batch is one indexing operation."""

    def __init__(self, tensors: Mapping[str, Tensor]):
        lengths = {name: len(tensor) for name, tensor in tensors.items()}
        assert len(set(lengths.values())) == 1, f"tensors of different lengths: {lengths}"
        self.tensors = dict(tensors)
        self._num_rows = next(iter(lengths.values()))

    def __len__(self) -> int:
        return self._num_rows

    def gather(self, rows: Tensor) -> Batch:
        return {name: tensor[rows] for name, tensor in self.tensors.items()}


@dataclass(frozen=True, slots=True, kw_only=True)
class Order:
    """One batch to be made: its rows, and the seed of what is random about it; None takes the samples as they are."""

    rows: Tensor
    seed: int | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class BatchMaker:
    source: Source
    transform: Transform | None = None

    def __call__(self, order: Order) -> Batch:
        if order.seed is not None and isinstance(self.source, RandomSource):
            generator = Generator().manual_seed(order.seed)
            batch = self.source.gather_random(order.rows, generator=generator)
        else:
            batch = self.source.gather(order.rows)
        return batch if self.transform is None else self.transform(batch)


class WorkerPool:
    """Worker processes that make batches ahead of time and live as long as the loader that owns them.

    One pass at a time: starting a pass ends the one before, which then goes on in a pass of its own (`is_current`).
    Started by a server process instead of by forking this one, whose threads and CUDA context a fork would break.
    """

    def __init__(self, make: BatchMaker, *, workers: int):
        if workers < 1:
            raise BadInputError(f"workers must be 0 (none) or more, not {workers}")
        self._orders: list[Order] = []
        self._pass = 0
        self._loader: DataLoader[Any] = DataLoader(
            _Making(make),
            batch_size=None,
            sampler=_Orders(self._orders),
            num_workers=workers,
            persistent_workers=True,
            pin_memory=torch.cuda.is_available(),
            multiprocessing_context="forkserver",
            generator=Generator(),  # the DataLoader draws from it; the global random state is the model's
        )

    def batches(self, orders: Iterable[Order]) -> Iterator[Batch]:
        """The batches of `orders`, in this order. Raises what making one raised."""
        remaining = list(orders)
        while remaining:
            mine = self._begin(remaining)
            for made in self._loader:
                if isinstance(made, BadInputError | TrainingFailedError):
                    raise made
                remaining = remaining[1:]
                yield made
                if self._pass != mine:  # another pass took the workers meanwhile
                    break

    def _begin(self, orders: list[Order]) -> int:
        self._orders[:] = orders
        self._pass += 1
        return self._pass


class _Orders:
    """A sampler that reads the list as it is when a pass begins."""

    def __init__(self, orders: list[Order]):
        self._orders = orders

    def __len__(self) -> int:
        return len(self._orders)

    def __iter__(self) -> Iterator[Order]:
        return iter(list(self._orders))


class _Making(Dataset[Any]):
    def __init__(self, make: BatchMaker):
        self._make = make

    def __getitem__(self, order: Order) -> Any:
        try:
            return self._make(order)
        except (BadInputError, TrainingFailedError) as error:
            return error  # as a value: the DataLoader would wrap its text in a traceback
