"""A small sample of experiments/benchmarks/kill_tries.py: `kill -9` at random moments, and on to the same end."""

from pathlib import Path

import pytest

from tests.support.commands import start_script
from tests.support.paths import ROOT

pytestmark = pytest.mark.slow


def test_a_killed_run_leaves_all_it_needs(tmp_path: Path) -> None:
    script = ROOT / "experiments" / "benchmarks" / "kill_tries.py"
    code, told = start_script(script, "--tries", "1", "--seed", "1", "--out", str(tmp_path), folder=tmp_path).done()
    assert code == 0, told
    assert "1 tries, " in told and ", 0 with faults" in told
    assert len((tmp_path / "kill_tries.csv").read_text().splitlines()) == 2
