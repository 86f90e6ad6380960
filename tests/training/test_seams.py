"""Where decision, budgets, weights, release and resume meet: what one part leaves, another has to read rightly."""

from dataclasses import replace
from types import SimpleNamespace
from typing import Any, cast

import lightning as L
import pytest
import torch
from torch import nn

from baoc.callbacks.budget_control import BudgetControl
from baoc.core.budgets import parse_budget
from baoc.planning.microbatch import Axes, no_option_fits
from baoc.planning.planner import Planner, PlannerSettings
from baoc.planning.reallocation.budget_schedule import BudgetChange, BudgetSchedule
from baoc.planning.reallocation.migration_cost import migration_peak
from baoc.profiling.phase_timer import PhaseTimer
from baoc.tasks.ema import EmaWeights
from baoc.training.lightning import BaocStrategy
from baoc.training.measure.microbatch_search import MicroBatchSearch
from baoc.training.measure.probe import Probe
from baoc.types import Option, PeakInterval, Plan
from tests.support.decision import transformer
from tests.support.planners import option, planner, uniform
from tests.support.weight_footprints import FOOTPRINT


def test_a_state_budget_that_no_option_meets_names_no_bytes_that_it_does_not_have() -> None:
    options = [replace(option(8, rate=1.0, risk=None), peak_bytes=77)]
    axes = Axes(micro_batches=(8,), recomputed=(0,))
    error = no_option_fits(options, budget=parse_budget("state_10"), axes=axes)
    assert "the least state takes 77 bytes, whatever the micro-batch" in str(error) and "None" not in str(error)


@pytest.mark.parametrize(
    ("specs", "such"), [(("adamw",), ", such as '*+split8', or"), (("adamw+split8@streamed",), ", or")]
)
def test_rows_that_are_there_are_no_advice(specs: tuple[str, ...], such: str) -> None:
    options = [replace(option(8, rate=1.0, risk=None), peak_bytes=77)]
    axes = Axes(micro_batches=(8,), recomputed=(0,))
    error = no_option_fits(options, budget=parse_budget("8mb"), axes=axes, specs=specs)
    assert f"more catalogue.specs{such} fewer roles" in str(error)


def test_an_option_that_ran_out_of_memory_is_not_the_least_that_is_named() -> None:
    """It was to take less than the budget, so the refusal would name what the budget has."""
    ran_out, other = (replace(option(8, rate=1.0, risk=None), peak_bytes=mib * 2**20) for mib in (7, 9))
    axes = Axes(micro_batches=(8,), recomputed=(0,))
    error = no_option_fits([ran_out, other], budget=parse_budget("8mb"), axes=axes)
    assert error.least_feasible_bytes == 9 * 2**20 and "the least that one takes is 9.00 MiB" in str(error)
    error = no_option_fits([ran_out], budget=parse_budget("8mb"), axes=axes)
    assert error.least_feasible_bytes > 8 * 2**20 and "all ran out of memory when they were tried" in str(error)


def splitting() -> Planner:
    settings = PlannerSettings(specs=("*", "*+split8"), keep_fp32_roles=())
    return Planner(transformer(), budget=parse_budget("unlimited"), settings=settings, footprint=planner().footprint)


def test_a_move_starts_from_the_weights_that_are_there() -> None:
    """Weights of 16 bits and their gradients are smaller than the probe saw them, before a move as in a step."""
    of = splitting()
    numel = sum(block.numel for block in of.blocks)
    now = uniform(of, "adamw+split8")
    still = migration_peak(of, current=now, target=now)
    assert still is not None
    assert still.peak_bytes == 1_900_000 + now.allocation.state_bytes - 2 * 2 * numel
    assert still.without_gradients_bytes == 1_000_000 + now.allocation.state_bytes - 2 * numel
    native = uniform(of, "adamw")
    there = migration_peak(of, current=native, target=native)
    last = migration_peak(of, current=now, target=native)
    assert there is not None and last is not None and last.peak_bytes <= there.peak_bytes + 2**22
    assert of.footprint is not None
    of.footprint = replace(of.footprint, released=True)
    released = migration_peak(of, current=now, target=now)
    assert released is not None and released.peak_bytes == 1_900_000 + now.allocation.state_bytes - 2 * numel


def test_released_gradients_are_not_taken_off_twice() -> None:
    """When a block is stepped, only some gradients are there: saving on all of them would promise too little."""
    released = replace(FOOTPRINT, intervals=(), gradient_order=(), released=True, step_temporary_bytes={"adamw": 2**25})
    less = {name: 512 * 512 * 2 for name in FOOTPRINT.gradient_order}
    whole = released.peak_bytes(state_bytes=0, specs=("adamw",))
    assert released.peak_bytes(state_bytes=0, specs=("adamw",), saved=less) == whole - sum(less.values())


def planned(control: BudgetControl, of: Planner, plan: Plan) -> None:
    """What a fit does with the callback until a plan is made."""
    strategy = BaocStrategy(of.budget, device="cpu")
    control.setup(cast(Any, SimpleNamespace(strategy=strategy)), L.LightningModule(), "fit")
    for listener in strategy.plan_listeners:
        listener(of, plan)


def test_copies_of_averages_count_at_the_moment_of_validation(monkeypatch: pytest.MonkeyPatch) -> None:
    """Where the probe tells intervals apart, they decide the peak, so EMA copies in validation count there too."""
    intervals = (PeakInterval(name="training", num_bytes=3000), PeakInterval(name="validation", num_bytes=2900))
    found = replace(FOOTPRINT, weights_bytes=0, resident_bytes=0, intervals=intervals, validation_bytes=2900)
    monkeypatch.setattr("baoc.training.measure.probe.probe_footprint", lambda *_, **__: found)
    module, averages = L.LightningModule(), EmaWeights(0.9)
    module.weight = nn.Parameter(torch.zeros(4))
    monkeypatch.setattr(averages, "validation_bytes", lambda _: 500)
    monkeypatch.setattr(averages, "nbytes", lambda _: 0)
    source = SimpleNamespace(dataloader=lambda: [torch.zeros(1, 4)], is_defined=lambda: True)
    val_loop = SimpleNamespace(_data_source=source)
    trainer: Any = SimpleNamespace(
        lightning_module=module,
        fit_loop=SimpleNamespace(_data_source=source, epoch_loop=SimpleNamespace(val_loop=val_loop)),
        limit_val_batches=1,
        callbacks=[averages],
        accumulate_grad_batches=1,
        gradient_clip_val=None,
        gradient_clip_algorithm=None,
    )
    probe = Probe(trainer, BaocStrategy("8gb", device="cpu"))
    assert probe.footprint(context_bytes=0).peak_bytes(state_bytes=0) == 3400


def test_auto_that_is_asked_for_in_mid_run_is_a_limit_too() -> None:
    """As a budget without limits it would let a run take the whole card from those it shares it with."""
    of = planner("state_50")
    control = BudgetControl(schedule=[BudgetChange(budget=parse_budget("auto"), step=5)])
    planned(control, of, uniform(of, "sign"))
    assert control.schedule.free_bytes is not None and control.schedule.free_bytes > 2**20
    control.schedule.free_bytes = 2**30
    assert control.schedule.budget_at(1)[0].memory_bytes is None
    assert control.schedule.budget_at(5)[0].memory_bytes == 2**30
    control.schedule.request("auto")
    assert control.schedule.budget_at(1)[0].memory_bytes == 2**30


def test_a_size_in_the_file_leaves_the_limit_on_time() -> None:
    schedule = BudgetSchedule(parse_budget({"memory": "8gb", "step_time": 1.2}))
    schedule.request("6gb")
    assert schedule.budget_at(1)[0].step_time == 1.2


def test_a_refusal_names_what_the_least_option_was_measured_to_take() -> None:
    """A line through one sample says that a whole released batch takes as little."""
    line, measured, known = {(1, False): 80, (8, True): 50, (8, False): 80}, {(8, True): 90}, {(1, False)}

    def made() -> list[Option]:
        return [
            replace(
                option(size, rate=1.0, risk=None),
                release=release,
                peak_bytes=measured.get((size, release), num_bytes) if (size, release) in known else num_bytes,
            )
            for (size, release), num_bytes in line.items()
        ]

    def measure(way: tuple[int, bool, bool], *, blocks: object) -> bool:
        known.add((way[0], way[2]))
        return True

    measurements = SimpleNamespace(
        capped=True, is_measured=lambda way: (way[0], way[2]) in known, measure_outside_cap=measure
    )
    decision = SimpleNamespace(
        budget=parse_budget("8mb"), measurements=measurements, phases=PhaseTimer(), blocks=[], plan_options=made
    )
    found = MicroBatchSearch.least_measured(cast(Any, decision), made())
    assert min(o.peak_bytes for o in found) == 80 and known == {(1, False), (8, True)}, "the rest is known to need more"
