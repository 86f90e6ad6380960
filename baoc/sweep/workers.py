"""Heartbeats of a study's workers, by which a running trial of a dead worker is recognised and taken over.

Each worker writes a heartbeat, a counter, into the study's attributes. A worker of the same machine is dead if its
process is. One of another machine is dead if its counter has not changed for PATIENCE_S of the reader's clock, so that
the machines' clocks need not agree. Optuna's own heartbeat fails a stale trial and queues a copy under a new number,
for SQL storages only.
"""

import os
import socket
import time
import uuid
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import optuna

BEAT_S = 10.0
PATIENCE_S = 60.0  # a worker without a new heartbeat for so long is dead
PREFIX = "worker:"  # of the attributes of a study that hold heartbeats, one per worker


def machine_id() -> str:
    """`host/boot/pid namespace`: within one of these, a process id names one process at a time. Containers number their
    processes separately and may share the machine's host name."""
    boot, namespace = Path("/proc/sys/kernel/random/boot_id"), Path("/proc/self/ns/pid")
    boot_id = boot.read_text()[:8] if boot.is_file() else ""
    return f"{socket.gethostname()}/{boot_id}/{os.readlink(namespace) if namespace.is_symlink() else ''}"


def process_start(pid: int) -> str:
    """When a process of this machine started, in the kernel's clock ticks. Empty if there is no such process; `?` if
    there is one, but its start cannot be read."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[19]
    except OSError:
        pass
    try:
        os.kill(pid, 0)  # raises if there is no such process
    except ProcessLookupError:
        return ""
    except PermissionError:
        return "?"
    return "" if Path("/proc/self/stat").is_file() else "?"


class WorkerRegistry:
    """Writes this worker's heartbeats, and decides by those of other workers whether they are dead."""

    def __init__(self, study: optuna.Study):
        self.study = study
        self.name = f"{PREFIX}{uuid.uuid4().hex[:8]}"
        self._process = {"machine": machine_id(), "process": os.getpid(), "began": process_start(os.getpid())}
        self._beats = 0
        self._last_beat_s = -BEAT_S
        self._newest_beats: dict[str, tuple[int, float]] = {}  # worker -> its newest beat, and when it was first read
        self._unowned_since: dict[int, float] = {}  # trial without a worker -> when it was first read as running

    def beat(self, *, running: int) -> bool:
        """Writes a heartbeat with the number of `running` trials if BEAT_S have passed since the last one; returns
        whether it did."""
        if self._beats and time.monotonic() - self._last_beat_s < BEAT_S:
            return False
        self._beats, self._last_beat_s = self._beats + 1, time.monotonic()
        self._write(running=running, ended=False)
        return True

    def end(self) -> None:
        """Marks this worker as ended, so that its trials may be taken over at once."""
        self._write(running=0, ended=True)

    def is_dead(self, worker: str | None, attributes: Mapping[str, Any], *, trial: int) -> bool:
        """Whether the worker of a running trial has ended or lost its heartbeat; `attributes` are the study's.

        A trial has no worker (None) between its acquisition and the storing of its owner. If the worker is killed at
        that moment, the trial counts as a dead worker's once all other workers are dead, or after PATIENCE_S.
        """
        entry = attributes.get(worker or "")
        if entry is None:
            others = [name for name in attributes if name.startswith(PREFIX) and name != self.name]
            since = self._unowned_since.setdefault(trial, time.monotonic())
            all_dead = all(self.is_dead(other, attributes, trial=trial) for other in others)
            return all_dead or time.monotonic() - since > PATIENCE_S
        if entry["ended"]:
            return True
        if entry["machine"] == self._process["machine"]:
            return process_start(entry["process"]) != entry["began"]
        beat, since = self._newest_beats.get(str(worker), (-1, 0.0))
        if entry["beat"] != beat:
            self._newest_beats[str(worker)] = (entry["beat"], time.monotonic())
            return False
        return time.monotonic() - since > PATIENCE_S

    def _write(self, *, running: int, ended: bool) -> None:
        heartbeat = {**self._process, "beat": self._beats, "running": running, "ended": ended}
        self.study.set_user_attr(self.name, heartbeat)
