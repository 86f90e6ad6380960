"""What tests of killed runs need: the processes below this one, and a callback that acts at a step."""

import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import lightning as L


def descendants() -> list[int]:
    """Processes below this one, the system's table read as it is."""
    parents = {}
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit():
            try:
                fields = (entry / "stat").read_text().rsplit(")", 1)[1].split()
            except OSError:
                continue
            parents[int(entry.name)] = int(fields[1])
    found = {os.getpid()}
    while new := {child for child, parent in parents.items() if parent in found} - found:
        found |= new
    return sorted(found - {os.getpid()})


class At(L.Callback):
    """Does something once, when a step begins."""

    def __init__(self, step: int, do: Callable[[], Any]):
        self.step, self.do = step, do

    def on_train_batch_start(self, trainer: L.Trainer, *_: Any) -> None:
        if trainer.global_step == self.step:
            self.do()
