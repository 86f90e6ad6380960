"""Handles a loss that is NaN or infinite: its step is skipped, and too many such steps in a row end the run.

Non-finite elements of gradients under a finite loss are handled by the optimizer (optim.nonfinite).
"""

import math
from collections.abc import Callable
from typing import Any

import lightning as L
import torch
from torch import Tensor

from baoc.callbacks.trainer_state import accumulating
from baoc.callbacks.vote import StepVote, ranks_of
from baoc.errors import DivergedError
from baoc.tracking.console import say

KINDS = ("finite", "-inf", "inf", "nan")  # of a loss; the last of several ranks' kinds counts
REMEDY = "lower optim.lr, set trainer.gradient_clip_val, or look at the data of that step"


class LossGuard(L.Callback):
    """Skips steps with a non-finite loss: backward starts from NaN, and the optimizer skips non-finite gradients.

    `patience` such steps in a row raise DivergedError (exit code 5), which a study counts as a violated constraint.
    Losses are read once per optimizer step, which synchronizes with a GPU. With a `vote`, a non-finite loss of one rank
    counts for all.
    """

    def __init__(self, *, patience: int = 20, vote: StepVote | None = None):
        self.patience = patience
        self.num_nonfinite = self.num_consecutive = 0
        self.say: Callable[[str], None] = say
        self._losses: list[Tensor] = []  # of the step in progress, one per micro-batch
        self._vote = vote or StepVote()
        self._vote.local_values["loss"] = self._loss_kind

    def setup(self, trainer: L.Trainer, pl_module: L.LightningModule, stage: str) -> None:
        self._vote.ranks = ranks_of(trainer)

    def on_before_backward(self, trainer: L.Trainer, pl_module: L.LightningModule, loss: Tensor) -> None:
        value = loss.detach()
        self._losses.append(value)
        if loss.requires_grad:
            finite = torch.isfinite(value)
            loss.register_hook(lambda gradient: torch.where(finite, gradient, torch.full_like(gradient, torch.nan)))

    def on_train_batch_end(
        self, trainer: L.Trainer, pl_module: L.LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        if accumulating(trainer):
            return
        kind = int(self._vote.outcome("loss"))
        if not kind:
            self.num_consecutive = 0
            return
        self.num_nonfinite += 1
        self.num_consecutive += 1
        what, before = f"the loss of step {trainer.global_step} is {KINDS[kind]}", self.num_consecutive - 1
        if self.num_consecutive >= self.patience:
            more = f", as was that of the {before} steps before it" if before else ""
            raise DivergedError(f"{what}{more} (faults.patience): {REMEDY}")
        self.say(f"{what}: the step leaves out what has no finite gradient (number {self.num_nonfinite} of this run)")

    def _loss_kind(self) -> float:
        """Index in KINDS of the step's first non-finite loss; 0 if all are finite."""
        losses, self._losses = self._losses, []
        values = torch.stack(losses).float().tolist() if losses else []
        return next((KINDS.index(str(value)) for value in values if not math.isfinite(value)), 0)

    def state_dict(self) -> dict[str, int]:
        return {"bad": self.num_nonfinite, "in_a_row": self.num_consecutive}

    def load_state_dict(self, state_dict: dict[str, int]) -> None:
        self.num_nonfinite, self.num_consecutive = state_dict["bad"], state_dict["in_a_row"]
