"""Bytes and seconds of every way to run the global batch: measured within the budget's cap, or interpolated.

A way is (micro-batch, recomputed layers, released gradients). What is known of one, from the least to the most exact:

- `tried`: small micro-batches with no layer recomputed and with all. Others lie on lines through these.
- `compared`: seconds of two steps of the way itself, outside of a training loop.
- `rehearsed`, with `partly` and `released` for its bytes: the way as training will run it, in Lightning's loop.
"""

import math
from collections.abc import Callable, Mapping, Sequence
from contextlib import nullcontext, suppress
from dataclasses import replace
from functools import partial
from statistics import median

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
from baoc.training.measure.microbatches import MicroBatchRunner, grow
from baoc.types import Block, Budget, Footprint, OptimizerSpec

TRIALS_S = 3.0  # about what trials of one kind may take
KEPT_SHARE = 0.75  # of a micro-batch with three forwards' work and one more, where nothing is computed again
COMPILED_BYTES = 0.6  # of what layers keep of a sample for backward, where compiled: about half of ViT-L's and DiT-XL's
Way = tuple[int, int, bool]


class Measurements:
    """Measured bytes and seconds of one run's network, by way.

    Weights are measured in full, or where that is too little, with 16-bit weights where a plan may keep such; the exact
    values then wait in CPU memory, and are restored afterwards.

    Args:
        bf16_params: The parameters that a plan may keep in 16 bits, by name; none where the network has them in 16 bits
            already, as it has no room in full.
        bf16_savings: Bytes that each of them saves in 16 bits, by name.
        capped: False where the CUDA context alone exceeds the budget. Sizes are then measured without the cap, for the
            error message.
        compiled: Options are measured with compiled layers, as they would be trained. Small measurements run layers
            uncompiled, as compiling takes seconds per size; lines through them are scaled by what compiled options
            were measured to take.
        explored: Small measurements of earlier searches, by recomputed layers, and whether their weights were bf16.
            They are not repeated.

    Attributes:
        measured_in_bf16: Numbers of recomputed layers that were measured with 16-bit weights, to stay in the cap.
        measured_outside_cap: Ways whose bytes are known from outside of the cap alone.
    """

    def __init__(
        self,
        config: RunConfig,
        *,
        task: Task,
        trials: MicroBatchRunner,
        where: torch.device,
        budget: Budget,
        axes: Axes,
        bf16_params: Mapping[str, Tensor],
        bf16_savings: Mapping[str, int],
        capped: bool = True,
        compiled: bool = False,
        explored: dict[int, tuple[list[MicroBatchMeasurement], bool]],
    ):
        self.config, self.task, self.trials = config, task, trials
        self.where, self.budget, self.axes, self.bf16_params = where, budget, axes, bf16_params
        self.capped, self.compiled, self._known = capped, compiled, explored
        # Seconds of compiling, by size, whether weights have 16 bits, and whether layers are recomputed.
        self._ready: dict[tuple[int, bool, bool], float] = {}
        self.bf16_savings = bf16_savings
        self.measured_in_bf16: set[int] = set(axes.recomputed) if bf16_savings and not bf16_params else set()
        self.no_room: set[Way] = set()  # those that ran out of memory when they were tried
        self.in_16_bits: set[Way] = set()  # those that had room with weights of 16 bits alone
        self.measured_outside_cap: set[Way] = set()
        self.tried: dict[int, list[MicroBatchMeasurement]] = {}  # by recomputed layers: the least and the most of them
        # By micro-batch and a number of recomputed layers between; where layers are compiled, any number.
        self.partly: dict[tuple[int, int], MicroBatchMeasurement] = {}
        self.released: dict[int, MicroBatchMeasurement] = {}  # of the whole batch, by recomputed layers
        self.compared: dict[Way, float] = {}  # seconds of a step but for the optimizer's part, by two steps
        self.rehearsed: dict[Way, float] = {}  # and by steps in the training loop

    def switch(self, recomputed: int, *, compiled: bool = False) -> None:
        set_recomputed(self.task.model, recomputed, name=self.config.model.name)
        set_compiled(self.task.model, compiled)

    def compile(self, way: Way, *, in_bf16: bool) -> None:
        """What runs next is compiled, if it is to be."""
        missing = self._kinds(way, in_bf16=in_bf16) - self._ready.keys() if self.compiled else None
        if missing:  # those that are compiled together take about as long as each other
            self._ready |= dict.fromkeys(missing, self.trials.compile(way[0]) / len(missing))

    def _kinds(self, way: Way, *, in_bf16: bool) -> set[tuple[int, bool, bool]]:
        """What has to be compiled to run a way: its kept layers, its recomputed ones, or both."""
        parts = {recomputes for recomputes in (False, True) if way[1] != (0 if recomputes else self.axes.num_layers)}
        return {(way[0], in_bf16, part) for part in parts or {False}}

    def compiled_s(self, way: Way) -> float:
        """What compiling this way as training has it took; 0 where it is not compiled."""
        kinds = self._kinds(way, in_bf16=way in self.in_16_bits) if self.compiled else set()
        return sum(self._ready.get(kind, 0.0) for kind in kinds)

    def compiling_s(self, size: int) -> float:
        """About what is still to be compiled takes, to try this micro-batch as training has it."""
        known = not self.compiled or size in {kind[0] for kind in self._ready}
        return 0.0 if known else 2 * max(self._ready.values(), default=0.0)  # kept layers, and recomputed ones

    # -- what is known --------------------------------------------------------------------------------------------

    def is_measured(self, way: Way) -> bool:
        """Whether its bytes were measured, not told by a line."""
        size, recomputed, release = way
        if release:
            return recomputed in self.released
        return (size, recomputed) in self.partly or (
            not self.compiled and size in [trial.micro_batch for trial in self.like(way)]
        )

    def like(self, way: Way) -> list[MicroBatchMeasurement]:
        """What is known of ways like this one."""
        size, recomputed, release = way
        known = self.released.get(recomputed) if release else None
        known = known or self.partly.get((size, recomputed))
        return [known] if known is not None else self.tried.get(recomputed, [])

    def reaches(self, recomputed: int) -> bool:
        """Whether trials tell of so many recomputed layers."""
        between = self.compiled and self.tried and min(self.tried) < recomputed < max(self.tried)
        return recomputed in self.tried or bool(between)

    def _around(self, way: Way, *, measured: bool) -> tuple[int, int, float]:
        """The next numbers of recomputed layers that were tried, fewer and more, and how far between them the way's
        number is; with those of which this micro-batch was `measured`."""
        size, recomputed, _ = way
        partly = {number for of, number in self.partly if of == size and measured}
        known = sorted({*self.tried, *partly}) or [recomputed]
        fewer = max((number for number in known if number <= recomputed), default=known[0])
        more = min((number for number in known if number >= recomputed), default=known[-1])
        return fewer, more, (recomputed - fewer) / (more - fewer) if more > fewer else 0.0

    def footprint(self, way: Way, *, blocks: Sequence[Block]) -> Footprint | None:
        """None where it is not known what released gradients would leave."""
        size, recomputed, release = way
        if release and recomputed in self.released:
            return self.released[recomputed].footprint
        fewer, more, share = self._around(way, measured=True)
        found = self._end(size, fewer)
        if fewer < more:
            kept = (
                () if self.compiled else params_keeping_activations(self.task, recomputed=recomputed)
            )  # compiled ones cast again
            found = interpolate(found, self._end(size, more), share=share, not_recomputed=kept)
        return with_gradient_release(found, blocks=blocks, grouped=self.where.type == "cuda") if release else found

    def _end(self, size: int, recomputed: int) -> Footprint:
        """With a number of recomputed layers that was tried. Where all are kept and compiled, what layers keep as they
        are is more than it takes, by COMPILED_BYTES or what was measured."""
        found = upper_bound_at(self.like((size, recomputed, False)), micro_batch=size)
        most = max(self.tried, default=0)
        if not self.compiled or recomputed or not most or (size, recomputed) in self.partly:
            return found
        shares: list[float] = []
        for (of, number), trial in self.partly.items():
            ends = [upper_bound_at(trials, micro_batch=of) for trials in (self.tried[0], self.like((of, most, False)))]
            kept, least, peak = (each.peak_bytes(state_bytes=0) for each in (*ends, trial.footprint))
            if number < most and kept > least:
                shares.append((peak - least) / (kept - least) * most / (most - number))
        share = min(max(median(shares or [COMPILED_BYTES]), 0.0), 1.0)
        return interpolate(found, upper_bound_at(self.tried[most], micro_batch=size), share=1 - share)

    def seconds(self, way: Way) -> float:
        """Of a step but for the optimizer's part: rehearsed, else compared, else on the line through trials."""
        if way in self.rehearsed:
            return self.rehearsed[way]
        if way in self.compared:
            return self.compared[way] * self._loop_share(release=way[2])
        gains = [self.rehearsed[other] / self._line_seconds(other) for other in self.rehearsed if self.compiled]
        return self._line_seconds(way) * (median(gains) if gains else 1.0)

    def _line_seconds(self, way: Way) -> float:
        size, _, release = way
        fewer, more, share = self._around(way, measured=not self.compiled)
        ends = [self._micro_batch_seconds((size, number, release)) for number in (fewer, more)]
        return self.config.batch_size // size * (ends[0] + share * (ends[1] - ends[0]))

    def _micro_batch_seconds(self, way: Way) -> float:
        """On the line through trials like this one. That of small ones, where the device waits for the host, goes on
        too low: what is kept takes a share of what computing it again was seen to take."""
        size, recomputed, _ = way
        trials = self.tried[recomputed] if self.compiled else self.like(way)
        seconds, most = seconds_at(trials, micro_batch=size), max(self.tried, default=0)
        if math.isnan(seconds):  # not timed
            return KEPT_SHARE * seconds_at(self.tried[most], micro_batch=size)
        if recomputed == 0 < most and size > max(trial.micro_batch for trial in trials):
            seconds = max(seconds, KEPT_SHARE * seconds_at(self.tried[most], micro_batch=size))
        return seconds

    def _loop_share(self, *, release: bool) -> float:
        """How many times as long steps took in the training loop as where they were compared; 1 where not known."""
        known = [self.rehearsed[way] / self.compared[way] for way in self.rehearsed if way in self.compared]
        return median(known) if known and not release else 1.0

    @property
    def any_room(self) -> bool:
        """Whether anything was tried within the cap."""
        ways = {(trial.micro_batch, kind, False) for kind, trials in self.tried.items() for trial in trials}
        ways |= {(size, number, False) for size, number in self.partly}
        ways |= {(trial.micro_batch, kind, True) for kind, trial in self.released.items()}
        return bool(ways - self.no_room - self.measured_outside_cap)

    def has_room(self, way: Way) -> bool:
        """Whether nothing that was tried says otherwise: neither itself nor one that takes less ran out of memory."""
        size, recomputed, release = way
        return not any(
            other <= size and number >= recomputed and (released or not release)
            for other, number, released in self.no_room
        )

    # -- trying ---------------------------------------------------------------------------------------------------

    def explore(self, recomputed: int) -> None:
        """Measures several micro-batches. Where not even one sample has room, its bytes are looked at outside of the
        cap, for a refusal to name what would fit, and to tell what released gradients would leave; with all gradients
        at once it is no option then, unless layers are compiled, which may take less."""
        trials, in_bf16 = self._known.get(recomputed, ([], False))
        if trials and not (self._timed(recomputed) and math.isnan(trials[0].seconds)):
            self.measured_in_bf16 |= {recomputed} if in_bf16 else set()
            self._explored(recomputed, trials)
            return
        self.switch(recomputed)
        sizes, look = list(self.axes.micro_batches), partial(self._look, recomputed)
        if not self.capped:
            self.no_room |= {(size, recomputed, release) for size in sizes for release in self.axes.release}
            self.tried[recomputed] = [look(sizes[0])]
            return
        # Compiled layers that are kept take less than these: the largest that fits says nothing.
        max_s = TRIALS_S if self._timed(recomputed) else 0.0
        grown = partial(grow, look, sizes=sizes, max_s=max_s, fits=self._may_fit)
        with suppress(_NoRoomInFull, torch.OutOfMemoryError):
            self._explored(recomputed, grown())
            return
        clear_cache(self.where)
        if self.bf16_params:
            self.measured_in_bf16.add(recomputed)
            with suppress(torch.OutOfMemoryError), cast_to_bf16(self.bf16_params, module=self.task):
                self._explored(recomputed, grown())
                return
            clear_cache(self.where)
        # All gradients at once were tried; where they are released there may be room still.
        if self.compiled:
            self.measured_outside_cap.add((sizes[0], recomputed, False))
        else:
            self.no_room |= {(size, recomputed, False) for size in sizes}
        with uncapped(self.where, budget=self.budget), cast_to_bf16(self.bf16_params, module=self.task):
            self.tried[recomputed] = [look(sizes[0])]

    def measure_again_in_bf16(self) -> bool:
        """Looks again with weights of 16 bits, where nothing fits by looks at those in full; whether there were any."""
        kinds = (
            [kind for kind in self.tried if kind not in self.measured_in_bf16]
            if self.bf16_params and self.capped
            else []
        )
        self.measured_in_bf16 |= set(kinds)
        for kind in kinds:
            self.switch(kind)
            sizes, look = list(self.axes.micro_batches), partial(self._look, kind)
            with suppress(torch.OutOfMemoryError), cast_to_bf16(self.bf16_params, module=self.task):
                self._explored(kind, grow(look, sizes=sizes, max_s=TRIALS_S, fits=self._may_fit))
        return bool(kinds)

    def _explored(self, recomputed: int, trials: list[MicroBatchMeasurement]) -> None:
        self._known[recomputed] = trials, recomputed in self.measured_in_bf16
        self.tried[recomputed] = trials
        for trial in trials if not self.compiled else ():
            count = self.config.batch_size // trial.micro_batch
            self.compared[trial.micro_batch, recomputed, False] = count * trial.seconds

    def _timed(self, recomputed: int) -> bool:
        """Whether layers are run as they are for their seconds too; kept ones take a share of recomputed ones', if such
        were tried, where they are to be compiled."""
        return bool(recomputed) or not self.compiled or not max(self.tried, default=0)

    def _look(self, recomputed: int, size: int) -> MicroBatchMeasurement:
        """One trial. Raises _NoRoomInFull without room for weights in full, else torch.OutOfMemoryError."""
        run = partial(
            self.trials.run,
            size,
            accumulation=2 if self.axes.micro_batches[0] < self.config.batch_size else 1,
            context_bytes=context_bytes(self.where),
            per_step=self.config.batch_size // size,
            timed=self._timed(recomputed),
        )
        if recomputed in self.measured_in_bf16 or not self.bf16_savings:
            return run(bf16_savings=self.bf16_savings)
        with suppress(torch.OutOfMemoryError):
            return run()
        clear_cache(self.where)
        raise _NoRoomInFull

    def _may_fit(self, footprint: Footprint) -> bool:
        """Whether some allocation might hold the budget: one without states, with weights of 16 bits where there are
        such."""
        memory = self.budget.memory_bytes
        return memory is None or footprint.peak_bytes(state_bytes=0, saved=self.bf16_savings) <= memory

    def rehearse(
        self,
        way: Way,
        *,
        blocks: Sequence[Sequence[Tensor]],
        specs: Sequence[OptimizerSpec],
        max_s: float | None = None,
    ) -> float:
        """Seconds of a step of this way, as training will take them. Raises torch.OutOfMemoryError."""
        given = self.config.trainer
        return self.trials.rehearsed(
            way[0],
            per_step=self.config.batch_size // way[0],
            clip=(given.gradient_clip_val, given.gradient_clip_algorithm),
            blocks=blocks,
            specs=specs if way[2] or self.where.type == "cuda" else (),  # on a CPU they are in the table
            release=way[2],
            max_s=max_s,
        )

    def compare(self, way: Way, *, blocks: Sequence[Sequence[Tensor]], specs: Sequence[OptimizerSpec] = ()) -> None:
        """Seconds of two steps of this way, outside of the training loop unless gradients are released there, or that
        it has no room."""
        size, _, release = way

        def compared(_: bool) -> None:
            if release:
                self.compared[way] = self.rehearse(way, blocks=blocks, specs=specs, max_s=0.0)
            else:
                count = self.config.batch_size // size
                self.compared[way] = count * self.trials.timed(size, per_step=count)

        self._in_room(way, compared)

    def try_out(self, way: Way, *, blocks: Sequence[Sequence[Tensor]], specs: Sequence[OptimizerSpec] = ()) -> None:
        """Bytes and seconds of this way as it would be run, or that it has no room. `blocks`: parameters of each, and
        `specs` what would step them."""

        def tried(in_bf16: bool) -> None:
            trial = self.run(way, blocks=blocks, in_bf16=in_bf16)
            if self._may_fit(trial.footprint):  # else its seconds are nobody's
                self.rehearsed[way] = self.rehearse(way, blocks=blocks, specs=specs)
                trial = replace(trial, seconds=self.rehearsed[way] * way[0] / self.config.batch_size)
            self._keep(way, trial)
            self.measured_outside_cap.discard(way)

        self._in_room(way, tried)

    def look_at(self, way: Way, *, blocks: Sequence[Sequence[Tensor]]) -> MicroBatchMeasurement | None:
        """Bytes of this way as it would be run, if it has room."""
        found: list[MicroBatchMeasurement] = []
        self._in_room(way, lambda in_bf16: found.append(self.run(way, blocks=blocks, in_bf16=in_bf16)))
        return found[0] if found else None

    def _in_room(self, way: Way, measure: Callable[[bool], None]) -> None:
        """`measure(in_bf16)` with weights in full or, where these have no room, in 16 bits; or that none has."""
        _, recomputed, _ = way
        self.switch(recomputed, compiled=self.compiled)
        known_in_bf16 = self._is_in_bf16(recomputed) or way in self.in_16_bits
        # Weights of 16 bits are compiled apart, and more layers can be recomputed without.
        more = self.compiled and recomputed < max(self.tried, default=0)
        for in_bf16 in (True,) if known_in_bf16 else (False, True):
            if in_bf16 and not (self.bf16_savings and (known_in_bf16 or not more)):
                break
            look = cast_to_bf16(self.bf16_params, module=self.task) if in_bf16 else nullcontext()
            with suppress(torch.OutOfMemoryError), look:
                self.compile(way, in_bf16=in_bf16)
                measure(in_bf16)
                self.in_16_bits |= {way} if in_bf16 else set()
                return
            clear_cache(self.where)
        self.no_room.add(way)

    def _is_in_bf16(self, recomputed: int) -> bool:
        """Whether trials have weights of 16 bits: between none and all layers as with all, which takes least."""
        return (
            recomputed if recomputed in self.tried else max(self.tried, default=recomputed)
        ) in self.measured_in_bf16

    def measure(self, way: Way, *, blocks: Sequence[Sequence[Tensor]]) -> bool:
        """Bytes of this way as it would be run, outside of the cap; whether the device had room for that."""
        self.switch(way[1], compiled=self.compiled)
        in_bf16 = bool(self.bf16_savings)
        look = cast_to_bf16(self.bf16_params, module=self.task) if in_bf16 else nullcontext()
        with suppress(torch.OutOfMemoryError), uncapped(self.where, budget=self.budget), look:
            self._keep(way, self.run(way, blocks=blocks, in_bf16=in_bf16))
            self.measured_outside_cap.add(way)
            return True
        clear_cache(self.where)
        return False

    def run(self, way: Way, *, blocks: Sequence[Sequence[Tensor]], in_bf16: bool) -> MicroBatchMeasurement:
        """The trial of a way, that of before where it was measured with weights as they are now."""
        size, recomputed, release = way
        if self.is_measured(way) and in_bf16 is self._is_in_bf16(recomputed):
            return next(trial for trial in self.like(way) if trial.micro_batch == size)
        return self.trials.run(
            size,
            accumulation=self.config.batch_size // size,
            context_bytes=context_bytes(self.where),
            released=blocks if release else (),
            timed=False,
            bf16_savings=self.bf16_savings if in_bf16 else None,
        )

    def _keep(self, way: Way, trial: MicroBatchMeasurement) -> None:
        size, recomputed, release = way
        before = next((other.seconds for other in self.like(way) if other.micro_batch == size), math.nan)
        trial = replace(trial, seconds=before) if math.isnan(trial.seconds) else trial
        if release:
            self.released[recomputed] = trial
        elif self.compiled or recomputed not in self.tried:
            self.partly[size, recomputed] = trial
        else:
            known = [other for other in self.tried[recomputed] if other.micro_batch != size]
            self.tried[recomputed] = [*known, trial]


class _NoRoomInFull(Exception):
    """Weights in full, with what a trial needs beside them, are more than the budget."""
