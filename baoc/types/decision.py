"""Values of planning: profile, cost, risk, candidate, budget, footprint, allocation, plan."""

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from itertools import accumulate
from typing import Any

from baoc.types.network import Block, Role
from baoc.units import MIB

# torch's CUDA allocator places a step's temporaries beside gradients, in segments that activations left, and may need
# two further segments of 20 MiB. Three of 83 runs held 13 to 21 MB more without this (H200, Muon).
GAPS_BYTES = 40 * MIB


@dataclass(frozen=True, slots=True, kw_only=True)
class GradientStats:
    """Streaming statistics of one block's gradients, sampled during warm-up (formulas: docs/methods.md#statistics).

    Each is a ratio without a unit. `snr_fan_in` is the SNR along fan-in (v shared per row), `snr_fan_out` along
    fan-out. `fold_residual` maps "fan_in:2" (axis:level) to ||R||^2 / ||G||^2. A value that the block cannot have is
    NaN. Checkpoints of earlier versions have `grad_rms`, `update_rms` and folds along fan-out too.
    """

    num_samples: int
    coherence: float  # kappa = ||EMA g||^2 / EMA ||g||^2
    noise: float  # N = tr Cov(g) / ||E g||^2
    anisotropy: float  # std over elements of log v
    snr_fan_in: float
    snr_fan_out: float
    factor_residual: float  # ||v - rank1(v)|| / ||v||
    spread: float  # mean over quantisation groups of std(log sqrt v)
    descent_share: float  # share of the step's predicted loss decrease, <g, u_ref>
    fold_residual: Mapping[str, float] = field(default_factory=dict[str, float])


@dataclass(frozen=True, slots=True, kw_only=True)
class Profile:
    """The measurements of a warm-up."""

    stats: Mapping[str, GradientStats]  # by block name
    num_samples: int = 0
    profile_s: float = 0.0  # host wall seconds spent on sampling
    warmup_s: float = 0.0  # host wall seconds of the steps in which it was sampled
    profile_bytes: int = 0  # of the profiler's buffers


@dataclass(frozen=True, slots=True, kw_only=True)
class Moments:
    """Means of a matrix parameter's squared gradients, from which v starts when a block without one turns to AdamW.

    `row`: float32 tensor (fan_out,), mean over fan-in. `col`: float32 tensor (fan_in,), mean over fan-out. Both are
    typed Any, as this module does not import torch.
    """

    row: Any
    col: Any


@dataclass(frozen=True, slots=True, kw_only=True)
class Cost:
    """Bytes and seconds of one spec on one block."""

    state_bytes: int  # of optimizer state on the device
    host_bytes: int = 0  # of optimizer state in pinned host memory
    shared_bytes: int = 0  # `host_bytes` where the device is the host, so that they count in its memory; else 0
    streamed_bytes: int = 0  # over the link to the device in each step, and as many back
    step_s: float = 0.0  # of the device; 0 without a latency table
    link_s: float = 0.0  # of the link, which works at the same time as the device
    weight_bytes: int = 0  # of the parameters alone: gradients take as much again
    saved_bytes: int = 0  # by 16-bit weights, gradients and autocast copies at the peak; 0 if the budget ignores them

    @property
    def transfer_bytes(self) -> int:
        """Bytes over the link per step, both ways."""
        return 2 * self.streamed_bytes

    @property
    def charged_bytes(self) -> int:
        """Bytes charged to the budget: state minus what the spec saves elsewhere. They may be negative."""
        return self.state_bytes + self.shared_bytes - self.saved_bytes


@dataclass(frozen=True, slots=True, kw_only=True)
class Risk:
    """Predicted loss of quality against fp32 AdamW: a hypothesis, not a measurement. Weighted `terms` add up to it."""

    total: float
    terms: Mapping[str, float] = field(default_factory=dict[str, float])


@dataclass(frozen=True, slots=True, kw_only=True)
class Candidate:
    block: str
    spec: str
    cost: Cost
    risk: Risk
    role: Role = Role.OTHER  # of the block: published baselines leave some roles on AdamW


@dataclass(frozen=True, slots=True, kw_only=True)
class Budget:
    """The limits of a run; each may be absent. See docs/budgets.md.

    `memory_bytes`: peak device memory of the process. `state_fraction`: state bytes / state bytes of fp32 AdamW.
    `step_time`: step / step with torch's fused AdamW. `host_memory_bytes`: pinned host memory for states. Setting it
    lets plans keep states on the host; without it only specs named `@streamed` do.
    """

    name: str
    memory_bytes: int | None = None
    state_fraction: float | None = None
    step_time: float | None = None
    host_memory_bytes: int | None = None

    @property
    def kind(self) -> str:
        """The kind of the byte limit; "none" also if only step time or host memory is limited."""
        if self.memory_bytes is not None:
            return "memory"
        return "state_fraction" if self.state_fraction is not None else "none"


@dataclass(frozen=True, slots=True, kw_only=True)
class Limits:
    """A budget as limits of totals over the blocks, as allocators take it. None is no limit."""

    state_bytes: int | None = None  # of `Cost.charged_bytes`: the state's bytes, unless weights of fewer bits save some
    step_s: float | None = None
    host_bytes: int | None = None
    link_s: float | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Allocation:
    """One spec per block. `gap`: (risk - lower bound) / max(|risk|, tiny); 0 is proven optimal, None is unknown."""

    choices: Mapping[str, str]  # block name -> spec name, in block order
    state_bytes: int
    risk: float
    allocator: str
    step_s: float = 0.0
    transfer_bytes: int = 0
    host_bytes: int = 0
    link_s: float = 0.0
    gap: float | None = None
    saved_bytes: int = 0  # by weights, gradients and autocast copies, against native weights


@dataclass(frozen=True, slots=True, kw_only=True)
class PeakInterval:
    """The peak of an interval of a step (`num_bytes`), and which gradients and bf16 copies were alive all through it.

    `gradients`: the number of live gradients, the first so many of `Footprint.gradient_order`; None is all of them.
    `copies`: parameter name -> bytes of the 16-bit copy that autocast made of it; 16-bit parameters need none.
    """

    name: str
    num_bytes: int
    gradients: int | None = 0
    copies: Mapping[str, int] = field(default_factory=dict[str, int])


@dataclass(frozen=True, slots=True, kw_only=True)
class Footprint:
    """Device bytes of a training step without optimizer state, and the peak that they predict (`peak_bytes`).

    With gradient release (`released`), `gradients_bytes` is the most of them alive at once, and `resident_bytes` the
    most of everything, activations too, alive while a block is stepped.
    """

    device: str
    micro_batch: int
    weights_bytes: int
    gradients_bytes: int
    forward_backward_bytes: int  # largest live total in forward and backward: weights, gradients, activations, data
    validation_bytes: int  # the same for a validation batch
    resident_bytes: int  # weights, gradients and data that live through the optimizer step
    settled_bytes: int = 0  # with gradient release, left after the last block's step: weights, data, tables
    ema_bytes: int = 0
    profile_bytes: int = 0  # of the gradient profiler's buffers
    profile_temporary_bytes: int = 0  # while gradients are sampled or read by a decision
    context_bytes: int = 0  # of the CUDA context with its loaded kernels
    reserve_bytes: int = 0  # for modules that CUDA loads late
    arrival_bytes: int = 0  # taken by loading weights, or by gathering them for a file, beyond the weights themselves
    gathered_ranks: int = 0  # whose optimizer states are gathered for a file as well, beside the states
    others_bytes: int = 0  # beside all this: other optimizers, late parameters, layers kept gathered
    step_temporary_bytes: Mapping[str, int] = field(default_factory=dict[str, int])  # by spec: for its largest tensor
    intervals: tuple[PeakInterval, ...] = ()  # of forward, backward and validation; empty if unknown
    gradient_order: tuple[str, ...] = ()  # parameter names in the order in which backward computes gradients
    source: str = "probe"  # probe | prior
    released: bool = False

    def peak_bytes(self, *, state_bytes: int, specs: Sequence[str] = (), saved: Mapping[str, int] | None = None) -> int:
        """Predicted peak with `state_bytes` of optimizer state, of an allocation that uses `specs`.

        `saved`: parameter name -> bytes that it saves by 16-bit weights; its gradient saves as many. An interval counts
        only the savings of what is known to be alive all through it, so the peak stays an upper bound.

        Raises:
            ValueError: the footprint has no temporaries of one of `specs`.
        """
        by_spec = self.step_temporary_bytes
        names = [spec if spec in by_spec else spec.partition("@")[0] for spec in specs]  # streaming changes no step
        if missing := [name for name in names if name not in by_spec]:
            raise ValueError(f"the footprint has no temporaries of {', '.join(missing)}: it knows {', '.join(by_spec)}")
        temporary = max((by_spec[name] for name in names), default=0)
        # With gradient release it is unknown which gradients are alive, so none counts as saved.
        live_gradients = 0 if self.released else None
        step = PeakInterval(name="step", num_bytes=self.resident_bytes + temporary, gradients=live_gradients)
        peak = max(self._bytes_after_savings(self._all_intervals(step, state_bytes=state_bytes), saved=saved or {}))
        gaps = 0 if self.device.startswith(("cpu", "meta")) else min(temporary, GAPS_BYTES)  # absent cards have names
        return peak + self.fixed_bytes + state_bytes + gaps

    @property
    def fixed_bytes(self) -> int:
        """Bytes that are there at every moment, beside weights, gradients, activations and this optimizer's state."""
        return self.ema_bytes + self.profile_bytes + self.context_bytes + self.reserve_bytes + self.others_bytes

    def savings_at_peak(self, saved: Mapping[str, int]) -> int:
        """Bytes that 16-bit parameters save at the largest interval of forward, backward and validation."""
        largest = max(self.intervals, key=lambda interval: interval.num_bytes, default=None)
        if largest is None:
            return sum(saved.values())
        return largest.num_bytes - self._bytes_after_savings((largest,), saved=saved)[0]

    def room_beside_gathered(self, num_bytes: int) -> int:
        """The most state for which gathering it for a file takes no more than `num_bytes` in all."""
        return (num_bytes - self.weights_bytes - self.arrival_bytes - self.fixed_bytes) // (1 + self.gathered_ranks)

    def _all_intervals(self, step: PeakInterval, *, state_bytes: int) -> tuple[PeakInterval, ...]:
        """The measured intervals of forward, backward and validation, then those of the optimizer and the profiler."""
        measured = self.intervals or (
            PeakInterval(name="forward and backward", num_bytes=self.forward_backward_bytes),
            PeakInterval(name="validation", num_bytes=self.validation_bytes),
        )
        # With gradient release, gradients and activations are gone when the profiler puts its sample together.
        resident_bytes = max(self.weights_bytes, self.settled_bytes) if self.released else self.resident_bytes
        sample = PeakInterval(
            name="sample",
            num_bytes=resident_bytes + self.profile_temporary_bytes,
            gradients=0 if self.released else None,
        )
        arrival_bytes = self.arrival_bytes + self.gathered_ranks * state_bytes
        arrival = PeakInterval(name="arrival", num_bytes=self.weights_bytes + arrival_bytes)
        return (*measured, step, sample, arrival)

    def _bytes_after_savings(self, intervals: tuple[PeakInterval, ...], *, saved: Mapping[str, int]) -> list[int]:
        """Bytes of each interval minus what its weights, live gradients and autocast copies save."""
        if not saved:
            return [interval.num_bytes for interval in intervals]
        weights = sum(saved.values())
        of_first_gradients = [0, *accumulate(saved.get(name, 0) for name in self.gradient_order)]
        return [
            interval.num_bytes
            - weights
            - (weights if interval.gradients is None else of_first_gradients[interval.gradients])
            - sum(interval.copies[name] for name in saved if name in interval.copies)
            for interval in intervals
        ]


@dataclass(frozen=True, slots=True, kw_only=True)
class LinkRates:
    """Copy rates of the link between host and device, in bytes per second, with pinned memory on the host.

    `sizes`: bytes of the copied piece, ascending. A rate for each: to the device (`in_rates`), from the device
    (`out_rates`), and the sum of both at the same time (`both_rates`).
    """

    sizes: tuple[int, ...]
    in_rates: tuple[float, ...]
    out_rates: tuple[float, ...]
    both_rates: tuple[float, ...]
    source: str  # measured | stored


@dataclass(frozen=True, slots=True, kw_only=True)
class LatencyTable:
    """Seconds of a training step on `device`: of its optimizer by spec, and of everything else."""

    device: str
    fixed_s: Mapping[str, float]  # spec -> seconds per tensor
    per_element_s: Mapping[str, float]  # spec -> seconds per element
    step_s: float = 0.0  # of the optimizer once per step, whatever the specs
    base_step_s: float = 0.0  # of the rest: forward and backward of the micro-batches, clipping, averages
    reference_step_s: float = 0.0  # of a whole step with torch's fused AdamW
    assumed: tuple[str, ...] = ()  # specs that were not timed: their seconds follow from the bytes that they move
    hidden_s: float = 0.0  # of the last backward pass, during which the link may already copy
    link: LinkRates | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Reason:
    """Why a block runs its spec: the next cheaper and the next dearer candidate, and the terms that decided."""

    block: str
    spec: str
    cheaper: str | None
    dearer: str | None
    text: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Basis:
    """How a plan was chosen, and the measurements behind it.

    Args:
        by: measured | prior | statistics | recipe | race, or the name of a baseline.
        text: the basis in one line, with its figures.
        recipe: name of the chosen recipe.
        family: of the measurements.
        reference: recipe that `change` is the difference from.
        change: difference of the final loss; below 0 is better.
        half: half-width of the 90 % interval of `change`.
        n: number of paired seeds.
        num_params: of the measured network.
        steps: of a measured run.
        lr: rule or role -> multiple of the learning rate that belongs to the choice.
        betas: rule -> betas that belong to the choice.
    """

    by: str
    text: str
    recipe: str | None = None
    family: str | None = None
    reference: str | None = None
    change: float | None = None
    half: float | None = None
    n: int | None = None
    num_params: int | None = None
    steps: int | None = None
    lr: Mapping[str, float] = field(default_factory=dict[str, float])
    betas: Mapping[str, tuple[float, float]] = field(default_factory=dict[str, tuple[float, float]])


@dataclass(frozen=True, slots=True, kw_only=True, repr=False)
class Plan:
    """The result of planning. `candidates`: block name -> candidates that the allocator chose from."""

    blocks: tuple[Block, ...]
    candidates: Mapping[str, tuple[Candidate, ...]]
    allocation: Allocation
    budget: Budget
    limits: Limits
    risk_model: str
    binding: bool
    peak_bytes: int  # predicted
    state_bytes_adamw: int
    least_feasible_bytes: int  # peak bytes under a memory budget, else state bytes
    most_useful_bytes: int  # the smallest budget that does not bind, in the same bytes
    staging_bytes: int = 0  # of device buffers that streamed states pass through; in the peak, not in the state
    host_bytes: int = 0  # pinned host memory for states
    reasons: tuple[Reason, ...] = ()
    basis: Basis | None = None

    def __repr__(self) -> str:
        """One line; `candidates` alone would fill pages."""
        runs = ", ".join(f"{num} x {spec}" for spec, num in Counter(self.allocation.choices.values()).most_common())
        return (
            f"Plan(budget={self.budget.name!r}, binding={self.binding}, {len(self.blocks)} blocks: {runs}, "
            f"state_bytes={self.allocation.state_bytes} of {self.state_bytes_adamw}, peak_bytes={self.peak_bytes})"
        )
