"""Classification of images."""

from typing import Any, ClassVar

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from baoc.errors import BadInputError
from baoc.tasks.base import Task, logits_of


class VisionTask(Task):
    """Cross-entropy on batches `{"images", "labels"}`, for a model that returns logits.

    `label_smoothing` and `mixup` apply to training only: val/loss is the plain cross-entropy, comparable between
    settings. With `ema_decay`, validation uses the averaged weights.
    """

    quality: ClassVar[tuple[str, bool]] = ("val/loss", False)
    task_family = "vision"

    def __init__(
        self, model: nn.Module, *, label_smoothing: float = 0.0, mixup: float = 0.0, ema_decay: float = 0.0, **base: Any
    ):
        """`base`: spec and optimizer, as `Task` takes them."""
        if not 0 <= label_smoothing < 1:
            raise BadInputError(f"label_smoothing must be at least 0 and below 1, not {label_smoothing}")
        if not 0 <= mixup < float("inf"):
            raise BadInputError(f"mixup must be 0 (none) or the alpha of a Beta distribution, such as 0.2, not {mixup}")
        options = {"label_smoothing": float(label_smoothing), "mixup": float(mixup), "ema_decay": float(ema_decay)}
        super().__init__(model, **options, **base)
        self.label_smoothing = float(label_smoothing)
        self.mixup = float(mixup)

    def training_step(self, batch: dict[str, Tensor], batch_idx: int) -> Tensor:
        images, labels = batch["images"], batch["labels"]
        loss = self._mixed_loss(images, labels) if self.mixup else self._smoothed_loss(self._logits(images), labels)
        self.log("train/loss", loss.detach(), prog_bar=True, sync_dist=True, batch_size=len(images))
        return loss

    def validation_step(self, batch: dict[str, Tensor], batch_idx: int) -> None:
        logits = self._logits(batch["images"]).float()
        loss = F.cross_entropy(logits, batch["labels"])
        accuracy = (logits.argmax(-1) == batch["labels"]).float().mean()
        self.log("val/loss", loss, prog_bar=True, batch_size=len(logits))
        self.log("val/acc", accuracy, prog_bar=True, batch_size=len(logits))

    def _logits(self, images: Tensor) -> Tensor:
        logits = logits_of(self.model(images), task="vision", shape="(B, classes)")
        classes = getattr(self.spec, "num_classes", None) or 0
        if logits.shape[1] < classes:
            raise BadInputError(
                f"the model tells {logits.shape[1]} classes apart and the data have {classes}: give its last layer "
                "`num_classes` outputs"
            )
        return logits

    def _smoothed_loss(self, logits: Tensor, labels: Tensor) -> Tensor:
        return F.cross_entropy(logits.float(), labels, label_smoothing=self.label_smoothing)

    def _mixed_loss(self, images: Tensor, labels: Tensor) -> Tensor:
        """Mixup (Zhang et al. 2018, arXiv 1710.09412): blends each image, and its loss, with another of the batch.

        One share per batch is drawn on the CPU, from torch's global generator, whose state checkpoints keep.
        """
        share = float(torch.distributions.Beta(self.mixup, self.mixup).sample())
        partner = torch.randperm(len(images)).to(images.device)
        logits = self._logits(share * images + (1 - share) * images[partner])
        return share * self._smoothed_loss(logits, labels) + (1 - share) * self._smoothed_loss(logits, labels[partner])
