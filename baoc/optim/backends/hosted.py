"""The backend of blocks whose states are in CPU memory: each piece is stepped on the device by an inner backend.

`baoc.optim.offload` describes how pieces pass through the device.
"""

from collections.abc import Mapping, Sequence
from dataclasses import replace

from torch import Tensor

from baoc.optim.backends.base import Backend, StepInputs
from baoc.optim.offload.streaming import Piece, StagingPipeline
from baoc.optim.state import State


class HostedBackend(Backend):
    """Steps pieces of host-placed blocks on their staged states: in backward, or all others when it is called.

    A step returns before its pieces are stepped. `StepUnit.waits` join them.
    """

    def __init__(
        self,
        pieces: Sequence[Piece],
        *,
        pipeline: StagingPipeline,
        build: type[Backend],
        state: Mapping[Tensor, State],
        releases: bool = False,
    ):
        """`build`: class of the backend that steps a piece. `releases`: gradients are dropped when a step returns."""
        super().__init__([live for piece in pieces for live in piece.blocks], state=state)
        self.pieces, self._releases = pieces, releases
        self.stepped_in_backward: set[int] = set()  # indices of pieces
        self.name = f"streamed {build.name}"
        self.excludes_nonfinite = build.excludes_nonfinite
        self._pipeline = pipeline
        self.inner = [build(piece.blocks, state=piece.staged) for piece in pieces]
        for backend in self.inner:
            backend.graphs = False  # a graph for each piece would cost memory
        self._steps_shared: set[int] = set()  # indices of pieces that have called `share_steps`

    def __call__(self, inputs: StepInputs) -> None:
        already_stepped, self.stepped_in_backward = self.stepped_in_backward, set()
        for index in range(len(self.pieces)):
            if index not in already_stepped:
                self.step(index, inputs)

    def step(self, index: int, inputs: StepInputs) -> None:
        piece = self.pieces[index]
        if piece.grads:
            staged = replace(inputs, state=piece.staged)
            self._pipeline.step(piece, lambda: self._run(index, staged), releases=self._releases)

    def _run(self, index: int, inputs: StepInputs) -> None:
        self.inner[index](inputs)
        if index not in self._steps_shared:
            self.pieces[index].share_steps()
            self._steps_shared.add(index)

    @property
    def moved(self) -> bool:
        return any([backend.moved for backend in self.inner])

    def mark(self) -> None:
        for index, backend in enumerate(self.inner):
            if index not in self.stepped_in_backward:
                backend.mark()

    def forget_marks(self) -> None:
        for backend in self.inner:
            backend.forget_marks()

    @property
    def marked(self) -> bool:
        return all(backend.marked for index, backend in enumerate(self.inner) if index not in self.stepped_in_backward)

    def new_nonfinite(self, *, wait: bool) -> dict[str, int]:
        counts: dict[str, int] = {}
        for backend in self.inner:
            counts |= backend.new_nonfinite(wait=wait)
        return counts
