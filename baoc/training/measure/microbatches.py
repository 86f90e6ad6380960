"""Runs micro-batches of several sizes outside of any Trainer, and measures the bytes and seconds of each.

They are cut from one batch, whose samples are repeated if there are too few. Afterwards weights, buffers and random
generators are as before, gradients are None, and kernels stay compiled.
"""

import gc
import math
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext, suppress
from dataclasses import replace
from time import perf_counter
from typing import Any

import lightning as L
import torch
from lightning.pytorch.plugins.precision import MixedPrecision
from torch import Tensor

from baoc.data.batches import BatchFactory, resize_batch
from baoc.errors import BadInputError
from baoc.optim.shards import is_sharded
from baoc.parallel import SINGLE_PROCESS, ranks
from baoc.planning.microbatch import MicroBatchMeasurement, footprint_at, seconds_at
from baoc.profiling import clear_cache, probe_footprint
from baoc.profiling.bf16_params import as_native
from baoc.profiling.cuda_emulation import CachingAllocator, CudaAutocast
from baoc.profiling.footprint import preserved_state
from baoc.profiling.latency import seconds_per_run, synchronize
from baoc.profiling.phase_timer import PhaseTimer
from baoc.tasks.ema import EmaWeights
from baoc.training.measure.benchmark_steps import rehearse
from baoc.training.measure.probe import silent, with_averages
from baoc.types import Footprint, OptimizerSpec, PeakInterval

MAX_SIZES = 4  # micro-batches that are measured for one number of recomputed layers
REHEARSED_S = {"cpu": 0.25, "cuda": 0.5}  # about how long steps in Lightning's loop are timed, after warm-up ones
TIMED_S = 0.1  # about how long a micro-batch is timed; options that may win are timed again in Lightning's loop
MAX_TIMING_SERIES = 2  # timed again if the allocator called cudaMalloc in the first series
RUNS_PER_MEASUREMENT = 6  # runs of a micro-batch that a measurement takes: 2 for bytes, 1 warm-up, about 3 timed


class MicroBatchRunner:
    """Measures micro-batches of `module`, which is on `device` already.

    `batch` and `val_batch` are real ones, of any size. Under fully_shard all ranks run each size together: the maximum
    over ranks counts, and an error on one rank is raised on all. `emulate_cuda`: tensors are fake ones on the CPU, with
    CUDA's allocator and autocast emulated.
    """

    def __init__(
        self,
        module: L.LightningModule,
        *,
        batch: Any,
        val_batch: Any,
        device: torch.device,
        precision: str,
        emulate_cuda: bool = False,
        phases: PhaseTimer | None = None,
    ):
        self.module, self.device, self.phases = module, device, phases or PhaseTimer()
        self.ranks = ranks() if any(map(is_sharded, module.parameters())) else SINGLE_PROCESS
        self._batch, self._val_batch = batch, val_batch
        self._emulate_cuda = emulate_cuda
        self._mixed = precision == "bf16-mixed"
        # Validation footprints by (micro-batch, gradients present, bf16 weights). Validation neither recomputes nor
        # compiles layers, so one measurement serves every number of recomputed layers.
        self._validation_cache: dict[tuple[int, bool, bool], Footprint] = {}

    @property
    def batches(self) -> tuple[Any, Any]:
        """The batches of training and validation as they came; one sample if a BatchFactory makes batches."""
        return resize_batch(self._batch, 1) if isinstance(self._batch, BatchFactory) else self._batch, self._val_batch

    def measure(
        self,
        micro_batch: int,
        *,
        accumulation: int,
        timed: bool = True,
        context_bytes: int = 0,
        released: Sequence[Sequence[Tensor]] = (),
        per_step: int | None = None,
        merge_intervals: bool = True,
        bf16_savings: Mapping[str, int] | None = None,
    ) -> MicroBatchMeasurement:
        """Measures the footprint of a micro-batch and, if `timed`, the seconds of its forward and backward.

        Args:
            released: The parameters of each block under gradient release.
            per_step: Micro-batches of a step, if not `accumulation`.
            merge_intervals: See `probe_footprint`.
            bf16_savings: Bytes that each parameter saves, as the caller holds it in bf16. The footprint is of native
                ones.
        """

        def measure() -> tuple[Footprint, float]:
            # in DistributedDataParallel's buckets
            keeps_gradients = ranks() is not SINGLE_PROCESS and self.ranks is SINGLE_PROCESS
            batch, cache_key = self._fresh_batch(micro_batch), (micro_batch, not released, bool(bf16_savings))
            validation = self._validation_cache.get(cache_key)
            validates = self._val_batch is not None and validation is None
            val_batch = self._to_device(resize_batch(self._val_batch, micro_batch)) if validates else None
            with silent(self.module), self._emulated_autocast(), self.phases("bytes of trials"):
                footprint = probe_footprint(
                    self.module,
                    run_micro_batch=lambda: self._loss(batch) / accumulation,
                    run_validation_batch=None if val_batch is None else lambda: self._validate(val_batch),
                    micro_batch=micro_batch,
                    accumulation=max(accumulation, 2) if keeps_gradients else accumulation,
                    context_bytes=context_bytes,
                    warm=not self._emulate_cuda,
                    allocator=CachingAllocator() if self._emulate_cuda else None,
                    released_blocks=released,
                    merge_intervals=merge_intervals,
                )
                with self.phases("seconds of trials"):
                    seconds = self._seconds(batch, per_step=per_step or accumulation) if timed else math.nan
            if validation is not None:
                peaks = tuple(interval for interval in validation.intervals if interval.name == "validation")
                peaks = peaks or (PeakInterval(name="validation", num_bytes=validation.validation_bytes),)
                intervals = (*footprint.intervals, *peaks) if footprint.intervals else ()
                footprint = replace(footprint, validation_bytes=validation.validation_bytes, intervals=intervals)
            elif validates and not self._emulate_cuda:
                self._validation_cache[cache_key] = footprint
            ema: Any = getattr(self.module, "ema", None)
            averages = [ema] if isinstance(ema, EmaWeights) else []
            return with_averages(
                footprint, averages, module=self.module, validates=self._val_batch is not None
            ), seconds

        footprint, seconds = self.ranks.run_or_raise_on_all(measure, has_collectives=True)
        if self.ranks is not SINGLE_PROCESS:
            footprints, all_seconds = zip(*self.ranks.all_gather((footprint, seconds)), strict=True)
            largest = max(footprints, key=lambda of_rank: of_rank.peak_bytes(state_bytes=0))
            context = max(of_rank.context_bytes for of_rank in footprints)
            footprint, seconds = replace(largest, device=footprint.device, context_bytes=context), max(all_seconds)
        if bf16_savings:
            footprint = as_native(footprint, savings=bf16_savings)
        return MicroBatchMeasurement(micro_batch=micro_batch, footprint=footprint, seconds=seconds)

    def compile(self, micro_batch: int) -> float:
        """Compiles its layers by running a micro-batch; returns the seconds. The caller must call `gc.unfreeze()`."""

        def compile() -> float:
            batch = self._fresh_batch(micro_batch)
            with silent(self.module), self._preserved_state(), self.phases("compiling"):
                start = perf_counter()
                self._loss(batch).backward()
                synchronize(self.device)
                seconds = perf_counter() - start
            gc.collect()
            gc.freeze()  # else each later emptying of caches walks the compiler's objects, which took .1 s
            return seconds

        return self._slowest(compile)

    def time_micro_batch(self, micro_batch: int, *, per_step: int) -> float:
        """Seconds of forward and backward, as `measure` takes them."""

        def time() -> float:
            batch = self._fresh_batch(micro_batch)
            with silent(self.module), self.phases("comparisons"):
                return self._seconds(batch, per_step=per_step)

        return self._slowest(time)

    def time_training_step(
        self,
        micro_batch: int,
        *,
        per_step: int,
        clip: tuple[float | None, str | None],
        blocks: Sequence[Sequence[Tensor]] = (),
        specs: Sequence[OptimizerSpec] = (),
        release: bool = False,
        max_s: float | None = None,
    ) -> float:
        """Seconds of a whole step in Lightning's loop, without the optimizer's part; see `rehearse`.

        `max_s`: seconds to spend, by default REHEARSED_S.
        """

        def time() -> float:
            batch = self._fresh_batch(micro_batch)
            with silent(self.module), self.phases("rehearsals"):
                return rehearse(
                    self._loss,
                    batch=batch,
                    module=self.module,
                    accumulation=per_step,
                    clip=clip,
                    blocks=blocks,
                    specs=specs,
                    release=release,
                    max_s=REHEARSED_S[self.device.type] if max_s is None else max_s,
                )

        return self._slowest(time)

    def _slowest(self, measure: Callable[[], float]) -> float:
        """Runs `measure`, which returns seconds, on all ranks; returns the maximum."""
        return self.ranks.all_reduce_max(self.ranks.run_or_raise_on_all(measure, has_collectives=True))[0]

    def _fresh_batch(self, micro_batch: int) -> Any:
        """A batch of this size on the device, after the allocator's cache has been emptied of other sizes' memory."""
        with self.phases("emptying caches"):
            clear_cache(self.device)
        return self._to_device(resize_batch(self._batch, micro_batch))

    def _seconds(self, batch: Any, *, per_step: int) -> float:
        """Seconds of forward and backward, timed again if the allocator asked the device for memory."""

        def run() -> None:
            self._loss(batch).backward()
            if per_step == 1:  # else the next micro-batch accumulates
                self.module.zero_grad(set_to_none=True)

        with self._preserved_state():
            start = perf_counter()
            run()
            synchronize(self.device)
            once_s = perf_counter() - start
            if self.ranks is not SINGLE_PROCESS:  # all ranks run equally often
                num_series, least, max_s = 1, 2, 0.0
            elif once_s < TIMED_S:
                num_series, least, max_s = MAX_TIMING_SERIES, 2, TIMED_S
            else:  # beside so long a run the allocator's part is small
                num_series, least, max_s = 1, 1, TIMED_S
            times: list[float] = []
            for _ in range(num_series):
                before = num_device_mallocs(self.device)
                times.append(
                    seconds_per_run(
                        run, least=least, device=self.device, max_s=max_s, warm=False, once_s=once_s, group=per_step
                    )
                )
                if num_device_mallocs(self.device) == before:
                    break
        return min(times)

    def run_forward(self, micro_batch: int) -> None:
        """Runs one forward under no_grad, for FLOP counters."""
        batch = self._to_device(resize_batch(self._batch, micro_batch))
        with silent(self.module), self._preserved_state(), self._emulated_autocast(), torch.no_grad():
            self._loss(batch)

    def _loss(self, batch: Any) -> Tensor:
        with self.autocast():
            out = self.module.training_step(batch, 0)
        loss: Any = out["loss"] if isinstance(out, dict) else out
        if not isinstance(loss, Tensor):
            raise BadInputError("training_step returned no loss tensor for the probe's batch: return the loss")
        return loss

    def _validate(self, batch: Any) -> None:
        with self.autocast():
            self.module.validation_step(batch, 0)

    def autocast(self) -> AbstractContextManager[Any]:
        """Lightning's own autocast, which does not cache bf16 copies of weights from one use to the next."""
        if not self._mixed:
            return nullcontext()
        return MixedPrecision("bf16-mixed", self.device.type).autocast_context_manager()

    def _emulated_autocast(self) -> AbstractContextManager[Any]:
        """Emulates CUDA's autocast, also in backward, so that recomputed activations get the forward's dtypes."""
        return CudaAutocast() if self._emulate_cuda else nullcontext()

    def _preserved_state(self) -> AbstractContextManager[Any]:
        return preserved_state(self.module, list(self.module.parameters()))

    def _to_device(self, batch: Any) -> Any:
        return self.module.transfer_batch_to_device(batch, self.device, 0)


def measure_sizes(
    measure: Callable[[int], MicroBatchMeasurement],
    *,
    sizes: Sequence[int],
    max_s: float,
    fits: Callable[[Footprint], bool],
) -> list[MicroBatchMeasurement]:
    """Measures the smallest size, one four times as large, and the largest that `fits` when extrapolated from these.

    A GPU takes as long for a small micro-batch as for one several times as large, so only the largest tells the seconds
    of those between. If it would take more than about `max_s`, a smaller one is measured; if it runs out of memory, one
    of at most half its size. Raises torch.OutOfMemoryError if the smallest size has no room.
    """
    measured = [measure(sizes[0])]
    with suppress(torch.OutOfMemoryError):
        second = next((size for size in sizes if size >= 4 * sizes[0]), sizes[-1])
        if second != sizes[0]:
            measured.append(measure(second))
    if len(measured) < 2:
        return measured
    larger = [size for size in sizes if size > second and fits(footprint_at(measured, micro_batch=size))]
    larger = [size for size in larger if RUNS_PER_MEASUREMENT * seconds_at(measured, micro_batch=size) <= max_s]
    for _ in range(MAX_SIZES - 2):
        if not larger:
            break
        size = larger[-1]
        with suppress(torch.OutOfMemoryError):
            measured.append(measure(size))
            break
        larger = [other for other in larger if 2 * other <= size]
    return measured


def num_device_mallocs(device: torch.device) -> int:
    """How often torch's allocator has asked the device for memory so far; 0 on other devices than CUDA."""
    if device.type != "cuda":
        return 0
    stats = torch.cuda.memory_stats(device)
    return stats.get("num_device_alloc", 0) + stats.get("num_alloc_retries", 0)
