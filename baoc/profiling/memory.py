"""What a process holds on a CUDA device beside its tensors, and how it is kept from taking more than its budget.

On any other device there is no context and no cap: the same functions answer 0, or do nothing.
"""

import ctypes
import gc
import os
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from typing import Any

import torch

from baoc.errors import BadInputError
from baoc.kernels.host_memory import available_host_bytes
from baoc.types import Budget
from baoc.units import MIB, format_bytes

# Of kernels and libraries that load later, as seen on an H200 (ViT-S/16 and a Llama, one run each): 148 MiB came with
# the first forward and backward, where the context had 610, and 73 more until training had begun.
EARLY_MODULES_BYTES = 144 * MIB
LATE_MODULES_BYTES = 88 * MIB
LAST_MODULES_BYTES = 8 * MIB  # of the late ones, whatever has loaded by now

free_at_start: dict[int, int] = {}  # device index -> bytes that were free before this process used it
first_context: dict[int, int] = {}  # device index -> bytes of the context at its first reading
settled_context: dict[int, int] = {}  # device index -> bytes of the context after the first forward and backward
_fractions: dict[int, float] = {}  # device index -> the cap that is in force, of the card's memory


def free_bytes(device: torch.device | str) -> int:
    """Bytes that this process may still take on `device`: on CUDA what is free on the card and in torch's cache.

    Elsewhere the memory that the system calls available.
    """
    device = torch.device(device)
    if device.type != "cuda":
        available = available_host_bytes()
        if available is None:
            raise BadInputError("the free memory of this machine is not known: give a budget as a size, not auto")
        return available
    index = _index(device)
    _remember_free(index)
    cached = torch.cuda.memory_reserved(index) - torch.cuda.memory_allocated(index)
    return torch.cuda.mem_get_info(index)[0] + cached + context_now(device)


def context_bytes(device: torch.device | str) -> int:
    """Bytes that plans and caps take the CUDA context for, with LATE_MODULES_BYTES beside it; 0 on other devices.

    What it was after the first look at a forward and backward (`settle_context`), as long as kernels that have loaded
    since leave LAST_MODULES_BYTES of LATE_MODULES_BYTES; from there on it grows with them. So it does not matter how
    many a process had loaded when it planned, and a least budget that one process names is one for the next. Before
    such a look, what is there and EARLY_MODULES_BYTES.
    """
    device = torch.device(device)
    if device.type != "cuda":
        return 0
    now, settled = context_now(device), settled_context.get(_index(device))
    if settled is None:
        return max(first_context.setdefault(_index(device), now), now) + EARLY_MODULES_BYTES
    return max(settled, now + LAST_MODULES_BYTES - LATE_MODULES_BYTES)


def settle_context(device: torch.device | str) -> int:
    """`context_bytes` from now on, a forward and backward having been run; only the first call decides."""
    device = torch.device(device)
    if device.type == "cuda":
        index, now = _index(device), context_now(device)
        settled_context.setdefault(index, max(now, first_context.setdefault(index, now)))
    return context_bytes(device)


def context_now(device: torch.device | str) -> int:
    """Bytes of the CUDA context and its loaded kernels, 0 on other devices.

    What the driver says that this process holds, less torch's own, where it tells processes apart. Else the fall of
    free memory since the start, in which what other processes took or gave back meanwhile counts too, and without a
    reading from before the context (no NVML) all that the card holds. Grows as kernels load, so it is to be read again
    after a step, and what is read lower than before is another process's doing.
    """
    device = torch.device(device)
    if device.type != "cuda":
        return 0
    index = _index(device)
    before = _remember_free(index)
    torch.zeros(1, device=device)  # the context exists from here on
    fall, own = before - torch.cuda.mem_get_info(index)[0], nvml_own(index)
    held = fall if own is None else own
    return max(0, held - torch.cuda.memory_reserved(index))


ALLOCATOR = "expandable_segments:True"
_ALLOCATOR_VARIABLES = ("PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF")


def settle_allocator(device: torch.device | str) -> None:
    """Lets what torch's allocator reserves grow and shrink in place, unless the user has settings of his own.

    Else states that come to lie between activations leave gaps that are reserved and of no use.
    """
    if torch.device(device).type == "cuda" and not any(os.environ.get(name) for name in _ALLOCATOR_VARIABLES):
        allocator_settings()(ALLOCATOR)


def allocator_settings() -> Any:
    """Torch's own setter; the older name warns where there is the newer one."""
    return getattr(torch._C, "_accelerator_setAllocatorSettings", None) or torch.cuda.memory._set_allocator_settings


def cap_device(device: torch.device | str, *, budget: Budget) -> None:
    """Lets torch's allocator reserve no more than the memory budget less context and LATE_MODULES_BYTES.

    Does nothing off CUDA, and without a memory budget only settles the allocator. A budget above the card's memory caps
    at that. Raises BadInputError if nothing is left.
    """
    device = torch.device(device)
    settle_allocator(device)
    if device.type != "cuda" or budget.memory_bytes is None:
        return
    total = torch.cuda.get_device_properties(device).total_memory
    left = budget.memory_bytes - context_bytes(device) - LATE_MODULES_BYTES
    if left <= 0:
        raise BadInputError(
            f"budget {budget.name} is {format_bytes(budget.memory_bytes)}, of which the CUDA context alone takes "
            f"{format_bytes(budget.memory_bytes - left)}: give a larger one"
        )
    _set_fraction(device, min(1.0, left / total))


def _set_fraction(device: torch.device, fraction: float) -> None:
    _fractions[_index(device)] = fraction
    torch.cuda.set_per_process_memory_fraction(fraction, device)


def recap_device(device: torch.device | str, *, budget: Budget) -> None:
    """The cap of a budget that took another's place: as `cap_device`, and none where memory is limited no more."""
    if budget.memory_bytes is None:
        uncap_device(device)
    else:
        cap_device(device, budget=budget)


def uncap_device(device: torch.device | str) -> None:
    """Takes the cap away again and gives cached memory back."""
    device = torch.device(device)
    if device.type == "cuda":
        _set_fraction(device, 1.0)
        torch.cuda.empty_cache()


@contextmanager
def uncapped(device: torch.device | str, *, budget: Budget) -> Iterator[None]:
    """Inside, the cap is away, for a look at what weights and gradients in full need, never to train.

    What was held meanwhile is given back, and no part of the peak that is measured afterwards. An error goes on as what
    it is, where the context has grown so that no cap leaves anything.
    """
    uncap_device(device)
    try:
        yield
    except BaseException:
        with suppress(BadInputError):
            _cap_again(device, budget=budget)
        raise
    _cap_again(device, budget=budget)


def _cap_again(device: torch.device | str, *, budget: Budget) -> None:
    clear_cache(device)
    if torch.device(device).type == "cuda":
        torch.cuda.reset_peak_memory_stats(device)
    cap_device(device, budget=budget)


@contextmanager
def lifted(device: torch.device | str) -> Iterator[None]:
    """Inside, the cap is away, and afterwards as it was: to put back what was there before."""
    device = torch.device(device)
    if device.type != "cuda":
        yield
        return
    before = _fractions.get(_index(device), 1.0)
    torch.cuda.set_per_process_memory_fraction(1.0, device)
    try:
        yield
    finally:
        torch.cuda.set_per_process_memory_fraction(before, device)


def clear_cache(device: torch.device | str) -> None:
    """Gives back what nobody holds any more, cycles and cuBLAS workspaces included; does nothing off CUDA."""
    if torch.device(device).type == "cuda":
        gc.collect()
        getattr(torch._C, "_cuda_clearCublasWorkspaces", lambda: None)()
        torch.cuda.empty_cache()


def _index(device: torch.device) -> int:
    return device.index if device.index is not None else torch.cuda.current_device()


def _remember_free(index: int) -> int:
    """Free bytes before the context; read once per device, from NVML, which makes no context itself."""
    if index not in free_at_start:
        free = None if torch.cuda.is_initialized() else nvml_free(index)
        free_at_start[index] = free if free is not None else torch.cuda.mem_get_info(index)[1]
    return free_at_start[index]


class _NvmlMemory(ctypes.Structure):
    _fields_ = [("total", ctypes.c_ulonglong), ("free", ctypes.c_ulonglong), ("used", ctypes.c_ulonglong)]


class _NvmlProcess(ctypes.Structure):
    _fields_ = [
        ("pid", ctypes.c_uint),
        ("used", ctypes.c_ulonglong),
        ("gpu_instance", ctypes.c_uint),
        ("compute_instance", ctypes.c_uint),
    ]


_MOST_PROCESSES = 256
_NOT_TOLD = 2**64 - 1  # NVML_VALUE_NOT_AVAILABLE


@contextmanager
def nvml(index: int) -> Iterator[tuple[Any, ctypes.c_void_p] | None]:
    """The driver's management library and its handle of a device; None where there is none."""
    visible = [name.strip() for name in os.environ.get("CUDA_VISIBLE_DEVICES", "").split(",") if name.strip()]
    name = visible[index] if index < len(visible) else str(index)
    try:
        nvml = ctypes.CDLL("libnvidia-ml.so.1")
    except OSError:
        yield None
        return
    if nvml.nvmlInit_v2() != 0:
        yield None
        return
    try:
        handle = ctypes.c_void_p()
        if name.isdigit():
            failed = nvml.nvmlDeviceGetHandleByIndex_v2(ctypes.c_uint(int(name)), ctypes.byref(handle))
        else:
            failed = nvml.nvmlDeviceGetHandleByUUID(name.encode(), ctypes.byref(handle))
        yield None if failed else (nvml, handle)
    finally:
        nvml.nvmlShutdown()


def nvml_free(index: int) -> int | None:
    """Free bytes of a device; None where the driver cannot tell."""
    memory = _NvmlMemory()
    with nvml(index) as found:
        if found is None or found[0].nvmlDeviceGetMemoryInfo(found[1], ctypes.byref(memory)):
            return None
    return memory.free


def nvml_own(index: int) -> int | None:
    """Bytes that this process holds on a device; None where the driver does not tell processes apart.

    In a container the driver may know this process by another number than it knows itself by: then it is told only if
    it is the single one.
    """
    processes, count = (_NvmlProcess * _MOST_PROCESSES)(), ctypes.c_uint(_MOST_PROCESSES)
    with nvml(index) as found:
        ask = getattr(found[0], "nvmlDeviceGetComputeRunningProcesses_v3", None) if found is not None else None
        if found is None or ask is None or ask(found[1], ctypes.byref(count), processes):
            return None
    told = [process for process in processes[: count.value] if process.used != _NOT_TOLD]
    mine = [process.used for process in told if process.pid == os.getpid()]
    if not mine and len(told) == count.value == 1:
        mine = [told[0].used]
    return mine[0] if len(mine) == 1 else None
