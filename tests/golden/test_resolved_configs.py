"""Resolved configurations as files: a changed default shows up in review as a changed golden file.

After a wanted change: `python -m tests.golden.test_resolved_configs` writes them anew.
"""

from pathlib import Path

import pytest

from baoc.config import assets
from baoc.config.compose import compose
from baoc.config.from_hydra import from_hydra, write_config
from baoc.config.resolve import resolve

FOLDER = Path(__file__).resolve().parent
CASES: dict[str, list[str]] = {
    "default": [],
    "state_25": ["budget=state_25", "budget.step_time=1.2", "logger=wandb", "micro_batch=16"],
    **{f"experiment_{name}": [f"experiments={name}"] for name in assets.option_files("experiments")},
}


@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=[pytest.mark.slow] * name.startswith("experiment_")) for name in CASES]
)
def test_a_configuration_is_what_its_golden_file_says(name: str, tmp_path: Path):
    config = from_hydra(compose(CASES[name]))
    write_config(config, path=tmp_path / "config.yaml")
    assert (tmp_path / "config.yaml").read_text() == (FOLDER / f"{name}.yaml").read_text()
    assert resolve(config, device="cpu").config.name == config.name


def test_no_golden_file_is_left_over():
    assert {file.stem for file in FOLDER.glob("*.yaml")} == set(CASES)


if __name__ == "__main__":
    for case, overrides in CASES.items():
        write_config(from_hydra(compose(overrides)), path=FOLDER / f"{case}.yaml")
