"""A study whose workers are jobs of Hydra's joblib and submitit launchers, with the whole command around it."""

from pathlib import Path

import optuna
import pytest

from tests.support.commands import start, start_script

pytestmark = pytest.mark.slow

WORDS = [
    "sweeps=frontier_vision",
    "hydra.sweeper.n_trials=2",
    "hydra.sweeper.early_stop=null",
    "trainer.max_steps=2",
    "trainer.val_check_interval=2",
    "reallocation.warmup_steps=2",
    "device=cpu",
    "trainer.enable_progress_bar=false",
]


# Joblib ends its workers as the interpreter ends, which a fork does not.
WITH_JOBLIB = """
import sys
from joblib.externals.loky import get_reusable_executor
from baoc.cli.main import main
code = main(sys.argv[1:])
get_reusable_executor().shutdown()
sys.exit(code)
"""


def test_workers_of_joblib_share_a_study_whose_failures_are_told_with_the_reason(tmp_path: Path):
    (script := tmp_path / "run.py").write_text(WITH_JOBLIB)
    words = (*WORDS, "hydra.sweeper.workers=2", "hydra.sweeper.retries=0", "dataset.path=nowhere.npz")
    words += ("hydra/launcher=joblib", f"hydra.sweep.dir={tmp_path / 'study'}")
    code, told = start_script(script, "-m", *words, folder=tmp_path / "log").done()
    assert code == 5, told
    assert "all 2 ended trials of study frontier_vision failed; the last failed:" in told
    assert "nowhere.npz does not exist" in told and (tmp_path / "study" / "workers" / "1").is_dir()


def test_a_worker_of_submitit_trains_a_study(tmp_path: Path):
    words = (*WORDS, "hydra/launcher=submitit_local", f"hydra.sweep.dir={tmp_path}")
    code, told = start("-m", *words, folder=tmp_path).done()
    assert code == 0, told
    study = optuna.load_study(study_name="frontier_vision", storage=f"sqlite:///{tmp_path / 'study.db'}")
    assert [trial.state.name for trial in study.trials] == ["COMPLETE", "COMPLETE"]
    assert (tmp_path / "frontier.html").is_file() and (tmp_path / "workers" / "0").is_dir()
    assert "trainer.max_steps=2" in study.trials[0].user_attrs["words"]
