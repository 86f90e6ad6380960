"""Times a few steps of Lightning's own loop before training, with an optimizer that updates nothing.

A loop takes time beside forward and backward: hooks, logging, clipping, and a check of the loss that synchronizes with
the device. If launching kernels limits a step, that is a tenth of it. The monitor is the one that times the run later.
"""

import logging
import signal
import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from itertools import repeat
from time import perf_counter
from typing import Any

import lightning as L
import torch
from lightning.fabric.plugins.environments.lightning import LightningEnvironment
from torch import Tensor, nn
from torchmetrics import Metric

from baoc.callbacks.loss_guard import LossGuard
from baoc.callbacks.steps import StepMonitor
from baoc.callbacks.trainer_state import accumulating
from baoc.optim import GradientRelease
from baoc.optim.shards import is_sharded
from baoc.parallel import SINGLE_PROCESS, Ranks, ranks
from baoc.profiling import clear_cache
from baoc.profiling.footprint import preserved_state
from baoc.profiling.proxy_blocks import ProxyBlocks
from baoc.types import OptimizerSpec

WARM = 2  # warm-up steps, in which memory is allocated and kernels are chosen
WARM_RELEASED = 4  # warm-up steps under gradient release, whose groups form after the first
MAX_STEPS = 48  # that are timed
FEW = 8  # micro-batches of a step that are run; further ones are taken to need as long
IDLE_CALLBACKS = 6  # stand for callbacks of a run that do little but are called at every hook


def rehearse(
    loss: Callable[[Any], Tensor],
    *,
    batch: Any,
    module: L.LightningModule,
    accumulation: int,
    clip: tuple[float | None, str | None] = (None, None),
    blocks: Sequence[Sequence[Tensor]] = (),
    specs: Sequence[OptimizerSpec] = (),
    release: bool = False,
    max_s: float,
) -> float:
    """Seconds of a step as training will run it, without the optimizer's own part.

    Returns the median of up to MAX_STEPS steps that begin within `max_s` seconds after the warm-up; of steps longer
    than that, one is warm-up. Gradients are None afterwards; weights, buffers and random generators are as before.

    Args:
        loss: Runs a forward of `module` on `batch`, which is on its device.
        accumulation: Micro-batches of a step. FEW are run; the others are taken to need as long as the inner ones.
        clip: Value and algorithm of Lightning's clipping; under `release` it is done in backward.
        blocks: The parameters of each block.
        specs: One for each block. The host then does the work of stepping them (`ProxyBlocks`).
        release: Free the gradients of a block when all have arrived.

    Raises:
        torch.OutOfMemoryError: The step does not fit.
    """
    params = [param for param in module.parameters() if param.requires_grad]
    device = params[0].device

    def measured() -> float:
        few, warm = min(accumulation, FEW), WARM_RELEASED if release and specs else WARM
        clips = {"clip_value" if clip[1] == "value" else "clip_norm": clip[0] or None}
        gradient_release = GradientRelease(**clips) if release else None
        group = ranks() if any(map(is_sharded, params)) else SINGLE_PROCESS  # forward has collectives
        clock, guard = _Clock(max_s=max_s, warm=warm, group=group), LossGuard()
        guard.say = lambda _: None  # these steps are not the run's
        cuda = device.type == "cuda"
        with (
            preserved_state(module, params),
            _quiet(),
            _stepping(blocks, specs=specs, release=gradient_release) as proxies,
            _interruptible(),
            _logging_to(stand_in := _LossModule(loss, params, proxies=proxies), module=module),
        ):
            trainer = L.Trainer(
                accelerator="cuda" if cuda else "cpu",
                devices=[device.index or 0] if cuda else 1,
                max_steps=warm + MAX_STEPS,
                accumulate_grad_batches=few,
                gradient_clip_val=None if release else clip[0],
                gradient_clip_algorithm=None if release else clip[1],
                callbacks=[*(L.Callback() for _ in range(IDLE_CALLBACKS)), guard, clock],
                plugins=[LightningEnvironment()],  # else Lightning detects a cluster's job
                logger=False,
                enable_checkpointing=False,
                enable_progress_bar=False,
                enable_model_summary=False,
            )
            # The process keeps its signal handlers: Lightning's would end the run without a checkpoint.
            trainer._signal_connector.register_signal_handlers = lambda: None
            trainer.fit(stand_in, train_dataloaders=_RepeatedBatch(batch, count=(warm + MAX_STEPS) * few))
        return (clock.step_ms + (accumulation - few) * clock.micro_batch_ms) / 1e3

    seconds = measured()
    if specs:  # frees proxy blocks, which are in reference cycles
        clear_cache(device)
    return seconds


class _RepeatedBatch:  # a list would be as many loaders
    def __init__(self, batch: Any, *, count: int):
        self._batch, self._count = batch, count

    def __len__(self) -> int:
        return self._count

    def __iter__(self) -> Iterator[Any]:
        return repeat(self._batch, self._count)


class _LossModule(L.LightningModule):
    """Runs `loss`. It has no parameters, so Lightning moves and converts nothing; its optimizer holds `params`."""

    def __init__(self, loss: Callable[[Any], Tensor], params: list[nn.Parameter], *, proxies: ProxyBlocks | None):
        super().__init__()
        self._loss, self._params, self._proxies = loss, params, proxies

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        return self._loss(batch)

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return _NoUpdate(self._params, proxies=self._proxies)


class _NoUpdate(torch.optim.Optimizer):
    def __init__(self, params: Sequence[Tensor], *, proxies: ProxyBlocks | None):
        super().__init__(params, {})
        self._proxies = proxies

    def step(self, closure: Callable[[], Any] | None = None) -> Any:  # pyright: ignore[reportIncompatibleMethodOverride]
        loss = None if closure is None else torch.enable_grad()(closure)()
        if self._proxies is not None:
            self._proxies.finish()
        return loss


class _Clock(StepMonitor):
    """Ends the loop after `max_s` seconds by rank 0's clock. If steps are long, fewer are warm-up."""

    def __init__(self, *, max_s: float, warm: int, group: Ranks):
        super().__init__(warmup_steps=warm, batch_size=1)
        self._max_s, self._group = max_s, group
        self._began = perf_counter()

    def on_train_start(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        super().on_train_start(trainer, pl_module)
        self._began = perf_counter()

    def on_train_batch_end(
        self, trainer: L.Trainer, pl_module: L.LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        super().on_train_batch_end(trainer, pl_module, outputs, batch, batch_idx)
        if accumulating(trainer):
            return
        late = self._group.broadcast_number(perf_counter() - self._began > self._max_s) > 0
        if self.num_seen > self.warmup_steps:
            trainer.should_stop = late
        elif late or self.num_seen == self.warmup_steps:
            self.warmup_steps, self._began = self.num_seen, perf_counter()


@contextmanager
def _quiet() -> Iterator[None]:
    """Inside, Lightning and BAOC log no warnings about this Trainer, which is not the user's."""
    loggers = [logging.getLogger(name) for name in ("lightning.pytorch", "baoc.optim")]
    levels = [logger.level for logger in loggers]
    for logger in loggers:
        logger.setLevel(logging.ERROR)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            yield
    finally:
        for logger, level in zip(loggers, levels, strict=True):
            logger.setLevel(level)


@contextmanager
def _logging_to(stand_in: L.LightningModule, *, module: L.LightningModule) -> Iterator[None]:
    """Inside, `module` logs through `stand_in`, which has a Trainer. Metrics keep their names of `module`."""
    stand_in._metric_attributes = {id(part): name for name, part in module.named_modules() if isinstance(part, Metric)}
    before = {name: module.__dict__[name] for name in ("log", "log_dict") if name in module.__dict__}
    module.__dict__["log"], module.__dict__["log_dict"] = stand_in.log, stand_in.log_dict
    try:
        yield
    finally:
        for name in ("log", "log_dict"):
            del module.__dict__[name]
        module.__dict__.update(before)


@contextmanager
def _stepping(
    blocks: Sequence[Sequence[Tensor]], *, specs: Sequence[OptimizerSpec], release: GradientRelease | None
) -> Iterator[ProxyBlocks | None]:
    """Inside, proxy blocks are stepped if there are `specs`. Under `release` the last gradient of a block frees all."""
    proxies = ProxyBlocks(blocks, specs=specs, release=release) if specs else None
    block_of = {param: [p for p in block if p.requires_grad] for block in blocks for param in block if release}

    def free_gradients(param: Tensor) -> None:
        if proxies is not None:
            proxies.gradient_ready(param)
        block = block_of[param]
        if all(other.grad is not None for other in block):
            for other in block:
                other.grad = None

    handles = [param.register_post_accumulate_grad_hook(free_gradients) for param in block_of if param.requires_grad]
    try:
        yield proxies
    finally:
        for handle in handles:
            handle.remove()


@contextmanager
def _interruptible() -> Iterator[None]:
    """Inside, Ctrl-C raises KeyboardInterrupt; Lightning would end the process and leave the signal ignored."""
    handler = signal.getsignal(signal.SIGINT)
    try:
        yield
    except SystemExit as end:
        if isinstance(end.__context__, KeyboardInterrupt):
            signal.signal(signal.SIGINT, handler)
            raise KeyboardInterrupt from None
        raise
