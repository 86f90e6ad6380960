"""Bytes and seconds of every option to run the global batch: measured within the budget's cap, or interpolated.

An option's key is (micro-batch, recomputed layers, gradient release). From the least to the most exact there are:

- `small`: a few micro-batches with no layer recomputed and with all. Other options lie on lines through these.
- `compared_s`: seconds of two steps of the option itself, outside of a training loop.
- `rehearsed_s`, with `exact` for its bytes: the option as training will run it, in Lightning's loop.
"""

import math
from collections.abc import Callable, Mapping, Sequence
from contextlib import nullcontext, suppress
from dataclasses import replace
from functools import partial
from statistics import median
from typing import TypeVar

import torch
from torch import Tensor

from baoc.config.schema import RunConfig
from baoc.models.switches import params_keeping_activations, set_compiled, set_recomputed
from baoc.planning.microbatch import (
    Axes,
    MicroBatchMeasurement,
    interpolate,
    seconds_at,
    upper_bound_at,
    with_gradient_release,
)
from baoc.profiling import clear_cache, context_bytes, uncapped
from baoc.profiling.bf16_params import cast_to_bf16
from baoc.tasks.base import Task
from baoc.training.measure.microbatches import MicroBatchRunner, measure_sizes
from baoc.types import Block, Budget, Footprint, OptimizerSpec

EXPLORING_S = 3.0  # about how long small measurements of one number of recomputed layers may take
KEPT_SHARE = 0.75  # of the seconds with all layers recomputed (4 forwards' work), what none recomputed takes (3)
COMPILED_BYTES = 0.6  # of the activations that layers keep, what compiled ones do: about half of ViT-L's and DiT-XL's
OptionKey = tuple[int, int, bool]
_T = TypeVar("_T")


class Measurements:
    """Measured bytes and seconds of one run's network, by option key.

    Weights are native, or in bf16 where native ones have no room and a plan may keep bf16; exact values then wait in
    CPU memory and are restored afterwards.

    Args:
        bf16_params: The parameters that a plan may keep in bf16, by name; empty if the network holds them in bf16
            already, as native ones have no room.
        bf16_savings: Bytes that each of them saves in bf16, by name.
        capped: False where the CUDA context alone exceeds the budget. Sizes are then measured without the cap, for the
            error message.
        compiled: Options are measured with compiled layers, as they would be trained. Small measurements run layers
            uncompiled, as compiling takes seconds per size; lines through them are scaled by what compiled options
            were measured to take.
        explored: Small measurements of earlier searches, by recomputed layers, and whether their weights were bf16.
            They are not repeated.

    Attributes:
        small: Small measurements, by recomputed layers: the fewest and the most of them.
        exact: Bytes of options that no small measurement is of: other numbers of layers, gradient release, compiled
            ones.
        compared_s: Seconds of a step without the optimizer's part, by two steps.
        rehearsed_s: The same, by steps in the training loop.
        out_of_memory: Options that ran out of memory when they were measured.
        fits_only_in_bf16: Options that had room with bf16 weights only.
        measured_in_bf16: Numbers of recomputed layers whose small measurements have bf16 weights.
        measured_outside_cap: Options whose bytes were only measured without the cap.
    """

    def __init__(
        self,
        config: RunConfig,
        *,
        task: Task,
        runner: MicroBatchRunner,
        device: torch.device,
        budget: Budget,
        axes: Axes,
        bf16_params: Mapping[str, Tensor],
        bf16_savings: Mapping[str, int],
        capped: bool = True,
        compiled: bool = False,
        explored: dict[int, tuple[list[MicroBatchMeasurement], bool]],
    ):
        self.config, self.task, self.runner = config, task, runner
        self.device, self.budget, self.axes, self.bf16_params = device, budget, axes, bf16_params
        self.capped, self.compiled, self._explored_before = capped, compiled, explored
        self.bf16_savings = bf16_savings
        self.measured_in_bf16: set[int] = set(axes.recomputed) if bf16_savings and not bf16_params else set()
        self.measured_outside_cap: set[OptionKey] = set()
        self.fits_only_in_bf16: set[OptionKey] = set()
        self.out_of_memory: set[OptionKey] = set()
        self.small: dict[int, list[MicroBatchMeasurement]] = {}
        self.exact: dict[OptionKey, MicroBatchMeasurement] = {}
        self.compared_s: dict[OptionKey, float] = {}
        self.rehearsed_s: dict[OptionKey, float] = {}
        # Seconds of compiling, by (micro-batch, bf16 weights, recomputed layers).
        self._compile_s: dict[tuple[int, bool, bool], float] = {}

    def set_layers(self, recomputed: int, *, compiled: bool = False) -> None:
        set_recomputed(self.task.model, recomputed, name=self.config.model.name)
        set_compiled(self.task.model, compiled)

    def compile(self, key: OptionKey, *, in_bf16: bool) -> None:
        """Compiles the layers of an option that have not been compiled yet, if layers are compiled at all."""
        missing = self._layer_kinds(key, in_bf16=in_bf16) - self._compile_s.keys() if self.compiled else None
        if missing:  # kinds that are compiled together are taken to need the same time
            self._compile_s |= dict.fromkeys(missing, self.runner.compile(key[0]) / len(missing))

    def _layer_kinds(self, key: OptionKey, *, in_bf16: bool) -> set[tuple[int, bool, bool]]:
        """Kinds of layers to compile for an option: kept ones, recomputed ones, or both."""
        parts = {recomputes for recomputes in (False, True) if key[1] != (0 if recomputes else self.axes.num_layers)}
        return {(key[0], in_bf16, part) for part in parts or {False}}

    def compile_seconds(self, key: OptionKey) -> float:
        """Seconds that compiling this option took; 0 if it is not compiled."""
        kinds = self._layer_kinds(key, in_bf16=key in self.fits_only_in_bf16) if self.compiled else set()
        return sum(self._compile_s.get(kind, 0.0) for kind in kinds)

    def remaining_compile_seconds(self, size: int) -> float:
        """About how long compiling takes before this micro-batch can be measured as training runs it."""
        nothing_left = not self.compiled or size in {kind[0] for kind in self._compile_s}
        return 0.0 if nothing_left else 2 * max(self._compile_s.values(), default=0.0)  # kept and recomputed layers

    # -- bytes and seconds -----------------------------------------------------------------------------------------

    def is_measured(self, key: OptionKey) -> bool:
        """True if the option's bytes were measured, not interpolated."""
        size, recomputed, release = key
        is_small = size in [measurement.micro_batch for measurement in self.small.get(recomputed, [])]
        return key in self.exact or (is_small and not release and not self.compiled)

    def measurements_of(self, key: OptionKey) -> list[MicroBatchMeasurement]:
        """The exact measurement of an option, else the small ones with its number of recomputed layers."""
        size, recomputed, _ = key
        exact = self.exact.get(key) or self.exact.get((size, recomputed, False))
        return [exact] if exact is not None else self.small.get(recomputed, [])

    def covers(self, recomputed: int) -> bool:
        """True if small measurements tell of this number of recomputed layers."""
        between = self.compiled and self.small and min(self.small) < recomputed < max(self.small)
        return recomputed in self.small or bool(between)

    def _neighbours(self, key: OptionKey, *, measured: bool) -> tuple[int, int, float]:
        """The next measured numbers of recomputed layers, fewer and more, and the key's share of the way between them.
        `measured`: also use numbers that were measured exactly for this micro-batch."""
        size, recomputed, _ = key
        exact = {number for other, number, released in self.exact if other == size and measured and not released}
        numbers = sorted({*self.small, *exact}) or [recomputed]
        fewer = max((number for number in numbers if number <= recomputed), default=numbers[0])
        more = min((number for number in numbers if number >= recomputed), default=numbers[-1])
        return fewer, more, (recomputed - fewer) / (more - fewer) if more > fewer else 0.0

    def footprint(self, key: OptionKey, *, blocks: Sequence[Block]) -> Footprint | None:
        """The option's footprint; None if it is unknown what gradient release would leave."""
        size, recomputed, release = key
        if release and key in self.exact:
            return self.exact[key].footprint
        fewer, more, share = self._neighbours(key, measured=True)
        footprint = self._footprint_at(size, fewer)
        if fewer < more:
            # Compiled layers cast all weights again in backward.
            kept = () if self.compiled else params_keeping_activations(self.task, recomputed=recomputed)
            footprint = interpolate(footprint, self._footprint_at(size, more), share=share, not_recomputed=kept)
        if release:
            return with_gradient_release(footprint, blocks=blocks, grouped=self.device.type == "cuda")
        return footprint

    def _footprint_at(self, size: int, recomputed: int) -> Footprint:
        """The footprint at a number of recomputed layers that was measured. Compiled layers keep a share of what
        uncompiled ones do: as exact measurements tell, else COMPILED_BYTES."""
        uncompiled = upper_bound_at(self.measurements_of((size, recomputed, False)), micro_batch=size)
        most = max(self.small, default=0)
        if not self.compiled or recomputed or not most or (size, recomputed, False) in self.exact:
            return uncompiled
        shares: list[float] = []
        for (other_size, number, _), measurement in [each for each in self.exact.items() if not each[0][2]]:
            recomputing = self.measurements_of((other_size, most, False))
            kept_bytes = upper_bound_at(self.small[0], micro_batch=other_size).peak_bytes(state_bytes=0)
            least_bytes = upper_bound_at(recomputing, micro_batch=other_size).peak_bytes(state_bytes=0)
            peak_bytes = measurement.footprint.peak_bytes(state_bytes=0)
            if number < most and kept_bytes > least_bytes:
                shares.append((peak_bytes - least_bytes) / (kept_bytes - least_bytes) * most / (most - number))
        share = min(max(median(shares or [COMPILED_BYTES]), 0.0), 1.0)
        return interpolate(uncompiled, upper_bound_at(self.small[most], micro_batch=size), share=1 - share)

    def seconds(self, key: OptionKey) -> float:
        """Seconds of a step without the optimizer's part: rehearsed, else compared, else by the line."""
        if key in self.rehearsed_s:
            return self.rehearsed_s[key]
        if key in self.compared_s:
            return self.compared_s[key] * self._loop_factor(release=key[2])
        factors = [self.rehearsed_s[other] / self._line_seconds(other) for other in self.rehearsed_s if self.compiled]
        return self._line_seconds(key) * (median(factors) if factors else 1.0)

    def _line_seconds(self, key: OptionKey) -> float:
        """Seconds of a step by the line through the next measured numbers of recomputed layers."""
        size, _, release = key
        fewer, more, share = self._neighbours(key, measured=not self.compiled)
        ends = [self._micro_batch_seconds((size, number, release)) for number in (fewer, more)]
        return self.config.batch_size // size * (ends[0] + share * (ends[1] - ends[0]))

    def _micro_batch_seconds(self, key: OptionKey) -> float:
        """Seconds of one micro-batch by the line through small measurements. For large ones it is too low, as the
        device waits for the host in small ones: kept layers then count with KEPT_SHARE."""
        size, recomputed, _ = key
        measurements = self.small[recomputed] if self.compiled else self.measurements_of(key)
        seconds, most = seconds_at(measurements, micro_batch=size), max(self.small, default=0)
        if math.isnan(seconds):  # not timed
            return KEPT_SHARE * seconds_at(self.small[most], micro_batch=size)
        if recomputed == 0 < most and size > max(measurement.micro_batch for measurement in measurements):
            seconds = max(seconds, KEPT_SHARE * seconds_at(self.small[most], micro_batch=size))
        return seconds

    def _loop_factor(self, *, release: bool) -> float:
        """Seconds in the training loop over seconds as compared; 1 if unknown, or under gradient release."""
        factors = [self.rehearsed_s[key] / self.compared_s[key] for key in self.rehearsed_s if key in self.compared_s]
        return median(factors) if factors and not release else 1.0

    @property
    def any_room(self) -> bool:
        keys = {(measured.micro_batch, number, False) for number, sizes in self.small.items() for measured in sizes}
        return bool((keys | self.exact.keys()) - self.out_of_memory - self.measured_outside_cap)

    def has_room(self, key: OptionKey) -> bool:
        """False if the option, or one that takes less, ran out of memory."""
        size, recomputed, release = key
        return not any(
            other_size <= size and number >= recomputed and (released or not release)
            for other_size, number, released in self.out_of_memory
        )

    # -- measuring ------------------------------------------------------------------------------------------------

    def explore(self, recomputed: int) -> None:
        """Measures several micro-batches with this number of recomputed layers. If not even one sample has room,
        measures its bytes without the cap, for the refusal and for gradient release. The option is then ruled out with
        all gradients at once, unless layers are compiled, which may take less."""
        measurements, in_bf16 = self._explored_before.get(recomputed, ([], False))
        if measurements and not (self._needs_seconds(recomputed) and math.isnan(measurements[0].seconds)):
            self.measured_in_bf16 |= {recomputed} if in_bf16 else set()
            self._add_small(recomputed, measurements)
            return
        self.set_layers(recomputed)
        sizes, measure_size = list(self.axes.micro_batches), partial(self._measure_size, recomputed)
        if not self.capped:
            self.out_of_memory |= {(size, recomputed, release) for size in sizes for release in self.axes.release}
            self.small[recomputed] = [measure_size(sizes[0])]
            return

        # Without seconds the largest size that fits is not measured: compiled, its layers would take less.
        max_s = EXPLORING_S if self._needs_seconds(recomputed) else 0.0
        measure_all = partial(measure_sizes, measure_size, sizes=sizes, max_s=max_s, fits=self._may_fit)
        with suppress(_NoRoomForNativeWeights, torch.OutOfMemoryError):
            self._add_small(recomputed, measure_all())
            return
        clear_cache(self.device)
        if self.bf16_params:
            self.measured_in_bf16.add(recomputed)
            with suppress(torch.OutOfMemoryError), cast_to_bf16(self.bf16_params, module=self.task):
                self._add_small(recomputed, measure_all())
                return
            clear_cache(self.device)
        # All gradients at once were tried; where they are released there may be room still.
        if self.compiled:
            self.measured_outside_cap.add((sizes[0], recomputed, False))
        else:
            self.out_of_memory |= {(size, recomputed, False) for size in sizes}
        with uncapped(self.device, budget=self.budget), cast_to_bf16(self.bf16_params, module=self.task):
            self.small[recomputed] = [measure_size(sizes[0])]

    def measure_again_in_bf16(self) -> bool:
        """Repeats small measurements of native weights with bf16 ones; False if there is nothing to repeat."""
        if not (self.bf16_params and self.capped):
            return False
        numbers = [number for number in self.small if number not in self.measured_in_bf16]
        self.measured_in_bf16 |= set(numbers)
        for number in numbers:
            self.set_layers(number)
            sizes, measure_size = list(self.axes.micro_batches), partial(self._measure_size, number)
            with suppress(torch.OutOfMemoryError), cast_to_bf16(self.bf16_params, module=self.task):
                self._add_small(number, measure_sizes(measure_size, sizes=sizes, max_s=EXPLORING_S, fits=self._may_fit))
        return bool(numbers)

    def _add_small(self, recomputed: int, measurements: list[MicroBatchMeasurement]) -> None:
        self._explored_before[recomputed] = measurements, recomputed in self.measured_in_bf16
        self.small[recomputed] = measurements
        for measurement in measurements if not self.compiled else ():
            count = self.config.batch_size // measurement.micro_batch
            self.compared_s[measurement.micro_batch, recomputed, False] = count * measurement.seconds

    def _needs_seconds(self, recomputed: int) -> bool:
        """True if small measurements are timed, not only measured for bytes. If layers are to be compiled, kept ones
        need no time of their own beside recomputed ones (KEPT_SHARE)."""
        return bool(recomputed) or not self.compiled or not max(self.small, default=0)

    def _measure_size(self, recomputed: int, size: int) -> MicroBatchMeasurement:
        """One small measurement. Raises _NoRoomForNativeWeights if bf16 weights may fit, else OutOfMemoryError."""
        run = partial(
            self.runner.measure,
            size,
            accumulation=2 if self.axes.micro_batches[0] < self.config.batch_size else 1,
            context_bytes=context_bytes(self.device),
            per_step=self.config.batch_size // size,
            timed=self._needs_seconds(recomputed),
        )
        if recomputed in self.measured_in_bf16 or not self.bf16_savings:
            return run(bf16_savings=self.bf16_savings)
        with suppress(torch.OutOfMemoryError):
            return run()
        clear_cache(self.device)
        raise _NoRoomForNativeWeights

    def _may_fit(self, footprint: Footprint) -> bool:
        """True if an allocation without states, with bf16 weights where possible, holds the budget."""
        memory = self.budget.memory_bytes
        return memory is None or footprint.peak_bytes(state_bytes=0, saved=self.bf16_savings) <= memory

    def rehearse(
        self,
        key: OptionKey,
        *,
        blocks: Sequence[Sequence[Tensor]],
        specs: Sequence[OptimizerSpec],
        max_s: float | None = None,
    ) -> float:
        """Seconds of a step as training will run it. Raises torch.OutOfMemoryError."""
        (size, _, release), trainer = key, self.config.trainer
        return self.runner.time_training_step(
            size,
            per_step=self.config.batch_size // size,
            clip=(trainer.gradient_clip_val, trainer.gradient_clip_algorithm),
            blocks=blocks,
            specs=specs if release or self.device.type == "cuda" else (),  # on a CPU they are in the table
            release=release,
            max_s=max_s,
        )

    def compare(
        self, key: OptionKey, *, blocks: Sequence[Sequence[Tensor]], specs: Sequence[OptimizerSpec] = ()
    ) -> None:
        """Times two steps of this option, under gradient release in the training loop, or finds that it has no room."""
        size, _, release = key

        def time_steps(_: bool) -> None:
            if release:
                self.compared_s[key] = self.rehearse(key, blocks=blocks, specs=specs, max_s=0.0)
            else:
                count = self.config.batch_size // size
                self.compared_s[key] = count * self.runner.time_micro_batch(size, per_step=count)

        self._try_within_cap(key, time_steps)

    def try_out(
        self, key: OptionKey, *, blocks: Sequence[Sequence[Tensor]], specs: Sequence[OptimizerSpec] = ()
    ) -> None:
        """Measures bytes and seconds of this option as training would run it, or finds that it has no room.

        `blocks`: the parameters of each block; `specs` step them.
        """

        def measure(in_bf16: bool) -> None:
            measurement = self.measure_bytes(key, blocks=blocks, in_bf16=in_bf16)
            if self._may_fit(measurement.footprint):  # else its seconds are nobody's
                self.rehearsed_s[key] = self.rehearse(key, blocks=blocks, specs=specs)
                measurement = replace(measurement, seconds=self.rehearsed_s[key] * key[0] / self.config.batch_size)
            self._record(key, measurement)
            self.measured_outside_cap.discard(key)

        self._try_within_cap(key, measure)

    def measure_within_cap(self, key: OptionKey, *, blocks: Sequence[Sequence[Tensor]]) -> MicroBatchMeasurement | None:
        """The bytes of this option as training would run it; None if it has no room."""
        return self._try_within_cap(key, lambda in_bf16: self.measure_bytes(key, blocks=blocks, in_bf16=in_bf16))

    def _try_within_cap(self, key: OptionKey, measure: Callable[[bool], _T]) -> _T | None:
        """What `measure(in_bf16)` returns with native weights or, if these have no room, with bf16 ones. If neither
        fits, the option joins `out_of_memory`, and None is returned."""
        _, recomputed, _ = key
        self.set_layers(recomputed, compiled=self.compiled)
        already_in_bf16 = self._is_in_bf16(recomputed) or key in self.fits_only_in_bf16
        # bf16 weights would be compiled separately, while more layers can be recomputed without that.
        more = self.compiled and recomputed < max(self.small, default=0)
        for in_bf16 in (True,) if already_in_bf16 else (False, True):
            if in_bf16 and not (self.bf16_savings and (already_in_bf16 or not more)):
                break
            cast = cast_to_bf16(self.bf16_params, module=self.task) if in_bf16 else nullcontext()
            with suppress(torch.OutOfMemoryError), cast:
                self.compile(key, in_bf16=in_bf16)
                measured = measure(in_bf16)
                self.fits_only_in_bf16 |= {key} if in_bf16 else set()
                return measured
            clear_cache(self.device)
        self.out_of_memory.add(key)
        return None

    def _is_in_bf16(self, recomputed: int) -> bool:
        """True if small measurements have bf16 weights; between none and all layers as with all, which takes least."""
        number = recomputed if recomputed in self.small else max(self.small, default=recomputed)
        return number in self.measured_in_bf16

    def measure_outside_cap(self, key: OptionKey, *, blocks: Sequence[Sequence[Tensor]]) -> bool:
        """Measures the bytes of this option without the cap; False if the device has no room for it."""
        self.set_layers(key[1], compiled=self.compiled)
        in_bf16 = bool(self.bf16_savings)
        cast = cast_to_bf16(self.bf16_params, module=self.task) if in_bf16 else nullcontext()
        with suppress(torch.OutOfMemoryError), uncapped(self.device, budget=self.budget), cast:
            self._record(key, self.measure_bytes(key, blocks=blocks, in_bf16=in_bf16))
            self.measured_outside_cap.add(key)
            return True
        clear_cache(self.device)
        return False

    def measure_bytes(
        self, key: OptionKey, *, blocks: Sequence[Sequence[Tensor]], in_bf16: bool
    ) -> MicroBatchMeasurement:
        """Measures the bytes of an option, unless they were measured with weights in the same format."""
        size, recomputed, release = key
        if self.is_measured(key) and in_bf16 is self._is_in_bf16(recomputed):
            return next(measurement for measurement in self.measurements_of(key) if measurement.micro_batch == size)
        return self.runner.measure(
            size,
            accumulation=self.config.batch_size // size,
            context_bytes=context_bytes(self.device),
            released=blocks if release else (),
            timed=False,
            bf16_savings=self.bf16_savings if in_bf16 else None,
        )

    def _record(self, key: OptionKey, measurement: MicroBatchMeasurement) -> None:
        size, recomputed, release = key
        before = next((other.seconds for other in self.measurements_of(key) if other.micro_batch == size), math.nan)
        measurement = replace(measurement, seconds=before) if math.isnan(measurement.seconds) else measurement
        if release or self.compiled or recomputed not in self.small:
            self.exact[key] = measurement
        else:
            others = [other for other in self.small[recomputed] if other.micro_batch != size]
            self.small[recomputed] = [*others, measurement]


class _NoRoomForNativeWeights(Exception):
    """A measurement with native weights exceeds the budget."""
