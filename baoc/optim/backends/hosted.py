"""Backends of blocks whose states are in CPU memory: each piece of them is stepped by a backend of its own.

Streamed pieces are stepped on the device, on the staged states in their buffer; updated pieces on the CPU, natively or
in eager torch, on staged gradients. How pieces pass is told in `baoc.optim.offload`.
"""

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

from torch import Tensor

from baoc.errors import BadInputError
from baoc.optim.backends.base import Backend, StepInputs
from baoc.optim.backends.fused import FusedBackend
from baoc.optim.nonfinite import all_finite, mask_
from baoc.optim.offload.streaming import Piece as StreamedPiece
from baoc.optim.offload.streaming import Streaming
from baoc.optim.offload.updating import Piece as UpdatedPiece
from baoc.optim.offload.updating import Updating
from baoc.optim.state import State, to_buckets


class HostedBackend(Backend):
    """Steps pieces of host-placed blocks, in backward or all that are left when it is called.

    What runs beside the caller then is waited for by the unit's `joins`. `releases`: gradients are dropped as soon as a
    step returns, which `Streaming.step` and `Updating.step` have to know.
    """

    looks_ahead = False  # True if it looks for non-finite gradients itself where it steps ahead

    def __init__(self, pieces: Sequence[Any], *, state: Mapping[Tensor, State], releases: bool = False):
        super().__init__(to_buckets([live for piece in pieces for live in piece.blocks]), state=state)
        self.pieces, self._releases = pieces, releases
        self.done: set[int] = set()  # pieces, by their number, that were stepped in backward

    def __call__(self, inputs: StepInputs) -> None:
        done, self.done = self.done, set()
        for index in range(len(self.pieces)):
            if index not in done:
                self.step(index, inputs)

    def step(self, index: int, inputs: StepInputs, *, ahead: bool = False) -> None:
        """Steps a piece; `ahead` of the others, in backward, when nobody has looked at its gradients yet."""
        raise NotImplementedError

    def flush(self, index: int) -> bool:
        """Brings a piece's gradients to the host, where it is stepped there; False where it is not."""
        return False

    def capture(self, inputs: StepInputs) -> None:
        names = ", ".join(block.block.name for bucket in self.buckets for block in bucket.blocks)
        raise BadInputError(
            f"a CUDA graph cannot capture the step of {names}: their states are on the host. Give them specs that are "
            "placed on the device, or capture forward and backward alone"
        )


class StreamedBackend(HostedBackend):
    """`build` is the backend that steps them."""

    def __init__(
        self,
        pieces: Sequence[StreamedPiece],
        *,
        streaming: Streaming,
        build: type[Backend],
        state: Mapping[Tensor, State],
        releases: bool = False,
    ):
        super().__init__(pieces, state=state, releases=releases)
        self.name = f"streamed {build.name}"
        self.excludes_nonfinite = build.excludes_nonfinite
        self._streaming = streaming
        extra = {"graphs": False} if build is FusedBackend else {}  # a graph for each piece would cost memory
        self.inner = [build(to_buckets(piece.blocks), state=piece.staged, **extra) for piece in pieces]
        self._shared: set[int] = set()

    def step(self, index: int, inputs: StepInputs, *, ahead: bool = False) -> None:
        piece = self.pieces[index]
        if piece.grads:
            staged = replace(inputs, state=piece.staged)
            self._streaming.step(piece, lambda: self._run(index, staged), releases=self._releases)

    def _run(self, index: int, inputs: StepInputs) -> None:
        self.inner[index](inputs)
        if index not in self._shared:
            self.pieces[index].share_steps()
            self._shared.add(index)

    @property
    def moved(self) -> bool:
        return any([backend.moved for backend in self.inner])

    def mark(self) -> None:
        for index, backend in enumerate(self.inner):
            if index not in self.done:
                backend.mark()

    def forget_marks(self) -> None:
        for backend in self.inner:
            backend.forget_marks()

    @property
    def marked(self) -> bool:
        return all(backend.marked for index, backend in enumerate(self.inner) if index not in self.done)

    def new_bad(self, *, wait: bool) -> dict[str, int]:
        found: dict[str, int] = {}
        for backend in self.inner:
            found |= backend.new_bad(wait=wait)
        return found


class UpdatedBackend(HostedBackend):
    """`build` is the backend that steps the host's twins of the blocks."""

    looks_ahead = True

    def __init__(
        self,
        pieces: Sequence[UpdatedPiece],
        *,
        updating: Updating,
        build: type[Backend],
        state: Mapping[Tensor, State],
        releases: bool = False,
    ):
        super().__init__(pieces, state=state, releases=releases)
        self.name = f"updated {build.name}"
        self._updating = updating
        self._inner = [build(to_buckets(piece.twins), state=piece.state) for piece in pieces]

    def step(self, index: int, inputs: StepInputs, *, ahead: bool = False) -> None:
        piece = self.pieces[index]
        if not piece.has_gradients:
            return
        looks = ahead or piece.flushed  # at what the host has, which nobody has seen
        found = {} if looks else inputs.masks
        masks = {weight: found[p].cpu() for p, weight in piece.twin_of().items() if p in found}
        given = replace(inputs, state=piece.state, masks=masks)
        self._updating.step(piece, lambda: self._run(index, given, looks=looks), releases=self._releases)

    def flush(self, index: int) -> bool:
        if self.pieces[index].has_gradients:
            self._updating.flush(self.pieces[index])
        return True

    def _run(self, index: int, inputs: StepInputs, *, looks: bool) -> None:
        """`looks`: nobody has looked at the gradients yet. What is found is counted when the guard does, at `step`."""
        names = {slot.param: slot.name for twin in self.pieces[index].twins for slot in twin.slots}
        params = [param for param in names if param.grad is not None]
        if looks and not all_finite(params, names=names):
            inputs = replace(inputs, masks=mask_(params))
        self._inner[index](inputs)

    @property
    def moved(self) -> bool:
        return any([piece.moved for piece in self.pieces])
