"""A study that a script starts without `if __name__ == "__main__"`: its trials must not start the script again."""

from pathlib import Path

import pytest

pytestmark = pytest.mark.slow

SCRIPT = """
from baoc.sweep.study import run_study
from baoc.sweep.study_config import read_study
CODE = "import json, sys; words = dict(w.split('=', 1) for w in sys.argv[1:]); " \\
    "json.dump({'quality': {'value': 1.0}, 'state_bytes': 1}, open(words['hydra.run.dir'] + '/result.json', 'w'))"
given = {"name": "s", "objectives": {"quality": "minimize"}, "space": {"x": {"choices": [1, 2]}}, "n_trials": 2}
study = run_study(read_study(given), folder="study", code=CODE)
print([trial.state.name for trial in study.trials])
"""


def test_a_script_without_a_guard_runs_its_study_once(tmp_path: Path, run_python):
    (tmp_path / "script.py").write_text(SCRIPT)
    done = run_python("script.py", cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    assert done.stdout.splitlines()[-1] == "['COMPLETE', 'COMPLETE']"
