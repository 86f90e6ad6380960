"""Loaders over tensors in memory: a batch is one indexing operation, without worker processes or per-item Python.

`ShuffledLoader` can stop anywhere and go on with the very same batches. Its order comes from (seed, epoch) alone, by a
generator of its own, so the global random state is neither read nor moved.
"""

import hashlib
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import torch
from torch import Tensor

from baoc.errors import BadInputError, CheckpointError

Batch = dict[str, Tensor]
Transform = Callable[[Batch], Batch]


class SequentialLoader:
    """Batches in order, the last one possibly smaller: for validation.

    `tensors`: name -> (N, ...). `indices`: the rows that belong to this loader, all by default. `transform` sees a
    whole batch.
    """

    def __init__(
        self,
        tensors: Mapping[str, Tensor],
        *,
        batch_size: int,
        indices: Tensor | None = None,
        transform: Transform | None = None,
    ):
        if batch_size < 1:
            raise BadInputError(f"batch_size must be at least 1, not {batch_size}")
        lengths = {name: len(tensor) for name, tensor in tensors.items()}
        assert len(set(lengths.values())) == 1, f"tensors of different lengths: {lengths}"
        self.batch_size = batch_size
        self._tensors = dict(tensors)
        self._indices = torch.arange(next(iter(lengths.values()))) if indices is None else indices
        self._transform = transform

    def __len__(self) -> int:
        return -(-len(self._indices) // self.batch_size)

    def __iter__(self) -> Iterator[Batch]:
        for rows in self._indices.split(self.batch_size):
            yield self._gather(rows)

    def _gather(self, rows: Tensor) -> Batch:
        batch = {name: tensor[rows] for name, tensor in self._tensors.items()}
        return self._transform(batch) if self._transform is not None else batch


class ShuffledLoader(SequentialLoader):
    """Batches of one size in an order drawn anew each epoch: for training.

    Rows that do not fill a batch are left out of that epoch. `accumulate` micro-batches make an optimizer step: an
    epoch holds whole steps only, so `batch_size=16, accumulate=4` sees the samples of `batch_size=64`, step by step.

    Each pass starts where `load_state_dict` last put the loader, else at the start of an epoch; finishing a pass moves
    on to the next epoch. Lightning never finishes one (it counts batches), but calls `sampler.set_epoch` before each.
    A pass begun elsewhere, such as a look at one batch before training, does not disturb the others; `state_dict` tells
    the position of the one that came farthest. `limit`: batches after which a trainer ends its epochs, if not all.
    """

    def __init__(
        self,
        tensors: Mapping[str, Tensor],
        *,
        batch_size: int,
        seed: int,
        accumulate: int = 1,
        limit: int | None = None,
        indices: Tensor | None = None,
        transform: Transform | None = None,
    ):
        super().__init__(tensors, batch_size=batch_size, indices=indices, transform=transform)
        if accumulate < 1:
            raise BadInputError(f"accumulation must be at least 1 micro-batch, not {accumulate}")
        num_rows = len(self._indices)
        if num_rows < batch_size * accumulate:
            raise BadInputError(
                f"a step of {accumulate} x {batch_size} samples does not fit the {num_rows} training samples: "
                f"lower the batch size, all micro-batches of a step together, to at most {num_rows}"
            )
        self.seed = seed
        self.accumulate = accumulate
        self.limit = limit
        self.epoch = 0
        self._start = 0  # batch at which a pass begins; above 0 where an epoch was left in its middle
        self._position = 0  # batches of this epoch handed out, by the pass that came farthest
        self._trainer_epoch: int | None = None  # what set_epoch was last told, by this process
        self._resumed = False

    def __len__(self) -> int:
        return len(self._indices) // (self.batch_size * self.accumulate) * self.accumulate

    def __iter__(self) -> Iterator[Batch]:
        # A generator, so epoch and start are read when the first batch is asked for, not when Lightning calls iter():
        # it does so up to twice before it has restored a checkpoint and set the epoch.
        order = self._order(self.epoch)
        for position in range(self._start, len(self)):
            self._position = max(self._position, position + 1)
            yield self._gather(order[position * self.batch_size : (position + 1) * self.batch_size])
        self._go_to(self.epoch + 1)

    @property
    def sampler(self) -> "ShuffledLoader":
        """Where Lightning looks for `set_epoch`."""
        return self

    def set_epoch(self, epoch: int) -> None:
        """A pass of the trainer begins, which counts it as `epoch`. The first call places a fresh loader there.

        Otherwise the number is not believed, only that it changed: the loader goes on behind its last batch, in the
        next epoch if this one is finished. Lightning 2.6.6, resumed under max_steps, has already counted the epoch that
        max_steps cut short, may count the last finished one twice, and may end one after its first batch.
        """
        if self._trainer_epoch is None and not self._resumed:
            self._go_to(epoch)
        elif self._trainer_epoch is not None and epoch != self._trainer_epoch:
            self._start = self._position
            self._leave_finished()
        self._trainer_epoch = epoch

    def _leave_finished(self) -> None:
        if self._position >= (len(self) if self.limit is None else min(self.limit, len(self))):
            self._go_to(self.epoch + 1)

    def _go_to(self, epoch: int) -> None:
        if epoch != self.epoch:
            self.epoch, self._start, self._position = epoch, 0, 0

    def state_dict(self) -> dict[str, int]:
        """Position in plain numbers, and what the order depends on."""
        return {"epoch": self.epoch, "position": self._position, **self._identity()}

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """Go on from a saved position. CheckpointError if this loader would give other batches than the saved one."""
        here = self._identity()
        missing = ({"epoch", "position"} | here.keys()) - state_dict.keys()
        if missing:
            raise CheckpointError(f"the data position of the checkpoint lacks {', '.join(sorted(missing))}")
        changed = [f"{key} was {state_dict[key]}, is {now}" for key, now in here.items() if state_dict[key] != now]
        if changed:
            raise CheckpointError(
                "the checkpoint was written with other data settings, so its position means nothing here: "
                f"{'; '.join(changed)}. Resume with the settings of the first run"
            )
        self.epoch = int(state_dict["epoch"])
        self._start = self._position = int(state_dict["position"])
        self._trainer_epoch, self._resumed = None, True
        self._leave_finished()

    def _identity(self) -> dict[str, int]:
        return {
            "seed": self.seed,
            "batch_size": self.batch_size,
            "accumulate": self.accumulate,
            "num_samples": len(self._indices),
        }

    def _order(self, epoch: int) -> Tensor:
        digest = hashlib.sha256(f"{self.seed}:{epoch}".encode()).digest()
        generator = torch.Generator().manual_seed(int.from_bytes(digest[:4], "big"))
        return self._indices[torch.randperm(len(self._indices), generator=generator)]
