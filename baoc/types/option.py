"""One way to run the global batch within a budget: micro-batch, recomputed layers, gradient release."""

import math
from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class Option:
    """A row of options.csv. Bytes and seconds are predicted; NaN seconds were not timed, or no plan fits."""

    micro_batch: int
    accumulation: int
    recomputed: int  # number of layers, the first ones, whose activations are computed again in backward
    num_layers: int  # of the network
    release: bool  # gradient release
    weights: str = ""  # formats that the plan keeps weights in; this and all fields to `risk` are set by a plan
    peak_bytes: int = 0  # 0 without a plan
    state_bytes: int = 0
    samples_per_s: float = math.nan
    risk: float | None = None  # of the best allocation within the budget; None: none fits or none was planned
    step_s: float = math.nan  # of a whole step
    fastest_s: float = math.nan  # of the fastest allocation, if it holds the memory and not the step time
    reference_s: float = math.nan  # of a step with fused AdamW, the unit of a budget's step_time
    least_host_bytes: int | None = None  # pinned host memory that would be enough, if it is too little
    why: str = ""  # why no plan fits
    compared: bool = False  # two of its own steps were timed
    tried: bool = False  # its bytes and its steps were measured as in training
    chosen: bool = False  # it is the one to run
    compiled: bool = False  # layers are run by torch.compile

    @property
    def name(self) -> str:
        parts = [f"{self.accumulation} x {self.micro_batch}"]
        parts += [f"recomputed layers {self.recomputed} of {self.num_layers}"] if self.recomputed else []
        parts += ["released gradients"] if self.release else []
        parts += ["compiled layers"] if self.compiled else []
        return ", ".join(parts)

    @property
    def key(self) -> tuple[int, int, bool]:
        """(micro-batch, recomputed layers, gradient release): what identifies an option."""
        return self.micro_batch, self.recomputed, self.release

    @property
    def fits(self) -> bool:
        return self.risk is not None
