"""One command over models of three tasks: each trains on what it brings along, and is compared with its like only."""

import csv
from pathlib import Path

import pytest

pytestmark = pytest.mark.slow

ARGUMENTS = [
    *("-m", "model=vit,llama,dit", "budget=state_25", "debug=fast_dev", "device=cpu"),
    *("trainer.enable_progress_bar=false", "checkpoint.export=false", "hydra.sweep.dir=sweep"),
]


def test_three_tasks_in_one_multirun_have_a_frontier_each(run_python, tmp_path: Path):
    code = (
        "import sys\nfrom baoc.cli.main import main\nfrom baoc.tasks import conclusion\n"
        "conclusion.AFFORDABLE_ON_CPU = 0  # no samples: most of the time, and not asked about here\n"
        f"sys.exit(main({ARGUMENTS!r}))"
    )
    done = run_python(code, cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    assert len(list(tmp_path.glob("sweep/*/result.json"))) == 3
    for title in ("vision, vit, digits", "language, llama, pysource", "diffusion, dit, digits"):
        assert f"Frontier of {title}" in done.stdout
    with (tmp_path / "sweep" / "frontier.csv").open() as file:
        rows = list(csv.DictReader(file))
    told = [(row["task"], row["model"], row["label"]) for row in rows]
    assert sorted(told) == [
        ("diffusion", "dit", "budget=state_25"),
        ("language", "llama", "budget=state_25"),
        ("vision", "vit", "budget=state_25"),
    ]
