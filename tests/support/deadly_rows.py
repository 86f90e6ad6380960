"""A data set whose samples kill the process that reads them."""

import os
import signal
from pathlib import Path

from torch import Tensor


class Rows:
    """Twelve samples; the process that makes a batch with row `deadly` kills itself, `lives` times in all."""

    def __init__(self, folder: Path, *, lives: int, deadly: int = 7):
        self.folder, self.lives, self.deadly = folder, lives, deadly

    def __len__(self) -> int:
        return 12

    def gather(self, rows: Tensor) -> dict[str, Tensor]:
        died = len(list(self.folder.iterdir()))
        if self.deadly in rows and died < self.lives:
            (self.folder / str(died)).touch()
            os.kill(os.getpid(), signal.SIGKILL)
        return {"x": rows.clone()}
