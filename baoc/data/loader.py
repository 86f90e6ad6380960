"""Batch loaders: in order for validation, shuffled in each epoch for training.

`ShuffledLoader` can resume after any batch. Its order depends on (seed, epoch) alone. It draws from a generator of its
own and neither reads nor changes the global random state.
"""

import hashlib
from collections.abc import Iterator, Mapping
from typing import Any

import torch
from torch import Tensor

from baoc.data.sources import Batch, BatchMaker, BatchRequest, Source, TensorSource, Transform, WorkerPool
from baoc.errors import BadInputError, CheckpointError

__all__ = ["Batch", "SequentialLoader", "ShuffledLoader", "Transform"]


class SequentialLoader:
    """Batches in order, the last one possibly smaller: for validation.

    Args:
        source: tensors by name, each (N, ...), or a Source.
        indices: rows that this loader returns, (n,) int64; None for all.
        transform: applied to each batch.
        workers: processes that make batches ahead of time; 0 makes them in this process.
    """

    def __init__(
        self,
        source: Source | Mapping[str, Tensor],
        *,
        batch_size: int,
        indices: Tensor | None = None,
        transform: Transform | None = None,
        workers: int = 0,
    ):
        rows = TensorSource(source) if isinstance(source, Mapping) else source
        self.batch_size = batch_size
        self._indices = torch.arange(len(rows)) if indices is None else indices
        self._make = BatchMaker(source=rows, transform=transform)
        self._pool = WorkerPool(self._make, workers=workers) if workers else None

    def __len__(self) -> int:
        return -(-len(self._indices) // self.batch_size)

    def __iter__(self) -> Iterator[Batch]:
        yield from self._batches([BatchRequest(rows=rows) for rows in self._indices.split(self.batch_size)])

    def _batches(self, requests: list[BatchRequest]) -> Iterator[Batch]:
        return map(self._make, requests) if self._pool is None else self._pool.batches(requests)


class ShuffledLoader(SequentialLoader):
    """Batches of equal size in an order drawn for each epoch: for training.

    An epoch consists of complete optimizer steps of `accumulate` micro-batches; the remaining rows are left out. So
    `batch_size=16, accumulate=4` trains on the same samples in each step as `batch_size=64`. Each of `num_ranks`
    processes takes its `rank`'s share of a global batch of num_ranks x batch_size samples.

    One `iter` is a pass. It starts at the position of the last `load_state_dict`, or at the start of an epoch. A
    finished pass moves on to the next epoch. Lightning counts batches and never finishes a pass, but calls
    `sampler.set_epoch` before each. Several passes may be open, such as one that measures memory before training;
    `state_dict` returns the position of the farthest one. `limit`: batches after which the trainer ends an epoch; None
    for all.
    """

    def __init__(
        self,
        source: Source | Mapping[str, Tensor],
        *,
        batch_size: int,
        seed: int,
        accumulate: int = 1,
        limit: int | None = None,
        rank: int = 0,
        num_ranks: int = 1,
        **settings: Any,
    ):
        """`settings`: indices, transform and workers, as SequentialLoader takes them."""
        super().__init__(source, batch_size=batch_size, **settings)
        assert 0 <= rank < num_ranks, f"rank {rank} of {num_ranks}"
        require_step(batch_size * num_ranks * accumulate, num_train=len(self._indices))
        self.seed = seed
        self.accumulate = accumulate
        self.limit = limit
        self.rank = rank
        self.num_ranks = num_ranks
        self.epoch = 0
        self._start = 0  # batch at which a pass begins; above 0 after a resume within an epoch
        self._position = 0  # batches of this epoch that the farthest pass has returned
        self._trainer_epoch: int | None = None  # argument of the last set_epoch in this process
        self._resumed = False

    def __len__(self) -> int:
        return len(self._indices) // (self._global_batch * self.accumulate) * self.accumulate

    def __iter__(self) -> Iterator[Batch]:
        # A generator, so that epoch and start are read at the first batch and not at iter(): Lightning calls that up
        # to twice before it has restored a checkpoint and set the epoch.
        requests = self._requests(self.epoch)
        for position, batch in enumerate(self._batches(requests[self._start :]), start=self._start):
            self._position = max(self._position, position + 1)
            yield batch
        self._go_to(self.epoch + 1)

    @property
    def sampler(self) -> "ShuffledLoader":
        """This loader: Lightning calls `loader.sampler.set_epoch`."""
        return self

    def set_epoch(self, epoch: int) -> None:
        """Called by Lightning before each of its epochs. The first call moves a new loader to `epoch`.

        Later calls only compare `epoch` with that of the last call. If it differs, the loader continues after its last
        batch, in the next epoch if this one is finished. The value itself is unusable: when Lightning 2.6.6 resumes
        under max_steps, it has already counted the epoch that max_steps ended early, may count the last finished epoch
        twice, and may end an epoch after its first batch.
        """
        if self._trainer_epoch is None and not self._resumed:
            self._go_to(epoch)
        elif self._trainer_epoch is not None and epoch != self._trainer_epoch:
            self._start = self._position
            self._advance_if_finished()
        self._trainer_epoch = epoch

    def _advance_if_finished(self) -> None:
        if self._position >= (len(self) if self.limit is None else min(self.limit, len(self))):
            self._go_to(self.epoch + 1)

    def _go_to(self, epoch: int) -> None:
        if epoch != self.epoch:
            self.epoch, self._start, self._position = epoch, 0, 0

    def state_dict(self) -> dict[str, int]:
        """Returns the position and the settings that determine the order."""
        return {"epoch": self.epoch, "position": self._position, **self._identity()}

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """Resumes at a saved position. Raises CheckpointError if this loader would return other batches."""
        saved = dict(state_dict)
        if self._has_same_steps(saved):
            position = int(saved["position"]) * int(saved["batch_size"]) // self._global_batch
            saved |= {"position": position, "batch_size": self._global_batch, "accumulate": self.accumulate}
        check_position(saved, keys={"epoch", "position"}, identity=self._identity())
        self.epoch = int(saved["epoch"])
        self._start = self._position = int(saved["position"])
        self._trainer_epoch, self._resumed = None, True
        self._advance_if_finished()

    def _has_same_steps(self, saved: Mapping[str, Any]) -> bool:
        """Whether this loader has the saved one's samples in each step and can continue at its position.

        Micro-batch, accumulation and number of ranks may differ.
        """
        keys = ("position", "batch_size", "accumulate")
        if any(not isinstance(saved.get(key), int) for key in keys):
            return False
        samples_returned = saved["position"] * saved["batch_size"]
        same_step = saved["batch_size"] * saved["accumulate"] == self._global_batch * self.accumulate
        return same_step and samples_returned % self._global_batch == 0

    @property
    def _global_batch(self) -> int:
        return self.batch_size * self.num_ranks

    def _identity(self) -> dict[str, int]:
        return {
            "seed": self.seed,
            "batch_size": self._global_batch,
            "accumulate": self.accumulate,
            "num_samples": len(self._indices),
        }

    def _requests(self, epoch: int) -> list[BatchRequest]:
        """This rank's batches of an epoch."""
        order = self._indices[torch.randperm(len(self._indices), generator=seeded_generator(self.seed, epoch))]
        starts = range(self.rank * self.batch_size, len(self) * self._global_batch, self._global_batch)
        return [
            BatchRequest(rows=order[start : start + self.batch_size], seed=seed_from_numbers(self.seed, epoch, start))
            for start in starts
        ]


def require_step(batch_size: int, *, num_train: int) -> None:
    """Raises BadInputError if the training samples are fewer than one step takes."""
    if num_train < batch_size:
        raise BadInputError(
            f"a step of {batch_size} samples does not fit the {num_train} training samples: lower the batch size, all "
            f"micro-batches of a step together, to at most {num_train}"
        )


def seeded_generator(*key: int) -> torch.Generator:
    return torch.Generator().manual_seed(seed_from_numbers(*key))


def seed_from_numbers(*key: int) -> int:
    """A 32-bit seed that depends on every number of `key`."""
    digest = hashlib.sha256(":".join(map(str, key)).encode()).digest()
    return int.from_bytes(digest[:4], "big")


def check_position(state_dict: Mapping[str, Any], *, keys: set[str], identity: Mapping[str, object]) -> None:
    """Raises CheckpointError if a saved position lacks one of `keys`, or if the settings `identity` have changed."""
    missing = (keys | identity.keys()) - state_dict.keys()
    if missing:
        raise CheckpointError(f"the data position of the checkpoint lacks {', '.join(sorted(missing))}")
    changed = [
        f"{key} was {state_dict[key]}, is {value}" for key, value in identity.items() if state_dict[key] != value
    ]
    if changed:
        raise CheckpointError(
            "the checkpoint was written with other data settings, so its position means nothing here: "
            f"{'; '.join(changed)}. Resume with the settings of the first run"
        )
