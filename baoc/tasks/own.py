"""Tasks of the user's own code: a subclass of `Task`, or a function that returns the loss of a batch."""

from collections.abc import Mapping
from typing import Any, ClassVar

import torch
from torch import Tensor, nn

from baoc.core import own_code
from baoc.errors import BadInputError
from baoc.tasks.base import Task
from baoc.tasks.settings import OptimizerSettings
from baoc.types import DataSpec


def build_user_task(
    name: str, *, model: nn.Module, spec: DataSpec | None, optimizer: OptimizerSettings, options: Mapping[str, Any]
) -> Task:
    """Builds the task of the class or function `name` around `model`. Raises BadInputError for other objects."""
    loaded = own_code.load(name, key="task")
    if not isinstance(loaded, type):
        return LossTask(model, spec=spec, optimizer=optimizer, name=name, arguments=options)
    if not issubclass(loaded, Task):
        raise BadInputError(
            f"task={name} is a class of {loaded.__mro__[1].__name__}: give a subclass of baoc.tasks.base.Task, or a "
            "function that returns the loss of (model, batch). A LightningModule of its own is trained by its own "
            "Trainer with baoc.BaocStrategy"
        )
    quality = getattr(loaded, "quality", None)
    if not (isinstance(quality, tuple) and len(quality) == 2 and isinstance(quality[0], str)):
        raise BadInputError(
            f"task={name} declares no quality: write quality = ('val/loss', False), the metric that runs are compared "
            "by and whether higher is better"
        )
    arguments = {"model": model, "spec": spec, "optimizer": optimizer, **options}
    return own_code.call(name, key="task", options=arguments)


class LossTask(Task):
    """Trains with the user's function `loss(model, batch, **arguments)`.

    It returns a scalar tensor, or a mapping with `loss` and other scalars, which are logged beside it. Runs are
    compared by val/loss, its mean over the validation samples.
    """

    quality: ClassVar[tuple[str, bool]] = ("val/loss", False)

    def __init__(self, model: nn.Module, *, name: str, arguments: Mapping[str, Any], **base: Any):
        """`base`: spec and optimizer, as `Task` takes them."""
        super().__init__(model, name=name, arguments=dict(arguments), **base)
        self._name, self._arguments = name, dict(arguments)

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        values = self._values(batch)
        self.log("train/loss", values["loss"].detach(), prog_bar=True, sync_dist=True, batch_size=batch_size_of(batch))
        return values["loss"]

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        for key, value in self._values(batch).items():
            self.log(f"val/{key}", value, prog_bar=key == "loss", batch_size=batch_size_of(batch))

    def _values(self, batch: Any) -> dict[str, Tensor]:
        returned = own_code.call(self._name, key="task", options={"_args_": [self.model, batch], **self._arguments})
        values = dict(returned) if isinstance(returned, Mapping) else {"loss": returned}
        loss = values.get("loss")
        if not isinstance(loss, Tensor) or loss.numel() != 1:
            shape = f" of shape {tuple(loss.shape)}" if isinstance(loss, Tensor) else ""
            raise BadInputError(
                f"task={self._name} returned a {type(returned).__name__}{shape}: it must return the loss as a tensor "
                "of one number, or a mapping with such a `loss`"
            )
        if self.training and not loss.requires_grad:
            raise BadInputError(
                f"task={self._name} returned a loss without a gradient: nothing that it is made of is trained"
            )
        return {
            key: torch.as_tensor(value).reshape(()) if key == "loss" else torch.as_tensor(value, dtype=torch.float32)
            for key, value in values.items()
        }


def batch_size_of(batch: Any) -> int:
    """Samples of a batch: the first dimension of its first tensor."""
    if isinstance(batch, Tensor):
        return len(batch) if batch.ndim else 1
    items = batch.values() if isinstance(batch, Mapping) else batch if isinstance(batch, list | tuple) else ()
    return next((batch_size_of(item) for item in items if isinstance(item, Tensor | Mapping | list | tuple)), 1)
