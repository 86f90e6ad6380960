"""Prediction of the next token."""

import math
from typing import Any, ClassVar

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint
from torchmetrics import MeanMetric

from baoc.errors import BadInputError
from baoc.tasks.base import Task, logits_of
from baoc.types import IGNORE_INDEX, TextDataSpec


class LanguageTask(Task):
    """Cross-entropy in float32 on batches `{"tokens", "targets"}` (B, T), for a model that returns logits.

    If batches also have `positions`, rows hold several texts, and tokens with target IGNORE_INDEX do not count.

    val/bpb (bits per byte) is the loss per token in bits over the mean bytes per token of `spec` (1 without a spec); it
    is comparable between tokenizers. val/ppl is the exponential of the mean loss.

    `loss_chunk` above 0 runs the model's head on that many tokens at a time and recomputes it in backward, so that the
    logits of all tokens never exist at once. The loss is equal up to the order of a sum.
    """

    quality: ClassVar[tuple[str, bool]] = ("val/bpb", False)
    task_family = "language"

    def __init__(self, model: nn.Module, *, loss_chunk: int = 0, ema_decay: float = 0.0, **base: Any):
        """`base`: spec and optimizer, as `Task` takes them."""
        if loss_chunk < 0:
            raise BadInputError(f"loss_chunk must be 0 (all at once) or a number of tokens, not {loss_chunk}")
        if loss_chunk and not hasattr(model, "features"):
            raise BadInputError(f"loss_chunk={loss_chunk} needs a model with `features` and `head`: set it to 0")
        options = {"loss_chunk": int(loss_chunk), "ema_decay": float(ema_decay)}
        super().__init__(model, **options, **base)
        self.loss_chunk = int(loss_chunk)
        self.bytes_per_token = self.spec.bytes_per_token if isinstance(self.spec, TextDataSpec) else 1.0
        self._val_loss = MeanMetric()  # mean over all tokens of all ranks, before the exponential

    def training_step(self, batch: dict[str, Tensor], batch_idx: int) -> Tensor:
        loss = self._loss(batch)
        self.log("train/loss", loss.detach(), prog_bar=True, sync_dist=True, batch_size=len(batch["tokens"]))
        return loss

    def on_validation_epoch_start(self) -> None:
        self._val_loss.reset()

    def validation_step(self, batch: dict[str, Tensor], batch_idx: int) -> None:
        loss, num_tokens = self._loss(batch), int((batch["targets"] != IGNORE_INDEX).sum())
        self._val_loss.update(loss, weight=num_tokens)
        self.log("val/loss", loss, prog_bar=True, batch_size=num_tokens)
        self.log("val/bpb", loss / (math.log(2) * self.bytes_per_token), prog_bar=True, batch_size=num_tokens)

    def on_validation_epoch_end(self) -> None:
        self.log("val/ppl", self._val_loss.compute().exp())

    def _loss(self, batch: dict[str, Tensor]) -> Tensor:
        inputs, targets = [batch["tokens"]], batch["targets"]
        if "positions" in batch:
            inputs.append(batch["positions"])
        if self.loss_chunk:
            return self._chunked_loss(inputs, targets.flatten())
        logits = logits_of(self.model(*inputs), task="language", shape="(B, T, vocabulary)").flatten(0, 1).float()
        if len(inputs) == 1:
            return F.cross_entropy(logits, targets.flatten())
        total = F.cross_entropy(logits, targets.flatten(), reduction="sum")
        return total / (targets != IGNORE_INDEX).sum().clamp(min=1)

    def _chunked_loss(self, inputs: list[Tensor], targets: Tensor) -> Tensor:
        model: Any = self.model

        def summed_loss(hidden: Tensor, targets: Tensor) -> Tensor:
            return F.cross_entropy(model.head(hidden).float(), targets, reduction="sum")

        hidden = model.features(*inputs).flatten(0, 1)
        total = hidden.new_zeros((), dtype=torch.float32)
        for chunk, chunk_targets in zip(hidden.split(self.loss_chunk), targets.split(self.loss_chunk), strict=True):
            total = total + checkpoint(summed_loss, chunk, chunk_targets, use_reentrant=False)
        return total / (targets != IGNORE_INDEX).sum().clamp(min=1)
