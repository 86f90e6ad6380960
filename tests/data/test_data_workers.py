"""A data worker that dies is replaced, and the batches are those of a run in which none died."""

import signal
from pathlib import Path

import pytest
from torch import Tensor

from baoc.data.loader import ShuffledLoader
from baoc.errors import TrainingFailedError
from tests.support.deadly_rows import Rows
from tests.support.waiting import has_ended, wait_until

pytestmark = pytest.mark.slow


def batches(folder: Path, *, lives: int, workers: int = 1) -> list[list[int]]:
    folder.mkdir()
    loader = ShuffledLoader(Rows(folder, lives=lives), batch_size=2, seed=3, workers=workers)
    return [batch["x"].tolist() for batch in loader]


def test_its_batch_is_made_again(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    whole = batches(tmp_path / "none", lives=0, workers=0)
    assert batches(tmp_path / "one", lives=1) == whole
    assert len(list((tmp_path / "one").iterdir())) == 1
    assert caplog.text.count("a data worker died") == 1


def test_workers_that_always_die_end_the_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("baoc.data.sources.MAX_WORKER_DEATHS", 2)
    with pytest.raises(TrainingFailedError, match=r"data workers died 2 times in a row .*dataset.workers=0") as error:
        batches(tmp_path / "always", lives=99)
    assert error.value.exit_code == 5


KILLED = """
import os, signal, sys
from pathlib import Path
from baoc.data.loader import ShuffledLoader
from tests.support.deadly_rows import Rows

if __name__ == "__main__":
    batches = iter(ShuffledLoader(Rows(Path(sys.argv[1]), lives=0), batch_size=2, seed=3, workers=1))
    next(batches)
    (worker,) = batches.gi_frame.f_locals["self"]._pool._loader._iterator._workers
    print(worker.pid, flush=True)
    os.kill(os.getpid(), signal.SIGKILL)
"""


def test_workers_end_with_a_run_that_was_killed(tmp_path: Path, run_python) -> None:
    """They are children of a server process, which does not see it either while they live."""
    script = tmp_path / "killed.py"
    script.write_text(KILLED)
    done = run_python(str(script), str(tmp_path))
    assert done.returncode == -signal.SIGKILL, done.stderr
    wait_until(lambda: has_ended(int(done.stdout)), what="the end of the worker")


def test_an_error_of_the_data_is_not_taken_for_a_death(tmp_path: Path) -> None:
    class Broken(Rows):
        def gather(self, rows: Tensor) -> dict[str, Tensor]:
            raise RuntimeError("no such shard")

    with pytest.raises(RuntimeError, match="no such shard"):
        list(ShuffledLoader(Broken(tmp_path, lives=0), batch_size=2, seed=0, workers=0))
