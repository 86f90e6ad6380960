"""One way to run a global batch within a budget: a row of the table that a decision is taken from."""

import math
from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class Option:
    """`peak_bytes`, `samples_per_s` and `step_s` (of a whole step) are predicted; NaN where nothing was timed or fits.

    `recomputed`: how many of the network's `num_layers` layers compute their activations again in backward, the first
    ones. `risk`: of the best allocation within the budget (`prior`); None where none fits or none was planned, and
    `why` says so; `peak_bytes` is 0 without a plan.
    `release`: gradients are dropped in backward. `weights`: formats that the allocation keeps weights in.
    `weights` to `risk` keep their defaults until a plan is known.
    `fastest_s`: where only seconds are missing, those of its fastest allocation; `reference_s`: of a step with fused
    AdamW, to which step_time is a ratio. `least_host_bytes`: where pinned memory of the host is missing, how much
    would do. `compared`: two of its own steps were timed; `tried`: its bytes and whole steps were measured as in
    training; else both follow from other options. `chosen` marks the row that is run. `compiled`: layers run by
    torch.compile.
    """

    micro_batch: int
    accumulation: int
    recomputed: int
    num_layers: int
    release: bool
    weights: str = ""
    peak_bytes: int = 0
    state_bytes: int = 0
    samples_per_s: float = math.nan
    risk: float | None = None
    step_s: float = math.nan
    fastest_s: float = math.nan
    reference_s: float = math.nan
    least_host_bytes: int | None = None
    why: str = ""
    compared: bool = False
    tried: bool = False
    chosen: bool = False
    compiled: bool = False

    @property
    def name(self) -> str:
        parts = [f"{self.accumulation} x {self.micro_batch}"]
        parts += [f"recomputed layers {self.recomputed} of {self.num_layers}"] if self.recomputed else []
        parts += ["released gradients"] if self.release else []
        parts += ["compiled layers"] if self.compiled else []
        return ", ".join(parts)

    @property
    def key(self) -> tuple[int, int, bool]:
        """Micro-batch, recomputed layers and release: what tells an option from the others."""
        return self.micro_batch, self.recomputed, self.release

    @property
    def fits(self) -> bool:
        return self.risk is not None
