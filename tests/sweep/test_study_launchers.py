"""A study whose workers are jobs of Hydra's joblib and submitit launchers, with the whole command around it."""

from pathlib import Path

import optuna
import pytest

pytestmark = pytest.mark.slow

WORDS = [
    "sweeps=frontier_vision",
    "hydra.sweeper.n_trials=2",
    "hydra.sweeper.workers=2",
    "hydra.sweeper.early_stop=null",
    "trainer.max_steps=2",
    "trainer.val_check_interval=2",
    "reallocation.warmup_steps=2",
    "device=cpu",
    "trainer.enable_progress_bar=false",
]


@pytest.mark.parametrize("launcher", ["joblib", "submitit_local"])
def test_launched_workers_share_a_study(launcher: str, tmp_path: Path, run_python):
    done = run_python("run.py", "-m", *WORDS, f"hydra/launcher={launcher}", f"hydra.sweep.dir={tmp_path}")
    assert done.returncode == 0, done.stderr + done.stdout
    study = optuna.load_study(study_name="frontier_vision", storage=f"sqlite:///{tmp_path / 'study.db'}")
    assert [trial.state.name for trial in study.trials] == ["COMPLETE", "COMPLETE"]
    assert (tmp_path / "frontier.html").is_file() and (tmp_path / "workers" / "1").is_dir()
    assert "trainer.max_steps=2" in study.trials[0].user_attrs["words"]
