"""Base class of DataModules: one training loader per fit, whose position is saved in checkpoints.

Subclasses make the loaders; this class resumes them at the next sample.
"""

from abc import abstractmethod
from collections.abc import Mapping
from functools import cached_property
from typing import Any

import lightning as L
import torch
from torch import Tensor

from baoc.data.loader import SequentialLoader, ShuffledLoader
from baoc.data.sources import Source, Transform
from baoc.data.stream import StreamLoader
from baoc.errors import BadInputError
from baoc.types import DataSpec

TrainLoader = ShuffledLoader | StreamLoader


class DataModule(L.LightningDataModule):
    """`batch_size` is the micro-batch, `accumulate` the number of them in an optimizer step.

    `seed` determines the order and augmentation of training samples, not which samples are held out. The position
    within an epoch is saved by the loader and again here, because Lightning discards the loader's if the loader was
    built before the loops were restored, for example by a schedule that needs the number of steps under max_epochs.
    """

    spec: DataSpec

    def __init__(self, *, batch_size: int, seed: int = 0, accumulate: int = 1):
        super().__init__()
        self.batch_size = batch_size
        self.accumulate = accumulate
        self.seed = seed
        self._loader: TrainLoader | None = None
        self._resume: Mapping[str, Any] | None = None
        self.settings: Mapping[str, Any] = {}  # of `build_data`

    @cached_property
    def identity(self) -> str:
        """SHA-256 of the content and the settings: runs are compared where it is equal."""
        from baoc.data.identity import identity_of

        return identity_of(self.contents(), settings=self.settings)

    def contents(self) -> tuple[str, ...]:
        """A hash for each part of the data, for `identity`; none for streams, which settings alone tell apart."""
        return ()

    @abstractmethod
    def make_train_loader(self, *, limit: int | None) -> TrainLoader:
        """A new training loader. `limit`: batches after which the trainer ends an epoch; None for all."""

    @abstractmethod
    def make_overfit_loader(self) -> SequentialLoader:
        """The training samples in a fixed order, so that the first batches are the same in each epoch."""

    @abstractmethod
    def val_dataloader(self) -> SequentialLoader: ...

    def setup(self, stage: str) -> None:
        """Starts a new pass. Lightning calls this first in each fit, before it restores a checkpoint."""
        if stage == "fit":
            self._loader = self._resume = None

    def train_dataloader(self) -> TrainLoader | SequentialLoader:
        """The training loader of this fit, the same object at each call, so that there is one position.

        Under Trainer(overfit_batches=...) the loader has a fixed order instead.
        """
        if getattr(self.trainer, "overfit_batches", 0) > 0:
            return self.make_overfit_loader()
        if self._loader is None:
            self._loader = self.make_train_loader(limit=self._limit())
            if self._resume is not None:
                self._loader.load_state_dict(self._resume)
        return self._loader

    def state_dict(self) -> dict[str, Any]:
        return {} if self._loader is None else {"train_loader": self._loader.state_dict()}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        self._resume = state_dict.get("train_loader")
        if self._loader is not None and self._resume is not None:
            self._loader.load_state_dict(self._resume)

    def _limit(self) -> int | None:
        """Trainer(limit_train_batches=...) as a number of batches; a fraction is converted."""
        limit = None if self.trainer is None else self.trainer.limit_train_batches
        if isinstance(limit, float):
            per_step = self.batch_size * self.accumulate
            return int(self.spec.num_train // per_step * self.accumulate * limit)
        return limit


class MapStyleDataModule(DataModule):
    """Samples that are numbered before training begins: `train_rows` of `train_source` and `val_rows` of `val_source`,
    all of them where None. `transform` is applied to whole batches, which `workers` processes make ahead of time."""

    train_source: Source
    val_source: Source
    train_rows: Tensor | None = None
    val_rows: Tensor | None = None
    transform: Transform | None = None
    workers: int = 0

    def contents(self) -> tuple[str, ...]:
        from baoc.data.identity import hash_source

        apart = () if self.val_source is self.train_source else (hash_source(self.val_source),)
        return (hash_source(self.train_source), *apart)

    def make_train_loader(self, *, limit: int | None) -> ShuffledLoader:
        rank, num_ranks = rank_and_size(self)
        return ShuffledLoader(
            self.train_source,
            batch_size=self.batch_size,
            seed=self.seed,
            accumulate=self.accumulate,
            limit=limit,
            rank=rank,
            num_ranks=num_ranks,
            indices=self.train_rows,
            transform=self.transform,
            workers=self.workers,
        )

    def make_overfit_loader(self) -> SequentialLoader:
        return self._in_order(self.train_source, self.train_rows)

    def val_dataloader(self) -> SequentialLoader:
        return self._in_order(self.val_source, self.val_rows)

    def _in_order(self, source: Source, rows: Tensor | None) -> SequentialLoader:
        return SequentialLoader(
            source, batch_size=self.batch_size, indices=rows, transform=self.transform, workers=self.workers
        )


def check_val_fraction(val_fraction: float) -> None:
    if not 0 < val_fraction < 1:
        raise BadInputError(f"val_fraction must lie between 0 and 1, not {val_fraction}; 0.05 holds back a 20th")


def random_split(count: int, *, val_fraction: float, split_seed: int) -> tuple[Tensor, Tensor]:
    """(rows of training samples, rows of validation samples) of `count`, in an order drawn by `split_seed`, which is
    independent of a run's seed."""
    check_val_fraction(val_fraction)
    if count < 2:
        raise BadInputError(f"{count} sample cannot be split into training and validation: at least 2 are needed")
    num_val = min(max(1, round(count * val_fraction)), count - 1)
    order = torch.randperm(count, generator=torch.Generator().manual_seed(split_seed))
    return order[num_val:], order[:num_val]


def rank_and_size(data: DataModule) -> tuple[int, int]:
    """(rank, number of ranks) of the trainer that `data` serves."""
    return (0, 1) if data.trainer is None else (data.trainer.global_rank, data.trainer.world_size)
