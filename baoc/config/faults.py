"""What a run does about non-finite losses; `faults` in conf/config.yaml."""

from dataclasses import dataclass
from typing import Literal

from baoc.config.strict import require


@dataclass(frozen=True, slots=True, kw_only=True)
class FaultsConfig:
    """`nonfinite_loss`: skip the step, rewind to the last checkpoint, or stop the run. `patience` is the number of such
    steps in a row after which `skip` stops the run. `max_rewinds` limits `rewind` per run."""

    nonfinite_loss: Literal["skip", "rewind", "stop"] = "skip"
    patience: int = 20
    max_rewinds: int = 3

    def __post_init__(self) -> None:
        require(self.patience >= 1, "faults.patience", self.patience, "1 or more steps")
        require(self.max_rewinds >= 1, "faults.max_rewinds", self.max_rewinds, "1 or more")
