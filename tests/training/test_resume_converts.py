"""A checkpoint resumed on another budget, catalogue or cut into blocks: states are converted, and that is said."""

import json
import re
from pathlib import Path
from typing import Any

import lightning as L
import pytest
import torch
from torch import nn

from baoc import BaocOptimizer, BaocStrategy
from baoc.config.schema import BlocksConfig, CatalogueConfig, ReallocationConfig
from baoc.core.budgets import parse_budget
from baoc.tracking.checkpoints import load_checked
from baoc.types import RunResult
from tests.support.classifier import QUIET, Classifier, loader
from tests.support.training_runs import EVERY_STEP, run

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def done(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run whose checkpoints are of every step: before, at and after the reallocation of step 6."""
    folder = tmp_path_factory.mktemp("outputs") / "day" / "done"
    run(folder, checkpoint=EVERY_STEP)
    return folder / "checkpoints"


def go_on(done: Path, run_dir: Path, *, step: int, **changes: Any) -> tuple[RunResult, dict[str, Any] | None]:
    """The result, and the event that tells of the conversion."""
    assert load_checked(done / f"step_{step:08d}.ckpt")["global_step"] == step
    result = run(run_dir, resume=str(done / f"step_{step:08d}.ckpt"), **changes)
    path = run_dir / "reallocations.jsonl"
    told = [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []
    assert sum(event["trigger"] == "resume" for event in told) <= 1
    return result, next((event for event in told if event["trigger"] == "resume"), None)


def test_nothing_is_said_where_nothing_changed(done: Path, tmp_path: Path) -> None:
    assert go_on(done, tmp_path / "day" / "on", step=7)[1] is None


@pytest.mark.parametrize(
    ("step", "budget", "share"),
    [
        (3, "state_10", (0.0, 0.1)),
        (6, "state_50", (0.4, 0.5)),
        (10, "state_50", (0.4, 0.5)),
    ],
)
def test_another_budget(
    done: Path, tmp_path: Path, step: int, budget: str, share: tuple[float, float], capsys: pytest.CaptureFixture[str]
) -> None:
    result, event = go_on(done, tmp_path / "day" / "on", step=step, budget=parse_budget(budget))
    low, high = share
    assert low * result.state_bytes_adamw <= result.state_bytes <= high * result.state_bytes_adamw
    assert event is not None and (event["step"], event["accepted"]) == (step, True)
    assert event["why"] == f"the budget was state_25, is {budget}"
    assert event["moves"] and all(move["kept"] for move in event["moves"])
    assert 0.2 < event["state_bytes_before"] / result.state_bytes_adamw <= 0.25, "what the checkpoint held"
    change = sum(move["bytes_after"] - move["bytes_before"] for move in event["moves"])
    assert event["state_bytes_after"] - event["state_bytes_before"] == pytest.approx(change, abs=64)
    told = " ".join(capsys.readouterr().out.split())
    moved = f"{len(event['moves'])} block{'s' * (len(event['moves']) > 1)} moved"
    assert f"step {step}, reallocation (resume): {moved}; the budget was state_25" in told
    assert result.num_steps == 14 and result.quality.value < 2.6


def test_another_catalogue(done: Path, tmp_path: Path) -> None:
    saved = load_checked(done / "step_00000009.ckpt")["optimizer_states"][0]["online"]["choices"]
    gone = sorted(set(saved.values()))[0]
    specs = tuple(sorted({"adamw_bf16", "lion_int8", "sign", *saved.values()} - {gone}))
    changes = {"catalogue": CatalogueConfig(specs=specs, keep_fp32_roles=())}
    result, event = go_on(done, tmp_path / "day" / "on", step=9, **changes)
    assert event is not None and f"the catalogue no longer has {gone}" in event["why"]
    assert {move["source"] for move in event["moves"]} >= {gone}
    assert result.num_steps == 14


def test_another_place_is_said(done: Path, tmp_path: Path) -> None:
    saved = load_checked(done / "step_00000009.ckpt")["optimizer_states"][0]["online"]["choices"]
    specs = tuple(sorted({f"{spec}@streamed" for spec in saved.values()}))
    result, event = go_on(done, tmp_path / "day" / "on", step=9, catalogue=CatalogueConfig(specs=specs))
    assert event is not None and re.match(r"\d blocks keep the same states in another place, such as", event["why"])
    assert event["state_bytes_after"] == result.state_bytes < event["state_bytes_before"]


@pytest.mark.parametrize(("step", "decided"), [(4, [7]), (9, [])])
def test_another_cut_into_blocks(done: Path, tmp_path: Path, step: int, decided: list[int]) -> None:
    """In warm-up, where a profile is being gathered anew, and after one was used."""
    changes = {
        "blocks": BlocksConfig(patterns=(("layers", "*attention*"),)),
        "reallocation": ReallocationConfig(mode="once", warmup_steps=3),
    }
    result, event = go_on(done, tmp_path / "day" / "on", step=step, **changes)
    assert event is not None and "parameters were cut into" in event["why"]
    assert "statistics of gradients start anew" in event["why"]
    told = [json.loads(line) for line in (tmp_path / "day" / "on" / "reallocations.jsonl").read_text().splitlines()]
    assert [event["step"] for event in told[1:]] == decided, "once a run, and not before three steps were seen"
    assert result.num_steps == 14


@pytest.mark.filterwarnings("ignore:.*dataloader is not resumable.*")
@pytest.mark.parametrize(
    ("first", "then", "note"),
    [
        ("state_10", "unlimited", "the budget was state_10, is unlimited"),
        ("state_50", "state_10", "the budget was state_50, is state_10"),
        ("state_25", {"state_fraction": 0.25, "host_memory": 2**20}, "was state_25, is state_25 host_memory=1048576"),
        ("state_25", "state_25", ""),
    ],
)
@pytest.mark.parametrize("door", ["loop", "strategy"])
def test_another_budget_is_planned_for_anew_through_every_door(
    door: str, first: str, then: Any, note: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """A larger one too, which the saved allocation would meet; run.py: `test_another_budget`."""

    def optimizer(budget: Any, *, steps: int, resumed: bool = False) -> Any:
        module = Classifier()
        if door == "strategy":
            strategy = BaocStrategy(budget)
            trainer = L.Trainer(strategy=strategy, max_steps=steps, **QUIET)
            trainer.fit(module, loader(), ckpt_path=str(tmp_path / "half") if resumed else None)
            if not resumed:
                trainer.save_checkpoint(tmp_path / "half")
            return strategy.reallocator.optimizer
        made = BaocOptimizer(module, budget=budget)
        if resumed:
            made.load_state_dict(torch.load(tmp_path / "half", weights_only=True))
        for inputs, labels in list(loader())[:1]:
            nn.functional.cross_entropy(module.net(inputs), labels).backward()
            made.step()
        if not resumed:
            torch.save(made.state_dict(), tmp_path / "half")
        return made

    optimizer(first, steps=1)
    capsys.readouterr()
    specs = optimizer(then, steps=2, resumed=True).specs
    told = " ".join(capsys.readouterr().out.split())
    assert note in told and ("the budget was" in told) == bool(note)
    (tmp_path / "half").unlink()
    assert specs == optimizer(then, steps=1).specs
