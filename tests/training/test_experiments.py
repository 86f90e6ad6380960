"""One experiment of each kind is stepped, small and on a CPU; all of them compose in tests/golden."""

import json
from pathlib import Path

import pytest

from baoc.config import assets
from baoc.config.compose import compose
from baoc.config.from_hydra import from_hydra
from baoc.config.schema import RunConfig
from baoc.training import run as train
from tests.support.experiment_words import OF_MODEL, SMALL

pytestmark = pytest.mark.slow
# Each task, each allocator and each kind of budget once; the others differ from one of these by a size.
STEPPED = (
    *("digits_state_25_random", "language_state_25_uniform", "diffusion_state_25"),
    *("vit_l16_8gb", "llama_350m_8gb", "dit_xl2_16gb"),
)
OF_DATASET = {
    "synthetic_images": ["dataset.num_samples=64", "dataset.num_classes=8", "dataset.image_size=16"],
    "random_latents": ["dataset.num_samples=64", "dataset.num_classes=8", "dataset.val_fraction=0.2"],
}


def small(name: str) -> RunConfig:
    asked = from_hydra(compose([f"experiments={name}"]))
    overrides = [*OF_MODEL[asked.model.name], *OF_DATASET.get(asked.dataset.name, [])]
    if asked.model.compile is True:
        overrides.append("model.compile=false")  # a CPU compiles a layer for half a minute
    if asked.micro_batch is not None:
        overrides.append("micro_batch=4")
    if asked.dataset.options.get("tokenizer", "bytes") != "bytes":
        overrides += ["dataset.tokenizer=bytes", "dataset.sequence_length=32"]
    return from_hydra(compose([f"experiments={name}", *SMALL, *overrides]))


@pytest.mark.parametrize("name", STEPPED)
def test_an_experiment_takes_its_steps_and_is_judged(name: str, tmp_path: Path):
    config = small(name)
    result = train.run(config, run_dir=tmp_path, command=f"python run.py experiments={name}")
    assert result is not None
    assert (result.num_steps, result.budget_met, result.allocator) == (3, True, config.allocator.name)
    assert result.quality.name in result.metrics
    assert json.loads((tmp_path / "result.json").read_text())["task"] == config.task.name


def test_each_experiment_is_in_the_table_of_experiments():
    text = (assets.root() / "experiments" / "README.md").read_text(encoding="utf-8")
    assert [name for name in assets.option_files("experiments") if f"`{name}`" not in text] == []
