"""Planners over a small transformer, measured footprints and micro-batch options, without a measurement."""

from baoc.core.budgets import parse_budget
from baoc.core.catalogue import ON_DEVICE
from baoc.planning.planner import Planner, PlannerSettings
from baoc.types import Footprint, GradientStats, Option, ParamInfo, PeakInterval, Plan, Role
from tests.support.decision import transformer

MIB = 2**20
NO_TEMPORARIES = dict.fromkeys(ON_DEVICE, 0)  # of footprints that are made up: steps in place
PARAMS = [
    ParamInfo(name=f"layers.{i}.{role}.weight", shape=(64, 64), dtype="float32", role=role, depth=i)
    for i in range(3)
    for role in (Role.ATTENTION, Role.MLP)
]
ADAMW = sum(8 * p.numel + 4 for p in PARAMS)
STATS = GradientStats(
    num_samples=8,
    coherence=0.1,
    noise=2.0,
    anisotropy=1.0,
    snr_fan_in=1.0,
    snr_fan_out=1.0,
    factor_residual=0.1,
    spread=0.5,
    descent_share=0.5,
)


def planner(budget: str = "state_50") -> Planner:
    footprint = Footprint(
        device="cpu",
        micro_batch=4,
        weights_bytes=1_000_000,
        gradients_bytes=900_000,
        forward_backward_bytes=5_000_000,
        validation_bytes=2_000_000,
        resident_bytes=1_900_000,
        step_temporary_bytes=NO_TEMPORARIES,
    )
    settings = PlannerSettings(keep_fp32_roles=())
    return Planner(transformer(), budget=parse_budget(budget), settings=settings, footprint=footprint)


def uniform(of: Planner, spec: str, **others: str) -> Plan:
    """Every block on `spec`, but for `others`."""
    choices = {block.name: spec for block in of.blocks} | others
    return of.resume_plan(choices, risk="prior", profile=None)


def footprint(micro_batch: int) -> Footprint:
    """Activations of 1 MiB per sample beside 4 MiB of weights and gradients."""
    peak = 4 * MIB + micro_batch * MIB
    return Footprint(
        device="cpu",
        micro_batch=micro_batch,
        weights_bytes=2 * MIB,
        gradients_bytes=2 * MIB,
        forward_backward_bytes=peak,
        validation_bytes=3 * MIB + micro_batch * 1000,
        resident_bytes=4 * MIB,
        intervals=(
            PeakInterval(name="training", num_bytes=peak, gradients=None),
            PeakInterval(name="training", num_bytes=peak - 7),
        ),
        gradient_order=("b", "a"),
        step_temporary_bytes=NO_TEMPORARIES,
    )


def option(micro_batch: int, *, rate: float, risk: float | None, recomputed: int = 0) -> Option:
    return Option(
        micro_batch=micro_batch,
        accumulation=64 // micro_batch,
        recomputed=recomputed,
        num_layers=4,
        release=False,
        weights="native",
        peak_bytes=micro_batch,
        state_bytes=1,
        samples_per_s=rate,
        risk=risk,
    )
