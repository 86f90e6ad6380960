"""Training batches from a stream without random access, such as a hub data set: shuffled, sharded, resumable.

A block of samples is read, shuffled and returned batch by batch. Checkpoints hold the stream's own position at the
start of the block, so resuming reads that block again and continues with the next batch.
"""

from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, replace
from itertools import islice
from typing import Any

import torch

from baoc.data.loader import check_position, seeded_generator
from baoc.data.sources import Batch
from baoc.errors import CheckpointError
from baoc.parallel import ranks

_PREFETCHED_BATCHES = 3


@dataclass(frozen=True, slots=True, kw_only=True, order=True)
class StreamPosition:
    """A position in training: `batch` batches of block `block` of an epoch are returned. Ordered in time."""

    epoch: int = 0
    block: int = 0
    batch: int = 0


class StreamLoader:
    """Shuffled batches of a stream. Passes and resuming work as in ShuffledLoader, but there is no length.

    Args:
        open_stream: epoch -> this rank's share of the stream, an iterable of samples in order. Its `state_dict` and
            `load_state_dict` save and restore its position, as those of `datasets.IterableDataset` do.
        make: (`batch_size` samples, generator) -> batch; runs on `threads` threads.
        buffer: samples of a block, rounded up to complete steps of `accumulate` batches. Samples at the end of an epoch
            that do not fill a step are left out.
    """

    def __init__(
        self,
        open_stream: Callable[[int], Any],
        *,
        make: Callable[[list[Any], torch.Generator], Batch],
        batch_size: int,
        seed: int,
        accumulate: int = 1,
        buffer: int = 2048,
        threads: int = 4,
        rank: int = 0,
    ):
        self.batch_size = batch_size
        self._step_size = batch_size * accumulate  # samples
        self._block_size = -(-buffer // self._step_size) * self._step_size  # samples
        self._open, self._make = open_stream, make
        self._seed, self._rank, self._threads = seed, rank, threads
        self._start = self._farthest = StreamPosition()  # where a pass begins; after the last batch that was returned
        self._stream_states: dict[StreamPosition, dict[str, Any]] = {}  # start of a block -> the stream's state there
        self._trainer_epoch: int | None = None

    def __iter__(self) -> Iterator[Batch]:
        start = self._start
        with ThreadPoolExecutor(self._threads) as threads:
            for position, batch in self._prefetch(threads, start):
                self._farthest = max(self._farthest, position)
                yield batch
        self._start = self._farthest = max(self._farthest, StreamPosition(epoch=start.epoch + 1))

    @property
    def sampler(self) -> "StreamLoader":
        """This loader: Lightning calls `loader.sampler.set_epoch`."""
        return self

    def set_epoch(self, epoch: int) -> None:
        """Called by Lightning before each epoch. Continues after the last batch if `epoch` is not the last call's."""
        if self._trainer_epoch is not None and epoch != self._trainer_epoch:
            self._start = self._farthest
        self._trainer_epoch = epoch

    def state_dict(self) -> dict[str, Any]:
        """Returns the position; with several ranks, the positions of all: a collective that every rank must call."""
        block = replace(self._farthest, batch=0)
        own = {
            "epoch": block.epoch,
            "block": block.block,
            "batch": self._farthest.batch,
            "stream": self._stream_states.get(block),
            **self._identity(),
        }
        every = ranks().all_gather(own)
        return {"ranks": every} if len(every) > 1 else own

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """Resumes at this rank's saved position. Raises CheckpointError if this loader would return other batches."""
        positions = state_dict.get("ranks", [state_dict])
        if len(positions) != ranks().size:
            raise CheckpointError(
                f"the checkpoint has positions of {len(positions)} rank(s) in the stream, and this run has "
                f"{ranks().size}: resume with as many, as a stream gives each rank a share of its own"
            )
        state_dict = positions[ranks().rank]
        check_position(state_dict, keys={"epoch", "block", "batch", "stream"}, identity=self._identity())
        block = StreamPosition(epoch=int(state_dict["epoch"]), block=int(state_dict["block"]))
        self._start = self._farthest = replace(block, batch=int(state_dict["batch"]))
        self._stream_states = {block: state_dict["stream"]} if state_dict["stream"] is not None else {}
        self._trainer_epoch = None

    def _identity(self) -> dict[str, int]:
        return {"seed": self._seed, "batch_size": self.batch_size, "block_size": self._block_size, "rank": self._rank}

    def _prefetch(self, threads: ThreadPoolExecutor, start: StreamPosition) -> Iterator[tuple[StreamPosition, Batch]]:
        """Yields (position after the batch, batch) in order; makes _PREFETCHED_BATCHES in advance on `threads`."""
        pending: deque[tuple[StreamPosition, Future[Batch]]] = deque()
        for position, samples in self._batches_of_samples(start):
            generator = seeded_generator(self._seed, self._rank, position.epoch, position.block, position.batch)
            batch = threads.submit(self._make, samples, generator)
            pending.append((replace(position, batch=position.batch + 1), batch))
            if len(pending) > _PREFETCHED_BATCHES:
                position_after, batch = pending.popleft()
                yield position_after, batch.result()
        for position_after, batch in pending:
            yield position_after, batch.result()

    def _batches_of_samples(self, start: StreamPosition) -> Iterator[tuple[StreamPosition, list[Any]]]:
        """Yields (position before the batch, its samples) for each batch of an epoch, from `start` on."""
        for position, block in self._blocks(replace(start, batch=0)):
            generator = seeded_generator(self._seed, self._rank, position.epoch, position.block)
            order = torch.randperm(len(block), generator=generator).tolist()
            first_batch = start.batch if position.block == start.block else 0
            for batch in range(first_batch, len(block) // self.batch_size):
                rows = order[batch * self.batch_size : (batch + 1) * self.batch_size]
                yield replace(position, batch=batch), [block[row] for row in rows]

    def _blocks(self, position: StreamPosition) -> Iterator[tuple[StreamPosition, list[Any]]]:
        """Yields (start of the block, its samples) of an epoch. `position` is the start of the first block.

        A block holds complete steps. Records the stream's state before each block that a checkpoint may need.
        """
        stream = self._open(position.epoch)
        if (stream_state := self._stream_states.get(position)) is not None:
            stream.load_state_dict(stream_state)
        else:
            assert position.block == 0, "a block in mid-epoch without the stream's position"
        samples: Iterable[Any] = iter(stream)
        while True:
            stream_state = stream.state_dict()
            block = list(islice(samples, self._block_size))
            block = block[: len(block) // self._step_size * self._step_size]
            if not block:
                return
            self._stream_states[position] = stream_state
            # Blocks are read ahead of the batches that are returned. A checkpoint needs the block of the newest
            # returned batch, and later ones.
            oldest = replace(self._farthest, batch=0)
            self._stream_states = {start: state for start, state in self._stream_states.items() if start >= oldest}
            yield position, block
            position = replace(position, block=position.block + 1)
