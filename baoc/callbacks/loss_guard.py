"""What a loss that is NaN or infinite costs: its step, the steps back to the last checkpoint, or the run.

Gradients that hold some non-finite elements under a finite loss are the optimizer's own affair (optim.nonfinite).
"""

import math
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, Literal

import lightning as L
import torch
from torch import Tensor

from baoc.callbacks.checkpoint import SafeCheckpoint
from baoc.callbacks.trainer_state import accumulating
from baoc.callbacks.vote import StepVote, ranks_of
from baoc.errors import CheckpointError, DivergedError, TrainingFailedError
from baoc.tracking.checkpoints import load_checked, resolve_resume
from baoc.tracking.console import say

KINDS = ("finite", "-inf", "inf", "nan")  # of a loss; of several ranks' the last one counts
REMEDY = "lower optim.lr, set trainer.gradient_clip_val, or look at the data of that step"


class LossGuard(L.Callback):
    """A step with a non-finite loss changes no weight, whatever the policy: its gradients are made NaN at their root,
    and the optimizer leaves such elements out. Then `nonfinite_loss` says what follows:

    `skip`: nothing. `patience` such steps in a row end the run.
    `rewind`: weights, states and averages become those of the newest intact checkpoint of this run (or of the one it
    resumed from), converted to the allocation in force. Data, learning rate and the count of steps go on, so the
    batches that led there are not seen again. After `max_rewinds` the run ends. `check` raises CheckpointError for a
    content that cannot be gone on from; such a checkpoint is passed over for an older one.
    `stop`: the run ends.

    An end is DivergedError, exit code 5, which a study is told as a violated constraint. Losses are read once per
    optimizer step, so a GPU is waited for once. By a `vote` the loss of any rank is that of all.
    """

    def __init__(
        self,
        *,
        nonfinite_loss: Literal["skip", "rewind", "stop"] = "skip",
        patience: int = 20,
        max_rewinds: int = 3,
        checkpoint: SafeCheckpoint | None = None,
        check: Callable[[Mapping[str, Any]], object] = lambda content: None,
        vote: StepVote | None = None,
    ):
        self.policy = nonfinite_loss
        self.patience = patience
        self.max_rewinds = max_rewinds
        self.num_bad = self.num_in_a_row = self.num_rewinds = 0
        self.tell: Callable[[str], None] = say
        self._checkpoint, self._check = checkpoint, check
        self._losses: list[Tensor] = []  # of the step in progress, one per micro-batch
        self._vote = vote or StepVote()
        self._vote.ask["loss"] = self._worst

    # -- Lightning ------------------------------------------------------------------------------------------------

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
            self.num_in_a_row = 0
            return
        self.num_bad += 1
        self.num_in_a_row += 1
        self._react(trainer, what=f"the loss of step {trainer.global_step} is {KINDS[kind]}")

    def _worst(self) -> float:
        """Which of KINDS the first loss of the step is that is no finite number; 0 where all are."""
        losses, self._losses = self._losses, []
        values = torch.stack(losses).float().tolist() if losses else []
        return next((KINDS.index(str(value)) for value in values if not math.isfinite(value)), 0)

    def state_dict(self) -> dict[str, int]:
        return {"bad": self.num_bad, "in_a_row": self.num_in_a_row, "rewinds": self.num_rewinds}

    def load_state_dict(self, state_dict: dict[str, int]) -> None:
        self.num_bad, self.num_in_a_row = state_dict["bad"], state_dict["in_a_row"]
        self.num_rewinds = state_dict["rewinds"]

    # -- policies -------------------------------------------------------------------------------------------------

    def _react(self, trainer: L.Trainer, *, what: str) -> None:
        if self.policy == "stop":
            raise DivergedError(f"{what}, and faults.nonfinite_loss=stop: {REMEDY}")
        if self.policy == "skip":
            if self.num_in_a_row >= self.patience:
                raise DivergedError(
                    f"{what}, as was that of the {self.num_in_a_row - 1} steps before it (faults.patience): {REMEDY}"
                )
            self.tell(f"{what}: the step changes nothing (number {self.num_bad} of this run)")
            return
        if self.num_rewinds >= self.max_rewinds:
            raise DivergedError(
                f"{what} after {self.num_rewinds} rewinds (faults.max_rewinds={self.max_rewinds}): {REMEDY}"
            )
        self.num_rewinds += 1
        step = self._rewind(trainer, what=what)
        self.tell(f"{what}: back to the weights and states of step {step} (rewind {self.num_rewinds})")

    def _newest(self) -> Path | None:
        if self._checkpoint is None or not self._checkpoint.folder.is_dir():
            return None
        return resolve_resume("auto", run_root=self._checkpoint.folder, check=self._check)

    def _rewind(self, trainer: L.Trainer, *, what: str) -> int:
        path = ranks_of(trainer).from_first(self._newest) or trainer.ckpt_path
        if path is None:
            raise DivergedError(
                f"{what}, and there is no checkpoint to rewind to: set checkpoint.every_n_steps, or {REMEDY}"
            )
        try:
            content = load_checked(path, ours=False)
        except CheckpointError as error:
            raise TrainingFailedError(f"{what}, and it cannot be rewound: {error}") from error
        try:
            self._check(content)  # the one that the run resumed from may have changed since
        except CheckpointError as error:
            raise TrainingFailedError(f"{what}, and it cannot be rewound: {path} {error}") from error
        restore(trainer, content)
        return int(content["global_step"])


def restore(trainer: L.Trainer, content: dict[str, Any]) -> None:
    """Weights, optimizer states and averages of a checkpoint into a run that goes on where it is.

    States are converted to the allocation in force; statistics and decisions are not taken back.
    """
    optimizer = trainer.optimizers[0]
    settings = [
        {k: v for k, v in group.items() if k not in ("params", "param_names")} for group in optimizer.param_groups
    ]
    states = [{k: v for k, v in state.items() if k != "online"} for state in content["optimizer_states"]]
    trainer.strategy.load_model_state_dict(content, strict=True)
    trainer.strategy.load_optimizer_state_dict({**content, "optimizer_states": states})
    for group, kept in zip(optimizer.param_groups, settings, strict=True):
        group.update(kept)
    callbacks: list[L.Callback] = trainer.callbacks  # pyright: ignore[reportAttributeAccessIssue]
    for callback in callbacks:
        if callback.state_key == "EmaWeights" and "EmaWeights" in content["callbacks"]:
            callback.load_state_dict(content["callbacks"]["EmaWeights"])
