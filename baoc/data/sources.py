"""Makes batches of numbered samples in this process or in worker processes, always in order.

The randomness of a batch depends on its own seed and not on the worker that makes it, so the number of workers changes
only speed.
"""

import errno
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

from baoc.errors import DISK_FULL_ERRNOS, BadInputError, TrainingFailedError, first_line

log = logging.getLogger(__name__)

MAX_WORKER_DEATHS = 3
Batch = dict[str, Tensor]
Transform = Callable[[Batch], Batch]


class Source(Protocol):
    """Numbered samples. `gather` takes rows (B,) int64 and returns tensors with B as first dimension.

    A source is pickled once per worker process, so it should hold little data, such as paths.
    """

    def __len__(self) -> int: ...

    def gather(self, rows: Tensor) -> Batch: ...


@runtime_checkable
class RandomSource(Source, Protocol):
    """A source that augments training samples; all randomness comes from `generator`."""

    def gather_random(self, rows: Tensor, *, generator: Generator) -> Batch: ...


class TensorSource:
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
class BatchRequest:
    """The rows (B,) int64 of a batch, and the seed of its augmentation; None for no augmentation."""

    rows: Tensor
    seed: int | None = None


@dataclass(frozen=True, kw_only=True)
class BatchMaker(Dataset[Any]):
    """Makes requested batches, in this process (`__call__`) or as the Dataset of a DataLoader (`__getitem__`)."""

    source: Source
    transform: Transform | None = None

    def __getitem__(self, request: BatchRequest) -> Any:
        try:
            return self(request)
        except (BadInputError, TrainingFailedError) as error:
            return error  # not raised: the DataLoader would put a traceback into its text

    def __call__(self, request: BatchRequest) -> Batch:
        try:
            if request.seed is not None and isinstance(self.source, RandomSource):
                generator = Generator().manual_seed(request.seed)
                batch = self.source.gather_random(request.rows, generator=generator)
            else:
                batch = self.source.gather(request.rows)
        except OSError as error:
            if error.errno in (errno.ENOMEM, *DISK_FULL_ERRNOS):  # these have messages of their own
                raise
            raise TrainingFailedError(f"the data cannot be read: {error}") from error
        return batch if self.transform is None else self.transform(batch)


class WorkerPool:
    """Worker processes that make batches ahead of time and live as long as the loader that owns them.

    One pass uses the workers at a time: a new pass takes them over, and an earlier pass that is continued takes them
    back and starts at its next batch. Workers come from a fork server, because forking this process would break its
    threads and its CUDA context.

    If a worker dies, for example killed for its memory, all workers are replaced and the same batch is made again.
    MAX_WORKER_DEATHS in a row without a batch raise TrainingFailedError.
    """

    def __init__(self, make: BatchMaker, *, workers: int):
        self._requests: list[BatchRequest] = []  # of the pass that uses the workers
        self._current_pass = 0
        self._make, self._workers = make, workers
        self._loader = self._start_workers()

    def batches(self, requests: Iterable[BatchRequest]) -> Iterator[Batch]:
        """Yields the batches of `requests` in order. Raises the error that making a batch raised."""
        remaining = list(requests)
        deaths = 0
        while remaining:
            self._requests[:] = remaining
            self._current_pass = this_pass = self._current_pass + 1
            batches = iter(self._loader)
            while remaining and self._current_pass == this_pass:  # until another pass takes the workers
                try:
                    batch = next(batches)
                except (RuntimeError, OSError, EOFError) as error:
                    deaths += 1
                    self._replace_workers(error, deaths=deaths)
                    break
                if isinstance(batch, BadInputError | TrainingFailedError):
                    raise batch
                deaths = 0
                remaining = remaining[1:]
                yield batch

    def _start_workers(self) -> DataLoader[Any]:
        return DataLoader(
            self._make,
            batch_size=None,
            sampler=self._requests,
            num_workers=self._workers,
            persistent_workers=True,
            pin_memory=torch.cuda.is_available(),
            multiprocessing_context="forkserver",
            worker_init_fn=_exit_with_parent,
            generator=Generator(),  # so that the DataLoader does not draw from the global random state
        )

    def _replace_workers(self, error: Exception, *, deaths: int) -> None:
        """Starts new workers if `error` means that a worker died; raises otherwise, and after MAX_WORKER_DEATHS.

        A death shows as the DataLoader's "DataLoader worker ..." or as a broken connection to a worker. Errors raised
        in a living worker start with "Caught ... in DataLoader worker process".
        """
        text = first_line(error)
        lost_connection = isinstance(error, ConnectionError | EOFError) and not text.startswith("Caught")
        if not lost_connection and not text.startswith("DataLoader worker"):
            raise error
        if deaths >= MAX_WORKER_DEATHS:
            raise TrainingFailedError(
                f"data workers died {deaths} times in a row ({text}): if the system killed them for their memory, set "
                "fewer dataset.workers; with dataset.workers=0 batches are made in the run itself, which shows why"
            ) from error
        log.warning("a data worker died (%s): new ones make its batch again", text)
        self._loader = self._start_workers()


def _exit_with_parent(_: int) -> None:
    """Runs in each worker and ends it with the run. Workers of a killed run would wait for ever in the fork server."""
    parent = multiprocessing.parent_process()  # the run, not the fork server
    assert parent is not None

    def wait_and_exit() -> None:
        parent.join()
        os._exit(1)

    threading.Thread(target=wait_and_exit, daemon=True).start()


def evenly_spaced(count: int, *, at_most: int | None) -> Tensor:
    """Indices below `count`, int64: all of them, or `at_most` evenly spaced ones."""
    size = count if at_most is None else min(count, at_most)
    return torch.arange(size) * count // max(size, 1)
