"""What a run does about what goes wrong in its middle; conf/config.yaml, `faults`."""

from dataclasses import dataclass
from typing import Literal

from baoc.config.strict import require


@dataclass(frozen=True, slots=True, kw_only=True)
class FaultsConfig:
    """`nonfinite_loss`: what a NaN or infinite loss costs: its step, the steps back to the last checkpoint, or the run.

    `patience`: such steps in a row that `skip` bears. `max_rewinds`: how often `rewind` goes back in one run.
    """

    nonfinite_loss: Literal["skip", "rewind", "stop"] = "skip"
    patience: int = 20
    max_rewinds: int = 3

    def __post_init__(self) -> None:
        require(self.patience >= 1, "faults.patience", self.patience, "1 or more steps")
        require(self.max_rewinds >= 1, "faults.max_rewinds", self.max_rewinds, "1 or more")
