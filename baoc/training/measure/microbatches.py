"""Runs micro-batches of several sizes outside of any Trainer, and measures the bytes and seconds of each.

They are cut from one batch, whose samples are repeated where there are too few. Weights, buffers and random generators
are as before; gradients are None and kernels compiled afterwards.
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

MOST_TRIALS = 4  # of one kind
PRECISIONS = ("32-true", "bf16-mixed")
REHEARSED_S = {"cpu": 0.25, "cuda": 0.5}  # about what steps in Lightning's loop may take, after warm ones
TIMED_S = 0.1  # about what repeats of a micro-batch may take: what may be chosen by them is rehearsed
SERIES = 2  # of repeats at most, where the allocator was at work in the one before
RUNS = 6  # of a micro-batch that a trial takes about: two for its bytes, one warm, some timed


class MicroBatchRunner:
    """Micro-batches of `module` on `device`, which it is on already.

    `batch` and `val_batch` are real ones, of any size. Ranks that have parts of it try in step; what takes most counts,
    and an error of one is one of all. With `emulate_cuda` all of them are fake tensors of a CPU, and
    flow as on a card. Raises BadInputError for a precision whose weights a Trainer would convert.
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
        if precision not in PRECISIONS:
            raise BadInputError(
                f"micro_batch=auto tries micro-batches at trainer.precision={' or '.join(PRECISIONS)}, not "
                f"{precision}: give a micro_batch, or one of these"
            )
        self.module, self.device, self.phases = module, device, phases or PhaseTimer()
        self.ranks = ranks() if any(map(is_sharded, module.parameters())) else SINGLE_PROCESS  # who try in step
        self._batch, self._val_batch = batch, val_batch
        self._emulate_cuda = emulate_cuda
        self._mixed = precision == "bf16-mixed"
        # Of validation, by micro-batch, whether gradients are there and whether weights are narrowed: as layers run as
        # they are in it, whichever are recomputed or compiled, it is looked at once.
        self._validated: dict[tuple[int, bool, bool], Footprint] = {}

    @property
    def _buckets(self) -> bool:
        """Whether DistributedDataParallel will keep gradients."""
        return ranks() is not SINGLE_PROCESS and self.ranks is SINGLE_PROCESS

    @property
    def batches(self) -> tuple[Any, Any]:
        """Of training and of validation, as they came; one sample where batches are made."""
        return resize_batch(self._batch, 1) if isinstance(self._batch, BatchFactory) else self._batch, self._val_batch

    def run(
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
        """Footprint of a micro-batch, and seconds of its forward and backward where `timed`.

        `released`: the parameters of each block, where gradients are to be dropped in backward. `per_step`: so many
        micro-batches follow each other in a step, where that is not `accumulation`. `merge_intervals`: see
        `probe_footprint`.
        `bf16_savings`: bytes that each parameter has less where the caller holds it in 16 bits; the footprint is
        told as that of native ones.
        """
        given = {"accumulation": accumulation, "context_bytes": context_bytes, "released": released}
        given |= {"validated": (micro_batch, not released, bool(bf16_savings))}
        given |= {"timed": timed, "per_step": per_step or accumulation, "merge_intervals": merge_intervals}
        footprint, seconds = self.ranks.run_or_raise_on_all(
            lambda: self._run(micro_batch, **given), has_collectives=True
        )
        if self.ranks is not SINGLE_PROCESS:
            found = self.ranks.all_gather((footprint, seconds))
            most = max((each for each, _ in found), key=lambda one: one.peak_bytes(state_bytes=0))
            footprint = replace(most, device=footprint.device, context_bytes=max(one.context_bytes for one, _ in found))
            seconds = max(each for _, each in found)
        if bf16_savings:
            footprint = as_native(footprint, savings=bf16_savings)
        return MicroBatchMeasurement(micro_batch=micro_batch, footprint=footprint, seconds=seconds)

    def _run(
        self,
        micro_batch: int,
        *,
        accumulation: int,
        timed: bool,
        context_bytes: int,
        released: Sequence[Sequence[Tensor]],
        per_step: int,
        merge_intervals: bool,
        validated: tuple[int, bool, bool],
    ) -> tuple[Footprint, float]:
        batch, known = self._cleared(micro_batch), self._validated.get(validated)
        looks = self._val_batch is not None and known is None
        val_batch = self._moved(resize_batch(self._val_batch, micro_batch)) if looks else None
        ema = [part for part in (getattr(self.module, "ema", None),) if isinstance(part, EmaWeights)]
        with silent(self.module), self._flowing(), self.phases("bytes of trials"):
            footprint = probe_footprint(
                self.module,
                run_micro_batch=lambda: self._loss(batch) / accumulation,
                run_validation_batch=None if val_batch is None else lambda: self._validate(val_batch),
                micro_batch=micro_batch,
                accumulation=max(accumulation, 2) if self._buckets else accumulation,  # where they stay
                context_bytes=context_bytes,
                warm=not self._emulate_cuda,
                allocator=CachingAllocator() if self._emulate_cuda else None,
                released_blocks=released,
                merge_intervals=merge_intervals,
            )
            with self.phases("seconds of trials"):
                seconds = self._seconds(batch, per_step=per_step) if timed else math.nan
        if known is not None:
            seen = tuple(interval for interval in known.intervals if interval.name == "validation")
            seen = seen or (PeakInterval(name="validation", num_bytes=known.validation_bytes),)
            intervals = (*footprint.intervals, *seen) if footprint.intervals else ()
            footprint = replace(footprint, validation_bytes=known.validation_bytes, intervals=intervals)
        elif looks and not self._emulate_cuda:
            self._validated[validated] = footprint
        return with_averages(footprint, ema, module=self.module, validates=self._val_batch is not None), seconds

    def compile(self, micro_batch: int) -> float:
        """Runs it once, for what is compiled then; seconds that this took."""

        def compiled() -> float:
            batch = self._cleared(micro_batch)
            with silent(self.module), self._restored(), self.phases("compiling"):
                began = perf_counter()
                self._loss(batch).backward()
                synchronize(self.device)
                took = perf_counter() - began
            gc.collect()
            gc.freeze()  # what the compiler keeps is looked through no more: each emptying of caches took .1 s longer
            return took

        return self._slowest(compiled)

    def timed(self, micro_batch: int, *, per_step: int) -> float:
        """Seconds of forward and backward alone, as `run` takes them."""

        def seconds() -> float:
            batch = self._cleared(micro_batch)
            with silent(self.module), self.phases("comparisons"):
                return self._seconds(batch, per_step=per_step)

        return self._slowest(seconds)

    def rehearsed(
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
        """Seconds of a whole step but for the optimizer's part, see `rehearse`; by default REHEARSED_S of them."""
        given: dict[str, Any] = {"module": self.module, "device": self.device, "clip": clip}
        given |= {"accumulation": per_step, "blocks": blocks, "specs": specs, "release": release}
        given["params"] = [param for param in self.module.parameters() if param.requires_grad]
        given["max_s"] = REHEARSED_S[self.device.type] if max_s is None else max_s

        def seconds() -> float:
            batch = self._cleared(micro_batch)
            with silent(self.module), self.phases("rehearsals"):
                return rehearse(self._loss, batch=batch, **given)

        return self._slowest(seconds)

    def _slowest(self, measure: Callable[[], float]) -> float:
        """Seconds of the rank that takes longest."""
        return self.ranks.all_reduce_max(self.ranks.run_or_raise_on_all(measure, has_collectives=True))[0]

    def _cleared(self, micro_batch: int) -> Any:
        """A batch, on the device; what other sizes left in the allocator's cache would be in the way of this one."""
        with self.phases("emptying caches"):
            clear_cache(self.device)
        return self._moved(resize_batch(self._batch, micro_batch))

    def _seconds(self, batch: Any, *, per_step: int) -> float:
        """As in training, where the allocator has all that it needs: a series in which it asked for more counts only
        if there is no other."""

        def run() -> None:
            self._loss(batch).backward()
            if per_step == 1:  # else gradients of the next micro-batch are added to these
                self.module.zero_grad(set_to_none=True)

        found: list[float] = []
        with self._restored():
            start = perf_counter()
            run()
            synchronize(self.device)
            once_s = perf_counter() - start
            series, least = (SERIES, 2) if once_s < TIMED_S else (1, 1)  # what the allocator takes is little beside it
            given = {"device": self.device, "max_s": TIMED_S, "warm": False, "once_s": once_s, "group": per_step}
            if self.ranks is not SINGLE_PROCESS:  # as often on each
                series, least, given["max_s"] = 1, 2, 0.0
            for _ in range(series):
                before = allocations(self.device)
                found.append(seconds_per_run(run, least=least, **given))
                if allocations(self.device) == before:
                    break
        return min(found)

    def forward(self, micro_batch: int) -> None:
        """A forward without gradients, for whoever counts what it does."""
        batch = self._moved(resize_batch(self._batch, micro_batch))
        with silent(self.module), self._restored(), self._flowing(), torch.no_grad():
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
        """Lightning's own, which keeps no copies of weights from one use to the next."""
        mixed = MixedPrecision("bf16-mixed", self.device.type) if self._mixed else None
        return mixed.autocast_context_manager() if mixed is not None else nullcontext()

    def _flowing(self) -> AbstractContextManager[Any]:
        """Around forward and backward, which computes recomputed activations as the forward did."""
        return CudaAutocast() if self._emulate_cuda else nullcontext()

    def _restored(self) -> AbstractContextManager[Any]:
        return preserved_state(self.module, list(self.module.parameters()))

    def _moved(self, batch: Any) -> Any:
        return self.module.transfer_batch_to_device(batch, self.device, 0)


def grow(
    run: Callable[[int], MicroBatchMeasurement],
    *,
    sizes: Sequence[int],
    max_s: float,
    fits: Callable[[Footprint], bool],
) -> list[MicroBatchMeasurement]:
    """Measures the smallest of `sizes`, of one four times as large, and of the largest that `fits` by the two.

    A small micro-batch takes a GPU as long as one several times as large, so it takes the largest to know the seconds
    of those between. Where that would take more than about `max_s`, the largest that does not; where memory ends, one
    of half the size. Raises torch.OutOfMemoryError where the smallest has no room.
    """
    found = [run(sizes[0])]
    with suppress(torch.OutOfMemoryError):
        second = next((size for size in sizes if size >= 4 * sizes[0]), sizes[-1])
        if second != sizes[0]:
            found.append(run(second))
    if len(found) < 2:
        return found
    left = [size for size in sizes if size > second and fits(footprint_at(found, micro_batch=size))]
    quick = [size for size in left if RUNS * seconds_at(found, micro_batch=size) <= max_s]
    for _ in range(MOST_TRIALS - 2):
        if not quick:
            break
        size = quick[-1]
        with suppress(torch.OutOfMemoryError):
            found.append(run(size))
            break
        quick = [other for other in quick if 2 * other <= size]
    return found


def allocations(device: torch.device) -> int:
    """How often torch's allocator has asked the device for memory so far; 0 off CUDA."""
    if device.type != "cuda":
        return 0
    stats = torch.cuda.memory_stats(device)
    return stats.get("num_device_alloc", 0) + stats.get("num_alloc_retries", 0)
