"""A small sample of experiments/benchmarks/kill_tries.py: `kill -9` at random moments, and on to the same end."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.support.paths import ROOT
from tests.support.waiting import PATIENCE_S

pytestmark = pytest.mark.slow


def test_a_killed_run_leaves_all_it_needs(tmp_path: Path) -> None:
    script = ROOT / "experiments" / "benchmarks" / "kill_tries.py"
    command = [sys.executable, str(script), "--tries", "1", "--seed", "1", "--out", str(tmp_path)]
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=PATIENCE_S)
    assert done.returncode == 0, done.stdout + done.stderr[-2000:]
    assert "1 tries, " in done.stdout and ", 0 with faults" in done.stdout
    assert len((tmp_path / "kill_tries.csv").read_text().splitlines()) == 2
