"""The interface of a backend, which steps all blocks that it takes in one call."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

from torch import Tensor

from baoc.kernels.triton.kinds import Options
from baoc.optim.state import LiveBlock, State


@dataclass(slots=True, kw_only=True)  # not frozen, as `Options`
class StepInputs:
    """What backends need for one step. Nobody changes it.

    Attributes:
        options: By parameter group, then one per tuning: `Slot.options_index` is the index.
        masks: Parameter -> bool mask, True where the gradient is finite, of those with non-finite elements.
        phase: The number of the step, for codecs.
        matching: Whether updates are matched.
    """

    state: Mapping[Tensor, State]
    options: Sequence[Options]
    masks: Mapping[Tensor, Tensor]
    phase: int
    matching: bool


class Backend:
    """Steps its blocks. State layout and codecs are the same for all backends, so any of them may make the next step.
    Everything else that a backend keeps, such as addresses, is made at its first step."""

    name = ""
    graphs = True  # whether it may capture a step's launches in a CUDA graph and replay them
    excludes_nonfinite = False  # True if it finds non-finite elements itself; else `StepInputs.masks` has them

    def __init__(self, blocks: Sequence[LiveBlock], *, state: Mapping[Tensor, State]):
        """`state`: the optimizer's own, parameter -> its tensors."""
        self.blocks = list(blocks)
        self.state = state

    @classmethod
    def for_blocks(cls, blocks: Sequence[LiveBlock], *, state: Mapping[Tensor, State]) -> "list[Backend]":
        """The backends that step these blocks."""
        return [cls(blocks, state=state)]

    @staticmethod
    def require() -> None:
        """Raises BadInputError if the backend, asked for by name, is not available on this machine."""

    @staticmethod
    def refusal(block: LiveBlock) -> str:
        """Why this backend cannot step the block; empty if it can."""
        raise NotImplementedError

    def __call__(self, inputs: StepInputs) -> None:
        """One step of every parameter that has a gradient."""
        raise NotImplementedError

    @property
    def moved(self) -> bool:
        """True if parameters are not where they were when the backend was built, so that it has to be rebuilt."""
        return False

    # Of backends with `excludes_nonfinite`:

    def mark(self) -> None:
        """Zeroes the non-finite elements of the gradients, which the coming step excludes. Waits for nothing."""

    def forget_marks(self) -> None:
        """To be called when the marked gradients are gone."""

    @property
    def marked(self) -> bool:
        """True if the current gradients are marked."""
        return False

    def new_nonfinite(self, *, wait: bool) -> dict[str, int]:
        """Parameter name -> non-finite elements found since the last call; without `wait`, perhaps not all."""
        return {}


@dataclass(slots=True, kw_only=True, eq=False)
class StepUnit:
    """Backends that are called together: all of an optimizer, or one that steps some blocks in backward.

    Attributes:
        checked_params: Parameter -> name, of those whose gradients the finite check has to check.
        prepares: Called before the backends, so that all have allocated before one steps.
        waits: Called after the backends, to wait for the work that runs beside the caller.
        unreported_nonfinite: Parameter name -> non-finite elements that backends found which are dropped by now.
        self_excluding: The backends with `excludes_nonfinite`.
    """

    backends: list[Backend]
    checked_params: Mapping[Tensor, str]
    prepares: Sequence[Callable[[], object]] = ()
    waits: Sequence[Callable[[], object]] = ()
    unreported_nonfinite: dict[str, int] = field(default_factory=dict)
    self_excluding: list[Backend] = field(init=False)

    def __post_init__(self) -> None:
        self.self_excluding = [backend for backend in self.backends if backend.excludes_nonfinite]
