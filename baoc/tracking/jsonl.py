"""A Lightning logger that fsyncs each step to metrics.jsonl before training goes on, and makes metrics.csv of it.

Frontiers are made from metrics.jsonl, since W&B loses up to an eighth of the logged steps of a killed process, and
Lightning's CSVLogger deletes its file when a run is resumed in the same folder.
"""

import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from lightning.pytorch.loggers import Logger
from lightning.pytorch.utilities import rank_zero_only

from baoc.tracking.files import FolderGuard, LineFile, read_jsonl, write_csv
from baoc.tracking.metrics import FIXED_KEYS, METRICS_FILE, METRICS_SCHEMA, read_metrics, supersede
from baoc.types import to_plain


class JsonlLogger(Logger):
    """Appends to `metrics.jsonl` and fsyncs each line (about 1 ms on a local disk).

    Args:
        csv_every_s: seconds between two writings of `metrics.csv`, one row per step; it is written at the end, too.
            None writes none.
    """

    def __init__(self, run_dir: str | Path, *, name: str | None = None, csv_every_s: float | None = None):
        super().__init__()
        self.run_dir, self._name, self.csv_every_s = Path(run_dir), name, csv_every_s
        self.path = self.run_dir / METRICS_FILE
        self._file: LineFile | None = None
        self._folder: FolderGuard | None = None
        self._last_line: dict[str, Any] = {}  # without its time
        self._last_step = -1
        self._epoch = 0
        # time_s continues from an earlier attempt in the same file
        earlier = [line.get("time_s") for line in read_jsonl(self.path)] if self.path.is_file() else []
        self._csv_written_s = time.monotonic()
        self._start_s = self._csv_written_s - max((s for s in earlier if isinstance(s, int | float)), default=0.0)

    @property
    def name(self) -> str | None:
        return self._name

    @property
    def version(self) -> str:
        return ""

    @property
    def save_dir(self) -> str:
        return str(self.run_dir)

    log_dir = save_dir

    def log_hyperparams(self, params: Any, *args: Any, **kwargs: Any) -> None:
        """Does nothing: config.yaml in the run folder holds every value."""

    @rank_zero_only
    def log_metrics(self, metrics: Mapping[str, Any], step: int | None = None) -> None:
        """Appends one line. Lightning passes `epoch` among the metrics; without a step the next one is taken."""
        values = {key: value for key, value in metrics.items() if key not in FIXED_KEYS}
        self._last_step = step = self._last_step + 1 if step is None else int(step)
        self._epoch = int(metrics.get("epoch", self._epoch))
        if self._file is None:
            self._file = LineFile(self.path)
            self._folder = self._folder or FolderGuard(self.run_dir)
        assert self._folder is not None
        self._folder.check()
        line = {"step": step, "epoch": self._epoch, **to_plain(values)}
        if line != self._last_line:  # a checkpoint logs its step's metrics before Lightning does
            time_s = round(time.monotonic() - self._start_s, 4)
            self._file.append(
                {"schema": METRICS_SCHEMA, "step": step, "epoch": self._epoch, "time_s": time_s, **values}
            )
            self._last_line = line

    @rank_zero_only
    def resume_from(self, *, step: int) -> int:
        """Prepares to log after `step` optimizer steps: moves lines of `step` (counted from 0) and later aside. Returns
        the number of lines moved."""
        self._close()
        self._last_step, self._last_line = step - 1, {}
        return supersede(self.path, from_step=step)

    @rank_zero_only
    def save(self) -> None:
        """Called by Lightning after each line."""
        if self.csv_every_s is not None and time.monotonic() - self._csv_written_s >= self.csv_every_s:
            self._write_csv()

    @rank_zero_only
    def finalize(self, status: str) -> None:
        self._close()
        if self.csv_every_s is not None:
            self._write_csv()

    def _close(self) -> None:
        if self._file is not None:
            self._file.close()
            self._file = None

    def _write_csv(self) -> None:
        if self.path.is_file():
            rows = read_metrics(self.path)
            metrics = dict.fromkeys(key for row in rows for key in row if key not in FIXED_KEYS)
            write_csv(self.run_dir / "metrics.csv", rows, columns=[*FIXED_KEYS[1:], *metrics])
        self._csv_written_s = time.monotonic()
