"""Predicts the peak memory of a training step from one probe of the network. Optimizer state is added later.

How a peak is predicted, in the order of the code:

1. `preserved_state` saves everything that a probe may change (RNG states, training modes, buffers, parameters that
   forward writes into, Python state of modules) and restores it afterwards. Gradients are None before and after.
2. `tracker.PeakMeter` measures bytes. On CUDA it reads torch's allocator. On the CPU and on meta a `MemoryTracker`
   counts the storages that are alive after each operator. For a card that is not in this machine, fake tensors run
   through `cuda_emulation.CachingAllocator`, which adds the pages that the real allocator would reserve.
3. `_measure_training` runs the same micro-batch twice. The first run starts without gradients, as the first step of
   training does. The second run starts with the gradients of the first, as every later step does; if the training loop
   sets gradients to None between forward and backward, the probe does so too. The larger peak counts. Fake tensors run
   once, next to zero gradients, and the emulated allocator replays their allocations twice. A callable that runs
   backward itself and drops no gradients belongs to a loop that drops them before forward, so that only runs without
   gradients count.
4. `timeline.Timeline` splits the second run into intervals: one ends when a gradient arrives, when autocast makes or
   frees a bf16 copy of a weight, and when gradients are set to None. Each interval has its own peak of live bytes, the
   number of gradients and the copies that exist all through it. What reserved memory exceeds the largest interval by
   (the slack) is added to each of them.
5. With gradient release, `GradientDropper` sets the gradients of a block to None as soon as the block has all of them,
   and records the largest totals at these moments. There are no intervals then.
6. `_measure_validation` runs a validation batch in inference mode, next to the gradients.
7. `step_temporary_bytes` measures what an optimizer step of one spec allocates and frees. `step_temporaries.py` calls
   it for each spec, on the largest tensor.
8. `Footprint.peak_bytes` (types/decision.py) adds it up. It takes the largest of: any interval, a validation batch, an
   optimizer step (weights, gradients and temporaries), a sample of the gradient profiler, loading of the weights. It
   adds what exists at every moment: optimizer state, EMA weights, profiler buffers, CUDA context, the reserve of
   `memory_reserve_bytes`, and on CUDA gaps around a step's temporaries. If a plan keeps weights in bf16, each interval
   first loses the bytes that these weights, their gradients and their copies save in it.

The prediction is meant to be an upper bound: a peak below it leaves some memory unused, a peak above it ends the run.
So terms are added even where they may not coincide, merged intervals keep the largest peak and the smallest savings,
and the reserve covers what a probe cannot see: fragmentation around optimizer states, pages, kernels that load late.
"""

import random
import sys
import weakref
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn

from baoc.errors import BadInputError
from baoc.optim.shards import reshard
from baoc.planning.cost import grouped_bytes
from baoc.profiling import memory
from baoc.profiling.cuda_emulation import CachingAllocator
from baoc.profiling.gradient_dropper import GradientDropper, storage_bytes
from baoc.profiling.param_restorer import ParamRestorer
from baoc.profiling.python_state import PythonState
from baoc.profiling.timeline import Timeline
from baoc.profiling.tracker import PeakMeter
from baoc.types import Footprint, PeakInterval
from baoc.units import KIB, MIB

StepProbe = Callable[[], Callable[[], None]]  # sets up an optimizer step and returns it

# Share of the probe's peak that torch's allocator reserves in addition when optimizer states lie between activations.
# Measured: 1.7 % (ViT-B/16, batch 32, bf16 autocast, fused AdamW, H100, one run).
FRAGMENTATION = 0.02
# Two pages of each size in which the allocator takes memory from the device: 20 MiB for large tensors, 2 MiB for small
# ones. The second small page is for a migration of states between specs (it raised a DiT's peak by 2 MiB). The second
# large page is for the gaps that 16-bit weights leave in the pages of the measured fp32 weights: with one large page,
# one of 81 random budgets on an H200 exceeded its prediction by 5.6 MiB, in its last step.
PAGES_BYTES = 44 * MIB
SCALARS_BYTES = 16 * KIB  # losses, logged values and gradient norms, which a loop keeps alive and a probe does not

NO_GRADIENT = (
    "no parameter has a gradient after the probe: it must run forward and backward on one batch, on the model that is "
    "trained, and leave the gradients where they are"
)


def probe_footprint(
    source: nn.Module | Sequence[Tensor],
    *,
    run_micro_batch: Callable[[], object],
    run_validation_batch: Callable[[], object] | None = None,
    micro_batch: int = 0,
    accumulation: int = 1,
    context_bytes: int = 0,
    released_blocks: Sequence[Sequence[Tensor]] = (),
    warm: bool = True,
    allocator: CachingAllocator | None = None,
    merge_intervals: bool = True,
) -> Footprint:
    """Measures one micro-batch and returns the Footprint of training with it. See the module docstring.

    Args:
        source: the module, or its parameters.
        run_micro_batch: runs forward and returns the loss, or runs forward and backward. For a returned loss, the probe
            calls backward in Lightning's order: forward next to the gradients of the step before, gradients set to
            None, backward. A callable that runs backward itself is assumed to find no gradients, unless it drops them.
        run_validation_batch: runs in evaluation and inference mode.
        micro_batch: number of samples of the micro-batch, for the Footprint.
        accumulation: micro-batches per optimizer step; above 1, gradients stay for the next one.
        context_bytes: of the CUDA context where it cannot be measured. On CUDA it is read after everything has run.
        released_blocks: the parameters of each block, for an optimizer that steps blocks inside backward and drops
            their gradients. Then `resident_bytes` is the largest live total when a block is stepped, and
            `gradients_bytes` the largest total of gradients.
        warm: False runs once instead of twice, next to zero gradients: for fake tensors.
        allocator: emulates the reserved memory of a card, for fake tensors.
        merge_intervals: False keeps every raw interval, named by the event that ended it.

    Raises:
        BadInputError: no parameter has a gradient afterwards.
    """
    module = source if isinstance(source, nn.Module) else None
    params = list(source.parameters()) if isinstance(source, nn.Module) else list(source)
    named = {} if module is None else {name: p for name, p in module.named_parameters() if p.requires_grad}
    device = next((param.device for param in params), torch.device("cpu"))
    released = bool(released_blocks)
    with (
        preserved_state(module, params) as restorer,  # first: the meter counts what is alive when it is made
        PeakMeter(device, source, allocator=allocator) as meter,
        GradientDropper(released_blocks, meter=meter) as dropper,
    ):

        def run() -> object:
            with restorer.watching():
                return run_micro_batch()

        training = _measure_training(
            run, params, meter, dropper, accumulation=accumulation, named=named, warm=warm, merge=merge_intervals
        )
        gradients_bytes, resident_bytes = _bytes_at_optimizer_step(params, meter, dropper, released=released)
        settled_bytes = meter.current_bytes if released else 0
        # Experts that got no sample of this batch have no gradient; a later batch gives them one.
        absent_bytes = 0 if released else storage_bytes([p for p in params if p.requires_grad and p.grad is None])
        later_bytes = waiting_gradient_bytes(device, params) if released else absent_bytes
        validation = _measure_validation(run_validation_batch, module, meter, named=named)

    def with_absent_gradients(interval: PeakInterval) -> PeakInterval:
        return replace(interval, num_bytes=interval.num_bytes + absent_bytes)

    intervals = tuple(map(with_absent_gradients, training.intervals))
    validation = tuple(map(with_absent_gradients, validation))
    peak_bytes = training.peak_bytes + later_bytes
    return Footprint(
        device=str(device),
        micro_batch=micro_batch,
        weights_bytes=storage_bytes([*params, *(module.buffers() if module else ())]),
        gradients_bytes=gradients_bytes + later_bytes,
        forward_backward_bytes=peak_bytes,
        validation_bytes=max((interval.num_bytes for interval in validation), default=0),
        resident_bytes=resident_bytes + later_bytes,
        settled_bytes=settled_bytes,
        context_bytes=memory.fix_context_bytes(device) or context_bytes,
        reserve_bytes=memory_reserve_bytes(device, peak=peak_bytes),
        released=released,
        intervals=(*intervals, *validation) if intervals else (),
        gradient_order=training.gradient_order,
    )


@contextmanager
def preserved_state(module: nn.Module | None, params: Sequence[Tensor]) -> Iterator[ParamRestorer]:
    """Restores RNG states, training modes, buffers, written parameters and the modules' Python state.

    Gradients are None at the start and end. Sharded modules are resharded at the end.
    """
    _drop_gradients(params)
    restorer = ParamRestorer(params)
    python = PythonState(module) if module is not None else None
    numpy: Any = sys.modules.get("numpy")  # None where it was not imported
    random_state, numpy_state = random.getstate(), None if numpy is None else numpy.random.get_state()
    modes = [(child, child.training) for child in module.modules()] if module is not None else []
    buffers = [
        (child, name, buffer, None if buffer.is_meta else buffer.detach().to("cpu", copy=True))
        for child, _ in modes
        for name, buffer in child._buffers.items()
        if buffer is not None
    ]
    cuda_indices = {param.device.index for param in params if param.device.type == "cuda"}
    try:
        with torch.random.fork_rng(devices=sorted(cuda_indices), device_type="cuda"):
            yield restorer
    finally:
        if module is not None:
            reshard(module)
        restorer.restore()
        if python is not None:
            python.restore()
        random.setstate(random_state)
        if numpy is not None:
            numpy.random.set_state(numpy_state)
        for child, mode in modes:
            child.training = mode
        with torch.no_grad():
            for child, name, buffer, saved in buffers:
                child._buffers[name] = buffer
                if saved is not None:
                    buffer.copy_(saved)
        _drop_gradients(params)


@dataclass(frozen=True, slots=True, kw_only=True)
class _TrainingPeak:
    """The peak of forward and backward; intervals and the order of gradients are empty where they cannot be known."""

    peak_bytes: int
    intervals: tuple[PeakInterval, ...] = ()
    gradient_order: tuple[str, ...] = ()


def _measure_training(
    run: Callable[[], object],
    params: Sequence[Tensor],
    meter: PeakMeter,
    dropper: GradientDropper,
    *,
    accumulation: int,
    named: Mapping[str, Tensor],
    warm: bool,
    merge: bool,
) -> _TrainingPeak:
    """Measures a first micro-batch without gradients and a later one next to them; returns the larger peak.

    Intervals need a loop that leaves backward to the probe, named parameters, and gradients that are not released.
    """
    meter.reset_peak()
    if warm:
        _run_micro_batch(run, params, after_drop=None)
        dropper.finish()
    else:
        for param in params:
            param.grad = torch.zeros_like(param) if param.requires_grad else None
        if meter.allocator is not None:
            meter.allocator.record()
    first_peak = meter.peak_bytes

    kept = [param.grad for param in params if param.grad is not None and not param.grad.is_sparse]
    storages = [gradient.untyped_storage() for gradient in kept]
    bytes_by_storage = {storage._cdata: storage.nbytes() for storage in storages}
    gradients = [weakref.ref(storage) for storage in storages]
    del kept, storages  # a gradient that is referenced here would not be freed where training frees it
    with Timeline(meter, named=named, gradients_alive=True) as timeline:
        runs_backward = _run_micro_batch(run, params, after_drop=timeline.dropped if accumulation == 1 else None)
        dropper.finish()
    if not warm and meter.allocator is not None:
        timeline.raise_reserved(meter.allocator.reserved_by_two_passes(bytes_by_storage))

    if accumulation == 1 and runs_backward and all(gradient() is not None for gradient in gradients):
        # Gradients were neither freed nor replaced, or all were released: the caller's loop has none in forward.
        if meter.device.type == "cuda":
            first_peak = max(first_peak, _peak_of_two_runs(run, params, meter, dropper))
        return _TrainingPeak(peak_bytes=first_peak)

    second_peak = max(interval.num_bytes for interval in timeline.intervals) + timeline.slack_bytes
    peak = max(first_peak, second_peak)
    if runs_backward or not named or dropper.gradients_bytes:
        return _TrainingPeak(peak_bytes=peak)
    intervals = timeline.merged("training") if merge else tuple(timeline.intervals)
    if first_peak > second_peak:
        intervals = (*intervals, PeakInterval(name="first", num_bytes=first_peak))
    return _TrainingPeak(peak_bytes=peak, intervals=intervals, gradient_order=tuple(timeline.order))


def _peak_of_two_runs(
    run: Callable[[], object], params: Sequence[Tensor], meter: PeakMeter, dropper: GradientDropper
) -> int:
    """The peak of reserved memory over two runs, both without gradients. On CUDA the second run has to fit into the
    gaps that the first one left, which may take more memory than the first."""
    _drop_gradients(params)
    meter.empty_cache()
    meter.reset_peak()
    for _ in range(2):
        _drop_gradients(params)
        run()  # its backward too
        dropper.finish()
    return meter.peak_bytes


def _run_micro_batch(
    run: Callable[[], object], params: Sequence[Tensor], *, after_drop: Callable[[], None] | None
) -> bool:
    """Runs forward and backward; returns whether `run` ran backward itself.

    With `after_drop`, gradients are set to None between forward and backward, and `after_drop` is called if there were
    any. None lets gradients accumulate.
    """
    loss = run()
    if not isinstance(loss, Tensor) or not loss.requires_grad or loss.grad_fn is None:
        return True
    if any(param.grad is not None for param in params) and after_drop is not None:
        _drop_gradients(params)
        after_drop()
    loss.backward()
    return False


def _drop_gradients(params: Sequence[Tensor]) -> None:
    for param in params:
        param.grad = None


def _bytes_at_optimizer_step(
    params: Sequence[Tensor], meter: PeakMeter, dropper: GradientDropper, *, released: bool
) -> tuple[int, int]:
    """(bytes of gradients, bytes of everything alive) when an optimizer steps. BadInputError without any gradient."""
    if all(param.grad is None for param in params) and not dropper.gradients_bytes:
        raise BadInputError(NO_GRADIENT)
    if released:
        return dropper.gradients_bytes, dropper.stepping_bytes
    return _gradients_bytes(params), meter.current_bytes


def _gradients_bytes(params: Sequence[Tensor]) -> int:
    return storage_bytes([param.grad for param in params if param.grad is not None])


def waiting_gradient_bytes(device: torch.device, params: Sequence[Tensor]) -> int:
    """Bytes of gradients that live longer on a card than in the probe: on CUDA, blocks wait to be stepped together,
    while the probe drops them one by one."""
    return grouped_bytes(sum(p.nbytes for p in params if p.requires_grad)) if device.type == "cuda" else 0


def _measure_validation(
    run: Callable[[], object] | None, module: nn.Module | None, meter: PeakMeter, *, named: Mapping[str, Tensor]
) -> tuple[PeakInterval, ...]:
    """The intervals of a validation batch in evaluation and inference mode, next to the gradients."""
    if run is None:
        return ()
    if module is not None:
        module.eval()
    meter.empty_cache()
    with torch.inference_mode(), Timeline(meter, named=named, gradients_alive=True) as timeline:
        run()
    return timeline.merged("validation")


def memory_reserve_bytes(device: torch.device, *, peak: int) -> int:
    """Bytes that a prediction adds for what a probe cannot see, given the measured `peak` of forward and backward."""
    if device.type == "cuda":
        return memory.LATE_MODULES_BYTES + PAGES_BYTES + int(FRAGMENTATION * peak)
    return SCALARS_BYTES


def step_temporary_bytes(probe: StepProbe, *, device: torch.device | str) -> int:
    """Bytes that an optimizer step allocates beyond what is alive before and after it.

    `probe()` makes parameter, gradient and state (for example of a spec on its largest tensor) and returns the step.
    The step runs twice, as a first one may compute what later ones reuse. Meta tensors suffice if no values are read.
    """
    with PeakMeter(torch.device(device)) as meter:
        step = probe()
        temporary_bytes = 0
        for _ in range(2):
            meter.reset_peak()
            before = meter.current_bytes
            step()
            temporary_bytes = max(temporary_bytes, meter.peak_allocated_bytes - max(before, meter.current_bytes))
    return temporary_bytes


class FirstStepMemory:
    """Measures the first step of the caller's own training loop, from construction to `finish` (or `stop`).

    Forward, backward and the optimizer step cannot be distinguished here. The peak of all of them is used for each,
    which is an upper bound. A parameter without a gradient in this step (an expert without a sample) is counted as if
    it had one, unless gradients are released.

    Args:
        params: all parameters of the network, and buffers that count as weights.
        existing: other tensors and modules that are alive all the time, optimizer states among them.
        context_bytes: of the CUDA context where it cannot be measured.
    """

    def __init__(self, params: Sequence[Tensor], *, existing: Sequence[Any] = (), context_bytes: int = 0):
        self._params = list(params)
        self._context_bytes = context_bytes
        self._stepping_bytes = self._gradients_bytes = self._forward_bytes = 0
        trained = [param for param in self._params if param.requires_grad]
        # Ids of parameters without a gradient so far: the hooks must not keep parameters alive.
        self._absent = absent = set(map(id, trained))
        self._hooks = [param.register_post_accumulate_grad_hook(lambda p: absent.discard(id(p))) for param in trained]
        device = next((param.device for param in self._params), torch.device("cpu"))
        self._meter: PeakMeter | None = PeakMeter(device, self._params, existing)
        self._meter.__enter__()

    def record_block_step(self) -> None:
        """To be called before a block is stepped inside backward, if gradients are released."""
        if self._meter is not None:
            self._gradients_bytes = max(self._gradients_bytes, _gradients_bytes(self._params))
            self._stepping_bytes = max(self._stepping_bytes, self._meter.current_bytes)

    def record_zeroing(self) -> None:
        """To be called when gradients are zeroed.

        In a loop that zeroes between forward and backward, the peak so far is forward's. From the second step on,
        forward runs next to the gradients of the step before, so `finish` adds them to it.
        """
        if self._meter is not None:
            self._forward_bytes = max(self._forward_bytes, self._meter.peak_bytes - _gradients_bytes(self._params))

    @property
    def peak_bytes(self) -> int:
        assert self._meter is not None
        return self._meter.peak_bytes

    def stop(self) -> None:
        """Ends measuring if no step was finished."""
        self._remove_hooks()
        if self._meter is not None:
            self._meter.exit_out_of_order()
            self._meter = None

    def finish(self, *, state_bytes: int) -> Footprint:
        """Ends measuring and returns the Footprint, from which `state_bytes` of optimizer state are subtracted."""
        assert self._meter is not None, "the first step was finished before"
        meter, self._meter = self._meter, None
        meter.__exit__(None, None, None)
        self._remove_hooks()
        device = meter.device
        released = bool(self._stepping_bytes)
        absent = [p for p in self._params if id(p) in self._absent and p.grad is None]
        absent_bytes = 0 if released else storage_bytes(absent)
        gradients_bytes = _gradients_bytes(self._params) + absent_bytes
        weights_bytes = storage_bytes(self._params)
        forward_bytes = self._forward_bytes + (0 if released else gradients_bytes)
        peak = max(meter.peak_bytes + absent_bytes, forward_bytes) - state_bytes
        return Footprint(
            device=str(device),
            micro_batch=0,
            weights_bytes=weights_bytes,
            gradients_bytes=self._gradients_bytes if released else gradients_bytes,
            forward_backward_bytes=peak,
            validation_bytes=0,
            resident_bytes=self._stepping_bytes - state_bytes if released else weights_bytes + gradients_bytes,
            settled_bytes=meter.current_bytes - state_bytes if released else 0,
            context_bytes=memory.fix_context_bytes(device) or self._context_bytes,
            reserve_bytes=memory_reserve_bytes(device, peak=peak + state_bytes),
            released=released,
        )

    def _remove_hooks(self) -> None:
        for hook in self._hooks:
            hook.remove()
        self._hooks = []
