"""What a fresh reader broke once: each stays mended."""

from dataclasses import replace
from pathlib import Path

import pytest

from baoc.config.schema import ModelConfig
from baoc.core.budgets import parse_budget
from baoc.errors import BadInputError, CheckpointError, InfeasibleBudgetError
from tests.support.training_runs import config, run

pytestmark = [pytest.mark.slow, pytest.mark.filterwarnings("ignore:.*does not have many workers.*")]


@pytest.fixture(scope="module")
def done(tmp_path_factory: pytest.TempPathFactory) -> Path:
    run_dir = tmp_path_factory.mktemp("outputs") / "day" / "done"
    run(run_dir)
    return run_dir


def test_a_finished_run_is_not_resumed(done, tmp_path):
    with pytest.raises(BadInputError, match=r"is of step 14 and trainer.max_steps=14: nothing is left to train"):
        run(tmp_path / "day" / "more", resume=str(done))


def test_a_checkpoint_of_another_model_is_refused(done, tmp_path):
    longer = replace(config().trainer, max_steps=20)
    with pytest.raises(CheckpointError, match=r"the checkpoint is of another model.*Missing key.{,200} \.\.\.\); res"):
        run(tmp_path / "day" / "other", resume=str(done), trainer=longer, model=ModelConfig(size="mini"))


def test_a_resumed_run_says_what_stays_and_predicts_its_own_peak(done, tmp_path, capsys):
    longer = replace(config().trainer, max_steps=20)
    result = run(tmp_path / "day" / "on", resume=str(done), trainer=longer, optim=replace(config().optim, lr=0.1))
    assert "resuming keeps optim.lr=0.003 of the checkpoint; optim.lr=0.1 is not applied" in capsys.readouterr().out
    assert 0.97 * result.peak_bytes_predicted <= result.peak_bytes <= result.peak_bytes_predicted


def test_a_step_time_that_cannot_be_met_is_told_as_a_ratio(tmp_path):
    with pytest.raises(InfeasibleBudgetError, match=r"step_time=0.01 cannot be met.* times .* Give budget.step_time="):
        run(tmp_path / "day" / "fast", budget=parse_budget({"state_fraction": 0.5, "step_time": 0.01}))
