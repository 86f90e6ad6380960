"""Rows of mutants whose function is gone are dropped, and that is said."""

import csv
from pathlib import Path

from experiments.benchmarks.mutants import FIELDS, record


def test_rows_of_a_renamed_function_are_told(tmp_path: Path, capsys):
    path, module = tmp_path / "mutants_all.csv", "baoc/core/statistics.py"

    def row(function: str, status: str, of: str = module) -> dict[str, str]:
        return dict.fromkeys(FIELDS, "") | {"module": of, "mutant": f"baoc.x_{function}__mutmut_1", "status": status}

    record(
        [row("half_interval", "survived"), row("no_longer", "killed"), row("f", "killed", "baoc/no.py")], path, only="*"
    )
    assert capsys.readouterr().out == ""
    record([row("half_interval", "killed")], path, only="*")
    with path.open(newline="") as file:
        assert [(kept["mutant"], kept["status"]) for kept in csv.DictReader(file)] == [
            ("baoc.x_half_interval__mutmut_1", "killed")
        ]
    assert [line.partition(" is gone")[0] for line in capsys.readouterr().out.splitlines()] == [
        f"{module}: no_longer",
        "baoc/no.py: f",
    ]
