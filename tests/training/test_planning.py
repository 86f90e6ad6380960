"""mode=plan for cards that are not here: no weights, few seconds, the same planner; and a frontier of plans."""

import csv
import json
from collections.abc import Mapping
from dataclasses import replace
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import cast

import pytest
import torch

from baoc.config.schema import (
    DatasetConfig,
    ModelConfig,
    OptimConfig,
    RunConfig,
)
from baoc.core.budgets import parse_budget
from baoc.errors import BadInputError, InfeasibleBudgetError
from baoc.frontier.planned import read_plans, write_planned_frontier
from baoc.planning.cards import CARDS
from baoc.profiling import probe_footprint
from baoc.profiling.bf16_params import as_native
from baoc.tasks.base import Task
from baoc.training import run as training
from baoc.training.measure.absent_card import card_of, planned_axes
from baoc.types import Footprint
from tests.support.images import write_folder
from tests.support.plan_runs import asked, plan
from tests.support.training_runs import config

pytestmark = pytest.mark.slow

GIB = 2**30


def test_a_plan_for_a_card_is_made_without_weights(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    """7M parameters: weights and gradients of 0.06 GiB, a context of 0.7 GiB, and activations by micro-batch."""
    found = plan(tmp_path / "all", asked("200gb"))
    assert "budget 200gb is more than h100 has: planned for its 79.00 GiB" in " ".join(capsys.readouterr().out.split())
    assert (found["device"], found["footprint"], found["binding"]) == ("h100", "prior", False)
    assert found["risk"] == 0 and found["micro_batch"] == 64
    assert 1.0 * GIB < found["peak_bytes"] < 8 * GIB and found["samples_per_s"] > 0
    with (tmp_path / "all" / "options.csv").open() as file:
        rows = list(csv.DictReader(file))
    assert [row["option"] for row in rows if row["release"] == "True"] == ["1 x 64, released gradients"]
    peaks = [int(row["peak_bytes"]) for row in rows]
    assert peaks.pop() < peaks[-1], "without gradients"
    rows.pop()
    assert [int(row["micro_batch"]) for row in rows] == [1, 2, 4, 8, 16, 32, 64] and peaks == sorted(peaks)
    tight = plan(tmp_path / "tight", asked("1.2gb"))
    assert tight["peak_bytes"] <= 1.2 * GIB and tight["micro_batch"] < 64
    auto = plan(tmp_path / "auto", asked("auto", device="rtx4090"))
    assert auto["device"] == "rtx4090" and auto["peak_bytes"] <= CARDS["rtx4090"].memory_bytes


def test_own_images_are_read_though_the_network_has_no_memory(tmp_path: Path, caplog: pytest.LogCaptureFixture):
    """Their sizes and classes are values: read under the network's meta device they were a traceback."""
    own = DatasetConfig(name="images", path=str(write_folder(tmp_path / "images")))
    assert plan(tmp_path / "run", replace(asked("2gb"), dataset=own, batch_size=4))["peak_bytes"] < 2 * GIB
    assert "no training image" not in caplog.text


def test_what_no_option_fits_names_the_least(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """Weights in full pass what the context leaves, so a step is looked at with those in 16 bits that may be so. Below
    the context, too."""
    looked: list[int] = []

    def told(found: Footprint, *, savings: Mapping[str, int]) -> Footprint:
        looked.append(found.weights_bytes)
        return as_native(found, savings=savings)

    monkeypatch.setattr("baoc.training.measure.absent_card.as_native", told)
    with pytest.raises(
        InfeasibleBudgetError, match=r"cannot be met by any of 16 options: .* more catalogue\.specs, or"
    ) as caught:
        training.run(asked("500mb"), run_dir=tmp_path, command="")
    assert looked and max(looked) < 0.6 * 4 * 7.5e6
    assert caught.value.least_feasible_bytes > CARDS["h100"].context_bytes


def test_a_card_is_to_plan_for_only_and_named_where_it_is_needed():
    with pytest.raises(BadInputError, match="device=h100 is a card to plan for, not one to run on: add mode=plan"):
        RunConfig(device="h100")
    assert card_of(asked("8gb")) is CARDS["h100"]
    on_here = asked("8gb", device="auto")
    assert card_of(on_here) is (None if torch.cuda.is_available() else CARDS["h100"])
    assert card_of(replace(on_here, model=ModelConfig(name="vit", size="tiny"))) is None
    assert card_of(replace(on_here, device="cpu")) is None


def test_plans_of_a_multirun_make_a_frontier(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    for at, (peak, risk, rate) in enumerate([(8, 0.1, 10.0), (16, 0.0, 20.0), (12, 0.2, 5.0)]):
        (tmp_path / str(at)).mkdir()
        values = {"name": f"m_{peak}gb", "budget": f"{peak}gb", "device": "h100", "micro_batch": 4, "state_bytes": 1}
        values |= {"peak_bytes": peak * GIB, "risk": risk, "samples_per_s": rate}
        (tmp_path / str(at) / "plan.json").write_text(json.dumps(values))
        (tmp_path / str(at) / "config.yaml").write_text(f"optim: {{lr: {at}}}")
    assert [(p["budget"], p["dominated"]) for p in read_plans(tmp_path)] == [
        ("8gb", False),
        ("12gb", True),
        ("16gb", False),
    ]
    assert write_planned_frontier(tmp_path).name == "planned.csv"
    said = capsys.readouterr().out
    assert "Planned frontier" in said and "optim.lr=2" in said


def test_fake_tensors_are_probed_as_real_ones_are():
    """The same network, on fake tensors and on real ones, under autocast: the same bytes at every moment."""
    from torch._subclasses.fake_tensor import FakeTensorMode

    from baoc.training.measure.absent_card import fake_, fake_batch

    def probe(net: torch.nn.Module, batch: torch.Tensor, *, warm: bool = True):
        def loss() -> torch.Tensor:
            with torch.autocast("cpu", dtype=torch.bfloat16):
                return net(batch).float().square().mean()

        return probe_footprint(net, run_micro_batch=loss, warm=warm)

    net = torch.nn.Sequential(torch.nn.Linear(32, 64), torch.nn.GELU(), torch.nn.Linear(64, 8))
    batch = torch.randn(4, 32)
    real = probe(net, batch)
    with FakeTensorMode(allow_non_fake_inputs=True):
        fake_(net)
        fake, cold = (probe(net, fake_batch(batch), warm=warm) for warm in (True, False))
    assert fake == real
    assert cold.forward_backward_bytes == real.forward_backward_bytes and cold.resident_bytes == real.resident_bytes
    assert cold.intervals[2:] == real.intervals[2:]  # the batch is first seen in the second


def test_a_plan_leaves_open_what_a_run_of_it_would_decide():
    """Else the least budget of a plan were that of an option which no run of the same command takes."""
    network = torch.nn.Module()
    network.checkpoint_units = [torch.nn.Linear(2, 2)]
    task = cast(Task, SimpleNamespace(model=network))
    asked_for = partial(config, mode="plan", device="h100", budget=parse_budget("8gb"))
    decided = planned_axes(asked_for(), task=task)
    assert decided.recomputed == (0, decided.num_layers) and decided.release == (False, True)
    pinned = planned_axes(asked_for(micro_batch=32), task=task)
    assert (pinned.micro_batches, pinned.recomputed, pinned.release) == ((32,), (0,), (False,))
    wanted = asked_for(micro_batch=32, optim=OptimConfig(release_gradients=True), model=ModelConfig(checkpointing=True))
    assert (planned_axes(wanted, task=task).recomputed, planned_axes(wanted, task=task).release) == (
        (1,),
        (True,),
    )


@pytest.mark.parametrize("accumulation", [1, 2])
def test_one_recorded_pass_tells_what_an_allocator_holds_after_two(accumulation: int):
    """Gradients of a first pass lie among its activations: what is reserved is more than what is ever held."""
    from torch._subclasses.fake_tensor import FakeTensorMode

    from baoc.profiling.cuda_emulation import LARGE_PAGE, CachingAllocator
    from baoc.training.measure.absent_card import fake_

    net = torch.nn.Sequential(*[torch.nn.Linear(2048, 2048) for _ in range(3)], torch.nn.Linear(2048, 20_000))
    with FakeTensorMode(allow_non_fake_inputs=True):
        fake_(net)
        batch = torch.empty(1024, 2048)

        def loss() -> torch.Tensor:
            with torch.autocast("cpu", dtype=torch.bfloat16):
                return torch.log_softmax(net(batch).float(), dim=-1).square().mean()

        probe = partial(probe_footprint, net, run_micro_batch=loss, accumulation=accumulation)
        twice, once = (probe(warm=warm, allocator=CachingAllocator()).forward_backward_bytes for warm in (True, False))
        held = probe(warm=False).forward_backward_bytes
    assert abs(once - twice) <= LARGE_PAGE and once > held + 3 * LARGE_PAGE
