"""The interface of a backend, which steps all blocks that it takes in one call."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

from torch import Tensor

from baoc.optim.state import LiveBlock, State


# Not frozen, because they are made in each step, and frozen ones take a microsecond more to make.
@dataclass(slots=True, kw_only=True)
class Options:
    """A parameter group's settings in one step. Nobody changes them."""

    lr: float
    betas: tuple[float, float]
    eps: float
    weight_decay: float


@dataclass(slots=True, kw_only=True)
class StepInputs:
    """One step; nobody changes it. `masks`: parameters with non-finite gradients; `phase` counts steps, for codecs."""

    state: Mapping[Tensor, State]
    options: Sequence[Options]  # by parameter group, then of blocks with settings of their own: `Slot.options_index`
    masks: Mapping[Tensor, Tensor]
    phase: int
    matching: bool


class Backend:
    """Steps its blocks.

    State layout and codecs are the same for all backends, so any of them may take the next step. All else that a
    backend keeps, such as addresses, is made at its first step and left out of copies and pickles.
    """

    name = ""
    graphs = True  # whether it may capture what a step launches, and replay that
    excludes_nonfinite = False  # True if it finds non-finite gradients itself; else the step inputs have masks of them

    def __init__(self, blocks: Sequence[LiveBlock], *, state: Mapping[Tensor, State]):
        """`state`: the optimizer's own, parameter -> its tensors."""
        self.blocks = list(blocks)
        self.state = state

    @staticmethod
    def require() -> None:
        """Raises BadInputError where the backend was asked for by name and cannot be had at all."""

    @staticmethod
    def refusal(block: LiveBlock) -> str:
        """Why this backend cannot step the block; empty if it can."""
        raise NotImplementedError

    def __call__(self, inputs: StepInputs) -> None:
        """One step of every parameter that has a gradient."""
        raise NotImplementedError

    @property
    def moved(self) -> bool:
        """True if parameters are not where the backend took them to be, so that it has to be built anew."""
        return False

    # Of backends that exclude non-finite gradients themselves.

    def mark(self) -> None:
        """Makes the non-finite elements of the gradients 0, to be left out by the coming step; waits for nothing."""

    def forget_marks(self) -> None:
        """The gradients that were marked are gone."""

    @property
    def marked(self) -> bool:
        """True if the current gradients are marked."""
        return False

    def new_nonfinite(self, *, wait: bool) -> dict[str, int]:
        """Parameter name -> non-finite elements found since this was last asked, without `wait` perhaps not all."""
        return {}


@dataclass(slots=True, kw_only=True, eq=False)
class StepUnit:
    """Backends that are called together: all of an optimizer, or one that steps some blocks in backward.

    Attributes:
        guarded: Parameter -> name, of those whose gradients the finite check looks at.
        joins: Called after the backends: what they run beside the caller is then waited for.
        unread: Parameter name -> non-finite elements that backends found which are gone by now.
        marking: The backends that exclude non-finite elements themselves, and count them.
    """

    backends: list[Backend]
    checked_params: Mapping[Tensor, str]
    waits: Sequence[Callable[[], object]] = ()
    unreported_nonfinite: dict[str, int] = field(default_factory=dict)
    self_excluding: list[Backend] = field(init=False)

    def __post_init__(self) -> None:
        self.self_excluding = [backend for backend in self.backends if backend.excludes_nonfinite]
