"""Classification of images."""

from collections.abc import Mapping
from typing import Any, ClassVar

from torch import Tensor, nn
from torch.nn import functional as F

from baoc.errors import BadInputError
from baoc.tasks.base import Task
from baoc.tasks.settings import OptimizerSettings


class VisionTask(Task):
    """Cross-entropy on batches `{"images", "labels"}`, for a model that gives logits.

    `label_smoothing` acts on training only: val/loss is always the plain cross-entropy, comparable between settings.
    """

    quality: ClassVar[tuple[str, bool]] = ("val/loss", False)

    def __init__(
        self,
        model: nn.Module,
        *,
        optimizer: OptimizerSettings | Mapping[str, Any] = OptimizerSettings(),  # noqa: B008 - frozen
        label_smoothing: float = 0.0,
    ):
        if not 0 <= label_smoothing < 1:
            raise BadInputError(f"label_smoothing must be at least 0 and below 1, not {label_smoothing}")
        super().__init__(model, optimizer=optimizer, label_smoothing=float(label_smoothing))
        self.label_smoothing = float(label_smoothing)

    def training_step(self, batch: dict[str, Tensor], batch_idx: int) -> Tensor:
        logits = self.model(batch["images"]).float()
        loss = F.cross_entropy(logits, batch["labels"], label_smoothing=self.label_smoothing)
        self.log("train/loss", loss.detach(), prog_bar=True, batch_size=len(logits))
        return loss

    def validation_step(self, batch: dict[str, Tensor], batch_idx: int) -> None:
        logits = self.model(batch["images"]).float()
        loss = F.cross_entropy(logits, batch["labels"])
        accuracy = (logits.argmax(-1) == batch["labels"]).float().mean()
        self.log("val/loss", loss, prog_bar=True, batch_size=len(logits))
        self.log("val/acc", accuracy, prog_bar=True, batch_size=len(logits))
