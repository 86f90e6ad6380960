"""Plans that keep states on the host: only where asked, as few as need be, within its memory and the step's time."""

from dataclasses import replace

import pytest

from baoc.core.catalogue import SPECS
from baoc.errors import InfeasibleBudgetError
from baoc.planning.cost import slab_bytes
from baoc.planning.microbatch import Axes, make_option, no_option_fits
from baoc.planning.planner import Planner, PlannerSettings
from baoc.planning.transfer import NUM_BUFFERS
from baoc.tracking import console
from baoc.types import Budget, Footprint, LatencyTable, ParamInfo, Role
from baoc.units import format_bytes
from tests.support.planners import NO_TEMPORARIES

MIB = 2**20
NUMEL = 4096 * 4096
PARAMS = [
    ParamInfo(name=f"layers.{i}.mlp.weight", shape=(4096, 4096), dtype="float32", role=Role.MLP, depth=i)
    for i in range(8)
]
ADAMW = 8 * NUMEL + 4  # of one layer
STAGING = NUM_BUFFERS * 8 * NUMEL
BASE = 1024 * MIB
FOOTPRINT = Footprint(
    device="cuda:0",
    micro_batch=1,
    weights_bytes=0,
    gradients_bytes=0,
    forward_backward_bytes=BASE,
    validation_bytes=0,
    resident_bytes=BASE,
    step_temporary_bytes=NO_TEMPORARIES,
)
ROWS = ("adamw", "adamw_int8")


def planner(
    budget: Budget, *, specs: tuple[str, ...] = ROWS, footprint: Footprint | None = FOOTPRINT, **extra: object
) -> Planner:
    return Planner(PARAMS, budget=budget, settings=PlannerSettings(specs=specs), footprint=footprint, **extra)  # pyright: ignore


def memory(num_bytes: int, *, host: int | None = 64 * 1024 * MIB, step_time: float | None = None) -> Budget:
    return Budget(name="m", memory_bytes=num_bytes, host_memory_bytes=host, step_time=step_time)


def table(*, step: float = 1e-12, hidden_s: float = 0.0) -> LatencyTable:
    """A step of 0.1 s, of which fused AdamW takes a tenth; every spec is as fast."""
    return LatencyTable(
        device="cuda",
        fixed_s=dict.fromkeys(ROWS, 0.0),
        per_element_s=dict.fromkeys(ROWS, step),
        base_step_s=0.09,
        reference_step_s=0.1,
        hidden_s=hidden_s,
    )


def test_nothing_is_placed_unless_it_is_asked_for():
    assert not planner(memory(BASE + 9 * ADAMW, host=None)).may_use_host
    assert planner(memory(BASE + 9 * ADAMW)).may_use_host
    assert planner(memory(BASE, host=None), specs=("adamw", "adamw@streamed")).may_use_host


def test_what_fits_stays_on_the_device():
    plan = planner(memory(BASE + 8 * ADAMW)).propose()
    assert set(plan.allocation.choices.values()) == {"adamw"}
    assert (plan.host_bytes, plan.staging_bytes, plan.allocation.transfer_bytes) == (0, 0, 0)
    assert not plan.binding and plan.most_useful_bytes == BASE + 8 * ADAMW


def test_no_more_is_streamed_than_must_be():
    """Staging takes as much as three layers, so half a layer short means four of them on the host."""
    room = BASE + 8 * ADAMW - ADAMW // 2
    plan = planner(memory(room, host=None), specs=("adamw", "adamw@streamed")).propose()
    chosen = list(plan.allocation.choices.values())
    assert (chosen.count("adamw"), chosen.count("adamw@streamed")) == (4, 4)
    assert plan.allocation.risk == 0 and plan.binding
    assert plan.staging_bytes == STAGING
    assert plan.peak_bytes == BASE + 4 * ADAMW + STAGING
    assert plan.allocation.host_bytes == 4 * ADAMW <= plan.host_bytes < 4 * ADAMW + 4096
    spec = SPECS["adamw@streamed"]
    rule = planner(memory(room)).rules["adamw"]
    assert plan.allocation.transfer_bytes == 2 * sum(slab_bytes(b, spec=spec, rule=rule) for b in plan.blocks[:4])


def test_the_least_feasible_budget_is_feasible_and_a_byte_less_is_not():
    specs = ("adamw", "adamw_int8", "adamw_int8@streamed")
    with pytest.raises(InfeasibleBudgetError) as caught:
        planner(memory(BASE, host=None), specs=specs).propose()
    least = caught.value.least_feasible_bytes
    plan = planner(memory(least, host=None), specs=specs).propose()
    assert plan.peak_bytes == least == plan.least_feasible_bytes < BASE + 8 * ADAMW // 4
    with pytest.raises(InfeasibleBudgetError):
        planner(memory(least - 1, host=None), specs=specs).propose()


def test_host_memory_is_a_budget_with_a_least_value_of_its_own():
    room = BASE + 8 * ADAMW - ADAMW // 2
    enough = 4 * ADAMW
    tight = planner(memory(room, host=2 * ADAMW), specs=("adamw",))  # and its twins
    with pytest.raises(InfeasibleBudgetError, match=r"within budget.host_memory=.*of host memory it could be met") as e:
        tight.propose()
    needed = e.value.least_host_bytes
    assert needed is not None and enough <= needed < enough + 4096
    assert planner(memory(room, host=needed), specs=("adamw",)).propose().host_bytes <= needed
    with pytest.raises(InfeasibleBudgetError):
        planner(memory(room, host=needed - 1), specs=("adamw",)).propose()
    option = make_option(tight, footprint=FOOTPRINT, batch_size=8, recomputed=0, num_layers=0, latency=table())
    assert not option.fits and option.why == f"needs {format_bytes(needed)} on the host"
    axes = Axes(micro_batches=(FOOTPRINT.micro_batch,), recomputed=(0,))
    told = no_option_fits([option], budget=tight.budget, axes=axes)
    assert f"Give budget.host_memory={needed}b or more" in str(told) and told.least_host_bytes == needed


def test_rows_that_are_on_the_host_alone_need_that_much_of_it():
    only = ("adamw@streamed",)
    with pytest.raises(InfeasibleBudgetError, match=r"budget.host_memory=1.00 MiB .* least feasible is 1.00 GiB") as e:
        planner(Budget(name="u", host_memory_bytes=MIB), specs=only).propose()
    needed = e.value.least_host_bytes
    assert needed is not None and f"Give budget.host_memory={needed}b or more" in str(e.value)
    planner(Budget(name="u", host_memory_bytes=needed), specs=only).propose()


def test_less_host_memory_means_narrower_states():
    room = BASE + STAGING
    wide = planner(memory(room)).propose()
    narrow = planner(memory(room, host=5 * ADAMW)).propose()
    assert wide.allocation.risk < narrow.allocation.risk
    assert narrow.host_bytes <= 5 * ADAMW and narrow.peak_bytes <= room


def test_a_state_fraction_counts_what_is_kept_on_the_device():
    budget = Budget(name="state_50", state_fraction=0.5, host_memory_bytes=64 * 1024 * MIB)
    plan = planner(budget).propose()
    chosen = list(plan.allocation.choices.values())
    assert (chosen.count("adamw"), chosen.count("adamw@streamed")) == (4, 4)
    assert plan.allocation.state_bytes == 4 * ADAMW == plan.limits.state_bytes


def test_where_the_device_is_the_host_placement_saves_nothing():
    """Its bytes are the device's, and staging comes to them: what is asked for by name is planned and charged."""
    here = replace(FOOTPRINT, device="cpu")
    plan = planner(memory(BASE + 8 * ADAMW - 1), footprint=here).propose()
    assert {SPECS[spec].placement for spec in plan.allocation.choices.values()} == {"device"}
    asked = planner(memory(BASE + 16 * ADAMW, host=None), specs=("adamw@streamed",), footprint=here).propose()
    assert asked.peak_bytes == BASE + 8 * ADAMW + STAGING and asked.allocation.state_bytes == 0


def test_seconds_of_the_link_are_weighed_against_risk():
    """A layer's states of 128 MiB take 2.9 ms both ways, in int8 a quarter of that; 15 ms are the optimizer's."""
    room = BASE + STAGING + ADAMW
    free = planner(memory(room), latency=table()).propose()
    assert free.allocation.risk == 0 and free.limits.link_s is None
    limited = planner(memory(room, step_time=1.05), latency=table()).propose()
    assert limited.limits.link_s is not None
    assert 0 < limited.allocation.link_s <= limited.limits.link_s < free.allocation.link_s
    assert limited.allocation.risk > 0
    hidden = planner(memory(room, step_time=1.05), latency=table(hidden_s=0.05)).propose()
    assert hidden.allocation.risk < limited.allocation.risk


def test_the_step_time_that_a_refusal_names_is_enough():
    with pytest.raises(InfeasibleBudgetError, match=r"step_time=1.0 cannot be met") as caught:
        planner(memory(BASE + STAGING, step_time=1.0), specs=("adamw",), latency=table(step=1e-10)).propose()
    ratio = float(str(caught.value).split("Give budget.step_time=")[1].split(" ")[0])
    plan = planner(memory(BASE + STAGING, step_time=ratio), specs=("adamw",), latency=table(step=1e-10)).propose()
    assert plan.allocation.link_s <= (plan.limits.link_s or 0) * (1 + 1e-9)
    assert 1.0 < ratio < 1.3


def test_a_plan_tells_what_is_on_the_host(capsys: pytest.CaptureFixture[str]):
    plan = planner(memory(BASE + STAGING, step_time=1.2), latency=table()).propose()
    console.print_plan(plan)
    out = " ".join(capsys.readouterr().out.split())
    assert f"on the host {format_bytes(plan.host_bytes)} ({plan.host_bytes} bytes, pinned); per step" in out
    assert (
        f"{plan.allocation.link_s * 1e3:.3g} ms" in out and f"{(plan.limits.link_s or 0) * 1e3:.3g} ms allowed" in out
    )
    assert "of staging on the device" in out and " MiB h " in out
    console.print_plan(planner(memory(BASE + 9 * ADAMW)).propose())
    assert "on the host" not in capsys.readouterr().out
    assert "16.0 GiB" not in console.describe_budget(memory(BASE, host=None))
    assert "16.00 GiB (17179869184 bytes) of pinned host memory" in console.describe_budget(memory(1, host=2**34))


def test_a_memory_refusal_points_to_the_host_where_there_is_one():
    for footprint, told in ((FOOTPRINT, True), (replace(FOOTPRINT, device="cpu"), False)):
        with pytest.raises(InfeasibleBudgetError) as caught:
            planner(memory(BASE, host=None), footprint=footprint).propose()
        assert ("budget.host_memory or catalogue=host" in str(caught.value)) == told
