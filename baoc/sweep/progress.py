"""A study's progress on the terminal: a bar, counts and the best values; in a log file, a line per ended trial."""

import time
from typing import Self

import optuna
from rich.console import Console, Group
from rich.live import Live
from rich.progress_bar import ProgressBar
from rich.table import Table
from rich.text import Text

from baoc.sweep.status import Status, status_of
from baoc.sweep.study_config import StudyConfig
from baoc.tracking.console import attach_live, detach_live, make_console, say

REFRESH_S = 2.0  # each refresh reads the storage, which may be a shared server


class Progress:
    """A context manager that shows the bar; messages are printed above it. Without a terminal there is no bar."""

    def __init__(self, study: optuna.Study, *, config: StudyConfig, console: Console | None = None):
        self.study, self.config = study, config
        self._console = console or make_console()
        self._live = Live(console=self._console, auto_refresh=False) if self._console.is_terminal else None
        self._next_refresh_s = 0.0
        self._total = min(config.n_trials, len(study.get_trials(deepcopy=False)) or config.n_trials)

    def __enter__(self) -> Self:
        if self._live is not None:
            self._live.start()
            attach_live(self._console)
            self.refresh(force=True)
        return self

    def __exit__(self, *error: object) -> None:
        if self._live is not None:
            self.refresh(force=True)
            self._live.stop()
            detach_live(self._console)

    def trial_ended(self, text: str) -> None:
        status = self.status()
        say(f"{text}  [{status.text}]" if self._live is None else text)
        self.refresh(force=True)

    def refresh(self, *, force: bool = False) -> None:
        """Draws the bar again, at most every REFRESH_S unless `force`."""
        if self._live is None or (time.monotonic() < self._next_refresh_s and not force):
            return
        self._next_refresh_s = time.monotonic() + REFRESH_S
        self._live.update(render(self.status(), name=self.config.name), refresh=True)

    def status(self) -> Status:
        """Counts from the storage, with the trials of all workers."""
        trials = self.study.get_trials(deepcopy=False)
        return status_of(trials, total=self._total, objectives=self.config.objectives, workers=self.config.workers)


def render(status: Status, *, name: str) -> Group:
    total, bar = max(status.total, 1), Table.grid(padding=(0, 1))
    share = Text(f"{100 * status.ended // total} %")
    bar.add_row(Text(name), ProgressBar(total=total, completed=status.ended, width=40), share)
    best = [Text(f"best: {'; '.join(status.best)}", style="dim")] if status.best else []
    return Group(bar, Text(status.text), *best)
