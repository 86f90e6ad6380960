"""What a run does about non-finite losses; `faults` in conf/config.yaml."""

from dataclasses import dataclass
from typing import Annotated, Literal

from baoc.config.validate import at_least


@dataclass(frozen=True, slots=True, kw_only=True)
class FaultsConfig:
    """`nonfinite_loss`: skip the step, rewind to the last checkpoint, or stop the run. `patience` is the number of such
    steps in a row after which `skip` stops the run. `max_rewinds` limits `rewind` per run."""

    nonfinite_loss: Literal["skip", "rewind", "stop"] = "skip"
    patience: Annotated[int, at_least(1, " steps")] = 20
    max_rewinds: Annotated[int, at_least(1)] = 3
