"""Host memory that a GPU reads and writes directly: how much is available, allocating it, and page-locking it."""

import logging
import os
import weakref
from contextlib import suppress
from pathlib import Path

import torch
from torch import Tensor

from baoc.errors import BadInputError
from baoc.units import format_bytes

log = logging.getLogger(__name__)
_ROOT = Path("/sys/fs/cgroup")
CGROUPS = (
    (_ROOT, "memory.max", "memory.current", "inactive_file"),
    (_ROOT / "memory", "memory.limit_in_bytes", "memory.usage_in_bytes", "total_inactive_file"),
)


def available_host_bytes() -> int | None:
    """Bytes that this process can still allocate, limited by the system and by its cgroup; None if both are unknown."""
    limits = [limit for limit in (system_available_bytes(), _cgroup_available_bytes()) if limit is not None]
    return min(limits, default=None)


def system_available_bytes() -> int | None:
    try:
        for line in Path("/proc/meminfo").read_text().splitlines():
            if line.startswith("MemAvailable:"):
                return int(line.split()[1]) * 1024
    except OSError:
        pass
    try:
        return os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    except (AttributeError, ValueError, OSError):  # Windows
        return None


def _cgroup_available_bytes() -> int | None:
    """Bytes that the cgroup's limit leaves, counting its inactive page cache as free; None without a limit."""
    for folder, limit, used, cache in CGROUPS:
        try:
            texts = [(folder / name).read_text().strip() for name in (limit, used)]
            stat = dict(line.split() for line in (folder / "memory.stat").read_text().splitlines())
        except (OSError, ValueError):
            continue
        if all(text.isdigit() for text in texts):
            return max(int(texts[0]) - int(texts[1]) + int(stat.get(cache, 0)), 0)
    return None


_ADVICE = "give fewer blocks to the host, or narrower storage such as int8"


def check_host_memory(nbytes: int, *, what: str) -> None:
    """Raises BadInputError if fewer than `nbytes` of host memory are available; `what` begins the message."""
    left = available_host_bytes()
    if left is not None and nbytes > left:
        raise BadInputError(
            f"{what} need {format_bytes(nbytes)} of host memory, and {format_bytes(left)} are available: {_ADVICE}"
        )


def allocate_host_memory(nbytes: int, *, what: str) -> Tensor:
    """uint8 zeros on the CPU, not page-locked. Raises BadInputError if there is not so much memory."""
    check_host_memory(nbytes, what=what)
    try:
        return torch.zeros(nbytes, dtype=torch.uint8, device="cpu")
    except RuntimeError as error:  # torch has no own type for this error on a CPU
        raise BadInputError(
            f"{what} need {format_bytes(nbytes)} of host memory, which was refused: {_ADVICE}"
        ) from error


class PageLock:
    """Page-locks `memory` for asynchronous copies to and from `device`, until this object is garbage-collected.

    The memory is registered with CUDA, not allocated as pinned, because torch rounds pinned memory up to a power of
    two. `refused` is True if the system refused, as it does above its limit on locked memory (`ulimit -l`); copies are
    then slower and synchronous.
    """

    def __init__(self, memory: Tensor, *, device: torch.device):
        self.memory, self.device = memory, device
        wanted = device.type == "cuda" and memory.numel() > 0
        self.locked = wanted and page_lock(memory, device=device)
        self.refused = wanted and not self.locked
        if self.locked:
            release = weakref.finalize(self, _page_unlock, memory, device)
            release.atexit = False  # the process gives everything back, in an order of its own


def page_lock(memory: Tensor, *, device: torch.device) -> bool:
    with torch.cuda.device(device):
        runtime = torch.cuda.cudart()
        try:
            error = int(runtime.cudaHostRegister(memory.data_ptr(), memory.numel(), 0))
        except RuntimeError as refused:
            log.debug("locking host memory raised: %s", refused)
            error = -1
        if error:  # the runtime keeps the error, and torch would raise it at its next launch: this launch consumes it
            with suppress(RuntimeError):
                torch.zeros(1, device=device)
        return not error


def _page_unlock(memory: Tensor, device: torch.device) -> None:
    """Unregisters `memory`, which the finalizer has kept alive, after copies to and from it have ended."""
    torch.cuda.synchronize(device)
    torch.cuda.cudart().cudaHostUnregister(memory.data_ptr())
