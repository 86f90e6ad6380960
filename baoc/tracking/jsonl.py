"""Lightning loggers that write each step to disk before training goes on: metrics.jsonl, and metrics.csv from it.

W&B loses up to an eighth of the logged steps if a process is killed, and Lightning's CSVLogger deletes its file if a
run is resumed in the same folder. Frontiers are therefore made from `metrics.jsonl`.
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


class _FolderLogger(Logger):
    """The part of Lightning's Logger interface that both loggers share."""

    def __init__(self, run_dir: str | Path, *, name: str | None = None):
        super().__init__()
        self.run_dir = Path(run_dir)
        self._name = name

    @property
    def name(self) -> str | None:
        return self._name

    @property
    def version(self) -> str:
        return ""

    @property
    def save_dir(self) -> str:
        return str(self.run_dir)

    @property
    def log_dir(self) -> str:
        return str(self.run_dir)

    def log_hyperparams(self, params: Any, *args: Any, **kwargs: Any) -> None:
        """Does nothing: config.yaml in the run folder holds every value."""


class JsonlLogger(_FolderLogger):
    """Appends to `metrics.jsonl` and fsyncs each line (about 1 ms on a local disk)."""

    def __init__(self, run_dir: str | Path, *, name: str | None = None):
        super().__init__(run_dir, name=name)
        self.path = self.run_dir / METRICS_FILE
        self._file: LineFile | None = None
        self._folder: FolderGuard | None = None
        self._line: dict[str, Any] = {}  # the newest, without times
        self._last_step = -1
        self._epoch = 0
        # time_s continues from an earlier attempt in the same file.
        earlier = read_jsonl(self.path) if self.path.is_file() else []
        self._start = time.monotonic() - max((line.get("time_s", 0.0) for line in earlier), default=0.0)

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
        if line != self._line:  # a checkpoint has it written before Lightning does
            elapsed = round(time.monotonic() - self._start, 4)
            fixed = {"schema": METRICS_SCHEMA, "step": step, "epoch": self._epoch, "time_s": elapsed}
            self._file.append({**fixed, **values})
            self._line = line

    @rank_zero_only
    def resume_from(self, *, step: int) -> int:
        """Moves lines of `step` and later aside: the run continues after `step` optimizer steps, and steps count from
        0. 0 moves a whole earlier run. Returns the number of lines moved."""
        self._close()
        self._last_step, self._line = step - 1, {}
        return supersede(self.path, from_step=step)

    def finalize(self, status: str) -> None:
        self._close()

    def _close(self) -> None:
        if self._file is not None:
            self._file.close()
            self._file = None


class CsvLogger(_FolderLogger):
    """Mirrors `metrics.jsonl` into `metrics.csv`, one row per step, every `interval_s` seconds and at the end."""

    def __init__(self, run_dir: str | Path, *, name: str | None = None, interval_s: float = 10.0):
        super().__init__(run_dir, name=name)
        self.path = self.run_dir / "metrics.csv"
        self.interval_s = interval_s
        self._written = time.monotonic()

    def log_metrics(self, metrics: Mapping[str, Any], step: int | None = None) -> None:
        """Does nothing: JsonlLogger comes first and has written the line to metrics.jsonl."""

    @rank_zero_only
    def save(self) -> None:
        if time.monotonic() - self._written >= self.interval_s:
            self._write()

    @rank_zero_only
    def finalize(self, status: str) -> None:
        self._write()

    def _write(self) -> None:
        source = self.run_dir / METRICS_FILE
        if source.is_file():
            rows = read_metrics(source)
            metrics = dict.fromkeys(key for row in rows for key in row if key not in FIXED_KEYS)
            write_csv(self.path, rows, columns=[*FIXED_KEYS[1:], *metrics])
        self._written = time.monotonic()
