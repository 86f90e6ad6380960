"""GPU slots that trials of all studies on a machine share, and the kernel's count of out-of-memory kills."""

import fcntl
import os
import shutil
import subprocess
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import count
from pathlib import Path

from baoc.errors import BadInputError

_COUNTERS = (Path("/sys/fs/cgroup/memory.events"), Path("/proc/vmstat"))


def count_oom_kills(counters: Sequence[Path] = _COUNTERS) -> int:
    """How many processes the kernel has killed for memory so far in this container; 0 if it does not tell."""
    for file in counters:
        try:
            lines = file.read_text().splitlines()
        except OSError:
            continue
        for line in lines:
            if line.startswith("oom_kill "):
                return int(line.split()[1])
    return 0


@dataclass(frozen=True, slots=True, kw_only=True)
class Gpu:
    """One GPU, named by its index as CUDA_VISIBLE_DEVICES writes it."""

    name: str
    total_bytes: int
    uuid: str = ""


def find_gpus(asked: str | Sequence[str] = "auto") -> tuple[Gpu, ...]:
    """The GPUs of this machine by nvidia-smi, without starting CUDA.

    Args:
        asked: `auto` for those that CUDA_VISIBLE_DEVICES allows, or a list of indices.

    Raises BadInputError for an index that nvidia-smi does not list.
    """
    if not isinstance(asked, str) and not asked:
        return ()
    smi = shutil.which("nvidia-smi")
    query = [str(smi), "--query-gpu=index,memory.total,uuid", "--format=csv,noheader,nounits"]
    done = subprocess.run(query, capture_output=True, text=True, check=False) if smi else None
    found = parse_gpus(done.stdout if done is not None and done.returncode == 0 else "")
    if asked == "auto":
        return filter_visible(found, os.environ.get("CUDA_VISIBLE_DEVICES"))
    names = [asked] if isinstance(asked, str) else [str(name) for name in asked]
    by_name = {gpu.name: gpu for gpu in found}
    for name in names:
        if name not in by_name:
            raise BadInputError(f"hydra.sweeper.gpus has {name!r}: allowed are {', '.join(by_name) or 'none, []'}")
    return tuple(by_name[name] for name in names)


def parse_gpus(text: str) -> tuple[Gpu, ...]:
    """GPUs from nvidia-smi's lines `index, MiB, uuid`."""
    rows = [[part.strip() for part in line.split(",")] for line in text.splitlines() if line.count(",") == 2]
    return tuple(Gpu(name=row[0], total_bytes=int(float(row[1])) * 2**20, uuid=row[2]) for row in rows)


def filter_visible(gpus: Sequence[Gpu], asked: str | None) -> tuple[Gpu, ...]:
    """The GPUs that CUDA_VISIBLE_DEVICES selects, by index or prefix of a UUID; all of them if it is not set (None)."""
    if asked is None:
        return tuple(gpus)
    names = [name.strip() for name in asked.split(",") if name.strip()]
    return tuple(gpu for gpu in gpus if any(gpu.name == n or (gpu.uuid + " ").startswith(n) for n in names))


@dataclass(frozen=True, slots=True, kw_only=True)
class GpuLease:
    """The GPUs of one trial, by name; the locks of `files` are its slots, and go with this process."""

    names: tuple[str, ...] = ()
    files: tuple[int, ...] = ()

    def release(self) -> None:
        for file in self.files:
            os.close(file)


class GpuSlots:
    """Assigns GPUs to trials, `per_trial` to each; all studies of a user on this machine agree through locked files. A
    GPU has `per_gpu` slots. Trials with known memory budgets share a GPU if their sum fits; a trial without one gets
    its GPUs alone. The kernel frees the slots of a process that is killed.

    Raises BadInputError where there are GPUs, but fewer than `per_trial`."""

    def __init__(self, *, gpus: Sequence[Gpu], per_gpu: int = 1, per_trial: int = 1, folder: Path | None = None):
        if 0 < len(gpus) < per_trial:
            raise BadInputError(
                f"hydra.sweeper.gpus_per_trial={per_trial}, and the study may use {len(gpus)} GPU(s) "
                f"({', '.join(gpu.name for gpu in gpus)}): choose at most {len(gpus)}, or more by hydra.sweeper.gpus"
            )
        self.gpus, self.per_gpu, self.per_trial = tuple(gpus), per_gpu, per_trial
        self.folder = folder or Path(tempfile.gettempdir()) / f"baoc_cards_{os.getuid()}"

    def acquire(self, budget_bytes: int | None) -> GpuLease | None:
        """Locks a slot of each of the GPUs with the fewest used slots that have room; None if too few have it. Without
        GPUs there is nothing to hold.

        Args:
            budget_bytes: the trial's memory budget of each GPU; None if it has none, which takes the whole of them.
        """
        if not self.gpus:
            return GpuLease()
        self.folder.mkdir(parents=True, exist_ok=True)
        lock = os.open(self.folder / "guard", os.O_RDWR | os.O_CREAT, 0o600)
        try:
            fcntl.flock(lock, fcntl.LOCK_EX)
            held = {gpu.name: self._slot_bytes(gpu) for gpu in self.gpus}
            fitting = [gpu for gpu in self.gpus if self._fits(gpu, budget_bytes, held[gpu.name])]
            if len(fitting) < self.per_trial:
                return None
            chosen = sorted(fitting, key=lambda gpu: len(held[gpu.name]))[: self.per_trial]
            files = [self._lock_slot(gpu, gpu.total_bytes if budget_bytes is None else budget_bytes) for gpu in chosen]
            return GpuLease(names=tuple(gpu.name for gpu in chosen), files=tuple(files))
        finally:
            os.close(lock)

    def _fits(self, gpu: Gpu, budget_bytes: int | None, held: Sequence[int]) -> bool:
        if not held:
            return True  # a budget above the GPU's memory is refused by the run
        return len(held) < self.per_gpu and budget_bytes is not None and sum(held) + budget_bytes <= gpu.total_bytes

    def _slot_bytes(self, gpu: Gpu) -> list[int]:
        """Bytes reserved by each locked slot of the GPU, of any process."""
        sizes = []
        for file in self.folder.glob(f"{gpu.name}_*"):
            opened = os.open(file, os.O_RDWR)
            try:
                fcntl.flock(opened, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except OSError:
                sizes.append(int(os.pread(opened, 32, 0) or b"0"))
            finally:
                os.close(opened)
        return sizes

    def _lock_slot(self, gpu: Gpu, num_bytes: int) -> int:
        """The file of the first free slot of the GPU, locked; the caller holds the folder's lock."""
        for slot in count():
            file = os.open(self.folder / f"{gpu.name}_{slot}", os.O_RDWR | os.O_CREAT, 0o600)
            try:
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except OSError:
                os.close(file)
                continue
            os.ftruncate(file, 0)
            os.pwrite(file, str(num_bytes).encode(), 0)
            return file
        raise AssertionError("unreachable")
