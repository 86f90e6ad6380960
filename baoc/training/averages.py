"""Callbacks of others that average weights: what they cannot see is left out of a plan."""

import logging
from collections.abc import Sequence
from dataclasses import replace

import lightning as L
from lightning.pytorch.callbacks import StochasticWeightAveraging, WeightAveraging
from torch.optim.swa_utils import AveragedModel

from baoc.core.catalogue import select
from baoc.errors import BadInputError
from baoc.planning.allocators import ALLOCATORS
from baoc.training.session import SessionSettings

log = logging.getLogger(__name__)


def averaging_callbacks(trainer: L.Trainer) -> list[str]:
    """Callbacks and parts of the module that average weights by reading parameters as they are."""
    callbacks: list[L.Callback] = trainer.callbacks  # pyright: ignore[reportAttributeAccessIssue]
    found = [
        type(callback).__name__
        for callback in callbacks
        if isinstance(callback, WeightAveraging | StochasticWeightAveraging)
        or any(isinstance(value, AveragedModel) for value in vars(callback).values())
    ]
    return found + [name for name, part in trainer.lightning_module.named_modules() if isinstance(part, AveragedModel)]


def without_narrow(settings: SessionSettings, *, because: Sequence[str]) -> SessionSettings:
    """The settings without specs that keep weights in 16 bits with corrections beside them, which averages would not
    see. Raises BadInputError where a recipe or an allocator asks for such."""
    planner = settings.planner
    rows = select(planner.specs)
    narrow = [name for name, spec in rows.items() if spec.weights != "native"]
    only = ALLOCATORS[planner.allocator].traits.only_spec
    if not narrow:
        return settings
    readers = ", ".join(because)
    if planner.recipe is not None or only in narrow or len(narrow) == len(rows):
        raise BadInputError(
            f"{readers} averages weights, and {', '.join(narrow[:3])} keeps them in 16 bits with a correction that an "
            "average does not see: leave one of the two out"
        )
    log.warning("%s averages weights, so that specs with weights of 16 bits are left out: %s", readers, narrow[0])
    kept = tuple(name for name in rows if name not in narrow)
    return replace(settings, planner=replace(planner, specs=kept, measured_specs=()))
