"""Measures one training and one validation micro-batch of a Trainer's module before training.

Afterwards random generators, buffers, gradients, metrics and the loader's position are as before.
"""

from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import replace
from functools import partial
from typing import Any

import lightning as L
import torch
from lightning.pytorch.utilities.combined_loader import CombinedLoader
from lightning.pytorch.utilities.model_helpers import is_overridden
from lightning.pytorch.utilities.signature_utils import is_param_in_hook_signature
from torch import Tensor
from torchmetrics import Metric

from baoc.callbacks.generators import capture_rng, restore_rng
from baoc.data.batches import num_samples
from baoc.errors import BadInputError, BaocError
from baoc.optim.shards import is_sharded
from baoc.parallel import ranks
from baoc.planning.allocators import ALLOCATORS
from baoc.profiling import probe_footprint
from baoc.profiling.caller_probe import inputs_of
from baoc.profiling.python_state import PythonState
from baoc.tasks.ema import EmaWeights
from baoc.training.measure.benchmark_steps import rehearse
from baoc.types import Footprint, OptimizerSpec

CLIP_BYTES = 12  # bytes per element that clipping by norm moves
MIN_REHEARSED_S = 2.0  # that steps in Lightning's loop are timed for on a GPU: its host's speed varies by the second
FIRST_HOOKS = ("on_fit_start", "on_train_start", "on_train_epoch_start", "on_train_batch_start")  # before a step
REHEARSAL_SHARE = 0.2  # of the seconds that a latency table may take, for steps in Lightning's loop on a CPU


def first_batches(source: Any, *, training: bool) -> list[Any]:
    """The first batches of a Lightning data source: for `training` one of all loaders combined, else one of each.

    Data sets, random generators and loaders with a `state_dict` are as before. (A DataLoader draws its workers' seed
    from the global generator when it is iterated, shuffled or not.)
    """
    generators = capture_rng()
    given = source.dataloader()
    together = given if isinstance(given, CombinedLoader) else CombinedLoader(given, "max_size_cycle")
    loaders = [loader for loader in together.flattened if loader is not None]
    before = PythonState(*(getattr(loader, "dataset", None) for loader in loaders))
    positions = [(loader, loader.state_dict()) for loader in loaders if hasattr(loader, "state_dict")]
    if training:
        found = next(iter(together), None) if loaders else None
        batches = [] if found is None else [found[0]]
    else:
        batches = [batch for loader in loaders if (batch := next(iter(loader), None)) is not None]
    for loader, position in positions:
        if hasattr(loader, "load_state_dict"):
            loader.load_state_dict(position)
    before.restore()
    restore_rng(generators)
    return batches


def step_arguments(hook: Callable[..., Any], batch: Any, *, dataloader_idx: int | None = None) -> tuple[Any, ...]:
    """The arguments of a step as Lightning's loops call it: with the batch index only if the step has one."""
    indices = () if dataloader_idx is None else (dataloader_idx,)
    return (batch, 0, *indices) if is_param_in_hook_signature(hook, "batch_idx", min_args=2) else (batch, *indices)


@contextmanager
def silent(module: L.LightningModule) -> Iterator[None]:
    """Inside, `self.log` does nothing; afterwards metrics are as before."""
    metrics = [child for child in module.modules() if isinstance(child, Metric)]
    states = [(metric, metric.metric_state.copy(), metric._update_count) for metric in metrics]
    for metric, state, _ in states:  # copies, as updates may be in place
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


@contextmanager
def after_first_hooks(module: L.LightningModule, batch: Any) -> Iterator[None]:
    """Inside, the module's hooks before a first step have run; afterwards the module is as before them."""
    before, generators = PythonState(module), capture_rng()
    try:
        for hook in FIRST_HOOKS:
            arguments = (batch, 0) if hook == "on_train_batch_start" else ()
            getattr(module, hook)(*arguments)
        yield
    finally:
        before.restore()
        restore_rng(generators)


class UnmeasuredStepError(Exception):
    """The module's step cannot run before training, for the reason in the message."""


class Probe:
    """Measures the trainer's module on its first batches, in Lightning's order. Raises BadInputError without one."""

    def __init__(self, trainer: L.Trainer, strategy: Any):
        self.module = trainer.lightning_module
        batches = first_batches(trainer.fit_loop._data_source, training=True)
        if not batches:
            raise BadInputError(
                "the training loader gave no batch, so no step can be planned: check the dataset's size"
            )
        (batch,) = batches
        val_source = trainer.fit_loop.epoch_loop.val_loop._data_source
        validates = trainer.limit_val_batches and val_source.is_defined()
        val_batches = first_batches(val_source, training=False) if validates else []
        callbacks: list[L.Callback] = trainer.callbacks  # pyright: ignore[reportAttributeAccessIssue]
        self._ema = [callback for callback in callbacks if isinstance(callback, EmaWeights)]
        self.accumulation = trainer.accumulate_grad_batches
        self._keeps_gradients = strategy.keeps_gradients
        self._clip = trainer.gradient_clip_val, trainer.gradient_clip_algorithm
        self._strategy, self._batch, self._val_batches = strategy, batch, val_batches
        flags = (self.accumulation, self._keeps_gradients, bool(self._ema))
        self._inputs = lambda: [batch, val_batches, str(trainer.precision), *flags]
        clips_in_backward = bool(trainer.gradient_clip_val) and strategy.settings.release is not False
        self.upkeep_bytes = upkeep_bytes(clips=clips_in_backward, averages=bool(self._ema))
        self._only_spec = ALLOCATORS[strategy.settings.planner.allocator].traits.only_spec
        self._before_first_step: Callable[[], AbstractContextManager[None]] = nullcontext

    @property
    def inputs(self) -> Any:
        return inputs_of(self._inputs())

    def footprint(self, *, context_bytes: int, released: Sequence[Sequence[Tensor]] = ()) -> Footprint:
        """See `Measurer`; averaged weights included. Raises UnmeasuredStepError if the step fails before training, with
        and without the hooks that Lightning calls before the first one."""
        try:
            return self._footprint(context_bytes=context_bytes, released=released)
        except (torch.OutOfMemoryError, BaocError):
            raise
        except Exception as error:
            first_error = error
        begins, self._before_first_step = self._before_first_step, partial(after_first_hooks, self.module, self._batch)
        if begins is not nullcontext or not any(is_overridden(hook, self.module) for hook in FIRST_HOOKS):
            raise UnmeasuredStepError(f"{type(first_error).__name__}: {first_error}") from first_error
        return self.footprint(context_bytes=context_bytes, released=released)

    def _footprint(self, *, context_bytes: int, released: Sequence[Sequence[Tensor]]) -> Footprint:
        with silent(self.module), self._before_first_step():
            footprint = probe_footprint(
                self.module,
                run_micro_batch=lambda: self._loss(self._on_device(self._batch)),
                run_validation_batch=self._validate if self._val_batches else None,
                micro_batch=num_samples(self._batch),
                accumulation=max(self.accumulation, 2) if self._keeps_gradients else self.accumulation,
                context_bytes=context_bytes,
                released_blocks=released,
            )
        return with_averages(footprint, self._ema, module=self.module, validates=bool(self._val_batches))

    def _on_device(self, batch: Any, **kwargs: Any) -> Any:
        return self._strategy.batch_to_device(self._strategy.precision_plugin.convert_input(batch), **kwargs)

    def _loss(self, moved: Any) -> Tensor:
        """The loss of training_step, under the precision plugin's context, on a batch that was moved."""
        out = self._strategy.training_step(*step_arguments(self.module.training_step, moved))
        loss = out["loss"] if isinstance(out, dict) else out
        if not isinstance(loss, Tensor):
            raise TypeError("training_step returned no loss for the first batch")  # as Lightning lets it skip one
        return loss

    def _validate(self) -> None:
        for index, batch in enumerate(self._val_batches):
            number = index if len(self._val_batches) > 1 else None
            moved = self._on_device(batch, dataloader_idx=index)
            self._strategy.validation_step(*step_arguments(self.module.validation_step, moved, dataloader_idx=number))

    def rest_seconds(
        self, specs: Sequence[OptimizerSpec], *, max_s: float, released: Sequence[Sequence[Tensor]]
    ) -> float:
        """See `Measurer`. Gradients are None afterwards."""
        params = [param for param in self.module.parameters() if param.requires_grad]
        device = params[0].device
        devices = [device.index] if device.type == "cuda" else []
        # Any spec that a plan may choose: the host's work is about the same for all.
        likely = next((spec for spec in specs if spec.name == self._only_spec), specs[0])
        with silent(self.module), self._before_first_step(), torch.random.fork_rng(devices=devices, device_type="cuda"):
            return rehearse(
                self._loss,
                batch=self._on_device(self._batch),
                module=self.module,
                accumulation=self.accumulation,
                clip=self._clip,
                blocks=(blocks := released or [[param] for param in params]),
                specs=[likely] * len(blocks) if released or device.type == "cuda" else (),
                release=bool(released),
                max_s=max(max_s, MIN_REHEARSED_S) if device.type == "cuda" else REHEARSAL_SHARE * max_s,
            )


def with_averages(
    footprint: Footprint, averages: Sequence[EmaWeights], *, module: L.LightningModule, validates: bool
) -> Footprint:
    """The footprint with averaged weights, of which validation makes copies, and what rank 0 gathers for a file."""
    extra = sum(part.validation_bytes(module) for part in averages) if validates else 0
    return replace(
        footprint,
        **gathered_for_a_file(footprint, module=module, averages=bool(averages)),
        ema_bytes=sum(part.nbytes(module) for part in averages),
        validation_bytes=footprint.validation_bytes + extra,
        intervals=tuple(
            replace(m, num_bytes=m.num_bytes + extra) if m.name == "validation" else m for m in footprint.intervals
        ),
    )


def gathered_for_a_file(footprint: Footprint, *, module: L.LightningModule, averages: bool) -> dict[str, int]:
    """Fields of the footprint on a CPU under fully_shard, where host and device share memory: what a checkpoint takes
    on rank 0 beside its rows of weights and states. That is gradients, all rows of weights, averages and states, and
    two copies of the tensor that is gathered last."""
    whole = [param for param in module.parameters() if is_sharded(param)]
    trainer = module._trainer  # None in the search of run.py, which always writes one
    if not whole or footprint.device != "cpu" or (trainer is not None and not trainer.checkpoint_callbacks):
        return {}
    averaged = sum(4 * param.numel() for param in whole if param.requires_grad and averages)
    largest = max(4 * param.numel() for param in whole)
    held = footprint.resident_bytes - footprint.weights_bytes
    weights = sum(param.numel() * param.element_size() for param in whole)
    return {"arrival_bytes": held + weights + averaged + 2 * largest, "gathered_ranks": ranks().size}


def upkeep_bytes(*, clips: bool, averages: bool) -> int:
    """Bytes per element that a step moves to check for non-finite elements, to clip and to average, in float32."""
    return 4 + (CLIP_BYTES if clips else 0) + (12 if averages else 0)
