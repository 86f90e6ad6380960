"""Who works on a study, and who of them is gone: a trial of a worker that is gone may be taken over.

A worker beats into the storage. On its own machine it is known by its process, elsewhere by beats that stopped, which
each worker times with its own clock, so that clocks of machines need not agree.
"""

import os
import socket
import time
import uuid
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import optuna

BEAT_S = 10.0
PATIENCE_S = 60.0  # without a beat
PREFIX = "worker:"


@dataclass(frozen=True, slots=True, kw_only=True)
class Identity:
    """One worker: a process of a machine (since its boot), and when that process began, as numbers come again."""

    machine: str
    process: int
    began: str
    unique: str

    @staticmethod
    def own() -> "Identity":
        return Identity(
            machine=machine(), process=os.getpid(), began=process_began(os.getpid()), unique=uuid.uuid4().hex[:8]
        )

    @property
    def name(self) -> str:
        return f"{PREFIX}{self.unique}"


def machine() -> str:
    """This machine since its boot, and where process numbers mean the same: containers have numbers of their own, and
    may share the machine's host name."""
    boot, numbers = Path("/proc/sys/kernel/random/boot_id"), Path("/proc/self/ns/pid")
    since = boot.read_text()[:8] if boot.is_file() else ""
    return f"{socket.gethostname()}/{since}/{os.readlink(numbers) if numbers.is_symlink() else ''}"


def process_began(process: int) -> str:
    """When a process of this machine began, in the kernel's own units; empty where there is none."""
    try:
        return Path(f"/proc/{process}/stat").read_text().rsplit(")", 1)[1].split()[19]
    except OSError:
        pass
    try:
        os.kill(process, 0)
    except ProcessLookupError:
        return ""
    except PermissionError:
        return "?"
    return "" if Path("/proc/self/stat").is_file() else "?"


class Register:
    """Writes this worker's beats and judges the others by theirs."""

    def __init__(self, study: optuna.Study, *, clock: Callable[[], float] = time.monotonic):
        self.study, self.clock = study, clock
        self.own = Identity.own()
        self._beats = 0
        self._last = -BEAT_S
        self._seen: dict[str, tuple[int, float]] = {}  # worker -> its newest beat and when it was first seen here
        self._unclaimed: dict[int, float] = {}  # trial -> when it was first seen running without a worker

    def beat(self, *, running: int) -> bool:
        """Says "alive" if it is time to; whether it did."""
        if self._beats and self.clock() - self._last < BEAT_S:
            return False
        self._beats, self._last = self._beats + 1, self.clock()
        self._write(running=running, ended=False)
        return True

    def end(self) -> None:
        """From now on this worker's trials may be taken over."""
        self._write(running=0, ended=True)

    def gone(self, worker: str | None, attributes: Mapping[str, Any], *, trial: int) -> bool:
        """Whether the worker of a running trial has ended or stopped beating; `attributes` are the study's.

        A trial without a worker was drawn a moment ago and is being begun; unless its worker was killed right there.
        """
        told = attributes.get(worker or "")
        if told is None:
            others = [name for name in attributes if name.startswith(PREFIX) and name != self.own.name]
            since = self._unclaimed.setdefault(trial, self.clock())
            alone = all(self.gone(other, attributes, trial=trial) for other in others)
            return alone or self.clock() - since > PATIENCE_S
        if told["ended"]:
            return True
        if told["machine"] == self.own.machine:
            return process_began(told["process"]) != told["began"]
        beat, since = self._seen.get(str(worker), (-1, 0.0))
        if told["beat"] != beat:
            self._seen[str(worker)] = (told["beat"], self.clock())
            return False
        return self.clock() - since > PATIENCE_S

    def _write(self, *, running: int, ended: bool) -> None:
        own = self.own
        value = {"machine": own.machine, "process": own.process, "began": own.began}
        self.study.set_user_attr(own.name, {**value, "beat": self._beats, "running": running, "ended": ended})
