"""Writes a task's pictures at the end of training, to the run folder and W&B.

The network and the optimizer's state are still on the device then, so that the memory of sampling counts towards the
run's peak.
"""

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from typing import Any

import lightning as L

from baoc.callbacks.trainer_state import fast_dev_run
from baoc.tracking.console import say
from baoc.tracking.loggers import log_picture


class FinalPictures(L.Callback):
    """Calls `task.conclude(datamodule, folder=...)`, if the task has it, with averaged weights and inside `track`."""

    def __init__(self, folder: Path, *, track: Callable[[str], AbstractContextManager[Any]] | None = None):
        self.folder = folder
        self.track = track or (lambda label: nullcontext())

    def on_train_end(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        conclude: Any = getattr(pl_module, "conclude", None)
        data: Any = getattr(trainer, "datamodule", None)
        if conclude is None or data is None or fast_dev_run(trainer) or trainer.interrupted:
            return
        pl_module.zero_grad(set_to_none=True)  # frees the last step's gradients
        averaged = pl_module.averaged()  # pyright: ignore[reportCallIssue]
        with trainer.precision_plugin.forward_context(), averaged, self.track("samples"):
            picture = conclude(data, folder=self.folder)
        if picture is not None:
            log_picture(trainer.loggers, key="samples", path=picture)
            say(f"samples: {picture}")
