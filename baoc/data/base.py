"""Base class of DataModules: one training loader per fit, whose position is saved in checkpoints.

Subclasses make the loaders; this class resumes them at the next sample.
"""

import logging
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

log = logging.getLogger(__name__)
TrainLoader = ShuffledLoader | StreamLoader


class DataModule(L.LightningDataModule):
    """Makes one training loader per fit and saves its position.

    The loader saves its position within the epoch too. Lightning discards that one if the loader was built before the
    loops were restored, for example by a schedule that needs the number of steps under max_epochs.

    Args:
        batch_size: samples of a micro-batch.
        seed: decides order and augmentation of training samples, but not which samples are held out.
        accumulate: micro-batches of an optimizer step.
    """

    spec: DataSpec
    ignored_options: tuple[str, ...] = ()  # of its entry in DATASETS; `build_data` refuses other values of them

    def __init__(self, *, batch_size: int, seed: int = 0, accumulate: int = 1):
        super().__init__()
        self.batch_size = batch_size
        self.accumulate = accumulate
        self.seed = seed
        self._loader: TrainLoader | None = None
        self._resume: Mapping[str, Any] | None = None
        self.settings: Mapping[str, Any] = {}  # the options that `build_data` used

    @cached_property
    def identity(self) -> str:
        """SHA-256 of the content and the settings. Runs are compared only if it is equal."""
        from baoc.data.identity import identity_of

        return identity_of(self.contents(), settings=self.settings)

    def contents(self) -> tuple[str, ...]:
        """One hash per part of the data, for `identity`. Empty if the settings alone identify the data."""
        return ()

    @abstractmethod
    def make_train_loader(self, *, limit: int | None) -> TrainLoader:
        """Makes a new training loader. `limit`: batches after which the trainer ends an epoch; None for all."""

    @abstractmethod
    def make_overfit_loader(self) -> SequentialLoader:
        """Makes a loader of the training samples in a fixed order: the first batches are the same in each epoch."""

    @abstractmethod
    def val_dataloader(self) -> SequentialLoader: ...

    def setup(self, stage: str) -> None:
        """Starts a new pass. Lightning calls this first in each fit, before it restores a checkpoint."""
        if stage == "fit":
            self._loader = self._resume = None

    def train_dataloader(self) -> TrainLoader | SequentialLoader:
        """Returns the training loader of this fit: the same object at each call, so that there is one position.

        Under Trainer(overfit_batches=...) it is a new loader with a fixed order.
        """
        limit = self._limit()
        if getattr(self.trainer, "overfit_batches", 0) > 0:
            return self.make_overfit_loader()
        if self._loader is None:
            self._loader = self.make_train_loader(limit=limit)
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
        """Batches of an epoch by Trainer(limit_train_batches=...), where overfit_batches count too; None for no limit.

        A step of fewer micro-batches would be of fewer samples and a smaller gradient, so the trainer, which reads its
        limit after this, gets one of whole optimizer steps.
        """
        trainer: Any = self.trainer
        if trainer is None:
            return None
        limit = trainer.limit_train_batches
        if isinstance(limit, float):
            per_step = self.batch_size * rank_and_size(self)[1] * self.accumulate
            limit = int(self.spec.num_train // per_step * self.accumulate * limit)
        whole = -(-limit // self.accumulate) * self.accumulate
        if whole != limit:
            log.warning(
                "an epoch of %d batches would end within a step of %d micro-batches: it is of %d batches",
                limit,
                self.accumulate,
                whole,
            )
            trainer.limit_train_batches = whole
        return whole


class MapStyleDataModule(DataModule):
    """Data with random access: training uses `train_rows` of `train_source`, validation `val_rows` of `val_source`.

    Rows are indices (n,) int64; None means all rows. `transform` is applied to whole batches. `workers` processes make
    batches ahead of time; 0 makes them in this process.
    """

    train_source: Source
    val_source: Source
    train_rows: Tensor | None = None
    val_rows: Tensor | None = None
    transform: Transform | None = None
    workers: int = 0

    def contents(self) -> tuple[str, ...]:
        from baoc.data.identity import hash_source

        shared = self.val_source is self.train_source
        sources = (self.train_source,) if shared else (self.train_source, self.val_source)
        return tuple(hash_source(source) for source in sources)

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
        return self._sequential_loader(self.train_source, self.train_rows)

    def val_dataloader(self) -> SequentialLoader:
        return self._sequential_loader(self.val_source, self.val_rows)

    def _sequential_loader(self, source: Source, rows: Tensor | None) -> SequentialLoader:
        return SequentialLoader(
            source, batch_size=self.batch_size, indices=rows, transform=self.transform, workers=self.workers
        )


def check_val_fraction(val_fraction: float) -> None:
    if not 0 < val_fraction < 1:
        raise BadInputError(f"val_fraction must lie between 0 and 1, not {val_fraction}; 0.05 holds back a 20th")


def random_split(count: int, *, val_fraction: float, split_seed: int) -> tuple[Tensor, Tensor]:
    """Splits `count` rows at random into (training rows, validation rows), both (n,) int64.

    `split_seed` alone decides the split, so runs with other seeds share it. Raises BadInputError for fewer than 2 rows.
    """
    check_val_fraction(val_fraction)
    if count < 2:
        raise BadInputError(f"{count} sample cannot be split into training and validation: at least 2 are needed")
    num_val = min(max(1, round(count * val_fraction)), count - 1)
    order = torch.randperm(count, generator=torch.Generator().manual_seed(split_seed))
    return order[num_val:], order[:num_val]


def rank_and_size(data: DataModule) -> tuple[int, int]:
    """(rank, number of ranks) of the Trainer that `data` is attached to; (0, 1) without a Trainer."""
    return (0, 1) if data.trainer is None else (data.trainer.global_rank, data.trainer.world_size)
