"""Makes batches of numbered samples in this process or in worker processes, always in order.

The randomness of a batch depends on its own seed and not on the worker that makes it, so the number of workers changes
only speed.
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

from baoc.errors import BadInputError, TrainingFailedError, first_line

log = logging.getLogger(__name__)

MAX_WORKER_DEATHS = 3
Batch = dict[str, Tensor]
Transform = Callable[[Batch], Batch]


class Source(Protocol):
    """Numbered samples. `gather` takes rows (B,) int64 and returns tensors of B rows each.

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
    """One batch to make: its rows, and the seed of its augmentation; None for no augmentation."""

    rows: Tensor
    seed: int | None = None


@dataclass(frozen=True, kw_only=True)
class BatchMaker(Dataset[Any]):
    """Batches by request, as a Dataset of the DataLoader whose workers make them."""

    source: Source
    transform: Transform | None = None

    def __getitem__(self, request: BatchRequest) -> Any:
        try:
            return self(request)
        except (BadInputError, TrainingFailedError) as error:
            return error  # as a value, because the DataLoader would wrap its text in a traceback

    def __call__(self, request: BatchRequest) -> Batch:
        if request.seed is not None and isinstance(self.source, RandomSource):
            generator = Generator().manual_seed(request.seed)
            batch = self.source.gather_random(request.rows, generator=generator)
        else:
            batch = self.source.gather(request.rows)
        return batch if self.transform is None else self.transform(batch)


class WorkerPool:
    """Worker processes that make batches ahead of time and live as long as the loader that owns them.

    Only one pass uses the workers at a time: a new pass takes them over, and the earlier one restarts when it is
    continued. Workers come from a fork server, as forking this process would break its threads and CUDA context.

    If a worker dies, for example killed for its memory, all workers are replaced and the same batch is made again.
    After MAX_DEATHS in a row without a batch, TrainingFailedError is raised.
    """

    def __init__(self, make: BatchMaker, *, workers: int):
        self._requests: list[BatchRequest] = []  # of the pass that has the workers
        self._pass = 0
        self._make, self._workers = make, workers
        self._loader = self._start()

    def _start(self) -> DataLoader[Any]:
        return DataLoader(
            self._make,
            batch_size=None,
            sampler=self._requests,
            num_workers=self._workers,
            persistent_workers=True,
            pin_memory=torch.cuda.is_available(),
            multiprocessing_context="forkserver",
            worker_init_fn=_end_with_the_run,
            generator=Generator(),  # so that the DataLoader does not draw from the global random state
        )

    def batches(self, requests: Iterable[BatchRequest]) -> Iterator[Batch]:
        """The batches of `requests`, in this order. Raises what making one raised."""
        remaining = list(requests)
        deaths = 0
        while remaining:
            self._requests[:] = remaining
            self._pass = mine = self._pass + 1
            made = iter(self._loader)
            while remaining and self._pass == mine:  # until another pass takes the workers
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
        """Starts new workers if `error` is the death of a worker; raises it otherwise, and after too many deaths.

        A death shows as the DataLoader's "DataLoader worker ..." or as a broken connection to a worker. Errors raised
        in a living worker start with "Caught ... in DataLoader worker process".
        """
        text = first_line(error)
        broken = isinstance(error, ConnectionError | EOFError) and not text.startswith("Caught")
        if not broken and not text.startswith("DataLoader worker"):
            raise error
        if deaths >= MAX_WORKER_DEATHS:
            raise TrainingFailedError(
                f"data workers died {deaths} times in a row ({text}): if the system killed them for their memory, set "
                "fewer dataset.workers; with dataset.workers=0 batches are made in the run itself, which shows why"
            ) from error
        log.warning("a data worker died (%s): new ones make its batch again", text)
        self._loader = self._start()


def _end_with_the_run(_: int) -> None:
    """Runs in a worker and ends it with the run: a killed run would leave its workers waiting in the fork server."""
    run = multiprocessing.parent_process()  # the run, not the fork server
    assert run is not None

    def follow() -> None:
        run.join()
        os._exit(1)

    threading.Thread(target=follow, daemon=True).start()
