"""Runs a training and a validation micro-batch before training, to know the bytes of a step apart from optimizer state.

Everything is left as it was: RNG, modes, buffers; gradients are None. On CUDA the allocator is asked; elsewhere (CPU,
meta) storages are counted, so a model on the meta device is measured without memory or arithmetic.
"""

import random
import sys
import weakref
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from baoc.errors import BadInputError
from baoc.profiling import memory
from baoc.profiling.cuda_emulation import CachingAllocator
from baoc.profiling.gradient_dropper import GradientDropper, storage_bytes
from baoc.profiling.param_restorer import ParamRestorer
from baoc.profiling.timeline import Timeline
from baoc.profiling.tracker import MemoryTracker, PeakMeter
from baoc.types import Footprint, PeakInterval
from baoc.units import KIB, MIB

__all__ = ["FirstStepMemory", "MemoryTracker", "StepProbe", "probe_footprint", "step_temporary_bytes"]

StepProbe = Callable[[], Callable[[], None]]

# Of the probe's peak: what torch's allocator reserves more when optimizer state lies between activations. Seen: 1.7 %
# (ViT-B/16, batch 32, bf16 autocast, fused AdamW, H100, one run).
FRAGMENTATION = 0.02
# What the allocator takes from the device comes in pages, of 20 MiB for large tensors and of 2 MiB for small ones.
PAGES_BYTES = 22 * MIB
SCALARS_BYTES = 16 * KIB  # losses, logged values and gradient norms, which a loop keeps and a probe does not see

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
    step_probes: Mapping[str, StepProbe] | None = None,
    context_bytes: int = 0,
    reserve_bytes: int | None = None,
    ema_bytes: int = 0,
    released: Sequence[Sequence[Tensor]] = (),
    warm: bool = True,
    allocator: CachingAllocator | None = None,
    thinned: bool = True,
) -> Footprint:
    """The Footprint of training `source` (a module, or its parameters) on one micro-batch.

    `run_micro_batch` either returns a loss, whose backward is then called in Lightning's order (forward with the
    gradients of the step before alive, gradients dropped, backward), or runs backward itself; then gradients are taken
    to be dropped before it, unless it drops them itself. It runs twice, so that the gradients of the step before exist.
    `run_validation_batch` runs in evaluation and inference mode. `step_probes`: see `step_temporary_bytes`, by spec.
    `reserve_bytes`: see `_reserve`. `released`: the parameters of each block, where an optimizer releases gradients;
    then `resident_bytes` is the most that is alive when a block is stepped, and `gradients_bytes` the most of
    gradients. Without `warm` it runs once, beside made-up gradients, for fake tensors; `allocator` tells what a card
    would have reserved after two passes. Without `thinned`, `intervals` are all stretches, named by what ended them. On
    CUDA the context is read when all has run.
    """
    params = list(source.parameters()) if isinstance(source, nn.Module) else list(source)
    device = next((param.device for param in params), torch.device("cpu"))
    module = source if isinstance(source, nn.Module) else None
    with (
        restored(module, params) as restorer,  # first, as what is there is counted when the meter is made
        PeakMeter(device, source, allocator=allocator) as meter,
        GradientDropper(released, meter=meter) as dropped,
    ):
        named = {} if module is None else {name: p for name, p in module.named_parameters() if p.requires_grad}
        run = _watched(run_micro_batch, restorer) if warm else run_micro_batch
        peak, intervals, order = _training_peak(
            run, params, meter, dropped, accumulation=accumulation, named=named, warm=warm, thinned=thinned
        )
        gradients_bytes, resident_bytes = _left(params, meter, dropped, released=bool(released))
        validation = _validation(run_validation_batch, module, meter, named=named)
    return Footprint(
        device=str(device),
        micro_batch=micro_batch,
        weights_bytes=storage_bytes([*params, *(module.buffers() if module else ())]),
        gradients_bytes=gradients_bytes,
        forward_backward_bytes=peak,
        validation_bytes=max((interval.num_bytes for interval in validation), default=0),
        resident_bytes=resident_bytes,
        ema_bytes=ema_bytes,
        context_bytes=memory.settle_context(device) or context_bytes,
        reserve_bytes=_reserve(device, peak=peak) if reserve_bytes is None else reserve_bytes,
        step_temporary_bytes={name: step_temporary_bytes(p, device=device) for name, p in (step_probes or {}).items()},
        released=bool(released),
        intervals=(*intervals, *validation) if intervals else (),
        gradient_order=order,
    )


def _left(params: Sequence[Tensor], meter: PeakMeter, dropped: GradientDropper, *, released: bool) -> tuple[int, int]:
    """Bytes of gradients, and of all that is there, when an optimizer steps. BadInputError where no gradient came."""
    if all(param.grad is None for param in params) and not dropped.gradients_bytes:
        raise BadInputError(NO_GRADIENT)
    if released:
        return dropped.gradients_bytes, dropped.stepping_bytes
    return storage_bytes([param.grad for param in params if param.grad is not None]), meter.current_bytes


def step_temporary_bytes(probe: StepProbe, *, device: torch.device | str) -> int:
    """Bytes that an optimizer step holds beyond what lives before and after it.

    `probe()` makes the parameter, gradient and state (a spec on its largest tensor, say) and returns its step, which is
    run twice, as a first step may measure what later ones know. Tensors on the meta device will do where the step does
    not look at numbers.
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
    """Measures the first step of a loop that is not ours: from when it is made to `finish`, or to `stop` if none came.

    Forward and backward cannot be told from the step here, and neither can the step's own temporaries: the peak of all
    stands for them, which is no less than it should be.
    """

    def __init__(self, params: Sequence[Tensor], *, context_bytes: int = 0):
        self._params = list(params)
        self._context_bytes = context_bytes
        self._stepping_bytes = self._gradients_bytes = 0
        device = next((param.device for param in self._params), torch.device("cpu"))
        self._meter: PeakMeter | None = PeakMeter(device, self._params)
        self._meter.__enter__()

    def note_block(self) -> None:
        """To be called before a block is stepped in the backward pass, where gradients are released."""
        assert self._meter is not None
        gradients = storage_bytes([param.grad for param in self._params if param.grad is not None])
        self._gradients_bytes = max(self._gradients_bytes, gradients)
        self._stepping_bytes = max(self._stepping_bytes, self._meter.current_bytes)

    def stop(self) -> None:
        """Ends measuring where the loop never came to a step; nothing if it did."""
        if self._meter is not None:
            self._meter.leave()
            self._meter = None

    def finish(self, *, state_bytes: int) -> Footprint:
        """The Footprint, `state_bytes` of optimizer state taken off where they were there all the time (CUDA)."""
        assert self._meter is not None, "the first step was finished before"
        meter, self._meter = self._meter, None
        meter.__exit__(None, None, None)
        device = meter.device
        held = state_bytes if device.type == "cuda" else 0
        gradients = storage_bytes([param.grad for param in self._params if param.grad is not None])
        weights = storage_bytes(self._params)
        released = self._stepping_bytes > 0
        return Footprint(
            device=str(device),
            micro_batch=0,
            weights_bytes=weights,
            gradients_bytes=self._gradients_bytes if released else gradients,
            forward_backward_bytes=meter.peak_bytes - held,
            validation_bytes=0,
            resident_bytes=self._stepping_bytes - held if released else weights + gradients,
            context_bytes=memory.settle_context(device) or self._context_bytes,
            reserve_bytes=_reserve(device, peak=meter.peak_bytes),
            released=released,
        )


def _reserve(device: torch.device, *, peak: int) -> int:
    """SCALARS_BYTES; on CUDA LATE_MODULES_BYTES, PAGES_BYTES and the share FRAGMENTATION of the peak."""
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
    thinned: bool,
) -> tuple[int, tuple[PeakInterval, ...], tuple[str, ...]]:
    """Peak of a micro-batch that finds the gradients of the one before, or of one that does not, as in training.

    And its intervals, with the order of gradients, where the loop leaves the backward to us and gradients stay.
    """
    meter.reset_peak()
    if warm:
        _one_micro_batch(run, params, drop=None)
        dropped.finish()
    else:
        for param in params:
            param.grad = torch.zeros_like(param) if param.requires_grad else None
        meter.record()
    first = meter.peak_bytes
    stand_ins = {s._cdata: s.nbytes() for s in (p.grad.untyped_storage() for p in params if p.grad is not None)}
    # Only weak references, and to storages: a gradient that was held here would not be freed where training frees it.
    gradients = [weakref.ref(param.grad.untyped_storage()) for param in params if param.grad is not None]
    with Timeline(meter, named=named, held=True) as line:
        own_backward = _one_micro_batch(run, params, drop=line.dropped if accumulation == 1 else None)
        dropped.finish()
    if not warm:
        line.reserve(meter.reserved_again(stand_ins))
    if own_backward and all(gradient() is not None for gradient in gradients):
        return first, (), ()  # the loop around it drops gradients, and does so before the forward
    intervals = line.merged("training") if thinned else tuple(line.intervals)
    second = max(interval.num_bytes for interval in line.intervals) + line.slack_bytes
    if own_backward or not named or dropped.gradients_bytes:
        return max(first, second), (), ()
    if first > second:
        intervals = (*intervals, PeakInterval(name="first", num_bytes=first))
    return max(first, second), intervals, tuple(line.order)


def _validation(
    run: Callable[[], object] | None, module: nn.Module | None, meter: PeakMeter, *, named: Mapping[str, Tensor]
) -> tuple[PeakInterval, ...]:
    """The intervals of a validation batch, in evaluation and inference mode, beside the gradients."""
    if run is None:
        return ()
    if module is not None:
        module.eval()
    meter.forget()
    with torch.inference_mode(), Timeline(meter, named=named, held=True) as line:
        run()
    return line.merged("validation")


def _one_micro_batch(run: Callable[[], object], params: Sequence[Tensor], *, drop: Callable[[], None] | None) -> bool:
    """Forward and backward; True if `run` did the backward itself. `drop`: gradients go between the two, it is told."""
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


def _watched(run: Callable[[], object], restorer: ParamRestorer) -> Callable[[], object]:
    """`run`, the first time watched for writes into parameters, unless these were looked at before."""

    def watched() -> object:
        if restorer.was_watched:
            return run()
        with restorer.watching():
            found = run()
        restorer.mark_watched()
        return found

    return watched


@contextmanager
def restored(module: nn.Module | None, params: Sequence[Tensor]) -> Iterator[ParamRestorer]:
    """Puts RNG states, training modes, buffers and what was written into parameters back; gradients are None inside at
    first, and afterwards."""
    _drop_gradients(params)
    restorer = ParamRestorer(params)
    random_state, numpy_state = random.getstate(), _numpy_random()
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
        restorer.restore()
        random.setstate(random_state)
        if numpy_state is not None:
            sys.modules["numpy"].random.set_state(numpy_state)
        for child, mode in modes:
            child.training = mode
        with torch.no_grad():
            for child, name, buffer, saved in buffers:
                child._buffers[name] = buffer
                if saved is not None:
                    buffer.copy_(saved)
        _drop_gradients(params)


def _numpy_random() -> Any:
    """State of numpy's global generator, if anyone has imported numpy."""
    return sys.modules["numpy"].random.get_state() if "numpy" in sys.modules else None
