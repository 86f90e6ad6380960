"""Values of planning: profile, cost, risk, candidates, budget, footprint, allocation, plan."""

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

    Each is a ratio without unit unless said. `snr_fan_in` is SNR along fan-in (sharing v per row), and so on;
    `fold_residual` maps "fan_in:2" (axis:level) to ||R||^2 / ||G||^2. NaN where the block cannot have the value.
    """

    num_samples: int
    grad_rms: float  # root mean square of the gradient's elements
    coherence: float  # kappa = ||EMA g||^2 / EMA ||g||^2
    noise: float  # N = tr Cov(g) / ||E g||^2
    anisotropy: float  # std over elements of log v
    snr_fan_in: float
    snr_fan_out: float
    factor_residual: float  # ||v - rank1(v)|| / ||v||
    spread: float  # mean over quantisation groups of std(log sqrt v)
    update_rms: float  # RMS of AdamW's update on the block's slice
    descent_share: float  # share of the step's predicted loss decrease, <g, u_ref>
    fold_residual: Mapping[str, float] = field(default_factory=dict[str, float])


@dataclass(frozen=True, slots=True, kw_only=True)
class Profile:
    """The measurements of a warm-up."""

    stats: Mapping[str, GradientStats]  # by block name
    num_samples: int = 0
    profile_s: float = 0.0  # host wall seconds spent on sampling
    warmup_s: float = 0.0  # host wall seconds of the steps in which it was sampled
    profile_bytes: int = 0  # what the profiler held


@dataclass(frozen=True, slots=True, kw_only=True)
class Moments:
    """Means of one matrix parameter's squared gradients, from which a stateless block can become Adam.

    `row`: float32 tensor (fan_out,), mean over fan-in; `col`: (fan_in,), mean over fan-out. Typed Any: no torch here.
    """

    row: Any
    col: Any


@dataclass(frozen=True, slots=True, kw_only=True)
class Cost:
    """`state_bytes` are on the device, `host_bytes` in pinned host memory, both of optimizer state.

    `shared_bytes`: the host's again where the device is the host, as they count in its memory. `weight_bytes`: of the
    parameters alone; gradients take as much again and are not included. `saved_bytes`: what weights,
    gradients and copies of 16 bits save at the peak against native weights; 0 under a budget that does not count them.
    `step_s` are seconds of the device, 0 where no latency table was asked for; `link_s` those of the link,
    which works beside it.
    """

    state_bytes: int
    host_bytes: int = 0
    shared_bytes: int = 0
    streamed_bytes: int = 0  # over the link to the device in each step, and as many back
    step_s: float = 0.0
    link_s: float = 0.0
    weight_bytes: int = 0
    saved_bytes: int = 0

    @property
    def transfer_bytes(self) -> int:
        """Over the link per step, both ways."""
        return 2 * self.streamed_bytes

    @property
    def charged_bytes(self) -> int:
        """Bytes charged to the budget: state, less what the spec saves elsewhere; may be negative."""
        return self.state_bytes + self.shared_bytes - self.saved_bytes


@dataclass(frozen=True, slots=True, kw_only=True)
class Risk:
    """Predicted loss of quality against fp32 AdamW: a hypothesis, no measurement. `terms` are weighted and sum up."""

    total: float
    terms: Mapping[str, float] = field(default_factory=dict[str, float])


@dataclass(frozen=True, slots=True, kw_only=True)
class Candidate:
    block: str
    spec: str
    cost: Cost
    risk: Risk
    role: Role = Role.OTHER  # the block's: published baselines leave some roles on AdamW


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
        """Of the byte limit; `none` also where only step time or host memory is limited."""
        if self.memory_bytes is not None:
            return "memory"
        return "state_fraction" if self.state_fraction is not None else "none"


@dataclass(frozen=True, slots=True, kw_only=True)
class Limits:
    """A budget turned into what an allocator understands: totals over the blocks. None does not bind.

    `state_bytes` limits the bytes that specs are charged (`Cost.charged_bytes`), which are those of the state alone
    where no weights are kept in fewer bits. `link_s` limits the seconds of the link beside the device.
    """

    state_bytes: int | None = None
    step_s: float | None = None
    host_bytes: int | None = None
    link_s: float | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Allocation:
    """One spec per block. `gap`: (risk - lower bound) / max(|risk|, tiny); 0 is proven optimal, None is not known."""

    choices: Mapping[str, str]  # block name -> spec name, in block order
    state_bytes: int
    risk: float
    allocator: str
    step_s: float = 0.0
    transfer_bytes: int = 0
    host_bytes: int = 0
    link_s: float = 0.0
    gap: float | None = None
    saved_bytes: int = 0  # of weights, gradients and copies, against native weights


@dataclass(frozen=True, slots=True, kw_only=True)
class PeakInterval:
    """The peak of an interval of a step (`num_bytes`), and which gradients and bf16 copies were alive all through it.

    `gradients`: how many, the first of `Footprint.gradient_order`; None is all of them. `copies`: bytes of the 16-bit
    copies that autocast made of fp32 parameters, by name; parameters kept in 16 bits need none.
    """

    name: str
    num_bytes: int
    gradients: int | None = 0
    copies: Mapping[str, int] = field(default_factory=dict[str, int])


@dataclass(frozen=True, slots=True, kw_only=True)
class Footprint:
    """Device bytes of a training step apart from optimizer state, and the peak they predict together.

    `forward_backward_bytes` is the largest live total during forward and backward (weights, gradients, activations,
    data), `validation_bytes` the same for a validation batch, both without optimizer state; `resident_bytes` are the
    weights, gradients and data that live through the optimizer step. Where gradients are `released` in backward,
    `gradients_bytes` is the most of them that is alive at once, and `resident_bytes` the most of all, activations
    too, that is alive when a block is stepped; `settled_bytes` is what is left after the last one: weights, data,
    tables. `step_temporary_bytes` maps a spec to what its step needs for the largest tensor beyond its state,
    `arrival_bytes` is what taking weights in holds beside what is kept of them.
    """

    device: str
    micro_batch: int
    weights_bytes: int
    gradients_bytes: int
    forward_backward_bytes: int
    validation_bytes: int
    resident_bytes: int
    settled_bytes: int = 0
    ema_bytes: int = 0
    profile_bytes: int = 0
    profile_temporary_bytes: int = 0  # while gradients are sampled, and while a decision looks at them
    context_bytes: int = 0
    reserve_bytes: int = 0  # for modules that load late
    arrival_bytes: int = 0
    others_bytes: int = 0  # beside all this: other optimizers, late parameters, layers kept gathered
    step_temporary_bytes: Mapping[str, int] = field(default_factory=dict[str, int])
    intervals: tuple[PeakInterval, ...] = ()  # of forward, backward and validation; empty if not known
    gradient_order: tuple[str, ...] = ()  # parameters in the order in which their gradients come
    source: str = "probe"  # probe | prior
    released: bool = False

    def peak_bytes(self, *, state_bytes: int, specs: Sequence[str] = (), saved: Mapping[str, int] | None = None) -> int:
        """Predicted peak with `state_bytes` of optimizer state, `specs` being those in use.

        `saved`: bytes that parameters of 16 bits have less than native ones, by name; their gradients have as many
        less. Each interval counts only what it is known to lose by them, so the peak stays an upper bound.

        Raises:
            ValueError: the footprint does not know what a step of one of `specs` needs.
        """
        known = self.step_temporary_bytes
        rows = [spec if spec in known else spec.partition("@")[0] for spec in specs]  # streamed ones step as the others
        if missing := [row for row in rows if row not in known]:
            raise ValueError(f"the footprint has no temporaries of {', '.join(missing)}: it knows {', '.join(known)}")
        temporary = max((known[row] for row in rows), default=0)
        held = 0 if self.released else None  # of released ones it is unknown which are alive
        step = PeakInterval(name="step", num_bytes=self.resident_bytes + temporary, gradients=held)
        gaps = 0 if self.device.startswith(("cpu", "meta")) else min(temporary, GAPS_BYTES)  # absent cards have names
        return (
            max(self._bytes_after_savings(self._all_intervals(step), saved=saved or {}))
            + self.fixed_bytes
            + state_bytes
            + gaps
        )

    @property
    def fixed_bytes(self) -> int:
        """What is there at every moment beside weights, gradients, activations and this optimizer's state."""
        return self.ema_bytes + self.profile_bytes + self.context_bytes + self.reserve_bytes + self.others_bytes

    def _all_intervals(self, step: PeakInterval) -> tuple[PeakInterval, ...]:
        whole = PeakInterval(name="forward and backward", num_bytes=self.forward_backward_bytes)
        # Where gradients are released they are gone, and activations with them, when a sample of all is put together.
        beside = max(self.weights_bytes, self.settled_bytes) if self.released else self.resident_bytes
        sample = PeakInterval(
            name="sample",
            num_bytes=beside + self.profile_temporary_bytes,
            gradients=0 if self.released else None,
        )
        arrival = PeakInterval(name="arrival", num_bytes=self.weights_bytes + self.arrival_bytes)
        beside_steps = (step, sample, arrival)
        return (
            *(self.intervals or (whole, PeakInterval(name="validation", num_bytes=self.validation_bytes))),
            *beside_steps,
        )

    def savings_at_peak(self, saved: Mapping[str, int]) -> int:
        """Bytes that 16-bit parameters save at the largest interval of forward, backward and validation."""
        largest = max(self.intervals, key=lambda interval: interval.num_bytes, default=None)
        return (
            sum(saved.values())
            if largest is None
            else largest.num_bytes - self._bytes_after_savings((largest,), saved=saved)[0]
        )

    def _bytes_after_savings(self, intervals: tuple[PeakInterval, ...], *, saved: Mapping[str, int]) -> list[int]:
        """Bytes of each interval with `saved` taken off its weights, its gradients and its copies."""
        if not saved:
            return [interval.num_bytes for interval in intervals]
        weights = sum(saved.values())
        before = [0, *accumulate(saved.get(name, 0) for name in self.gradient_order)]
        return [
            interval.num_bytes
            - weights
            - (weights if interval.gradients is None else before[interval.gradients])
            - sum(interval.copies[name] for name in saved if name in interval.copies)
            for interval in intervals
        ]


@dataclass(frozen=True, slots=True, kw_only=True)
class LinkRates:
    """Copy rates of the link between host and device, with pinned memory on the host.

    Bytes per second by size of the piece that is copied, `sizes` ascending: to the device (`in_rates`), from it
    (`out_rates`), and both at once in sum (`both_rates`).
    """

    sizes: tuple[int, ...]
    in_rates: tuple[float, ...]
    out_rates: tuple[float, ...]
    both_rates: tuple[float, ...]
    source: str  # measured | stored


@dataclass(frozen=True, slots=True, kw_only=True)
class LatencyTable:
    """Seconds of an optimizer step on `device`: `step_s` once, by spec `fixed_s` per tensor and `per_element_s`.

    `assumed` names the specs whose seconds were not timed here, but follow from the bytes that they move. `hidden_s`:
    seconds of a step's backward pass under which the link may already work.
    """

    device: str
    fixed_s: Mapping[str, float]
    per_element_s: Mapping[str, float]
    step_s: float = 0.0  # of a step whatever the specs
    base_step_s: float = 0.0  # all else of a step: forward and backward of its micro-batches, clipping, averages
    reference_step_s: float = 0.0  # whole step with torch's fused AdamW
    assumed: tuple[str, ...] = ()
    hidden_s: float = 0.0
    link: LinkRates | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Reason:
    """Why a block runs what it runs: the next cheaper and dearer candidate, and the terms that decided."""

    block: str
    spec: str
    cheaper: str | None
    dearer: str | None
    text: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Basis:
    """The basis of a plan: how it was chosen, and what is known of the choice.

    Args:
        by: measured | prior | statistics | recipe | race, or the name of a baseline.
        text: the same in one line, with its figures.
        recipe: name of the recipe that was chosen.
        family: of the measurements.
        reference: what `change` of the final loss is against; below 0 is better.
        half: of the 90 % interval of `change`.
        n: paired seeds.
        num_params: of the network that was measured.
        steps: of the runs that were measured.
        lr: rule or role -> multiple of the learning rate that belongs to the choice.
        betas: rule -> betas that belong to it.
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
    """The result of planning. `candidates` holds those that were not dominated, by block."""

    blocks: tuple[Block, ...]
    candidates: Mapping[str, tuple[Candidate, ...]]
    allocation: Allocation
    budget: Budget
    limits: Limits
    risk_model: str
    binding: bool
    peak_bytes: int  # predicted
    state_bytes_adamw: int
    least_feasible_bytes: int  # in the budget's measure: peak for memory, state for a state fraction
    most_useful_bytes: int  # the same measure, from which on the budget does not bind
    staging_bytes: int = 0  # on the device, through which streamed states pass; in the peak, not in the state
    host_bytes: int = 0  # pinned host memory: states that are kept there, and what a step there works on
    reasons: tuple[Reason, ...] = ()
    basis: Basis | None = None

    def __repr__(self) -> str:
        """One line; `candidates` alone would fill pages."""
        runs = ", ".join(f"{num} x {spec}" for spec, num in Counter(self.allocation.choices.values()).most_common())
        return (
            f"Plan(budget={self.budget.name!r}, binding={self.binding}, {len(self.blocks)} blocks: {runs}, "
            f"state_bytes={self.allocation.state_bytes} of {self.state_bytes_adamw}, peak_bytes={self.peak_bytes})"
        )
