"""Weights of 16 bits in a plan: what they save where, which budgets count it, and what they risk."""

from dataclasses import replace
from itertools import product
from math import inf

import pytest
import torch
from torch import nn

from baoc.core.catalogue import SPECS, STORAGES
from baoc.core.rule_tags import RULE_INFOS
from baoc.errors import InfeasibleBudgetError
from baoc.planning.cost import weight_savings
from baoc.planning.limits import SavingsMode, savings_by_format, temporaries_levels
from baoc.planning.planner import Planner, PlannerSettings
from baoc.planning.risk import RISKS
from baoc.profiling import probe_footprint
from baoc.types import Block, Budget, Footprint, ParamInfo, Role
from tests.support.weight_footprints import FOOTPRINT, MIB, NAMES, NUMEL, PARAMS, WEIGHTS


def test_each_moment_loses_the_gradients_and_copies_that_it_had():
    less = {name: 2 * NUMEL for name in NAMES}
    whole = FOOTPRINT.peak_bytes(state_bytes=5)
    assert whole == 2 * WEIGHTS + 8 * MIB + 5
    forward = 2 * WEIGHTS + 8 * MIB - 4 * 3 * 2 * NUMEL  # weights, gradients and copies of four layers
    backward = WEIGHTS + 11 * MIB - (4 + 2) * 2 * NUMEL  # weights of four, gradients of two
    assert backward > forward
    assert FOOTPRINT.peak_bytes(state_bytes=5, saved=less) == backward + 5
    last = {NAMES[3]: 2 * NUMEL}  # its gradient is not there yet in the second interval
    assert FOOTPRINT.peak_bytes(state_bytes=0, saved=last) == 2 * WEIGHTS + 8 * MIB - 3 * 2 * NUMEL


def test_a_probe_that_cannot_tell_moments_apart_promises_weights_alone():
    plain = Footprint(
        device="cpu",
        micro_batch=1,
        weights_bytes=8 * MIB,
        gradients_bytes=8 * MIB,
        forward_backward_bytes=20 * MIB,
        validation_bytes=0,
        resident_bytes=16 * MIB,
    )
    assert plain.peak_bytes(state_bytes=0, saved={"w": 4 * MIB}) == 16 * MIB


def planner(budget: Budget, *specs: str) -> Planner:
    settings = PlannerSettings(specs=specs, keep_fp32_roles=())
    return Planner(PARAMS, budget=budget, settings=settings, footprint=FOOTPRINT)


def memory(num_bytes: int) -> Budget:
    return Budget(name="m", memory_bytes=num_bytes)


def test_a_memory_budget_counts_what_weights_save():
    """State of split AdamW is larger than AdamW's, and yet it is what fits."""
    whole = FOOTPRINT.peak_bytes(state_bytes=0) + 4 * (8 * NUMEL + 4)
    plan = planner(memory(whole - MIB), "adamw", "adamw+split8").propose()
    chosen = list(plan.allocation.choices.values())
    assert plan.binding and "adamw+split8" in chosen and "adamw" in chosen
    assert plan.peak_bytes <= whole - MIB and plan.allocation.saved_bytes > 0
    assert plan.most_useful_bytes == whole
    free = planner(memory(whole), "adamw", "adamw+split8").propose()
    assert set(free.allocation.choices.values()) == {"adamw"} and free.peak_bytes == whole


def test_a_state_budget_counts_state_alone():
    plan = planner(Budget(name="s", state_fraction=1.0), "adamw", "adamw+split8", "sign").propose()
    assert set(plan.allocation.choices.values()) == {"adamw"} and plan.allocation.saved_bytes == 0


@pytest.mark.parametrize("specs", [("adamw", "adamw+split8"), ("sign", "sign+bf16_sr", "adamw+split8")])
def test_the_least_is_feasible_and_one_byte_less_is_not(specs: tuple[str, ...]):
    with pytest.raises(InfeasibleBudgetError, match="the least feasible is") as caught:
        planner(memory(1), *specs).propose()
    least = caught.value.least_feasible_bytes
    plan = planner(memory(least), *specs).propose()
    assert plan.peak_bytes <= least == plan.least_feasible_bytes
    with pytest.raises(InfeasibleBudgetError):
        planner(memory(least - 1), *specs).propose()


def test_what_savings_spare_is_spent_where_counting_them_boldly_is_too_much():
    """Between savings of two gradients, which pass the budget, and of none, which nothing is left to run by."""
    intervals = (FOOTPRINT.intervals[0], replace(FOOTPRINT.intervals[1], gradients=1))
    settings = PlannerSettings(specs=("sign", "sign+split8", "adamw_int8+split8", "adamw+split8"), keep_fp32_roles=())
    given = {"settings": settings, "footprint": replace(FOOTPRINT, intervals=intervals)}
    planner = Planner(PARAMS, budget=memory(61 * MIB // 4), **given)
    pool = planner.candidates(risk="prior", profile=None, count="none")
    all_ways = list(product(*pool.values()))
    fitting = [way for way in all_ways if planner.budget_bytes_of(way) <= 61 * MIB // 4]
    least = min(sum(one.risk.total for one in way) for way in fitting)
    assert len(fitting) < len(all_ways) and planner.propose().allocation.risk == pytest.approx(least, rel=0.01)


@pytest.mark.slow
@pytest.mark.parametrize(
    "specs",
    [("adamw", "sign+split8"), ("adamw", "muon", "*+split8"), ("adamw", "muon+bf16_sr", "sign+bf16_sr")],
    ids=" ".join,
)
def test_no_level_of_room_that_16_bit_weights_bring_within_the_budget_is_left_out(
    specs: tuple[str, ...], monkeypatch: pytest.MonkeyPatch
):
    """A step's peak passes the budget with native weights, and not with those that the plan keeps."""
    needs = {**FOOTPRINT.step_temporary_bytes, "adamw": 16 * MIB, "muon": 20 * MIB}
    heavy = replace(FOOTPRINT, step_temporary_bytes=needs)

    def risks() -> list[float]:
        found: list[float] = []
        for quarters in range(44, 104, 2):
            settings = PlannerSettings(specs=specs, keep_fp32_roles=())
            one = Planner(PARAMS, budget=memory(quarters * MIB // 4), settings=settings, footprint=heavy)
            try:
                plan = one.propose()
            except InfeasibleBudgetError as refused:
                assert refused.least_feasible_bytes > quarters * MIB // 4
                found.append(inf)
            else:
                assert plan.peak_bytes <= quarters * MIB // 4
                found.append(plan.allocation.risk)
        return found

    within = risks()
    monkeypatch.setattr(
        "baoc.planning.attempts.temporaries_levels",
        lambda footprint, *, specs, memory, most_saved: temporaries_levels(footprint, specs=specs, memory=None),
    )
    assert inf in within and within == risks()


def test_weights_of_16_bits_risk_what_their_format_loses():
    block = Block(name="b", params=(PARAMS[0],), role=Role.MLP)

    def risk(spec: str, **weights: float) -> float:
        row = SPECS[spec]
        options = {"rule": RULE_INFOS[row.rule], "storage": STORAGES[row.storage], "profile": None, "weights": weights}
        return RISKS["prior"](block=block, spec=row, **options).total

    assert 0 == risk("adamw") < risk("adamw+split8") < risk("adamw_int8")
    assert risk("adamw_int8") < risk("adamw+bf16_sr") < risk("rmsprop") < risk("sign") < risk("adamw+bf16")
    assert risk("adamw_int8+split8") == pytest.approx(risk("adamw_int8") + risk("adamw+split8"))
    assert risk("adamw+split8", round_weights=0.0) == 0.0


def test_only_what_has_more_bits_is_saved():
    half = ParamInfo(name="h", shape=(8, 8), dtype="bfloat16", role=Role.MLP)
    block = Block(name="b", params=(PARAMS[0], half), role=Role.MLP)
    assert weight_savings(block, spec=SPECS["adamw+split8"]) == {PARAMS[0].name: 2 * NUMEL}
    assert weight_savings(block, spec=SPECS["adamw"]) == {}


def test_the_probe_sees_copies_and_the_order_of_gradients():
    """Autocast keeps a 16-bit copy of every weight until the backward has used it."""
    net = nn.Sequential(nn.Linear(64, 64, bias=False), nn.GELU(), nn.Linear(64, 64, bias=False))
    batch = torch.randn(4, 64)

    def micro_batch() -> torch.Tensor:
        with torch.autocast("cpu", dtype=torch.bfloat16):
            return net(batch).float().square().mean()

    found = probe_footprint(net, run_micro_batch=micro_batch)
    assert found.gradient_order == ("2.weight", "0.weight")
    forward = [interval for interval in found.intervals if interval.gradients is None]
    assert forward[0].copies == {} and forward[-1].copies == {"2.weight": 2 * 64 * 64}  # no gradient of the input
    assert max(interval.num_bytes for interval in found.intervals) == found.forward_backward_bytes
    counts = [interval.gradients for interval in found.intervals if interval.gradients is not None]
    assert counts == [0, 0, 1, 2]  # the copy goes when it was used, which ends a moment before the first gradient comes


@pytest.mark.parametrize(("count", "times"), [("weights", 1), ("gradients", 2)])
def test_savings_are_those_of_the_weights_and_where_they_count_of_as_many_gradients(count: SavingsMode, times: int):
    made = planner(memory(1024 * MIB), "adamw", "adamw+split8")
    assert made.footprint is not None
    for block in made.blocks:
        spec = made.specs["adamw+split8"]
        saves = sum(weight_savings(block, spec=spec).values())
        assert saves > 0
        assert savings_by_format([block], specs={spec.name: spec}, count=count, footprint=made.footprint) == (
            (times * saves,),
        )
