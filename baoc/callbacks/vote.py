"""One all-reduce of all ranks after each step, for events that only one of them may have seen."""

from collections import defaultdict
from collections.abc import Callable
from typing import Any

import lightning as L

from baoc.callbacks.trainer_state import accumulating
from baoc.parallel import SINGLE_PROCESS, Ranks


class StepVote(L.Callback):
    """Calls each of `local_values` for a number; `outcome(name)` is the maximum of this number over ranks.

    Votes are taken before the first step, after each step and after each validation, by one all-reduce of all numbers.
    A callback that acts on an outcome therefore acts on all ranks in the same step. Place this callback before those.
    Without ranks, or if the Trainer does not have this callback, `outcome` calls and all-reduces at once.
    """

    def __init__(self) -> None:
        self.local_values: dict[str, Callable[[], float]] = {}
        self._outcomes: dict[str, float] = defaultdict(float)
        self.ranks: Ranks = SINGLE_PROCESS
        self._in_trainer = False

    def outcome(self, name: str) -> float:
        return self._outcomes[name] if self._in_trainer else self.ranks.all_reduce_max(self.local_values[name]())[0]

    def reset(self, name: str) -> None:
        """Sets the outcome to 0 until the next vote, once a callback has acted on it."""
        self._outcomes[name] = 0.0

    def setup(self, trainer: L.Trainer, pl_module: L.LightningModule, stage: str) -> None:
        self.ranks = ranks_of(trainer)
        self._in_trainer = self.ranks is not SINGLE_PROCESS

    def on_train_start(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        self._take()

    def on_train_batch_end(
        self, trainer: L.Trainer, pl_module: L.LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        if not accumulating(trainer):
            self._take()

    def on_validation_end(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        if trainer.state.fn == "fit" and not trainer.sanity_checking:
            self._take()

    def _take(self) -> None:
        if self.ranks is not SINGLE_PROCESS:
            numbers = self.ranks.all_reduce_max(*(ask() for ask in self.local_values.values()))
            self._outcomes.update(zip(self.local_values, numbers, strict=True))


def ranks_of(trainer: L.Trainer) -> Ranks:
    """The ranks of a BAOC strategy; SINGLE_PROCESS with any other strategy."""
    return getattr(trainer.strategy, "ranks", SINGLE_PROCESS)
