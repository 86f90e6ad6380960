"""Results: a reallocation and its migrations, the result of a run, points of a frontier."""

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

RESULT_SCHEMA = 1  # of result.json


@dataclass(frozen=True, slots=True, kw_only=True)
class BlockMove:
    """One block's migration. `kept`: state name -> "kept" | "converted" | "dropped" | "new"; error is relative RMS."""

    block: str
    source: str
    target: str
    kept: Mapping[str, str]
    conversion_error: Mapping[str, float] = field(default_factory=dict[str, float])
    bytes_before: int = 0
    bytes_after: int = 0
    why: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class Reallocation:
    """One decision about another allocation, and the migrations that it led to."""

    step: int
    trigger: str
    accepted: bool
    why: str
    moves: tuple[BlockMove, ...]
    state_bytes_before: int
    state_bytes_after: int
    risk_before: float
    risk_after: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Quality:
    name: str  # a metric key, such as val/loss
    value: float
    higher_is_better: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class RunResult:
    """`result.json`. Bytes and seconds are measured unless the name ends in `_predicted`. `num_ranks` processes
    trained, each on a device of its own; `peak_bytes` is of the fullest one, states are the same on each."""

    schema: int
    task: str
    model: str
    name: str
    allocator: str
    risk: str
    num_params: int
    budget: Mapping[str, Any]  # {kind, name, limit}
    budget_bytes: int | None
    budget_met: bool | None  # None: nothing was limited
    binding: bool
    least_feasible_bytes: int
    peak_bytes: int
    peak_bytes_predicted: int
    state_bytes: int
    state_bytes_predicted: int
    state_bytes_adamw: int
    step_ms: float
    samples_per_s: float
    quality: Quality
    metrics: Mapping[str, float]
    risk_total: float
    allocation_gap: float | None
    num_reallocations: int
    num_steps: int
    seed: int
    commit: str
    versions: Mapping[str, str]
    command: str
    step_s_predicted: float = math.nan  # of a whole step of the last plan in force; NaN: not timed
    peak_by_stretch: Mapping[str, int] = field(default_factory=dict[str, int])  # training, decision, ...; empty on CUDA
    num_ranks: int = 1
    peak_by_rank: tuple[int, ...] = ()  # of each rank in this attempt; empty for one process
    dataset: str = ""  # the name that the data give themselves
    data_sha256: str = ""  # of their content and settings
    code_sha256: Mapping[str, str] = field(default_factory=dict[str, str])  # of the user's own code, by setting
    recomputed_layers: int = 0  # the first of `num_layers`, whose activations were computed again in backward
    num_layers: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class FrontierPoint:
    """One run (or the mean of several seeds) as a frontier sees it. Bytes are of one of its `num_ranks` devices."""

    run: str
    task: str
    model: str
    label: str
    quality: float
    peak_bytes: int
    state_bytes: int
    samples_per_s: float
    num_seeds: int = 1
    num_ranks: int = 1
    quality_spread: float | None = None  # sample standard deviation over seeds
    dominated: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class FailedRun:
    """A job of a multirun that left no result or failed: a row of the frontier table with its reason. `exit_code` is
    None for a job that has not ended or was killed."""

    run: str
    label: str
    exit_code: int | None
    message: str
