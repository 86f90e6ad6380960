"""Steps that were captured in a CUDA graph: what of them the host does, at the capture and before each replay."""

from collections.abc import Sequence
from typing import TYPE_CHECKING

from baoc.errors import BadInputError
from baoc.optim.backends import Backend

if TYPE_CHECKING:
    from baoc.optim.optimizer import BlockwiseOptimizer


def capture(optimizer: "BlockwiseOptimizer", backends: Sequence[Backend]) -> None:
    """The device's part of a step. Raises BadInputError for what cannot be captured."""
    if optimizer.nonfinite != "skip_element":
        raise BadInputError(
            f"nonfinite={optimizer.nonfinite} waits for the device, so the step cannot be captured: use skip_element"
        )
    for backend in backends:
        backend.capture(optimizer.inputs({}, options=optimizer.options(), phase=optimizer.num_steps))


def prepare(optimizer: "BlockwiseOptimizer") -> None:
    """The host's part of the step that is replayed next; see `BlockwiseOptimizer.prepare_replay`."""
    if optimizer.releaser is not None:
        raise BadInputError("steps with gradient release cannot be replayed as a CUDA graph: build without release")
    backends, options = optimizer.roster.ready(), optimizer.options()
    optimizer.num_steps += 1
    inputs = optimizer.inputs({}, options=options, phase=optimizer.num_steps)
    for backend in backends:
        backend.prepare(inputs)
