"""One way to run a global batch within a budget: a row of the table that a decision is taken from."""

from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class Option:
    """`peak_bytes` and `samples_per_s` are predicted; NaN samples per second where nothing was timed.

    `risk`: of the best allocation within the budget (`prior`); None where none fits, and `why` says so. `weights`:
    formats that the allocation keeps weights in. `chosen` marks the row that is run.
    """

    micro_batch: int
    accumulation: int
    checkpointing: bool
    release: bool
    weights: str
    peak_bytes: int
    state_bytes: int
    samples_per_s: float
    risk: float | None
    why: str = ""
    chosen: bool = False

    @property
    def name(self) -> str:
        parts = [f"{self.accumulation} x {self.micro_batch}"]
        parts += ["recomputed activations"] if self.checkpointing else []
        parts += ["released gradients"] if self.release else []
        return ", ".join(parts)

    @property
    def fits(self) -> bool:
        return self.risk is not None
