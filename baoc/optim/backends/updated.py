"""The backend of updated blocks: each piece is stepped on the host, natively or in eager torch, on staged gradients."""

from collections.abc import Mapping, Sequence
from dataclasses import replace

from torch import Tensor

from baoc.optim.backends.base import Backend, StepInputs
from baoc.optim.backends.streamed import HostedBackend
from baoc.optim.finite import all_finite, mask_
from baoc.optim.offload.updating import Piece, Updating
from baoc.optim.state import State, to_buckets


class UpdatedBackend(HostedBackend):
    """`build` is the backend that steps the host's twins of the blocks."""

    looks_ahead = True

    def __init__(
        self,
        pieces: Sequence[Piece],
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
        return any(piece.moved for piece in self.pieces)
