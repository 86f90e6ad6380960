"""Base class of tasks: AdamW with a no-decay group, a step-wise schedule, and settings that checkpoints can hold.

Tasks run under a plain `lightning.Trainer`. BaocStrategy replaces the optimizer and keeps its groups and schedule.
"""

import hashlib
import math
from collections.abc import Mapping
from contextlib import AbstractContextManager, nullcontext
from dataclasses import asdict
from typing import Any, ClassVar

import lightning as L
import torch
from torch import Tensor, nn

from baoc.errors import BadInputError
from baoc.tasks.ema import EmaWeights
from baoc.tasks.settings import OptimizerSettings
from baoc.types import DataSpec


class Task(L.LightningModule):
    """A model with its loss. Subclasses add the steps and declare the metric that runs are compared by."""

    quality: ClassVar[tuple[str, bool]]  # metric key, and whether higher is better
    task_family: ClassVar[str | None] = None  # name in `baoc.core.measured.families` of measurements of this task

    def __init__(
        self,
        model: nn.Module,
        *,
        spec: DataSpec | None = None,
        optimizer: OptimizerSettings | Mapping[str, Any] = OptimizerSettings(),  # noqa: B008 - frozen
        **options: Any,
    ):
        """Args:
        optimizer: of AdamW and its schedule.
        spec: describes the data, for tasks whose loss or metric depends on it; None if not known.
        options: the subclass's settings, numbers and strings only. `hparams` holds them beside the optimizer's, so that
            checkpoints load with `weights_only=True`: `load_from_checkpoint(path, model=model)`. An `ema_decay` above
            0 keeps an exponential moving average of the weights, which is what validation uses.
        """
        super().__init__()
        self.model = model
        self.spec = spec
        self.settings = optimizer if isinstance(optimizer, OptimizerSettings) else OptimizerSettings(**optimizer)
        self.save_hyperparameters({"optimizer": asdict(self.settings), **options})
        ema_decay = options.get("ema_decay", 0.0)
        self.ema = EmaWeights(ema_decay) if ema_decay != 0 else None

    def configure_callbacks(self) -> list[L.Callback]:
        """Lightning adds these callbacks to any Trainer that fits or validates the module."""
        return [] if self.ema is None else [self.ema]

    def averaged(self) -> AbstractContextManager[None]:
        """Inside, the weights are replaced by their moving averages, if the task keeps any."""
        return nullcontext() if self.ema is None else self.ema.swapped(self)

    def configure_optimizers(self) -> Any:
        settings = self.settings
        beta1, beta2 = settings.betas
        optimizer = torch.optim.AdamW(self.optimizer_groups(), lr=settings.lr, betas=(beta1, beta2), eps=settings.eps)
        num_steps = self.trainer.estimated_stepping_batches
        if math.isinf(num_steps) and settings.schedule != "constant":
            raise BadInputError(
                f"the {settings.schedule} schedule needs an end: give trainer.max_steps or trainer.max_epochs"
            )
        num_steps = 0 if math.isinf(num_steps) else int(num_steps)
        schedule = torch.optim.lr_scheduler.LambdaLR(
            optimizer, lambda step: settings.lr_factor(step, num_steps=num_steps)
        )
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": schedule, "interval": "step"}}

    def optimizer_groups(self) -> list[dict[str, Any]]:
        """Two parameter groups; parameters with fewer than two dimensions (norms, biases) have no weight decay."""
        trainable = [(name, p) for name, p in self.named_parameters() if p.requires_grad]
        decayed = [(name, p) for name, p in trainable if p.ndim >= 2]
        others = [(name, p) for name, p in trainable if p.ndim < 2]
        groups = [(decayed, self.settings.weight_decay), (others, 0.0)]
        return [{"params": params, "weight_decay": decay} for params, decay in groups if params]


def seed_from_key(key: str) -> int:
    """A seed for generators that follows from every character of `key`, the same on every machine."""
    return int.from_bytes(hashlib.sha256(key.encode()).digest()[:8], "big") >> 1


def logits_of(output: Any, *, task: str, shape: str) -> Tensor:
    """The logits of a model's output: itself, or its `logits`, as transformers' models return them.

    Raises BadInputError, which names the `task` and the `shape` that it needs, for anything else.
    """
    logits = output.get("logits") if isinstance(output, Mapping) else getattr(output, "logits", output)
    if not isinstance(logits, Tensor):
        raise BadInputError(
            f"the model returned a {type(output).__name__} and task {task} needs logits {shape}: return them as a "
            "tensor, or as `logits` of what is returned"
        )
    if logits.ndim != shape.count(",") + 1:
        raise BadInputError(f"the model returned logits of shape {tuple(logits.shape)} and task {task} needs {shape}")
    return logits
