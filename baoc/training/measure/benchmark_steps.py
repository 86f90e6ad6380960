"""Times a few steps of Lightning's own loop before training, with an optimizer that leaves everything as it is.

A loop costs what its forward and backward do not show: hooks, logged values, clipping, a look at the loss that waits
for the device. Where launching limits a step, that is a tenth of it. The same monitor times it as later times the run.
"""

import logging
import signal
import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from itertools import repeat
from statistics import median
from time import perf_counter
from typing import Any

import lightning as L
import torch
from lightning.fabric.plugins.environments.lightning import LightningEnvironment
from torch import Tensor
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

WARM = 2  # steps that are not counted: memory is taken, kernels are chosen
WARM_RELEASED = 4  # and where gradients are released: groups form after the first
MOST = 48  # that are
FEW = 8  # micro-batches of a step: more of them are as those before
BYSTANDERS = 6  # callbacks of a run that do little, and are asked at every hook


def rehearse(
    loss: Callable[[Any], Tensor],
    *,
    batch: Any,
    module: L.LightningModule,
    params: Sequence[Tensor],
    device: torch.device,
    accumulation: int,
    clip: tuple[float | None, str | None] = (None, None),
    blocks: Sequence[Sequence[Tensor]] = (),
    specs: Sequence[OptimizerSpec] = (),
    release: bool = False,
    max_s: float,
) -> float:
    """Seconds of a step as training will take it, all but the optimizer's own part.

    The median of as many steps of `accumulation` micro-batches as begin within `max_s` seconds after WARM ones, MOST at
    most; of steps longer than that one is warm. Of more than FEW micro-batches so many are run, and the rest is taken
    to last as long as those between the first and the last. `loss` runs a forward of `module` on `batch`, which is on
    the device, and `log` logs meanwhile as it does in training. `clip`: value and algorithm of Lightning's clipping.
    `release`: the gradients of a block go when all have come, and `clip` is done in backward. `blocks`: the parameters
    of each; with `specs`, one for each, the host does what it does to step them (`ProxyBlocks`). Gradients are None
    afterwards, however it ends; weights, buffers and generators are as they were. Raises torch.OutOfMemoryError.
    """

    def measured() -> float:
        few, warm = min(accumulation, FEW), WARM_RELEASED if release and specs else WARM
        clips = {"clip_value" if clip[1] == "value" else "clip_norm": clip[0] or None}
        releasing = GradientRelease(**clips) if release else None
        group = ranks() if any(map(is_sharded, params)) else SINGLE_PROCESS  # who send each other messages in forward
        clock, guard = _Clock(max_s=max_s, warm=warm, group=group), LossGuard()
        guard.say = lambda _: None  # these are no steps of the run
        cuda = device.type == "cuda"
        with (
            preserved_state(module, params),
            _quiet(),
            _stepping(blocks, specs=specs, release=releasing) as small,
            _interruptible(),
            _logging_to(stand_in := _LossModule(loss, params, small=small), module=module),
        ):
            trainer = L.Trainer(
                accelerator="cuda" if cuda else "cpu",
                devices=[device.index or 0] if cuda else 1,
                max_steps=warm + MOST,
                accumulate_grad_batches=few,
                gradient_clip_val=None if release else clip[0],
                gradient_clip_algorithm=None if release else clip[1],
                callbacks=[*(L.Callback() for _ in range(BYSTANDERS)), guard, clock],
                plugins=[LightningEnvironment()],  # whatever job of a cluster this process is
                logger=False,
                enable_checkpointing=False,
                enable_progress_bar=False,
                enable_model_summary=False,
            )
            # Those that are there go on: Lightning's would end the run without a checkpoint.
            trainer._signal_connector.register_signal_handlers = lambda: None
            trainer.fit(stand_in, train_dataloaders=_RepeatedBatch(batch, count=(warm + MOST) * few))
        return (clock.step_ms + (accumulation - few) * clock.micro_batch_ms) / 1e3

    seconds = measured()
    if specs:  # proxy blocks are in cycles, and no part of what comes next
        clear_cache(device)
    return seconds


class _RepeatedBatch:
    """One batch, so many times."""

    def __init__(self, batch: Any, *, count: int):
        self._batch, self._count = batch, count

    def __len__(self) -> int:
        return self._count

    def __iter__(self) -> Iterator[Any]:
        return repeat(self._batch, self._count)


class _LossModule(L.LightningModule):
    """Has no parameters of its own, so nothing is moved or converted, and `params` for an optimizer to hold."""

    def __init__(self, loss: Callable[[Any], Tensor], params: Sequence[Tensor], *, small: ProxyBlocks | None = None):
        super().__init__()
        self._loss, self._params, self._small = loss, list(params), small

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        return self._loss(batch)

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return _NoUpdate(self._params, small=self._small)


class _NoUpdate(torch.optim.Optimizer):
    def __init__(self, params: Sequence[Tensor], *, small: ProxyBlocks | None):
        super().__init__(params, {})
        self._small = small

    def step(self, closure: Callable[[], Any] | None = None) -> Any:  # pyright: ignore[reportIncompatibleMethodOverride]
        loss = None if closure is None else torch.enable_grad()(closure)()
        if self._small is not None:
            self._small.finish()
        return loss


class _Clock(StepMonitor):
    """Ends the loop when the time is up, of `group` by rank 0's clock, long steps after fewer warm ones."""

    def __init__(self, *, max_s: float, warm: int, group: Ranks):
        super().__init__(warmup_steps=warm, batch_size=1)
        self._max_s, self._group = max_s, group
        self._began = perf_counter()
        self._inner: list[list[tuple[Any, Any]]] = []  # micro-batches but for the first and the last, by counted step

    @property
    def micro_batch_ms(self) -> float:
        """Median over the counted steps of the mean micro-batch between the first and the last; 0 of fewer than 3."""
        self._read_events()
        spent = lambda start, end: start.elapsed_time(end) if self._cuda else (end - start) * 1e3  # noqa: E731
        means = [sum(spent(*part) for part in parts) / len(parts) for parts in self._inner if parts]
        return median(means) if means else 0.0

    def _count(self) -> None:
        super()._count()
        self._inner.append(self._parts[1:-1])

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
        if self._num_seen > self.warmup_steps:
            trainer.should_stop = late
        elif late or self._num_seen == self.warmup_steps:
            self.warmup_steps, self._began = self._num_seen, perf_counter()


@contextmanager
def _quiet() -> Iterator[None]:
    """Remarks on a Trainer and an optimizer of which the user knows nothing stay off the terminal."""
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
    """`module` logs through the stand-in, which is in a loop; afterwards as before. Metrics are found by their names in
    `module`."""
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
    """Inside, small blocks are stepped if there are `specs`, and with `release` the gradients of a block go when the
    last of them has come."""
    small = ProxyBlocks(blocks, specs=specs, release=release) if specs else None
    block_of = {param: [p for p in block if p.requires_grad] for block in blocks for param in block if release}

    def come(param: Tensor) -> None:
        if small is not None:
            small.gradient_ready(param)
        block = block_of[param]
        if all(other.grad is not None for other in block):
            for other in block:
                other.grad = None

    handles = [param.register_post_accumulate_grad_hook(come) for param in block_of if param.requires_grad]
    try:
        yield small
    finally:
        for handle in handles:
            handle.remove()


@contextmanager
def _interruptible() -> Iterator[None]:
    """Ctrl-C inside is KeyboardInterrupt: Lightning would end the process and leave the signal ignored."""
    handler = signal.getsignal(signal.SIGINT)
    try:
        yield
    except SystemExit as end:
        if isinstance(end.__context__, KeyboardInterrupt):
            signal.signal(signal.SIGINT, handler)
            raise KeyboardInterrupt from None
        raise
