"""A whole run with `optim.release_gradients=true`: inside its prediction, and the same when stopped and resumed."""

from pathlib import Path

import pytest

from baoc.config.schema import OptimConfig
from tests.support.training_runs import EVERY_STEP, logged, run

pytestmark = pytest.mark.slow


def test_a_run_that_releases_its_gradients(tmp_path: Path) -> None:
    optim = OptimConfig(release_gradients=True)
    result = run(tmp_path / "day" / "whole", optim=optim, checkpoint=EVERY_STEP)
    assert result.num_steps == 14 and result.budget_met
    assert 0.95 * result.peak_bytes_predicted <= result.peak_bytes <= result.peak_bytes_predicted
    whole = logged(tmp_path / "day" / "whole")
    # From where gradients are profiled by parts, through the reallocation of step 6.
    (checkpoint,) = (tmp_path / "day" / "whole" / "checkpoints").glob("*step*03.ckpt")
    run(tmp_path / "day" / "from_3", optim=optim, resume=str(checkpoint))
    rest = logged(tmp_path / "day" / "from_3")
    assert len(rest) >= 11 and rest == whole[-len(rest) :]
