"""Training batches from a stream without random access, such as a hub data set: shuffled, sharded, resumable.

A block of samples is read, shuffled and returned batch by batch. The stream's position is saved at the start of each
block, so resuming reads one block again and continues with the next sample.
"""

from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, replace
from itertools import islice
from typing import Any

import torch

from baoc.data.loader import check_position, seed_from_numbers, seeded_generator
from baoc.data.sources import Batch
from baoc.errors import CheckpointError
from baoc.parallel import ranks

_AHEAD = 3  # batches that are made in advance


@dataclass(frozen=True, slots=True, kw_only=True, order=True)
class StreamPosition:
    """Number of batches returned of a block of an epoch; ordered as the batches are."""

    epoch: int = 0
    block: int = 0
    batch: int = 0


class StreamLoader:
    """Shuffled batches of a stream. Passes and resuming work as in ShuffledLoader, but there is no length.

    Args:
        open_stream: epoch -> this rank's share of the stream: samples in order with a position that `state_dict` saves
            and `load_state_dict` restores, as `datasets.IterableDataset` has them.
        make: (`batch_size` samples, generator) -> batch; runs on `threads`.
        buffer: samples of a block, rounded up to whole steps of `accumulate` batches. Samples at the end of an epoch
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
        per_step = batch_size * accumulate
        self.batch_size = batch_size
        self._per_step = per_step
        self._block_size = -(-buffer // per_step) * per_step
        self._open, self._make = open_stream, make
        self._seed, self._rank, self._threads = seed, rank, threads
        self._start = self._farthest = StreamPosition()
        self._stream_at: dict[StreamPosition, dict[str, Any]] = {}  # the stream's own position at the start of a block
        self._trainer_epoch: int | None = None

    def __iter__(self) -> Iterator[Batch]:
        place = self._start
        with ThreadPoolExecutor(self._threads) as threads:
            for reached, batch in self._ahead(threads, place):
                self._farthest = max(self._farthest, reached)
                yield batch
        self._start = self._farthest = max(self._farthest, StreamPosition(epoch=place.epoch + 1))

    @property
    def sampler(self) -> "StreamLoader":
        """Where Lightning looks for `set_epoch`."""
        return self

    def set_epoch(self, epoch: int) -> None:
        """Called by Lightning before each epoch: if the number changed, continues after the last batch."""
        if self._trainer_epoch is not None and epoch != self._trainer_epoch:
            self._start = self._farthest
        self._trainer_epoch = epoch

    def state_dict(self) -> dict[str, Any]:
        """This rank's position; of several, those of all, which ask for it together."""
        block = replace(self._farthest, batch=0)
        own = {
            "epoch": block.epoch,
            "block": block.block,
            "batch": self._farthest.batch,
            "stream": self._stream_at.get(block),
            **self._identity(),
        }
        every = ranks().all_gather(own)
        return {"ranks": every} if len(every) > 1 else own

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """Resumes at this rank's saved position. Raises CheckpointError if this loader would return other batches."""
        every = state_dict.get("ranks", [state_dict])
        if len(every) != ranks().size:
            raise CheckpointError(
                f"the checkpoint has positions of {len(every)} rank(s) in the stream, and this run has {ranks().size}: "
                "resume with as many, as a stream gives each rank a share of its own"
            )
        state_dict = every[ranks().rank]
        check_position(state_dict, keys={"epoch", "block", "batch", "stream"}, identity=self._identity())
        block = StreamPosition(epoch=int(state_dict["epoch"]), block=int(state_dict["block"]))
        self._start = self._farthest = replace(block, batch=int(state_dict["batch"]))
        self._stream_at = {block: state_dict["stream"]} if state_dict["stream"] is not None else {}
        self._trainer_epoch = None

    def _identity(self) -> dict[str, int]:
        return {"seed": self._seed, "batch_size": self.batch_size, "block_size": self._block_size, "rank": self._rank}

    def _ahead(self, threads: ThreadPoolExecutor, start: StreamPosition) -> Iterator[tuple[StreamPosition, Batch]]:
        """Batches in order, each with the position after it, made a few in advance."""
        waiting: deque[tuple[StreamPosition, Future[Batch]]] = deque()
        for place, samples in self._samples(start):
            seed = seed_from_numbers(self._seed, self._rank, place.epoch, place.block, place.batch)
            made = threads.submit(self._make, samples, torch.Generator().manual_seed(seed))
            waiting.append((replace(place, batch=place.batch + 1), made))
            if len(waiting) > _AHEAD:
                reached, made = waiting.popleft()
                yield reached, made.result()
        for reached, made in waiting:
            yield reached, made.result()

    def _samples(self, start: StreamPosition) -> Iterator[tuple[StreamPosition, list[Any]]]:
        """The samples of each batch of an epoch, from `start` on."""
        for place, block in self._blocks(replace(start, batch=0)):
            generator = seeded_generator(self._seed, self._rank, place.epoch, place.block)
            order = torch.randperm(len(block), generator=generator).tolist()
            skipped = start.batch if place.block == start.block else 0
            for batch in range(skipped, len(block) // self.batch_size):
                rows = order[batch * self.batch_size : (batch + 1) * self.batch_size]
                yield replace(place, batch=batch), [block[row] for row in rows]

    def _blocks(self, place: StreamPosition) -> Iterator[tuple[StreamPosition, list[Any]]]:
        """Blocks of whole steps. Keeps the stream's position before each block that a checkpoint may need."""
        stream = self._open(place.epoch)
        if (position := self._stream_at.get(place)) is not None:
            stream.load_state_dict(position)
        else:
            assert place.block == 0, "a block in mid-epoch without the stream's position"
        samples: Iterable[Any] = iter(stream)
        while True:
            position = stream.state_dict()
            block = list(islice(samples, self._block_size))
            block = block[: len(block) // self._per_step * self._per_step]
            if not block:
                return
            self._stream_at[place] = position
            # a checkpoint needs no block before that of the newest returned batch; reading is a few batches ahead
            needed = replace(self._farthest, batch=0)
            self._stream_at = {at: held for at, held in self._stream_at.items() if at >= needed}
            yield place, block
            place = replace(place, block=place.block + 1)
