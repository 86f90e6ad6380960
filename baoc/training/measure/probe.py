"""Runs one training and one validation micro-batch before training, so that the peak is known before it is reached.

The probe leaves nothing behind: RNG, buffers, gradients, metrics and the loader's position are as before.
"""

from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import lightning as L
import torch
from torch import Tensor, nn
from torchmetrics import Metric

from baoc.cache import cache_folder
from baoc.errors import BadInputError
from baoc.planning.allocators import ALLOCATORS
from baoc.profiling import probe_footprint
from baoc.tasks.ema import EmaWeights
from baoc.training.callbacks.resume import capture_rng, restore_rng
from baoc.training.measure.benchmark_steps import rehearse
from baoc.training.measure.step_time import time_specs
from baoc.types import Footprint, LatencyTable, OptimizerSpec

CLIP_BYTES = 12  # per element, of clipping by norm
REHEARSED_S = 2.0  # about what steps in Lightning's loop may take on a GPU, whose host's speed changes within a second
SHARE = 0.2  # of what a latency table may take, that a rehearsal does on a CPU


def first_batch(source: Any) -> Any:
    """One batch of a Lightning data source, without moving a loader that can tell its position, or any random numbers.

    A DataLoader draws its workers' seed from the global generator when it is iterated, shuffled or not.
    """
    generators = capture_rng()
    loader = source.dataloader()
    loaders = loader if isinstance(loader, list | tuple) else [loader]
    loader = loaders[0] if loaders else None
    if loader is None:
        return None
    position = loader.state_dict() if hasattr(loader, "state_dict") else None
    batch = next(iter(loader), None)
    if position is not None and hasattr(loader, "load_state_dict"):
        loader.load_state_dict(position)
    restore_rng(generators)
    return batch


@contextmanager
def silent(module: L.LightningModule) -> Iterator[None]:
    """Inside, `self.log` does nothing and metrics keep what they had: the probe is no step of the run."""
    metrics = [child for child in module.modules() if isinstance(child, Metric)]
    states = [(metric, metric.metric_state.copy(), metric._update_count) for metric in metrics]
    for metric, state, _ in states:  # what is added in place, or cleared, is added to copies
        for name, value in state.items():
            setattr(metric, name, value.clone() if isinstance(value, Tensor) else list(value))
    module.__dict__["log"] = module.__dict__["log_dict"] = lambda *_, **__: None
    try:
        yield
    finally:
        del module.__dict__["log"], module.__dict__["log_dict"]
        for metric, state, count in states:
            for name, value in state.items():
                setattr(metric, name, value)
            metric._update_count, metric._computed = count, None


class Probe:
    """`trainer`'s own module on its own first batches, in Lightning's order of a step.

    Raises BadInputError where the loader is empty.
    """

    def __init__(self, trainer: L.Trainer, strategy: Any):
        self.module = trainer.lightning_module
        batch = first_batch(trainer.fit_loop._data_source)
        if batch is None:
            raise BadInputError(
                "the training loader gave no batch, so no step can be planned: check the dataset's size"
            )
        val_source = trainer.fit_loop.epoch_loop.val_loop._data_source
        validates = trainer.limit_val_batches and val_source.is_defined()
        val_batch = first_batch(val_source) if validates else None
        callbacks: list[L.Callback] = trainer.callbacks  # pyright: ignore[reportAttributeAccessIssue]
        self._ema = [callback for callback in callbacks if isinstance(callback, EmaWeights)]
        self.accumulation = trainer.accumulate_grad_batches
        self._keeps = strategy.ranks.size > 1  # gradients, in buckets that are there all the time
        self._clip = trainer.gradient_clip_val, trainer.gradient_clip_algorithm
        self._micro_batch = batch_size_of(batch)
        self._batch = batch
        self._move = lambda: strategy.batch_to_device(strategy.precision_plugin.convert_input(batch))
        self._loss = _training(strategy)
        self._only = ALLOCATORS[strategy.settings.planner.allocator].traits.only_spec
        self._validate = None if val_batch is None else _validation(strategy, val_batch)

    def footprint(self, *, context_bytes: int, released: Sequence[Sequence[Tensor]] = ()) -> Footprint:
        """The module's bytes, averages of its weights included.

        `released`: the parameters of each block, where gradients are released in backward.
        """
        with silent(self.module):
            footprint = probe_footprint(
                self.module,
                run_micro_batch=lambda: self._loss(self._move()),
                run_validation_batch=self._validate,
                micro_batch=self._micro_batch,
                accumulation=max(self.accumulation, 2) if self._keeps else self.accumulation,
                context_bytes=context_bytes,
                released=released,
            )
        extra = sum(ema.validation_bytes(self.module) for ema in self._ema) if self._validate is not None else 0
        return replace(
            footprint,
            ema_bytes=sum(ema.nbytes(self.module) for ema in self._ema),
            validation_bytes=footprint.validation_bytes + extra,
            intervals=tuple(
                replace(m, num_bytes=m.num_bytes + extra) if m.name == "validation" else m for m in footprint.intervals
            ),
        )

    def latency(
        self,
        specs: Sequence[OptimizerSpec],
        *,
        max_s: float,
        needed: Collection[str],
        given: LatencyTable | None = None,
        released: Sequence[Sequence[Tensor]] = (),
    ) -> LatencyTable:
        """Seconds of the optimizer step of `specs`, and of the rest of a step as it will be trained; gradients are None
        afterwards.

        Of the specs those that are `needed` are timed, see `time_specs`. With a `given` table only these, the rest of a
        step and the reference being known from it. `released`: as in `footprint`.
        """
        params = [param for param in self.module.parameters() if param.requires_grad]
        device = params[0].device
        devices = [device.index] if device.type == "cuda" else []
        rest_s = 0.0
        if given is None:
            with silent(self.module), torch.random.fork_rng(devices=devices, device_type="cuda"):
                rest_s = rehearse(
                    self._loss,
                    batch=self._move(),
                    module=self.module,
                    params=params,
                    device=device,
                    accumulation=self.accumulation,
                    clip=self._clip,
                    blocks=(blocks := released or [[param] for param in params]),
                    specs=[self._likely(specs)] * len(blocks) if released or device.type == "cuda" else (),
                    release=bool(released),
                    max_s=max(max_s, REHEARSED_S) if device.type == "cuda" else SHARE * max_s,
                )
        clips = bool(self._clip[0]) and bool(released)
        table = time_specs(
            specs,
            device=device,
            num_elements=sum(param.numel() for param in params),
            num_tensors=len(params),
            rest_s=rest_s,
            upkeep_bytes=upkeep_bytes(clips=clips, averages=bool(self._ema)),
            needed=needed,
            max_s=max_s,
            cache_dir=cache_folder(),
        )
        if given is None:
            return table
        return replace(table, base_step_s=given.base_step_s, reference_step_s=given.reference_step_s)

    def _likely(self, specs: Sequence[OptimizerSpec]) -> OptimizerSpec:
        """One that a plan may hold, before there is a plan: the host does about the same for all."""
        return next((spec for spec in specs if spec.name == self._only), specs[0])


def upkeep_bytes(*, clips: bool, averages: bool) -> int:
    """Bytes per element that a step moves beside forward, backward and the optimizer's own: non-finite elements are
    looked for, norms are taken and gradients scaled, weights averaged; all of it in float32."""
    return 4 + (CLIP_BYTES if clips else 0) + (12 if averages else 0)


def _training(strategy: Any) -> Callable[[Any], Tensor]:
    """A callable: training_step under the precision plugin's context on a batch that was moved; returns the loss."""

    def run(moved: Any) -> Tensor:
        out = strategy.training_step(moved, 0)
        loss = out["loss"] if isinstance(out, dict) else out
        if not isinstance(loss, Tensor):
            raise BadInputError("training_step returned no loss tensor for the probe's batch: return the loss")
        return loss

    return run


def _validation(strategy: Any, batch: Any) -> Callable[[], None]:
    def run() -> None:
        strategy.validation_step(strategy.batch_to_device(strategy.precision_plugin.convert_input(batch)), 0)

    return run


def batch_size_of(batch: Any) -> int:
    """Samples of a batch: the first dimension of its first tensor; 0 where there is none."""
    if isinstance(batch, Tensor):
        return batch.shape[0] if batch.ndim else 0
    values = batch.values() if isinstance(batch, dict) else batch if isinstance(batch, list | tuple) else ()
    return next((size for size in map(batch_size_of, values) if size), 0)


def unwrapped(module: nn.Module) -> nn.Module:
    """The module that may declare blocks: a LightningModule's `model` or `net` if it has one, else itself."""
    for name in ("model", "net", "network"):
        child = getattr(module, name, None)
        if isinstance(child, nn.Module) and hasattr(child, "parameter_blocks"):
            return child
    return module
