"""One run, whole: what it leaves, that its promises are measured, and that the same command gives the same numbers."""

import csv
import json
import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any

import lightning as L
import pytest
from torch.utils._python_dispatch import _get_current_dispatch_mode

from baoc.config.schema import AllocatorConfig, ModelConfig, RiskConfig, TaskConfig
from baoc.core.budgets import parse_budget
from baoc.errors import BadInputError, CheckpointError, InfeasibleBudgetError, TrainingFailedError
from baoc.training import run as training
from baoc.training import trainer as assembly
from baoc.types import RunResult
from tests.support.training_runs import EVERY_STEP, config, logged, run

pytestmark = pytest.mark.slow
REQUIRED = {
    *("task", "model", "num_params", "budget_bytes", "budget_met", "binding", "least_feasible_bytes", "peak_bytes"),
    *("state_bytes", "state_bytes_predicted", "state_bytes_adamw", "step_ms", "samples_per_s", "quality", "risk_total"),
    *("allocation_gap", "num_reallocations", "seed", "commit", "versions"),
}
LEFT = {
    *("allocation.json", "blocks.json", "candidates.csv", "footprint.json", "frontier.csv", "latency.json"),
    *("metrics.jsonl", "profile.json", "reallocations.jsonl", "result.json"),
}


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, RunResult]:
    run_dir = tmp_path_factory.mktemp("outputs") / "day" / "whole"
    return run_dir, run(run_dir)


def test_every_value_of_the_run_is_left_and_the_budget_is_measured(whole):
    run_dir, result = whole
    assert {p.name for p in run_dir.iterdir()} >= LEFT
    written = json.loads((run_dir / "result.json").read_text())
    assert set(written) >= REQUIRED
    assert written["budget"]["kind"] == "state_fraction" and written["binding"] and written["budget_met"]
    assert result.state_bytes == result.state_bytes_predicted <= 0.25 * result.state_bytes_adamw
    assert 0.95 * result.peak_bytes_predicted <= result.peak_bytes <= result.peak_bytes_predicted
    assert result.num_steps == 14 and result.quality.name == "val/loss"
    event = json.loads((run_dir / "reallocations.jsonl").read_text())
    assert event["step"] == 6 and event["accepted"] == bool(event["moves"])
    with (run_dir / "candidates.csv").open() as file:
        rows = list(csv.DictReader(file))
    chosen = json.loads((run_dir / "allocation.json").read_text())["choices"]
    assert {(r["block"], r["spec"]) for r in rows} >= set(chosen.items())


def test_the_same_run_twice_is_the_same_bit_for_bit(whole, tmp_path):
    again = run(tmp_path / "day" / "again")
    assert logged(tmp_path / "day" / "again") == logged(whole[0])
    assert again.quality == whole[1].quality


def test_stopped_and_resumed_it_is_the_same_run(whole, tmp_path, monkeypatch):
    """At the reallocation of step 6; in mid-epoch, with dropout on. Other moments: test_budget_control."""

    class Killed(Exception):
        pass

    class Kill(L.Callback):
        def on_train_batch_start(self, trainer: L.Trainer, *_: Any) -> None:
            if trainer.global_step == 6:
                raise Killed

    run_dir = tmp_path / "day" / "cut"
    monkeypatch.setattr(assembly, "RunProgress", Kill)
    with pytest.raises(Killed):
        run(run_dir, trainer=replace(config().trainer, enable_progress_bar=True), checkpoint=EVERY_STEP)
    monkeypatch.undo()
    resumed = run(run_dir, resume="auto", checkpoint=EVERY_STEP)
    assert logged(run_dir) == logged(whole[0])
    assert resumed.quality == whole[1].quality
    assert resumed.num_reallocations == whole[1].num_reallocations
    events = [json.loads(line) for line in (run_dir / "reallocations.jsonl").read_text().splitlines()]
    assert [event["step"] for event in events] == [6]


@pytest.mark.parametrize("missing", ["result.json", "frontier.csv"])
def test_a_run_that_was_killed_between_its_last_step_and_its_end_only_makes_that(whole, tmp_path, capsys, missing):
    run_dir = tmp_path / "day" / "late"
    shutil.copytree(whole[0], run_dir)
    (run_dir / missing).unlink()
    capsys.readouterr()
    late = run(run_dir, resume="auto")
    assert (run_dir / missing).is_file()
    assert "steps are done: only the result is still to be made" in " ".join(capsys.readouterr().out.split())
    assert logged(run_dir) == logged(whole[0])
    for name in ("quality", "num_steps", "peak_bytes", "peak_bytes_predicted", "state_bytes", "budget_met"):
        assert getattr(late, name) == getattr(whole[1], name), name
    assert late.peak_bytes > 0, "of the attempt that trained"
    assert _get_current_dispatch_mode() is None, "nothing is tracked once a run is over"
    with pytest.raises(BadInputError, match="nothing is left to train"):
        run(run_dir, resume="auto")


def test_a_memory_budget_that_does_not_bind_is_adamw_throughout(tmp_path):
    result = run(tmp_path / "day" / "free", budget=parse_budget("8gb"))
    assert not result.binding and result.budget_met and result.num_reallocations == 0
    assert result.state_bytes == result.state_bytes_adamw
    assert 0.97 * result.peak_bytes_predicted <= result.peak_bytes <= result.peak_bytes_predicted


@pytest.mark.parametrize("name", ["lagrangian", "random", "uniform_signum8bit"])
def test_other_allocators_run_inside_the_budget(tmp_path, name):
    steps = replace(config().trainer, max_steps=7)
    result = run(tmp_path / "day" / name, allocator=AllocatorConfig(name=name), trainer=steps)
    assert result.budget_met and result.allocator == name


def test_accumulation_and_bf16(tmp_path):
    result = run(
        tmp_path / "day" / "bf16",
        risk=RiskConfig(name="statistics"),
        micro_batch=16,
        trainer=replace(config().trainer, precision="bf16-mixed", max_steps=8, val_check_interval=16),
    )
    assert result.budget_met and result.num_steps == 8
    profile = json.loads((tmp_path / "day" / "bf16" / "profile.json").read_text())
    assert profile["stats"]


def test_plan_and_eval(tmp_path, whole):
    plan_dir = tmp_path / "day" / "plan"
    plan_dir.mkdir(parents=True)
    assert training.run(config(mode="plan"), run_dir=plan_dir, command="") is None
    assert (plan_dir / "allocation.json").exists() and not (plan_dir / "result.json").exists()
    eval_dir = tmp_path / "day" / "eval"
    eval_dir.mkdir()
    path = str(whole[0] / "checkpoints" / "last.ckpt")
    assert training.run(config(mode="eval", resume=path), run_dir=eval_dir, command="") is None
    values = json.loads((eval_dir / "eval.json").read_text())
    assert values["val/loss"] == pytest.approx(whole[1].quality.value, rel=1e-6)


def test_a_run_that_diverges_fails_and_says_so(tmp_path):
    broken = replace(config().optim, lr=1e12)
    with pytest.raises(TrainingFailedError, match=r"lower optim\.lr"):
        run(tmp_path / "day" / "broken", optim=broken, trainer=replace(config().trainer, gradient_clip_val=None))


# -- what a fresh reader broke once -----------------------------------------------------------------------------------


def test_a_finished_run_is_not_resumed(whole, tmp_path):
    with pytest.raises(BadInputError, match=r"is of step 14 and trainer.max_steps=14: nothing is left to train"):
        run(tmp_path / "day" / "more", resume=str(whole[0]))


def test_a_checkpoint_of_another_model_is_refused(whole, tmp_path):
    longer = replace(config().trainer, max_steps=20)
    with pytest.raises(CheckpointError, match=r"the checkpoint is of another model.*Missing key.{,200} \.\.\.\); res"):
        run(tmp_path / "day" / "other", resume=str(whole[0]), trainer=longer, model=ModelConfig(size="mini"))


def test_a_checkpoint_with_a_position_in_other_data_is_refused(whole, tmp_path):
    longer = replace(config().trainer, max_steps=20, overfit_batches=1)
    with pytest.raises(CheckpointError, match=r"this run's loader takes none: .*trainer.overfit_batches too"):
        run(tmp_path / "day" / "overfit", resume=str(whole[0]), trainer=longer)


def test_a_resumed_run_says_what_stays_and_predicts_its_own_peak(whole, tmp_path, caplog):
    longer = replace(config().trainer, max_steps=20)
    result = run(tmp_path / "day" / "on", resume=str(whole[0]), trainer=longer, optim=replace(config().optim, lr=0.1))
    assert "the checkpoint's settings of the optimizer go on: lr=0.003, not 0.1" in caplog.text
    assert "the training goes on with other settings" not in caplog.text
    assert 0.97 * result.peak_bytes_predicted <= result.peak_bytes <= result.peak_bytes_predicted


def test_a_resumed_run_says_which_settings_of_the_training_are_others(whole, tmp_path, caplog):
    """Those that loading refuses, such as another number of samples, and those of the optimizer are told elsewhere."""
    given = config()
    trainer = replace(given.trainer, max_steps=16, precision="bf16-mixed", gradient_clip_val=0.5, log_every_n_steps=3)
    run(
        tmp_path / "day" / "on",
        resume=str(whole[0]),
        trainer=trainer,
        micro_batch=16,
        task=TaskConfig(options={"label_smoothing": 0.1}),
        dataset=replace(given.dataset, options={"split_seed": 1}),
        optim=replace(given.optim, schedule="constant", weight_decay=0.2),
        checkpoint=replace(given.checkpoint, keep=2),
    )
    (told,) = (line for line in caplog.messages if line.startswith("the training goes on with other settings than"))
    assert told.partition(": ")[2].split("; ") == [
        "task.label_smoothing null -> 0.1", "dataset.split_seed null -> 1",
        "trainer.precision 32-true -> bf16-mixed", "trainer.gradient_clip_val 1.0 -> 0.5",
        "optim.schedule cosine -> constant", "accumulation 1 -> 2",
    ]  # fmt: skip
    assert "go on: weight_decay=0.01, not 0.2" in caplog.text


def test_a_step_time_that_cannot_be_met_is_told_as_a_ratio(tmp_path):
    with pytest.raises(InfeasibleBudgetError, match=r"step_time=0.01 cannot be met.* times .* Give budget.step_time="):
        run(tmp_path / "day" / "fast", budget=parse_budget({"state_fraction": 0.5, "step_time": 0.01}))
