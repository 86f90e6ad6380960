"""Settings of a task's AdamW and its learning rate schedule. Imports no torch."""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal


@dataclass(frozen=True, slots=True, kw_only=True)
class OptimizerSettings:
    """AdamW and its schedule. `warmup_fraction` is of all steps, `final_lr_fraction` of `lr`.

    The defaults suit the digits run. Values are converted to plain Python numbers; their ranges are those of
    `baoc.config.schema.OptimConfig`, which checks them.
    """

    lr: float = 3e-3
    betas: Sequence[float] = (0.9, 0.999)
    eps: float = 1e-8
    weight_decay: float = 0.01
    schedule: Literal["cosine", "constant"] = "cosine"
    warmup_fraction: float = 0.1
    final_lr_fraction: float = 0.1

    def __post_init__(self):
        object.__setattr__(self, "betas", (float(self.betas[0]), float(self.betas[1])))
        for name in ("lr", "eps", "weight_decay", "warmup_fraction", "final_lr_fraction"):
            object.__setattr__(self, name, float(getattr(self, name)))

    def lr_factor(self, step: int, *, num_steps: int) -> float:
        """Learning rate of optimizer step `step` (from 0) of `num_steps`, as a factor on `lr`.

        Linear warm-up that reaches 1 at its last step, then constant, or half a cosine that reaches
        `final_lr_fraction` at the last step of all.
        """
        num_warmup = round(self.warmup_fraction * num_steps)
        if step < num_warmup:
            return (step + 1) / num_warmup
        if self.schedule == "constant":
            return 1.0
        progress = min(1.0, (step - num_warmup + 1) / max(1, num_steps - num_warmup))
        return self.final_lr_fraction + (1 - self.final_lr_fraction) * 0.5 * (1 + math.cos(math.pi * progress))
