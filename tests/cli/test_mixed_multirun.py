"""One command over models of three tasks: each trains on what it brings along, and is compared with its like only."""

import csv
from pathlib import Path

import pytest

from baoc.cli.main import main
from baoc.tasks import sample_grid

pytestmark = pytest.mark.slow

ARGUMENTS = [
    *("-m", "model=vit,llama,dit", "budget=state_25", "debug=fast_dev", "device=cpu"),
    *("trainer.enable_progress_bar=false", "checkpoint.export=false", "hydra.sweep.dir=sweep"),
]


@pytest.mark.usefixtures("own_logging")
def test_three_tasks_in_one_multirun_have_a_frontier_each(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sample_grid, "AFFORDABLE_ON_CPU", 0)  # no samples: most of the time, and not asked about here
    assert main(ARGUMENTS) == 0
    told = capsys.readouterr().out
    assert len(list(tmp_path.glob("sweep/*/result.json"))) == 3
    for title in ("vision, vit, digits", "language, llama, pysource", "diffusion, dit, digits"):
        assert f"Frontier of {title}" in told
    with (tmp_path / "sweep" / "frontier.csv").open() as file:
        rows = list(csv.DictReader(file))
    found = [(row["task"], row["model"], row["label"]) for row in rows]
    assert sorted(found) == [
        ("diffusion", "dit", "budget=state_25"),
        ("language", "llama", "budget=state_25"),
        ("vision", "vit", "budget=state_25"),
    ]
