"""Chooses the backend that steps each block, and builds it. No other module decides this.

Host-placed blocks pass through staging buffers (`optim.offload`). The same backends step them on the device, on staged
states.
"""

import logging
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from baoc.errors import BadInputError
from baoc.optim.backends.base import Backend, Options, StepInputs, StepUnit
from baoc.optim.backends.eager import EagerBackend, has_changed
from baoc.optim.backends.fused import ExchangedBackend, FusedBackend
from baoc.optim.backends.hosted import HostedBackend
from baoc.optim.backends.native import NativeBackend, native_refusal
from baoc.optim.offload import StagingPipeline
from baoc.optim.state import LiveBlock, Slot, State
from baoc.types import OptimizerSpec

__all__ = [
    "BACKENDS", "MIN_NATIVE_ELEMENTS", "Backend", "BackendChoice", "HostedBackend", "Options", "StepInputs", "StepUnit",
    "build_backends", "build_backward_backend", "choose_backend", "proxy_backend",
]  # fmt: skip

log = logging.getLogger(__name__)

BACKENDS: dict[str, type[Backend]] = {
    "eager": EagerBackend,
    "fused": FusedBackend,
    "native": NativeBackend,
    "exchanged": ExchangedBackend,
}
# Elements of an optimizer from which `auto` steps natively on the CPU. Smaller networks step in milliseconds anyway and
# so need no compiler; results recorded with them stay the same bit for bit.
MIN_NATIVE_ELEMENTS = 1_000_000


@dataclass(frozen=True, slots=True, kw_only=True)
class BackendChoice:
    """The backend that steps a block, and why those that were tried before it do not."""

    backend: str
    refused: str = ""


def choose_backend(block: LiveBlock, *, name: str, numel: int = 0) -> BackendChoice:
    """The backend for a block of an optimizer that steps `numel` elements in all.

    `auto` takes the fastest that can step the block: `fused` (Triton, NVIDIA GPUs) for contiguous fp32 and bf16
    parameters whose rule, storage and weights have a kernel; `native` (C++) for the same on the CPU, from
    MIN_NATIVE_ELEMENTS on; `eager` for all else, and for fp32 AdamW on the CPU, where it is torch's own step bit for
    bit. A named backend takes what it can; the rest is eager, and the log says so. Matrices that need other ranks' rows
    are `exchanged` by kernels, else eager; what needs sums over other ranks' rows is eager.

    native agrees with eager to the tolerance in tests/kernels/test_native_*.py (a unit in the last place of an update,
    a code in thousands). A machine without a compiler trains the same only to that tolerance: name a backend where bits
    matter.
    """
    candidates = _automatic(block.spec, numel=numel) if name == "auto" else (name,)
    if any(slot.gathers_rows for slot in block.slots):
        candidates = (ExchangedBackend.name if name in ("auto", "fused", ExchangedBackend.name) else "eager",)
    if any(slot.sums_over_ranks for slot in block.slots):
        candidates = (EagerBackend.name,)
    refused = []
    for candidate in candidates:
        why = BACKENDS[candidate].refusal(block)
        if not why:
            return BackendChoice(backend=candidate, refused="; ".join(refused))
        refused.append(f"{candidate}: {why}")
    return BackendChoice(backend="eager", refused="; ".join(refused))


def _automatic(spec: OptimizerSpec, *, numel: int) -> tuple[str, ...]:
    torchs_own = spec.rule == "adamw" and spec.storage == "fp32" and spec.weights == "native"
    return ("fused", "native") if numel >= MIN_NATIVE_ELEMENTS and not torchs_own else ("fused",)


def proxy_backend(spec: OptimizerSpec, *, device: torch.device, numel: int) -> str:
    """The backend to name for a small optimizer that is measured as a proxy of one of `numel` elements under `auto`."""
    if device.type != "cpu" or "native" not in _automatic(spec, numel=numel) or native_refusal(spec):
        return "auto"
    return "native" if NativeBackend.available() else "auto"


def build_backends(
    blocks: Iterable[LiveBlock], *, state: Mapping[Tensor, State], name: str, pipelines: Iterable[StagingPipeline]
) -> tuple[list[Backend], dict[str, BackendChoice]]:
    """The backends that all blocks need, those that work beside others first, and each block's BackendChoice."""
    blocks = list(blocks)
    for slot in (slot for live in blocks for slot in live.slots):
        _check_as_built(slot)
    if name != "auto":
        BACKENDS[name].require()
    numel = sum(live.block.numel for live in blocks)
    choices = {live.block.name: choose_backend(live, name=name, numel=numel) for live in blocks}
    backends: list[Backend] = []
    for pipeline in pipelines:
        for backend, pieces in pipeline.pieces(lambda live: choices[live.block.name].backend).items():
            backends.append(HostedBackend(pieces, pipeline=pipeline, build=BACKENDS[backend], state=state))
    for backend, build in BACKENDS.items():
        own = [live for live in blocks if choices[live.block.name].backend == backend and not live.on_host]
        if own:
            backends += build.for_blocks(own, state=state)
    refused = {f"{block} ({choice.refused})" for block, choice in choices.items() if choice.refused}
    if refused and name != "auto":
        log.warning("stepped by the eager backend: %s", ", ".join(sorted(refused)))
    return backends, choices


def build_backward_backend(
    blocks: Sequence[LiveBlock], *, state: Mapping[Tensor, State], backend: str, pipeline: StagingPipeline | None
) -> Backend:
    """A backend that steps some blocks in backward and drops their gradients, or a host-placed one by its
    `pipeline`."""
    for slot in (slot for live in blocks for slot in live.slots):
        _check_as_built(slot)
    if pipeline is not None:
        piece = pipeline.single(blocks[0].block.name)
        return HostedBackend([piece], pipeline=pipeline, build=BACKENDS[backend], state=state, releases=True)
    alone = BACKENDS[backend](blocks, state=state)
    # Memory is short in backward, and torch cannot empty its cache while it captures, nor after a capture that failed.
    alone.graphs = False
    return alone


def _check_as_built(slot: Slot) -> None:
    """Raises BadInputError if a parameter's shape or type is no longer that of its states or weights format."""
    if not has_changed(slot):
        return
    shape, dtype = tuple(slot.param.shape), slot.param.dtype
    if shape != slot.info.shape:
        raise BadInputError(
            f"{slot.name} has shape {shape} now, and its states are of shape {slot.info.shape}: resize a model before "
            "its optimizer is built"
        )
    raise BadInputError(
        f"{slot.name} is {dtype} now, and its block keeps {slot.weights} weights, which are torch.bfloat16: cast a "
        "model before its optimizer is built, and run this one under bf16 autocast"
    )
