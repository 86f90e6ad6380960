"""Samples gradients during training and computes the statistics that risk models and state migration use.

It reads a few slices of every block and never copies whole gradients. `slices` chooses the elements, `statistics` has
the formulas, `schedule` chooses the steps.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from baoc.errors import CheckpointError
from baoc.optim.shards import local_shard, shard_of
from baoc.parallel import SINGLE_PROCESS, Ranks
from baoc.profiling.averages import BUFFERS, BYTES_PER_PIECE, Averages
from baoc.profiling.moments import RowColMoments
from baoc.profiling.schedule import LARGE_PARAMS, MAX_SHARE, SamplingAction, SamplingSchedule, SavedSchedule
from baoc.profiling.slices import Buffer, Slices
from baoc.profiling.tracker import PeakMeter
from baoc.types import Block, GradientStats, Moments, ParamInfo, Profile, read_plain, to_plain
from baoc.units import MIB

MAX_BYTES = 16 * MIB
BYTES_PER_PARAM = 0.2  # instead, from LARGE_PARAMS up


@dataclass(frozen=True, slots=True, kw_only=True)
class _SavedMoments:
    average: Any  # a tensor
    num_samples: int


@dataclass(frozen=True, slots=True, kw_only=True)
class _Saved:
    """What a checkpoint keeps of a profiler; `layout` is what two of them must share to exchange their tensors."""

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

    Call `observe()` between gradient clipping and the optimizer's step; it returns whether it sampled. Step 0 is never
    sampled: gates that start at zero make its gradients exactly zero. Non-finite elements count as 0. Noise is
    estimated from consecutive steps.

    Limits: buffers hold at most `max_bytes` (16 MiB; from 10M parameters up 0.2 B each) and are allocated at once.
    Below 10M parameters, which steps are sampled follows from their numbers alone (all; after 64 steps every second,
    after 128 every fourth, and so on), so that results repeat bit for bit; only when 3 s
    of processor time are used up does sampling end. From 10M up, a sample is taken where `max_share` (5 %) of the time
    since the first step pays for it; what it costs is found in a rehearsal when the profiler is built (`schedule`).

    `betas` and `eps` are AdamW's. `incremental`: a step's gradients are never there at once, and come by `begin_step`,
    `add_gradients` for some of them, and `end_step` instead of by `observe`; the result is the same.

    Of parameters that `fully_shard` cuts each rank samples its rows, and all ranks have all of them, by one message a
    sample: statistics are those of one device. Row and column means of g^2 are left out there.
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
        self._blocks = tuple(replace(block, params=tuple(map(_whole, block.params))) for block in blocks)
        num_params = sum(block.numel for block in self._blocks)
        if max_bytes is None:
            held = sum(block.numel for block in blocks)  # of a rank
            max_bytes = int(BYTES_PER_PARAM * held) if num_params >= LARGE_PARAMS else MAX_BYTES
        self._params = {p.name: params[p.name] for block in blocks for p in block.params}
        device = next((param.device for param in self._params.values()), torch.device("cpu"))
        blocks = self._blocks
        self._shards = {name: shard for name, param in self._params.items() if (shard := shard_of(param)) is not None}
        averaged = () if self._shards else blocks
        self._moments = RowColMoments(
            averaged, beta=betas[1], max_bytes=max_bytes // 2, device=device, incremental=incremental
        )
        self._slices = Slices.within(
            blocks,
            max_bytes=max_bytes - self._moments.nbytes,
            per_element=4 * (BUFFERS + 2),
            per_piece=BYTES_PER_PIECE + 8,
            device=device,
        )
        if self._shards:
            self._slices.keep_own(self._shards)
        self._grad, self._prev = self._slices.buffer(device), self._slices.buffer(device)
        self._averages = Averages(self._slices, betas=betas, eps=eps, device=device)
        self._schedule = SamplingSchedule(num_params=num_params, max_share=max_share, ranks=ranks)
        self._step = -1  # of the newest call
        self._prev_step: int | None = None  # of the gradient in the older buffer
        self._turn = SamplingAction.SKIP  # what the step in progress is for
        self._stats: dict[str, GradientStats] | None = None
        self._freed = False
        if self._schedule.large and device.type != "meta":
            self._rehearse()

    @property
    def nbytes(self) -> int:
        """Bytes of everything it holds."""
        return sum(tensor.nbytes for tensor in self.buffers())

    def buffers(self) -> list[Tensor]:
        """Every tensor it holds, for counting memory; none once freed."""
        if self._freed:
            return []
        return [*self._tensors().values(), *self._moments.tensors(), *self._slices.tensors()]

    @property
    def num_samples(self) -> int:
        return self._averages.count["samples"]

    # -- observing ------------------------------------------------------------------------------------------------

    @torch.no_grad()
    def observe(self, *, step: int | None = None) -> bool:
        """Samples the present gradients of `params` if the schedule chooses this step. `step` counts from 0."""
        self._turn = self._next_turn(step)
        if not self.samples_this_step:
            return False
        self._take({name: param.grad for name, param in self._params.items() if param.grad is not None})
        return self._turn is SamplingAction.SAMPLE

    @torch.no_grad()
    def begin_step(self, *, step: int) -> None:
        """A step begins whose gradients come by parts."""
        self._turn = self._next_turn(step)
        if self.samples_this_step:
            with self._schedule.running(self._turn):
                self._begin()

    @property
    def samples_this_step(self) -> bool:
        """Whether the step in progress is sampled or gathered."""
        return self._turn is not SamplingAction.SKIP and not self._freed

    @torch.no_grad()
    def add_gradients(self, grads: Mapping[str, Tensor]) -> None:
        """Final gradients of some of `params`, by name. What never comes counts as 0."""
        if self.samples_this_step:
            with self._schedule.running(self._turn, more=True):
                self._see(grads)

    @torch.no_grad()
    def end_step(self) -> None:
        """The step's gradients have all been seen."""
        if self.samples_this_step:
            with self._schedule.running(self._turn, more=True):
                self._finish()
        self._turn = SamplingAction.SKIP

    def _next_turn(self, step: int | None) -> SamplingAction:
        self._step = self._step + 1 if step is None else step
        self._schedule.start()
        if self._freed or self._step == 0:
            return SamplingAction.SKIP
        turn = self._schedule.next_action()
        self._schedule.advance(turn)
        return turn

    def _take(self, grads: Mapping[str, Tensor], *, alone: bool = False) -> None:
        with self._schedule.running(self._turn):
            self._begin()
            self._see(grads)
            self._finish(alone=alone)

    def _begin(self) -> None:
        self._grad, self._prev = self._prev, self._grad
        self._grad.flat.zero_()
        if self._turn is SamplingAction.SAMPLE:
            self._moments.begin()

    def _see(self, grads: Mapping[str, Tensor]) -> None:
        self._slices.gather_(self._grad, grads={name: local_shard(grad) for name, grad in grads.items()})
        if self._turn is SamplingAction.SAMPLE:
            self._moments.see(grads)

    def _finish(self, *, alone: bool = False) -> None:
        """The gathered gradients, of all ranks unless `alone`, join the statistics."""
        grad = self._grad.flat
        if self._shards and not alone:
            next(iter(self._shards.values())).group.all_reduce_(grad)
        grad.nan_to_num_(nan=0.0, posinf=0.0, neginf=0.0)
        if self._prev_step == self._step - 1:
            self._averages.pair(self._prev.flat, grad)
        self._prev_step = self._step
        if self._turn is SamplingAction.SAMPLE:
            self._stats = None
            self._averages.sample(grad)
            self._moments.finish()

    def _rehearse(self) -> None:
        """Runs everything once unseen, on the parameters as gradients, and once more to learn what it costs."""
        fresh = self.state_dict()
        device = self._grad.flat.device
        for _ in range(2):
            self._take_unseen(SamplingAction.GATHER, SamplingAction.SAMPLE)
            if device.type == "cuda":
                torch.cuda.synchronize(device)
        self.load_state_dict(fresh)

    def _take_unseen(self, *turns: SamplingAction) -> None:
        """Takes the parameters for gradients; whoever calls this puts the state back.

        No rank waits for another: one alone may have no room for this, and then tells them so.
        """
        values = {name: param.detach() for name, param in self._params.items()}
        before = self._turn
        for self._turn in turns:
            self._step += 1
            self._take(values, alone=True)
        self._turn = before

    @torch.no_grad()
    def temporary_bytes(self) -> int:
        """Temporary bytes of a sample or a profile beyond `nbytes`, measured on the parameters as gradients.

        Leaves it as it was.
        """
        device = self._grad.flat.device
        if device.type == "meta" or self._freed:
            return self.nbytes
        fresh, held = self.state_dict(), [*self.buffers(), *self._params.values()]
        with PeakMeter(device, held) as meter:
            before = meter.current_bytes
            gather, sample = SamplingAction.GATHER, SamplingAction.SAMPLE
            self._take_unseen(gather, sample, sample, gather)
            self._averages.statistics()
            self.second_moments()
            most = meter.peak_allocated_bytes - before
        self.load_state_dict(fresh)
        return most

    # -- what was seen --------------------------------------------------------------------------------------------

    @torch.no_grad()
    def profile(self) -> Profile:
        """The statistics so far; none before two samples. Costs a pass over the slices after each new sample."""
        assert not self._freed, "a freed profiler has no statistics"
        if self._stats is None:  # a look at what is known already tells nothing of what a profile takes
            with self._schedule.running("profile"):
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
        """Frees all buffers of samples, not the index tensors of slices; nothing is observed from then on."""
        self._freed = True
        self._params = {}
        self._grad = self._prev = Buffer(torch.zeros(0), [])
        self._averages.tensors = {}
        self._moments.free()

    # -- resume ---------------------------------------------------------------------------------------------------

    def state_dict(self, *, copies: bool = True) -> dict[str, Any]:
        """Tensors, numbers, strings, lists and dicts, on the host, so that a device which weights fill holds no second
        one. `copies`: on a CPU too, so that the state does not move on; not needed by who writes it at once."""
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
        """Goes on where `state` was taken. Raises CheckpointError if that profiler sampled other elements, or `state`
        is damaged; nothing is changed then."""
        try:
            saved = read_plain(_Saved, state)
        except ValueError as error:
            raise CheckpointError(f"the checkpoint's gradient profile is damaged: {error}") from error
        pairs: list[tuple[Tensor, Any]] = [
            (tensor, saved.tensors.get(name)) for name, tensor in self._tensors().items()
        ]
        pairs.append((self._moments.average, saved.moments.average))
        same = list(saved.layout) == self._layout() and saved.count.keys() == self._averages.count.keys()
        if not same or not all(_is_loadable(value, tensor) for tensor, value in pairs):
            raise CheckpointError(
                "the checkpoint's gradient profile is of other blocks or parameters than this run's: "
                "resume with the same model and blocks"
            )
        for tensor, value in pairs:
            tensor.copy_(value)
        self._moments.num_samples = saved.moments.num_samples
        self._averages.count = dict(saved.count)
        self._step, self._prev_step = saved.step, saved.prev_step
        self._schedule.go_on(saved.schedule)
        self._stats = None

    def _tensors(self) -> dict[str, Tensor]:
        return {"grad": self._grad.flat, "prev": self._prev.flat, **self._averages.tensors}

    def _layout(self) -> list[str]:
        pieces = [
            f"{self._blocks[p.block].name} {p.param.name} {list(p.param.shape)} {list(p.shape)} {p.offset}"
            for p in self._slices.pieces
        ]
        return [*pieces, f"moments {len(self._moments.average)}"]


def _whole(param: ParamInfo) -> ParamInfo:
    """As it is of all ranks together."""
    return param if param.whole is None else replace(param, shape=param.whole, whole=None)
