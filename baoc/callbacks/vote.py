"""One vote of all ranks after each step, on what one of them may have seen alone."""

from collections import defaultdict
from collections.abc import Callable
from typing import Any

import lightning as L

from baoc.callbacks.trainer_state import accumulating
from baoc.parallel import SINGLE_PROCESS, Ranks


class StepVote(L.Callback):
    """Asks each of `local_values` for a number; the `outcome` is the largest that any rank has, by the same name.

    Votes come before the first step, after each step and after each validation: one small message of all numbers. What
    a callback does by one it then does on all ranks in the same step. Place it before all callbacks that do. A process
    alone is asked when the outcome is, and so are ranks where the Trainer does not have it: by a message for each.
    """

    def __init__(self) -> None:
        self.local_values: dict[str, Callable[[], float]] = {}
        self._agreed: dict[str, float] = defaultdict(float)
        self.ranks: Ranks = SINGLE_PROCESS
        self._placed = False

    def outcome(self, name: str) -> float:
        return self._agreed[name] if self._placed else self.ranks.all_reduce_max(self.local_values[name]())[0]

    def reset(self, name: str) -> None:
        """What was agreed on is done, and is not to be done again before the next vote."""
        self._agreed[name] = 0.0

    def setup(self, trainer: L.Trainer, pl_module: L.LightningModule, stage: str) -> None:
        self.ranks = ranks_of(trainer)
        self._placed = self.ranks is not SINGLE_PROCESS

    def on_train_start(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        self._vote()

    def on_train_batch_end(
        self, trainer: L.Trainer, pl_module: L.LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        if not accumulating(trainer):
            self._vote()

    def on_validation_end(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        if trainer.state.fn == "fit" and not trainer.sanity_checking:
            self._vote()

    def _vote(self) -> None:
        if self.ranks is not SINGLE_PROCESS:
            numbers = self.ranks.all_reduce_max(*(ask() for ask in self.local_values.values()))
            self._agreed.update(zip(self.local_values, numbers, strict=True))


def ranks_of(trainer: L.Trainer) -> Ranks:
    """Those that train together by a strategy of BAOC's; others are not asked."""
    return getattr(trainer.strategy, "ranks", SINGLE_PROCESS)
