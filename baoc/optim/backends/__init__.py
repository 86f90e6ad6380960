"""Who steps what. This is the one place that decides it: fused kernels where there are some, else eager torch.

Blocks that are placed on the host pass through rings of buffers (`optim.offload`), and the same backends step them
on the device, on staged states.
"""

import logging
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from baoc.errors import BadInputError
from baoc.optim.backends.base import Backend, Options, StepInputs, StepUnit
from baoc.optim.backends.eager import EagerBackend, changed
from baoc.optim.backends.exchanged import ExchangedBackend
from baoc.optim.backends.fused import FusedBackend
from baoc.optim.backends.hosted import HostedBackend
from baoc.optim.backends.native import NativeBackend, native_refusal
from baoc.optim.offload import Pipelines
from baoc.optim.state import LiveBlock, Slot, State, to_buckets
from baoc.types import OptimizerSpec

__all__ = [
    "BACKENDS", "NATIVE_FROM", "Backend", "Choice", "HostedBackend", "Options", "StepInputs", "StepUnit", "backend_for",
    "build_alone", "build_backends", "stand_in",
]  # fmt: skip

log = logging.getLogger(__name__)

BACKENDS: dict[str, type[Backend]] = {
    "eager": EagerBackend,
    "fused": FusedBackend,
    "native": NativeBackend,
    "exchanged": ExchangedBackend,
}
_AUTO = ("fused",)  # in order of preference; eager steps what none of them takes
# Elements of all blocks together from which `auto` steps natively on the CPU. Smaller networks step in milliseconds
# anyhow, and need no compiler for it; results that were recorded with them stay the same bits.
NATIVE_FROM = 1_000_000


@dataclass(frozen=True, slots=True, kw_only=True)
class Choice:
    """Who steps a block, and why nobody who was asked before does."""

    backend: str
    refused: str = ""


def backend_for(block: LiveBlock, *, name: str, numel: int = 0) -> Choice:
    """The backend for a block of an optimizer that steps `numel` elements altogether.

    `auto` takes the fastest that can step it: `fused` (Triton, NVIDIA GPUs) for contiguous fp32 and bf16 parameters
    whose rule, storage and weights have a kernel, `native` (C++) for the same on the CPU in an optimizer of at least
    NATIVE_FROM elements, and `eager` for all else. fp32 AdamW on the CPU is eager under `auto`, for that is torch's own
    step bit for bit. The native step agrees with the eager one to the tolerance that tests/kernels/test_native_*.py
    state (a unit in the last place of an update, a code in thousands), so a machine without a compiler trains the same
    to that tolerance and not to the bit; name a backend where it has to be. A backend that is named takes what it can;
    the rest is eager too, and the log says so.
    Matrices that need other ranks' rows of them are `exchanged` by kernels, else eager.
    Where states are placed makes no difference.
    """
    candidates = _automatic(block.spec, numel=numel) if name == "auto" else (name,)
    if any(slot.gathers for slot in block.slots):
        candidates = (ExchangedBackend.name if name in ("auto", "fused") else "eager",)
    refused = []
    for candidate in candidates:
        why = BACKENDS[candidate].refusal(block)
        if not why:
            return Choice(backend=candidate, refused="; ".join(refused))
        refused.append(f"{candidate}: {why}")
    return Choice(backend="eager", refused="; ".join(refused))


def _automatic(spec: OptimizerSpec, *, numel: int) -> tuple[str, ...]:
    torchs_own = spec.rule == "adamw" and spec.storage == "fp32" and spec.weights == "native"
    return (*_AUTO, "native") if numel >= NATIVE_FROM and not torchs_own else _AUTO


def stand_in(spec: OptimizerSpec, *, device: torch.device, numel: int) -> str:
    """What to name for a small optimizer that stands in measurements for one of `numel` elements under `auto`."""
    if device.type != "cpu" or "native" not in _automatic(spec, numel=numel) or native_refusal(spec):
        return "auto"
    return "native" if NativeBackend.available() else "auto"


def build_backends(
    blocks: Iterable[LiveBlock], *, state: Mapping[Tensor, State], name: str, rings: Pipelines
) -> tuple[list[Backend], dict[str, Choice]]:
    """The backends that are needed, those that work beside the others first, and who steps each block."""
    blocks = list(blocks)
    for slot in (slot for live in blocks for slot in live.slots):
        _check_as_built(slot)
    if name != "auto":
        BACKENDS[name].require()
    numel = sum(live.block.numel for live in blocks)
    choices = {live.block.name: backend_for(live, name=name, numel=numel) for live in blocks}
    backends: list[Backend] = []
    for ring in rings:
        for backend, pieces in ring.pieces(lambda live: choices[live.block.name].backend).items():
            backends.append(HostedBackend(pieces, streaming=ring, build=BACKENDS[backend], state=state))
    for backend, build in BACKENDS.items():
        mine = [live for live in blocks if choices[live.block.name].backend == backend and not live.on_host]
        if mine:
            backends.append(build(to_buckets(mine), state=state))
    refused = {f"{block} ({choice.refused})" for block, choice in choices.items() if choice.refused}
    if refused and name != "auto":
        log.warning("stepped by the eager backend: %s", ", ".join(sorted(refused)))
    return backends, choices


def build_alone(
    blocks: Sequence[LiveBlock], *, state: Mapping[Tensor, State], backend: str, rings: Pipelines
) -> Backend:
    """A backend for some blocks by themselves, stepped in the middle of a backward pass, which then drops their
    gradients. On the host there is one of them.

    Its kernels are launched plainly: nothing is captured there.
    """
    for slot in (slot for live in blocks for slot in live.slots):
        _check_as_built(slot)
    block = blocks[0]
    ring = rings.of(block)
    if ring is not None:
        piece = ring.single(block.block.name)
        return HostedBackend([piece], streaming=ring, build=BACKENDS[backend], state=state, releases=True)
    if backend == FusedBackend.name:
        return FusedBackend(to_buckets(blocks), state=state, graphs=False)
    return BACKENDS[backend](to_buckets(blocks), state=state)


def _check_as_built(slot: Slot) -> None:
    """Raises BadInputError where a parameter is no longer what its states and its kind of weights were made for."""
    if not changed(slot):
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
