"""A diffusion run under a budget: averages count towards the predicted and measured peak, and are what comes out."""

import json
from pathlib import Path
from typing import Any

import lightning as L
import pytest
import torch
from safetensors.torch import load_file

from baoc import BaocStrategy
from baoc.config.schema import CatalogueConfig, ModelConfig, ReallocationConfig, RunConfig, TaskConfig, TrainerConfig
from baoc.core.budgets import parse_budget
from baoc.data import build_data
from baoc.models import build_model
from baoc.planning.planner import PlannerSettings
from baoc.tasks import build_task
from baoc.tracking.checkpoints import load_checked
from baoc.training import run as training
from baoc.training.session import SessionSettings
from baoc.types import RunResult
from tests.support.tiny import tiny_trainer

pytestmark = pytest.mark.slow


def run(run_dir: Path, **options: Any) -> RunResult:
    run_dir.mkdir(parents=True)
    config = RunConfig(
        name="test",
        device="cpu",
        batch_size=32,
        budget=parse_budget("state_50"),
        model=ModelConfig(name="dit"),
        task=TaskConfig(name="diffusion", options={"sample_steps": 2, "num_samples": 10, **options}),
        catalogue=CatalogueConfig(specs=("adamw", "adamw_int8", "signum")),  # few: each is tried for its temporaries
        reallocation=ReallocationConfig(mode="off"),
        trainer=TrainerConfig(
            max_steps=6,
            gradient_clip_val=1.0,
            enable_progress_bar=False,
            num_sanity_val_steps=0,
            log_every_n_steps=1,
            enable_model_summary=False,
        ),
    )
    result = training.run(config, run_dir=run_dir, command="python run.py")
    assert result is not None
    return result


def test_averages_count_and_come_out(tmp_path):
    peaks = {}
    for decay in (0.0, 0.9999):
        folder = tmp_path / str(decay)
        result = run(folder, ema_decay=decay)
        footprint = json.loads((folder / "footprint.json").read_text())
        assert footprint["ema_bytes"] == (4 * 328_964 if decay else 0)
        assert 0.97 * result.peak_bytes_predicted <= result.peak_bytes <= result.peak_bytes_predicted
        peaks[decay] = result.peak_bytes
        assert (folder / "samples.png").is_file()
        assert result.quality.name == "val/mse"
    assert peaks[0.9999] - peaks[0.0] == pytest.approx(4 * 328_964, rel=0.02)
    averages = load_checked(tmp_path / "0.9999" / "checkpoints" / "last.ckpt")["callbacks"]["EmaWeights"]["averages"]
    exported = load_file(tmp_path / "0.9999" / "model" / "model.safetensors")
    for name, average in averages.items():
        assert torch.equal(exported[name.removeprefix("model.")], average)


class ExactAverage(L.Callback):
    """Averages the float32 numbers that the optimizer says its weights stand for, by the formula."""

    def __init__(self):
        self.average: dict[str, torch.Tensor] = {}
        self.steps = 0

    def on_train_start(self, trainer, pl_module):
        self.average = {name: p.detach().float().clone() for name, p in pl_module.named_parameters()}

    def on_train_batch_end(self, trainer, pl_module, outputs, batch, batch_idx):
        weights = trainer.optimizers[0].export_weights()
        decay = (1 + self.steps) / (10 + self.steps)
        self.steps += 1
        for name, average in self.average.items():
            average.lerp_(weights[name], 1 - decay)


def test_averages_of_split_weights_are_of_what_they_stand_for():
    data = build_data("digits", task="diffusion", batch_size=32)
    task = build_task("diffusion", model=build_model("dit", spec=data.spec, seed=0), spec=data.spec)
    planner = PlannerSettings(specs=("adamw_int8+split8",), keep_fp32_roles=())
    settings = SessionSettings(planner=planner, reallocation=ReallocationConfig(mode="off"))
    exact = ExactAverage()
    trainer = tiny_trainer(
        strategy=BaocStrategy("unlimited", settings=settings), max_steps=4, precision="bf16-mixed", callbacks=[exact]
    )
    trainer.fit(task, data)
    assert {p.dtype for p in task.parameters()} == {torch.bfloat16}
    assert task.ema is not None and task.ema.num_updates == 4
    for name, average in task.ema.averages.items():
        torch.testing.assert_close(average, exact.average[name], atol=1e-6, rtol=1e-5)
