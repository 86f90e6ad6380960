"""Where batches come from: samples by number, made in this process or in worker processes, always in order.

What is random about a batch follows from its own seed, never from the worker that happens to make it, so the number of
workers changes nothing but speed.
"""

import logging
import multiprocessing
import os
import threading
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any, Protocol, runtime_checkable

import torch
from torch import Generator, Tensor
from torch.utils.data import DataLoader, Dataset

from baoc.errors import BadInputError, TrainingFailedError

log = logging.getLogger(__name__)

MAX_DEATHS = 3
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

    A worker that dies (killed by the system for its memory, say) is replaced together with the others, and its batch is
    made again, the very same one; after MAX_DEATHS in a row without a batch between them, TrainingFailedError.
    """

    def __init__(self, make: BatchMaker, *, workers: int):
        if workers < 1:
            raise BadInputError(f"workers must be 0 (none) or more, not {workers}")
        self._orders: list[Order] = []
        self._pass = 0
        self._making, self._workers = _Making(make), workers
        self._loader = self._start()

    def _start(self) -> DataLoader[Any]:
        return DataLoader(
            self._making,
            batch_size=None,
            sampler=_Orders(self._orders),
            num_workers=self._workers,
            persistent_workers=True,
            pin_memory=torch.cuda.is_available(),
            multiprocessing_context="forkserver",
            worker_init_fn=_end_with_the_run,
            generator=Generator(),  # the DataLoader draws from it; the global random state is the model's
        )

    def batches(self, orders: Iterable[Order]) -> Iterator[Batch]:
        """The batches of `orders`, in this order. Raises what making one raised."""
        remaining = list(orders)
        deaths = 0
        while remaining:
            mine = self._begin(remaining)
            made = iter(self._loader)
            while remaining and self._pass == mine:  # else another pass took the workers meanwhile
                try:
                    batch = next(made)
                except (RuntimeError, OSError, EOFError) as error:
                    deaths += 1
                    self._replace(error, deaths=deaths)
                    break
                if isinstance(batch, BadInputError | TrainingFailedError):
                    raise batch
                deaths = 0
                remaining = remaining[1:]
                yield batch

    def _replace(self, error: Exception, *, deaths: int) -> None:
        """New workers in the place of dead ones. Raises what was no death, and after too many TrainingFailedError.

        A death shows as the DataLoader's own words, or as a broken connection to a worker that held a tensor of ours;
        what a living one raised is told as "Caught ... in DataLoader worker process".
        """
        text = str(error).splitlines()[0] if str(error) else type(error).__name__
        broken = isinstance(error, ConnectionError | EOFError) and not text.startswith("Caught")
        if not broken and not text.startswith("DataLoader worker"):
            raise error
        if deaths >= MAX_DEATHS:
            raise TrainingFailedError(
                f"data workers died {deaths} times in a row ({text}): if the system killed them for their memory, set "
                "fewer dataset.workers; with dataset.workers=0 batches are made in the run itself, which shows why"
            ) from error
        log.warning("a data worker died (%s): new ones make its batch again", text)
        self._loader = self._start()

    def _begin(self, orders: list[Order]) -> int:
        self._orders[:] = orders
        self._pass += 1
        return self._pass


def _end_with_the_run(_: int) -> None:
    """In a worker: a run that is killed would leave it to the server process, in which it would wait for ever."""
    run = multiprocessing.parent_process()  # the run, not the server that has forked this process
    assert run is not None

    def follow() -> None:
        run.join()
        os._exit(1)

    threading.Thread(target=follow, daemon=True).start()


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
