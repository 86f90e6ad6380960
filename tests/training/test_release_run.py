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
    for step in (3, 8):  # while gradients are profiled, by parts, and after the reallocation of step 6
        (checkpoint,) = (tmp_path / "day" / "whole" / "checkpoints").glob(f"*step*{step:02d}.ckpt")
        run(tmp_path / "day" / f"from_{step}", optim=optim, resume=str(checkpoint))
        rest = logged(tmp_path / "day" / f"from_{step}")
        assert len(rest) >= 14 - step and rest == whole[-len(rest) :]
