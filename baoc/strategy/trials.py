"""Runs small micro-batches of a task outside of any Trainer, to learn what each needs and how long it takes.

The same probe as before training (`probe_footprint`), for several sizes of one batch: samples are taken again where
there are too few. Leaves nothing behind but compiled kernels and gradients of None.
"""

import math
import time
from contextlib import AbstractContextManager, nullcontext
from dataclasses import replace
from typing import Any

import lightning as L
import torch
from torch import Tensor

from baoc.errors import BadInputError
from baoc.options import Trial
from baoc.profiling import probe_footprint
from baoc.strategy.probe import batch_size_of, silent
from baoc.tasks.ema import EmaWeights

PRECISIONS = ("32-true", "bf16-mixed")
TIMED = 3  # repeats of a micro-batch, of which the fastest counts


def resized(batch: Any, micro_batch: int) -> Any:
    """The batch with so many samples, the first ones taken again where there are not enough."""
    size = batch_size_of(batch)
    if isinstance(batch, Tensor):
        if not batch.ndim or not size:
            return batch
        return batch[torch.arange(micro_batch, device=batch.device) % size]
    if isinstance(batch, dict):
        return {key: resized(value, micro_batch) for key, value in batch.items()}
    if isinstance(batch, list | tuple):
        return type(batch)(resized(value, micro_batch) for value in batch)
    return batch


class Trials:
    """Micro-batches of `module` on `device`, which it is on already.

    `batch` and `val_batch` are real ones, of any size. Raises BadInputError for a precision whose weights a Trainer
    would convert.
    """

    def __init__(
        self,
        module: L.LightningModule,
        *,
        batch: Any,
        val_batch: Any,
        device: torch.device,
        precision: str,
        warm: bool = True,
    ):
        if precision not in PRECISIONS:
            raise BadInputError(
                f"micro_batch=auto tries micro-batches at trainer.precision={' or '.join(PRECISIONS)}, not "
                f"{precision}: give a micro_batch, or one of these"
            )
        self.module, self.device = module, device
        self._batch, self._val_batch = batch, val_batch
        self._warm = warm
        self._mixed = precision == "bf16-mixed"

    def run(self, micro_batch: int, *, accumulation: int, timed: bool = True, context_bytes: int = 0) -> Trial:
        """Footprint of a micro-batch, and seconds of its forward and backward where `timed`."""
        batch = self._moved(resized(self._batch, micro_batch))
        val_batch = None if self._val_batch is None else self._moved(resized(self._val_batch, micro_batch))
        ema = [part for part in (getattr(self.module, "ema", None),) if isinstance(part, EmaWeights)]
        with silent(self.module), self._seeded():
            footprint = probe_footprint(
                self.module,
                run_micro_batch=lambda: self._loss(batch) / accumulation,
                run_validation_batch=None if val_batch is None else lambda: self._validate(val_batch),
                micro_batch=micro_batch,
                accumulation=accumulation,
                context_bytes=context_bytes,
                warm=self._warm,
                ema_bytes=sum(part.nbytes(self.module) for part in ema),
            )
            seconds = self._seconds(batch) if timed else math.nan
        extra = sum(part.validation_bytes(self.module) for part in ema) if val_batch is not None else 0
        footprint = replace(footprint, validation_bytes=footprint.validation_bytes + extra)
        if extra:
            moments = tuple(
                replace(m, num_bytes=m.num_bytes + extra) if m.name == "validation" else m for m in footprint.moments
            )
            footprint = replace(footprint, moments=moments)
        return Trial(micro_batch=micro_batch, footprint=footprint, seconds=seconds)

    def _seconds(self, batch: Any) -> float:
        fastest = math.inf
        for attempt in range(TIMED + 1):
            self._wait()
            began = time.perf_counter()
            self._loss(batch).backward()
            self._wait()
            if attempt:
                fastest = min(fastest, time.perf_counter() - began)
        self.module.zero_grad(set_to_none=True)
        return fastest

    def forward(self, micro_batch: int) -> None:
        """A forward without gradients, for whoever counts what it does."""
        batch = self._moved(resized(self._batch, micro_batch))
        with silent(self.module), self._seeded(), torch.no_grad():
            self._loss(batch)

    def _wait(self) -> None:
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)

    def _loss(self, batch: Any) -> Tensor:
        with self._autocast():
            out = self.module.training_step(batch, 0)
        loss: Any = out["loss"] if isinstance(out, dict) else out
        if not isinstance(loss, Tensor):
            raise BadInputError("training_step returned no loss tensor for the probe's batch: return the loss")
        return loss

    def _validate(self, batch: Any) -> None:
        with self._autocast():
            self.module.validation_step(batch, 0)

    def _autocast(self) -> AbstractContextManager[Any]:
        return torch.autocast(self.device.type, dtype=torch.bfloat16) if self._mixed else nullcontext()

    def _seeded(self) -> AbstractContextManager[Any]:
        devices = [self.device] if self.device.type == "cuda" else []
        return torch.random.fork_rng(devices=devices, device_type="cuda")

    def _moved(self, batch: Any) -> Any:
        return self.module.transfer_batch_to_device(batch, self.device, 0)


def grow(
    trials: Trials, *, sizes: list[int], accumulation: int, max_s: float, most: int = 4, **options: Any
) -> list[Trial]:
    """Trials of the smallest of `sizes`, and of larger ones while time and memory last; at least one.

    Sizes grow by 2 at least (4 from the third on). Where memory ends, what was learned stays.
    """
    found: list[Trial] = []
    began, at = time.monotonic(), 0
    while at < len(sizes) and len(found) < most:
        try:
            found.append(trials.run(sizes[at], accumulation=accumulation, **options))
        except torch.OutOfMemoryError:
            if not found:
                raise
            break
        took = time.monotonic() - began
        factor = 2 if len(found) < 2 else 4
        bigger = [i for i in range(at + 1, len(sizes)) if sizes[i] >= factor * sizes[at]]
        if not bigger or (len(found) >= 2 and took * factor > max_s):
            break
        at = bigger[0]
    return found
