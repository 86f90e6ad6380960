"""GPU slots that trials of all studies on a machine share, and the kernel's count of out-of-memory kills."""

import fcntl
import os
import re
import shutil
import subprocess
import tempfile
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from itertools import count
from pathlib import Path

from baoc.errors import BadInputError
from baoc.units import MIB

_OOM_COUNTERS = (Path("/sys/fs/cgroup/memory.events"), Path("/proc/vmstat"))


def count_oom_kills(counters: Sequence[Path] = _OOM_COUNTERS) -> int:
    """How many processes of this container the kernel has killed for memory so far; 0 if no counter is readable."""
    for file in counters:
        with suppress(OSError):
            if match := re.search(r"^oom_kill (\d+)", file.read_text(), re.MULTILINE):
                return int(match[1])
    return 0


@dataclass(frozen=True, slots=True, kw_only=True)
class Gpu:
    """One GPU, named by its index as CUDA_VISIBLE_DEVICES writes it."""

    name: str
    total_bytes: int
    uuid: str = ""


def find_gpus(setting: str | Sequence[str] = "auto") -> tuple[Gpu, ...]:
    """The GPUs of this machine by nvidia-smi, without starting CUDA.

    Args:
        setting: `auto` for those that CUDA_VISIBLE_DEVICES allows, or a list of indices.

    Raises BadInputError for an index that nvidia-smi does not list.
    """
    if not isinstance(setting, str) and not setting:
        return ()
    smi = shutil.which("nvidia-smi")
    query = [str(smi), "--query-gpu=index,memory.total,uuid", "--format=csv,noheader,nounits"]
    done = subprocess.run(query, capture_output=True, text=True, check=False) if smi else None
    gpus = parse_gpus(done.stdout if done is not None and done.returncode == 0 else "")
    if setting == "auto":
        return filter_visible(gpus, os.environ.get("CUDA_VISIBLE_DEVICES"))
    names = [setting] if isinstance(setting, str) else [str(name) for name in setting]
    by_name = {gpu.name: gpu for gpu in gpus}
    for name in names:
        if name not in by_name:
            raise BadInputError(f"hydra.sweeper.gpus has {name!r}: allowed are {', '.join(by_name) or 'none, []'}")
    return tuple(by_name[name] for name in names)


def parse_gpus(text: str) -> tuple[Gpu, ...]:
    """GPUs from nvidia-smi's lines `index, MiB, uuid`."""
    rows = [[part.strip() for part in line.split(",")] for line in text.splitlines() if line.count(",") == 2]
    return tuple(Gpu(name=row[0], total_bytes=int(float(row[1])) * MIB, uuid=row[2]) for row in rows)


def filter_visible(gpus: Sequence[Gpu], visible: str | None) -> tuple[Gpu, ...]:
    """The GPUs that CUDA_VISIBLE_DEVICES selects, by index or prefix of a UUID; all of them if it is not set (None)."""
    if visible is None:
        return tuple(gpus)
    names = [name.strip() for name in visible.split(",") if name.strip()]
    return tuple(gpu for gpu in gpus if any(gpu.name == n or (gpu.uuid + " ").startswith(n) for n in names))


@dataclass(frozen=True, slots=True, kw_only=True)
class GpuLease:
    """The GPUs of one trial, by name. Each of its slots is a locked file; `descriptors` hold the locks until they are
    closed, also by the end of this process."""

    names: tuple[str, ...] = ()
    descriptors: tuple[int, ...] = ()

    def release(self) -> None:
        for descriptor in self.descriptors:
            os.close(descriptor)


class GpuSlots:
    """Assigns GPUs to trials, `per_trial` to each. A GPU has `per_gpu` slots.

    Trials with memory budgets share a GPU if their sum fits; a trial without one gets its GPUs alone. All studies of a
    user on this machine agree through locked files in `folder`; the kernel unlocks those of a process that is killed.

    Raises BadInputError if there are GPUs, but fewer than `per_trial`.
    """

    def __init__(self, *, gpus: Sequence[Gpu], per_gpu: int = 1, per_trial: int = 1, folder: Path | None = None):
        if 0 < len(gpus) < per_trial:
            raise BadInputError(
                f"hydra.sweeper.gpus_per_trial={per_trial}, and the study may use {len(gpus)} GPU(s) "
                f"({', '.join(gpu.name for gpu in gpus)}): choose at most {len(gpus)}, or more by hydra.sweeper.gpus"
            )
        self.gpus, self.per_gpu, self.per_trial = tuple(gpus), per_gpu, per_trial
        self.folder = folder or Path(tempfile.gettempdir()) / f"baoc_cards_{os.getuid()}"

    def acquire(self, budget_bytes: int | None) -> GpuLease | None:
        """Locks a slot on each of `per_trial` GPUs with room, those with the fewest used slots first; None if too few
        have room. On a machine without GPUs the lease is empty.

        Args:
            budget_bytes: the trial's memory budget for each GPU; None if it has none and takes GPUs as a whole.
        """
        if not self.gpus:
            return GpuLease()
        self.folder.mkdir(parents=True, exist_ok=True)
        lock = os.open(self.folder / "guard", os.O_RDWR | os.O_CREAT, 0o600)
        try:
            fcntl.flock(lock, fcntl.LOCK_EX)
            reserved = {gpu.name: self._reserved_bytes(gpu) for gpu in self.gpus}
            with_room = [gpu for gpu in self.gpus if self._has_room(gpu, budget_bytes, reserved[gpu.name])]
            if len(with_room) < self.per_trial:
                return None
            chosen = sorted(with_room, key=lambda gpu: len(reserved[gpu.name]))[: self.per_trial]
            slots = [self._lock_slot(gpu, gpu.total_bytes if budget_bytes is None else budget_bytes) for gpu in chosen]
            return GpuLease(names=tuple(gpu.name for gpu in chosen), descriptors=tuple(slots))
        finally:
            os.close(lock)

    def _has_room(self, gpu: Gpu, budget_bytes: int | None, reserved: Sequence[int]) -> bool:
        if not reserved:
            return True  # a budget above the GPU's memory is refused by the run
        if len(reserved) >= self.per_gpu or budget_bytes is None:
            return False
        return sum(reserved) + budget_bytes <= gpu.total_bytes

    def _reserved_bytes(self, gpu: Gpu) -> list[int]:
        """Bytes that each locked slot of the GPU reserves, of any process."""
        sizes = []
        for file in self.folder.glob(f"{gpu.name}_*"):
            descriptor = os.open(file, os.O_RDWR)
            try:
                fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except OSError:
                sizes.append(int(os.pread(descriptor, 32, 0) or b"0"))
            finally:
                os.close(descriptor)
        return sizes

    def _lock_slot(self, gpu: Gpu, num_bytes: int) -> int:
        """Locks the first free slot of the GPU and returns the descriptor of its file, which states `num_bytes`. The
        caller holds the folder's lock."""
        for slot in count():
            descriptor = os.open(self.folder / f"{gpu.name}_{slot}", os.O_RDWR | os.O_CREAT, 0o600)
            try:
                fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except OSError:
                os.close(descriptor)
                continue
            os.ftruncate(descriptor, 0)
            os.pwrite(descriptor, str(num_bytes).encode(), 0)
            return descriptor
        raise AssertionError("unreachable")
