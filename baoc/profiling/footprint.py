"""Predicts the peak memory of a training step, apart from optimizer state, from one probe of the network.

How a peak is predicted:
1. `probe_footprint` restores everything that it touches (`preserved_state`): RNG states, training modes, buffers,
   parameters that forward writes into, Python state of the modules. Gradients are None before and after.
2. It runs a micro-batch twice. The first run creates the gradients of a step before; the second one runs beside them,
   as every later step does. If gradients are set to None between forward and backward, the probe does the same. A
   callable that runs backward itself and leaves gradients there, or releases all, runs twice more on CUDA without them.
3. Bytes are measured by `tracker.PeakMeter`: on CUDA by torch's allocator; on the CPU and on meta by `MemoryTracker`,
   which counts the storages that are alive after each operator. Planning for an absent card runs fake tensors through
   an emulated CUDA allocator (`cuda_emulation`), which adds the pages that the real one would reserve.
4. `timeline.Timeline` cuts the second run into intervals, each with its peak and with the gradients and bf16 copies of
   weights that are alive all through it. What reserved memory exceeds the largest interval by is added to each.
5. A validation batch runs in the same way, in inference mode, beside the gradients.
6. `step_temporary_bytes` measures what an optimizer step allocates and frees, on the largest tensor of a spec.
7. `Footprint.peak_bytes` takes the largest part (an interval, a validation batch, an optimizer step, a sample of the
   gradient profiler, loading of weights) and adds what is there in all of them: optimizer state, EMA weights, profiler
   buffers, CUDA context and reserve. With bf16 weights each interval loses only what was certainly alive in it.

The prediction is meant to be an upper bound: a peak below it costs some unused memory, a peak above it ends the run.
Parts are therefore added even where they need not coincide, merged intervals keep the largest peak and the smallest
savings, and the reserve covers what a probe cannot see: fragmentation beside optimizer states, pages, late kernels.
"""

import random
import sys
import weakref
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import replace
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
from baoc.profiling.tracker import MemoryTracker, PeakMeter
from baoc.types import Footprint, PeakInterval
from baoc.units import KIB, MIB

__all__ = ["FirstStepMemory", "MemoryTracker", "StepProbe", "probe_footprint", "step_temporary_bytes"]

StepProbe = Callable[[], Callable[[], None]]

# Share of the probe's peak that torch's allocator reserves in addition when optimizer states lie between activations.
# Measured: 1.7 % (ViT-B/16, batch 32, bf16 autocast, fused AdamW, H100, one run).
FRAGMENTATION = 0.02
# The allocator takes memory from the device in pages of 20 MiB for large tensors and of 2 MiB for small ones: two of
# each. A move of states between specs begins one more of the small ones (a DiT's peak rose by 2 MiB with it). 16-bit
# weights leave gaps in the pages of the fp32 ones that were measured: one of 81 random budgets on an H200 held 5.6 MiB
# more than was predicted with one large page, in its last step.
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
    """The Footprint of training on one micro-batch. The module docstring says how it is made.

    Args:
        source: the module, or its parameters.
        run_micro_batch: runs forward and returns the loss, or runs forward and backward. For a returned loss, backward
            is called in Lightning's order: forward beside the gradients of the step before, gradients set to None,
            backward. A callable that runs backward itself is assumed to find gradients None, unless it drops them.
        run_validation_batch: runs in evaluation and inference mode.
        accumulation: micro-batches per optimizer step; above 1, gradients stay for the next one.
        context_bytes: of the CUDA context where it cannot be measured. On CUDA it is read after everything has run.
        released_blocks: the parameters of each block, for an optimizer that steps blocks inside backward and drops
            their gradients. Then `resident_bytes` is the largest live total when a block is stepped, and
            `gradients_bytes` the largest total of gradients.
        warm: False runs once instead of twice, beside zero gradients: for fake tensors.
        allocator: emulates the reserved memory of a card, for fake tensors.
        merge_intervals: False keeps every raw interval, named by the event that ended it.

    Raises:
        BadInputError: no parameter has a gradient afterwards.
    """
    params = list(source.parameters()) if isinstance(source, nn.Module) else list(source)
    device = next((param.device for param in params), torch.device("cpu"))
    module = source if isinstance(source, nn.Module) else None
    with (
        preserved_state(module, params) as restorer,  # first: the meter counts what is alive when it is made
        PeakMeter(device, source, allocator=allocator) as meter,
        GradientDropper(released_blocks, meter=meter) as dropped,
    ):
        named = {} if module is None else {name: p for name, p in module.named_parameters() if p.requires_grad}

        def run() -> object:
            with restorer.watching() if warm else nullcontext():
                return run_micro_batch()

        peak, intervals, order = _training_peak(
            run,
            params,
            meter,
            dropped,
            accumulation=accumulation,
            named=named,
            warm=warm,
            merge_intervals=merge_intervals,
        )
        gradients_bytes, resident_bytes = _left(params, meter, dropped, released=bool(released_blocks))
        settled_bytes = meter.current_bytes if released_blocks else 0
        # Experts that this batch had no sample for: a later one has some.
        idle = 0 if released_blocks else storage_bytes([p for p in params if p.requires_grad and p.grad is None])
        waiting = waiting_gradient_bytes(device, params) if released_blocks else idle
        validation = _validation(run_validation_batch, module, meter, named=named)
    intervals, validation = (
        tuple(replace(one, num_bytes=one.num_bytes + idle) for one in some) for some in (intervals, validation)
    )
    return Footprint(
        device=str(device),
        micro_batch=micro_batch,
        weights_bytes=storage_bytes([*params, *(module.buffers() if module else ())]),
        gradients_bytes=gradients_bytes + waiting,
        forward_backward_bytes=peak + waiting,
        validation_bytes=max((interval.num_bytes for interval in validation), default=0),
        resident_bytes=resident_bytes + waiting,
        settled_bytes=settled_bytes,
        context_bytes=memory.fix_context_bytes(device) or context_bytes,
        reserve_bytes=memory_reserve_bytes(device, peak=peak + waiting),
        released=bool(released_blocks),
        intervals=(*intervals, *validation) if intervals else (),
        gradient_order=order,
    )


def waiting_gradient_bytes(device: torch.device, params: Sequence[Tensor]) -> int:
    """Gradients that are there longer on a card, where blocks wait for others; here they are dropped one by one."""
    return grouped_bytes(sum(p.nbytes for p in params if p.requires_grad)) if device.type == "cuda" else 0


def _left(params: Sequence[Tensor], meter: PeakMeter, dropped: GradientDropper, *, released: bool) -> tuple[int, int]:
    """(bytes of gradients, bytes of everything alive) when an optimizer steps. BadInputError without any gradient."""
    if all(param.grad is None for param in params) and not dropped.gradients_bytes:
        raise BadInputError(NO_GRADIENT)
    if released:
        return dropped.gradients_bytes, dropped.stepping_bytes
    return storage_bytes([param.grad for param in params if param.grad is not None]), meter.current_bytes


def step_temporary_bytes(probe: StepProbe, *, device: torch.device | str) -> int:
    """Bytes that an optimizer step allocates beyond what is alive before and after it.

    `probe()` makes parameter, gradient and state (for example of a spec on its largest tensor) and returns the step. It
    is run twice, as a first step may compute what later ones reuse. Meta tensors suffice if no values are read.
    """
    with PeakMeter(torch.device(device)) as meter:
        step = probe()
        most = 0
        for _ in range(2):
            meter.reset_peak()
            before = meter.current_bytes
            step()
            most = max(most, meter.peak_allocated_bytes - max(before, meter.current_bytes))
    return most


class FirstStepMemory:
    """Measures the first step of the caller's own training loop, from construction to `finish` (or `stop`).

    Forward, backward and the optimizer step cannot be distinguished here. The peak of all of them is used for each,
    which is an upper bound. A parameter that got no gradient in it, as an expert without a sample, may get one later.
    `existing`: tensors and modules that are alive all the time, optimizer states among them.
    """

    def __init__(self, params: Sequence[Tensor], *, existing: Sequence[Any] = (), context_bytes: int = 0):
        self._params = list(params)
        self._context_bytes = context_bytes
        self._stepping_bytes = self._gradients_bytes = self._forward_bytes = 0
        trained = [param for param in self._params if param.requires_grad]
        self._idle = idle = set(map(id, trained))  # those that had no gradient so far; a hook must not hold them
        self._hooks = [param.register_post_accumulate_grad_hook(lambda p: idle.discard(id(p))) for param in trained]
        device = next((param.device for param in self._params), torch.device("cpu"))
        self._meter: PeakMeter | None = PeakMeter(device, self._params, existing)
        self._meter.__enter__()

    def record_block_step(self) -> None:
        """To be called before a block is stepped inside backward, if gradients are released."""
        if self._meter is not None:
            gradients = storage_bytes([param.grad for param in self._params if param.grad is not None])
            self._gradients_bytes = max(self._gradients_bytes, gradients)
            self._stepping_bytes = max(self._stepping_bytes, self._meter.current_bytes)

    def record_zeroing(self) -> None:
        """To be called when gradients are zeroed. What was held until then, beside those that are there still, is
        forward's, in a loop that zeroes between forward and backward: there it is held beside the gradients of the step
        before, from the second step on."""
        if self._meter is not None:
            gradients = storage_bytes([param.grad for param in self._params if param.grad is not None])
            self._forward_bytes = max(self._forward_bytes, self._meter.peak_bytes - gradients)

    @property
    def peak_bytes(self) -> int:
        """The most that was held so far."""
        assert self._meter is not None
        return self._meter.peak_bytes

    def stop(self) -> None:
        """Ends measuring if no step was finished."""
        self._remove_hooks()
        if self._meter is not None:
            self._meter.exit_out_of_order()
            self._meter = None

    def finish(self, *, state_bytes: int) -> Footprint:
        """The Footprint. `state_bytes` of optimizer state were alive all the time and are subtracted."""
        assert self._meter is not None, "the first step was finished before"
        meter, self._meter = self._meter, None
        meter.__exit__(None, None, None)
        self._remove_hooks()
        device = meter.device
        released = self._stepping_bytes > 0
        idle = 0 if released else storage_bytes([p for p in self._params if id(p) in self._idle and p.grad is None])
        gradients = storage_bytes([param.grad for param in self._params if param.grad is not None]) + idle
        weights = storage_bytes(self._params)
        peak = max(meter.peak_bytes + idle, self._forward_bytes + (0 if released else gradients)) - state_bytes
        return Footprint(
            device=str(device),
            micro_batch=0,
            weights_bytes=weights,
            gradients_bytes=self._gradients_bytes if released else gradients,
            forward_backward_bytes=peak,
            validation_bytes=0,
            resident_bytes=self._stepping_bytes - state_bytes if released else weights + gradients,
            settled_bytes=meter.current_bytes - state_bytes if released else 0,
            context_bytes=memory.fix_context_bytes(device) or self._context_bytes,
            reserve_bytes=memory_reserve_bytes(device, peak=peak + state_bytes),
            released=released,
        )

    def _remove_hooks(self) -> None:
        for hook in self._hooks:
            hook.remove()
        self._hooks = []


def memory_reserve_bytes(device: torch.device, *, peak: int) -> int:
    """SCALARS_BYTES; on CUDA LATE_MODULES_BYTES + PAGES_BYTES + FRAGMENTATION * peak."""
    if device.type == "cuda":
        return memory.LATE_MODULES_BYTES + PAGES_BYTES + int(FRAGMENTATION * peak)
    return SCALARS_BYTES


def _training_peak(
    run: Callable[[], object],
    params: Sequence[Tensor],
    meter: PeakMeter,
    dropped: GradientDropper,
    *,
    accumulation: int,
    named: Mapping[str, Tensor],
    warm: bool,
    merge_intervals: bool,
) -> tuple[int, tuple[PeakInterval, ...], tuple[str, ...]]:
    """(peak, intervals, order of gradients) of a micro-batch; the last two are empty where they cannot be known.

    The peak is the larger one of a first micro-batch without gradients and of a later one beside them. Intervals need
    a loop that leaves backward to the probe, named parameters, and gradients that are not released.
    """
    meter.reset_peak()
    if warm:
        _one_micro_batch(run, params, drop=None)
        dropped.finish()
    else:
        for param in params:
            param.grad = torch.zeros_like(param) if param.requires_grad else None
        if meter.allocator is not None:
            meter.allocator.record()
    first = meter.peak_bytes
    stand_ins = {s._cdata: s.nbytes() for s in (p.grad.untyped_storage() for p in params if p.grad is not None)}
    # Weak references to the storages: a gradient that is held here would not be freed where training frees it.
    gradients = [weakref.ref(param.grad.untyped_storage()) for param in params if param.grad is not None]
    with Timeline(meter, named=named, gradients_alive=True) as line:
        own_backward = _one_micro_batch(run, params, drop=line.dropped if accumulation == 1 else None)
        dropped.finish()
    if not warm and meter.allocator is not None:
        line.reserve(meter.allocator.reserved_again(stand_ins))
    if accumulation == 1 and own_backward and all(gradient() is not None for gradient in gradients):
        # Gradients were neither freed nor replaced, or all released: the caller's loop has none in forward. On a card a
        # step is laid where the one before it left room, which may take more than the first one did.
        if meter.device.type == "cuda":
            _drop_gradients(params)
            meter.empty_cache()
            meter.reset_peak()
            for _ in range(2):
                _drop_gradients(params)
                _one_micro_batch(run, params, drop=None)
                dropped.finish()
            first = max(first, meter.peak_bytes)
        return first, (), ()
    intervals = line.merged("training") if merge_intervals else tuple(line.intervals)
    second = max(interval.num_bytes for interval in line.intervals) + line.slack_bytes
    if own_backward or not named or dropped.gradients_bytes:
        return max(first, second), (), ()
    if first > second:
        intervals = (*intervals, PeakInterval(name="first", num_bytes=first))
    return max(first, second), intervals, tuple(line.order)


def _validation(
    run: Callable[[], object] | None, module: nn.Module | None, meter: PeakMeter, *, named: Mapping[str, Tensor]
) -> tuple[PeakInterval, ...]:
    """The intervals of a validation batch in evaluation and inference mode, beside the gradients."""
    if run is None:
        return ()
    if module is not None:
        module.eval()
    meter.empty_cache()
    with torch.inference_mode(), Timeline(meter, named=named, gradients_alive=True) as line:
        run()
    return line.merged("validation")


def _one_micro_batch(run: Callable[[], object], params: Sequence[Tensor], *, drop: Callable[[], None] | None) -> bool:
    """Runs forward and backward; True if `run` ran backward itself.

    `drop`: called after gradients were set to None between forward and backward; None lets them accumulate.
    """
    loss = run()
    if not isinstance(loss, Tensor) or not loss.requires_grad or loss.grad_fn is None:
        return True
    if any(param.grad is not None for param in params) and drop is not None:
        _drop_gradients(params)
        drop()
    loss.backward()
    return False


def _drop_gradients(params: Sequence[Tensor]) -> None:
    for param in params:
        param.grad = None


@contextmanager
def preserved_state(module: nn.Module | None, params: Sequence[Tensor]) -> Iterator[ParamRestorer]:
    """Restores RNG states, training modes, buffers, written parameters and the modules' Python state.

    Gradients are None at the start and end.
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
    cuda = [param.device for param in params if param.device.type == "cuda"]
    try:
        with torch.random.fork_rng(devices=sorted({device.index for device in cuda}), device_type="cuda"):
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
