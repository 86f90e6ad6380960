"""What every task shares: AdamW with a no-decay group and a step-wise schedule, and settings that checkpoints may hold.

Works under a plain `lightning.Trainer`; BaocStrategy replaces the optimizer and keeps its groups and schedule.
"""

import math
from collections.abc import Mapping
from contextlib import AbstractContextManager, nullcontext
from dataclasses import asdict
from typing import Any, ClassVar

import lightning as L
import torch
from torch import nn

from baoc.errors import BadInputError
from baoc.tasks.ema import EmaWeights
from baoc.tasks.settings import OptimizerSettings
from baoc.types import DataSpec


class Task(L.LightningModule):
    """A model with its loss. Subclasses add the steps and state by which metric they are judged."""

    quality: ClassVar[tuple[str, bool]]  # metric key, and whether higher is better

    def __init__(
        self,
        model: nn.Module,
        *,
        optimizer: OptimizerSettings | Mapping[str, Any],
        spec: DataSpec | None = None,
        **options: Any,
    ):
        """`spec` describes the data, for tasks whose loss or metric depends on it; None where it is not known.

        `options` are the subclass's own settings. They are kept in `hparams` beside the optimizer's, as numbers and
        strings only, so that checkpoints load with `weights_only=True`; `load_from_checkpoint(path, model=model)`.
        `ema_decay` among them, above 0, keeps averages of the weights, which validate in their place."""
        super().__init__()
        self.model = model
        self.spec = spec
        self.settings = optimizer if isinstance(optimizer, OptimizerSettings) else OptimizerSettings(**optimizer)
        self.save_hyperparameters({"optimizer": asdict(self.settings), **options})
        ema_decay = options.get("ema_decay", 0.0)
        self.ema = EmaWeights(ema_decay) if ema_decay != 0 else None

    def configure_callbacks(self) -> list[L.Callback]:
        """What any Trainer that fits or validates this module must run beside it."""
        return [] if self.ema is None else [self.ema]

    def averaged(self) -> AbstractContextManager[None]:
        """Inside, the weights are their averages, where such are kept."""
        return nullcontext() if self.ema is None else self.ema.swapped(self)

    def configure_optimizers(self) -> Any:
        settings = self.settings
        beta1, beta2 = settings.betas
        optimizer = torch.optim.AdamW(self._groups(), lr=settings.lr, betas=(beta1, beta2), eps=settings.eps)
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

    def _groups(self) -> list[dict[str, Any]]:
        """Trainable parameters in two groups; those with fewer than two dimensions (norms, biases) do not decay."""
        trainable = [(name, p) for name, p in self.named_parameters() if p.requires_grad]
        decayed = [(name, p) for name, p in trainable if p.ndim >= 2]
        others = [(name, p) for name, p in trainable if p.ndim < 2]
        groups = [(decayed, self.settings.weight_decay), (others, 0.0)]
        return [{"params": params, "weight_decay": decay} for params, decay in groups if params]
