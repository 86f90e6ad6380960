"""Samples gradients during training and computes the statistics that risk models and state migration use.

It reads a few slices of every block and never copies whole gradients. `slices` chooses the elements, `schedule` the
steps; `averages` keeps the running sums, and `statistics` has the formulas. `moments` averages g^2 by row and column.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from baoc.errors import CheckpointError
from baoc.optim.shards import local_shard, shard_of
from baoc.parallel import SINGLE_PROCESS, Ranks
from baoc.profiling.averages import BYTES_PER_PIECE, NUM_BUFFERS, Averages
from baoc.profiling.moments import RowColSecondMoments
from baoc.profiling.schedule import LARGE_PARAMS, MAX_SHARE, SamplingAction, SamplingSchedule, SavedSchedule
from baoc.profiling.slices import Buffer, Slices
from baoc.profiling.statistics import FOLD_LEVELS
from baoc.profiling.tracker import PeakMeter
from baoc.types import Block, GradientStats, Moments, ParamInfo, Profile, read_plain, to_plain
from baoc.units import MIB

MAX_BYTES = 16 * MIB  # of all buffers, below LARGE_PARAMS
BYTES_PER_PARAM = 0.2  # of all buffers, from LARGE_PARAMS up


@dataclass(frozen=True, slots=True, kw_only=True)
class _SavedMoments:
    average: Any  # a tensor
    num_samples: int


@dataclass(frozen=True, slots=True, kw_only=True)
class _Saved:
    """A profiler in a checkpoint, for profilers of the same `layout`, which describes the sampled elements."""

    layout: tuple[str, ...]
    tensors: Mapping[str, Any]
    moments: _SavedMoments
    count: Mapping[str, int]
    step: int
    prev_step: int | None
    schedule: SavedSchedule


def _is_loadable(saved: Any, tensor: Tensor) -> bool:
    if not isinstance(saved, Tensor) or saved.shape != tensor.shape:
        return False
    # aminmax returns NaN if any element is NaN; isfinite() would allocate a copy, which a resume has no room for.
    return not saved.numel() or all(bool(end.isfinite()) for end in saved.aminmax())


class GradientProfiler:
    """Samples gradients of `params` (by name) block by block; `profile()` returns their statistics.

    Call `observe()` between gradient clipping and the optimizer's step. Step 0 is never sampled: gates that start at
    zero make its gradients exactly zero. Non-finite elements count as 0. Noise is estimated from consecutive steps.

    With gradient release, the gradients of a step never exist at once. Then build the profiler with `incremental` and
    call `begin_step`, `add_gradients` for some of the gradients at a time, and `end_step`; the statistics are the same.

    Below 10M parameters, the number of a step alone decides whether it is sampled (all; after 64 steps every second,
    after 128 every fourth, and so on), so that results repeat bit for bit; sampling ends after 3 s of processor time.
    From 10M on, a step is sampled if the cost of a sample fits into `max_share` of the time since the first step. The
    constructor takes samples of the parameters to measure this cost.

    Sharded parameters: each rank samples its rows, and one all-reduce per sample gives every rank the whole sample, so
    statistics equal those of one device. Row and column means of g^2 are not collected.

    Args:
        betas, eps: AdamW's.
        max_bytes: of all buffers, which are allocated at once; None is MAX_BYTES, or BYTES_PER_PARAM for each parameter
            of this rank from LARGE_PARAMS up.
        max_share: share of the training time, from LARGE_PARAMS up.
        ranks: rank 0 of them chooses the steps for all.
    """

    def __init__(
        self,
        blocks: Sequence[Block],
        params: Mapping[str, Tensor],
        *,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-8,
        max_bytes: int | None = None,
        max_share: float = MAX_SHARE,
        incremental: bool = False,
        ranks: Ranks = SINGLE_PROCESS,
    ):
        self._blocks = tuple(replace(block, params=tuple(map(_unsharded, block.params))) for block in blocks)
        num_params = sum(block.numel for block in self._blocks)
        if max_bytes is None:
            num_local_params = sum(block.numel for block in blocks)
            max_bytes = int(BYTES_PER_PARAM * num_local_params) if num_params >= LARGE_PARAMS else MAX_BYTES
        self._params = {p.name: params[p.name] for block in blocks for p in block.params}
        device = next((param.device for param in self._params.values()), torch.device("cpu"))
        self._shards = {name: shard for name, param in self._params.items() if (shard := shard_of(param)) is not None}
        self._moments = RowColSecondMoments(
            () if self._shards else self._blocks,
            beta=betas[1],
            max_bytes=max_bytes // 2,
            device=device,
            incremental=incremental,
        )
        self._slices = Slices.within(
            self._blocks,
            max_bytes=max_bytes - self._moments.nbytes,
            per_element=4 * (NUM_BUFFERS + 2),
            per_piece=BYTES_PER_PIECE + 8,
            device=device,
        )
        if self._shards:
            self._slices.restrict_to_local(self._shards)
        self._grad, self._prev = self._slices.buffer(device), self._slices.buffer(device)
        self._averages = Averages(self._slices, betas=betas, eps=eps, device=device)
        self._schedule = SamplingSchedule(num_params=num_params, max_share=max_share, ranks=ranks)
        self._step = -1  # the latest step
        self._prev_step: int | None = None  # the step of the gradient in `_prev`
        self._action = SamplingAction.SKIP  # of the step in progress
        self._stats: dict[str, GradientStats] | None = None  # of the samples so far, once computed
        self._freed = False
        if self._schedule.large and device.type != "meta":
            self._measure_cost()

    @property
    def nbytes(self) -> int:
        return sum(tensor.nbytes for tensor in self.buffers())

    def buffers(self) -> list[Tensor]:
        """Every tensor that the profiler allocated; none once freed."""
        if self._freed:
            return []
        return [*self._tensors().values(), *self._moments.tensors(), *self._slices.tensors()]

    @property
    def num_samples(self) -> int:
        return self._averages.count["samples"]

    # -- sampling -------------------------------------------------------------------------------------------------

    @torch.no_grad()
    def observe(self, *, step: int | None = None) -> bool:
        """Samples the present gradients if the schedule chooses this step; returns whether it did.

        `step` counts from 0; None is the next one.
        """
        self._action = self._next_action(step)
        if not self.samples_this_step:
            return False
        self._process({name: param.grad for name, param in self._params.items() if param.grad is not None})
        return self._action is SamplingAction.SAMPLE

    @torch.no_grad()
    def begin_step(self, *, step: int) -> None:
        """Begins a step whose gradients are passed to `add_gradients`."""
        self._action = self._next_action(step)
        if self.samples_this_step:
            with self._schedule.timed(self._action):
                self._begin()

    @property
    def samples_this_step(self) -> bool:
        """Whether the gradients of the step in progress are read, for a sample or to be paired with the next step's."""
        return self._action is not SamplingAction.SKIP and not self._freed

    @torch.no_grad()
    def add_gradients(self, grads: Mapping[str, Tensor]) -> None:
        """Adds final gradients of some parameters, by name. Gradients that are never added count as 0."""
        if self.samples_this_step:
            with self._schedule.timed(self._action, continued=True):
                self._add(grads)

    @torch.no_grad()
    def end_step(self) -> None:
        if self.samples_this_step:
            with self._schedule.timed(self._action, continued=True):
                self._end()
        self._action = SamplingAction.SKIP

    def _next_action(self, step: int | None) -> SamplingAction:
        self._step = self._step + 1 if step is None else step
        self._schedule.start()
        if self._freed or self._step == 0:
            return SamplingAction.SKIP
        action = self._schedule.next_action()
        self._schedule.advance(action)
        return action

    def _process(self, grads: Mapping[str, Tensor], *, reduce: bool = True) -> None:
        with self._schedule.timed(self._action):
            self._begin()
            self._add(grads)
            self._end(reduce=reduce)

    def _begin(self) -> None:
        self._grad, self._prev = self._prev, self._grad
        self._grad.flat.zero_()
        if self._action is SamplingAction.SAMPLE:
            self._moments.begin()

    def _add(self, grads: Mapping[str, Tensor]) -> None:
        self._slices.gather_(self._grad, grads={name: local_shard(grad) for name, grad in grads.items()})
        if self._action is SamplingAction.SAMPLE:
            self._moments.add(grads)

    def _end(self, *, reduce: bool = True) -> None:
        """Adds the gathered gradients, summed over all ranks if `reduce`, to the statistics."""
        grad = self._grad.flat
        if self._shards and reduce:
            next(iter(self._shards.values())).group.all_reduce_(grad)
        grad.nan_to_num_(nan=0.0, posinf=0.0, neginf=0.0)
        if self._prev_step == self._step - 1:
            self._averages.add_pair(self._prev.flat, grad)
        self._prev_step = self._step
        if self._action is SamplingAction.SAMPLE:
            self._stats = None
            self._averages.add_sample(grad)
            self._moments.end()

    def _measure_cost(self) -> None:
        """Tells the schedule what a sample costs: runs once to warm up, and once to time it, then resets the state."""
        fresh = self.state_dict()
        device = self._grad.flat.device
        for _ in range(2):
            self._process_params(SamplingAction.GATHER, SamplingAction.SAMPLE)
            if device.type == "cuda":
                torch.cuda.synchronize(device)
        self.load_state_dict(fresh)

    def _process_params(self, *actions: SamplingAction) -> None:
        """Runs steps with the parameters as gradients. The caller restores the state.

        There is no all-reduce, so that a rank that runs out of memory does not hang the others.
        """
        values = {name: param.detach() for name, param in self._params.items()}
        before = self._action
        for self._action in actions:
            self._step += 1
            self._process(values, reduce=False)
        self._action = before

    @torch.no_grad()
    def temporary_bytes(self) -> int:
        """Temporary bytes of a sample or a profile beyond `nbytes`, measured with the parameters as gradients.

        The state does not change. On meta tensors: `nbytes`, an upper guess.
        """
        device = self._grad.flat.device
        if device.type == "meta" or self._freed:
            return self.nbytes
        state = self.state_dict()
        gather, sample = SamplingAction.GATHER, SamplingAction.SAMPLE
        with PeakMeter(device, [*self.buffers(), *self._params.values()]) as meter:
            before = meter.current_bytes
            self._process_params(gather, sample, sample, gather)
            self._averages.statistics()
            self.second_moments()
            temporary_bytes = meter.peak_allocated_bytes - before
        self.load_state_dict(state)
        return temporary_bytes

    # -- results --------------------------------------------------------------------------------------------------

    @torch.no_grad()
    def profile(self) -> Profile:
        """The statistics so far; none before two samples. Costs a pass over the slices after each new sample."""
        assert not self._freed, "a freed profiler has no statistics"
        if self._stats is None:  # returning statistics again is not timed
            with self._schedule.timed("profile"):
                self._stats = self._averages.statistics()
        return Profile(
            stats=self._stats,
            num_samples=self.num_samples,
            profile_s=self._schedule.spent_s,
            warmup_s=self._schedule.elapsed_s,
            profile_bytes=self.nbytes,
        )

    def second_moments(self) -> dict[str, Moments]:
        """Parameter name -> row and column means of g^2, for the matrices; empty before a sample."""
        return self._moments.moments()

    def free(self) -> None:
        """Frees all buffers but the index tensors of the slices; no step is sampled from then on."""
        self._freed = True
        self._params = {}
        self._grad = self._prev = Buffer(torch.zeros(0), [])
        self._averages.tensors = {}
        self._moments.free()

    # -- resume ---------------------------------------------------------------------------------------------------

    def state_dict(self, *, copies: bool = True) -> dict[str, Any]:
        """The state as CPU tensors, numbers, strings, lists and dicts; the device may have no room for copies.

        `copies`: copies CPU tensors too. A caller that writes the state at once does not need them.
        """
        if self._freed:
            return {}
        return {
            "layout": self._layout(),
            "tensors": {name: tensor.to("cpu", copy=copies) for name, tensor in self._tensors().items()},
            "moments": {
                "average": self._moments.average.to("cpu", copy=copies),
                "num_samples": self._moments.num_samples,
            },
            "count": dict(self._averages.count),
            "step": self._step,
            "prev_step": self._prev_step,
            "schedule": to_plain(self._schedule.saved()),
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Continues from `state`. Raises CheckpointError, and changes nothing, if `state` is damaged or its profiler
        sampled other elements."""
        try:
            saved = read_plain(_Saved, state)
        except ValueError as error:
            raise CheckpointError(f"the checkpoint's gradient profile is damaged: {error}") from error
        tensors = dict(saved.tensors)
        if isinstance(folds := tensors.get("folds"), Tensor) and folds.ndim == 2:
            tensors["folds"] = folds[:, : len(FOLD_LEVELS)]  # earlier versions had those along fan-out after these
        pairs: list[tuple[Tensor, Any]] = [(tensor, tensors.get(name)) for name, tensor in self._tensors().items()]
        pairs.append((self._moments.average, saved.moments.average))
        same_layout = list(saved.layout) == self._layout() and saved.count.keys() == self._averages.count.keys()
        if not same_layout or not all(_is_loadable(value, tensor) for tensor, value in pairs):
            raise CheckpointError(
                "the checkpoint's gradient profile is of other blocks or parameters than this run's: "
                "resume with the same model and blocks"
            )
        for tensor, value in pairs:
            tensor.copy_(value)
        self._moments.num_samples = saved.moments.num_samples
        self._averages.count = dict(saved.count)
        self._step, self._prev_step = saved.step, saved.prev_step
        self._schedule.resume(saved.schedule)
        self._stats = None

    def _tensors(self) -> dict[str, Tensor]:
        return {"grad": self._grad.flat, "prev": self._prev.flat, **self._averages.tensors}

    def _layout(self) -> list[str]:
        pieces = [
            f"{self._blocks[p.block].name} {p.param.name} {list(p.param.shape)} {list(p.shape)} {p.offset}"
            for p in self._slices.pieces
        ]
        return [*pieces, f"moments {len(self._moments.average)}"]


def _unsharded(param: ParamInfo) -> ParamInfo:
    return param if param.whole is None else replace(param, shape=param.whole, whole=None)
