"""CUDA memory outside of torch's tensors (the context), free memory, and the cap that keeps a process to its budget.

Other devices have no context and no cap: the same functions return 0 or do nothing there.
"""

import ctypes
import gc
import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from typing import Any

import torch

from baoc.errors import BadInputError, InfeasibleBudgetError
from baoc.kernels.host_memory import available_host_bytes
from baoc.profiling.cuda_emulation import SMALL_PAGE
from baoc.types import Budget
from baoc.units import MIB, format_bytes

# The context grows as kernels and libraries load. Measured on an H200 (ViT-S/16 and a Llama, one run each): 610 MiB at
# first, 148 more after the first forward and backward, 73 more until training had begun.
EARLY_MODULES_BYTES = 144 * MIB  # reserved for the first forward and backward
LATE_MODULES_BYTES = 88 * MIB  # reserved for what loads after that
LAST_MODULES_BYTES = 8 * MIB  # part of the late reserve that is always kept, whatever has loaded
MAX_CONFIRMATIONS = 12  # budgets that are planned for before a refusal names one

free_at_start: dict[int, int] = {}  # device index -> bytes that were free before this process used it
first_context: dict[int, int] = {}  # device index -> bytes of the context at its first reading
settled_context: dict[int, int] = {}  # device index -> bytes of the context after the first forward and backward
others_at_start: dict[int, frozenset[int | None]] = {}  # device index -> processes before this one used it, by NVML
own_pid: dict[int, int | None] = {}  # device index -> this process in NVML's list
_fractions: dict[int, float] = {}  # device index -> the cap in force, as a fraction of the card's memory


def free_bytes(device: torch.device | str) -> int:
    """Bytes that this process may use on `device`: on CUDA free memory, torch's cache and this process's context.

    On other devices the available memory of the system. Raises BadInputError if that is unknown.
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
    return torch.cuda.mem_get_info(index)[0] + cached + current_context_bytes(device)


def context_bytes(device: torch.device | str) -> int:
    """Bytes that plans and caps assume for the CUDA context, LATE_MODULES_BYTES not included; 0 on other devices.

    Before the first forward and backward: its present size plus EARLY_MODULES_BYTES. After it (`fix_context_bytes`):
    its size then, until later kernels leave less than LAST_MODULES_BYTES of LATE_MODULES_BYTES; from there on it grows
    with them. A plan thus does not depend on how many kernels the process had loaded, and the
    least budget that one process reports holds in the next.
    """
    device = torch.device(device)
    if device.type != "cuda":
        return 0
    now, settled = current_context_bytes(device), settled_context.get(_index(device))
    if settled is None:
        return max(first_context.setdefault(_index(device), now), now) + EARLY_MODULES_BYTES
    return max(settled, now + LAST_MODULES_BYTES - LATE_MODULES_BYTES)


def fix_context_bytes(device: torch.device | str) -> int:
    """Fixes `context_bytes` after a forward and backward have run, and returns it. Only the first call has effect."""
    device = torch.device(device)
    if device.type == "cuda":
        index, now = _index(device), current_context_bytes(device)
        settled_context.setdefault(index, max(now, first_context.setdefault(index, now)))
    return context_bytes(device)


def current_context_bytes(device: torch.device | str) -> int:
    """Present bytes of the CUDA context and its loaded kernels; 0 on other devices.

    The driver's bytes of this process less those that torch's allocator reserved. If the driver does not list bytes by
    process, the fall of free memory since the start is used, which includes what other processes took or returned;
    without NVML, all used memory of the card. The context grows as kernels load, so read it again after a step. A lower
    reading than before comes from another process.
    """
    device = torch.device(device)
    if device.type != "cuda":
        return 0
    index = _index(device)
    free_before = _remember_free(index)
    torch.zeros(1, device=device)  # creates the context
    fall, own = free_before - torch.cuda.mem_get_info(index)[0], nvml_own(index)
    return max(0, (fall if own is None else own) - torch.cuda.memory_reserved(index))


def device_peak_bytes(device: torch.device) -> int:
    """Bytes of the CUDA context plus the peak of reserved memory since its last reset; 0 on other devices."""
    return current_context_bytes(device) + torch.cuda.max_memory_reserved(device) if device.type == "cuda" else 0


ALLOCATOR = "expandable_segments:True"
_ALLOCATOR_VARIABLES = ("PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF")


def use_expandable_segments(device: torch.device | str) -> None:
    """Switches torch's allocator to expandable segments, unless the user set the allocator's environment variables.

    Fixed segments would keep unusable gaps where optimizer states lie between activations.
    """
    if torch.device(device).type == "cuda" and not any(os.environ.get(name) for name in _ALLOCATOR_VARIABLES):
        allocator_settings()(ALLOCATOR)


def allocator_settings() -> Any:
    """torch's setter of allocator settings under its name in this version: the old name warns in new versions."""
    return getattr(torch._C, "_accelerator_setAllocatorSettings", None) or torch.cuda.memory._set_allocator_settings


def cap_device(device: torch.device | str, *, budget: Budget) -> None:
    """Caps torch's allocator at the memory budget less the context and LATE_MODULES_BYTES, at most the card's memory.

    Does nothing on other devices. Without a memory budget it only uses expandable segments. Raises BadInputError if the
    budget is smaller than the context.
    """
    device = torch.device(device)
    use_expandable_segments(device)
    if device.type != "cuda" or budget.memory_bytes is None:
        return
    total = torch.cuda.get_device_properties(device).total_memory
    left = budget.memory_bytes - context_bytes(device) - LATE_MODULES_BYTES
    if left <= 0:
        raise BadInputError(
            f"budget {budget.name} is {format_bytes(budget.memory_bytes)}, of which the CUDA context alone takes "
            f"{format_bytes(budget.memory_bytes - left)}: give a larger one"
        )
    _set_fraction(device, min(1.0, (left + 0.5) / total))  # half a byte: torch rounds the product down


def least_budget_with_same_pages(device: torch.device, memory_bytes: int) -> int:
    """The least memory budget in bytes whose cap (`cap_device`) has as many pages of the allocator as `memory_bytes`
    has. A step that runs out of memory under one of these budgets does so under all of them."""
    return memory_bytes - (memory_bytes - context_bytes(device) - LATE_MODULES_BYTES) % SMALL_PAGE


def least_confirmed_bytes(
    refusal: InfeasibleBudgetError, *, plan_at: Callable[[int], int], page_start: Callable[[int], int]
) -> int | None:
    """The least memory budget, in bytes, of at most MAX_CONFIRMATIONS that were planned for; None if none was enough.

    Args:
        refusal: names the first budget to try.
        plan_at: plans within so many bytes and returns the peak of the smallest plan by its measurement. Raises
            InfeasibleBudgetError.
        page_start: the least budget whose cap has as many pages, see `least_budget_with_same_pages`.

    Under a smaller cap a step may take fewer bytes, since the allocator reserves less, or run out of memory. Therefore:
    1. The budgets that refusals name are tried until one is enough.
    2. The number of pages of the cap is bisected, from the peak that the smallest plan would have on.
    3. Within the last page the step stays the same, and the peak of its smallest plan is the answer.
    """
    refused, enough, peak, candidate = refusal.budget_bytes, None, 0, refusal.least_feasible_bytes
    for _ in range(MAX_CONFIRMATIONS):
        try:
            peak = plan_at(candidate)
            enough = candidate
        except InfeasibleBudgetError as error:
            refused = candidate
            if enough is None:
                candidate = max(error.without_frames().least_feasible_bytes, candidate + 1)
                continue
        except (BadInputError, torch.OutOfMemoryError):
            refused = candidate
        if enough is None:
            return None
        start = page_start(enough)
        if peak < start and refused < start - 1:
            middle = peak if refused < peak else (refused + start) // 2
            candidate = min(start - 1, page_start(middle) + SMALL_PAGE - 1)
        else:
            candidate = max(peak, start)
            if not refused < candidate < enough:
                break
    return enough


def _set_fraction(device: torch.device, fraction: float) -> None:
    _fractions[_index(device)] = fraction
    torch.cuda.set_per_process_memory_fraction(fraction, device)


def recap_device(device: torch.device | str, *, budget: Budget) -> None:
    """Replaces the cap by that of a new `budget`, or removes it if the budget does not limit memory."""
    if budget.memory_bytes is None:
        uncap_device(device)
    else:
        cap_device(device, budget=budget)


def uncap_device(device: torch.device | str) -> None:
    """Removes the cap and empties torch's cache."""
    device = torch.device(device)
    if device.type == "cuda":
        _set_fraction(device, 1.0)
        torch.cuda.empty_cache()


@contextmanager
def uncapped(device: torch.device | str, *, budget: Budget) -> Iterator[None]:
    """Inside, there is no cap: for measuring what native weights and gradients need, never for training.

    Afterwards memory is returned and peak statistics are reset, so that later peaks do not include it. An error inside
    is raised unchanged, even if the context has grown so much that the cap cannot be set again.
    """
    uncap_device(device)
    try:
        yield
    except GeneratorExit:  # garbage collection, at interpreter exit without the names of modules
        raise
    except BaseException:
        with suppress(BadInputError):
            _restore_cap(device, budget=budget)
        raise
    _restore_cap(device, budget=budget)


def _restore_cap(device: torch.device | str, *, budget: Budget) -> None:
    clear_cache(device)
    if torch.device(device).type == "cuda":
        torch.cuda.reset_peak_memory_stats(device)
    cap_device(device, budget=budget)


@contextmanager
def cap_suspended(device: torch.device | str) -> Iterator[None]:
    """Inside, there is no cap; afterwards the same cap as before. For restoring tensors that are older than the cap."""
    device = torch.device(device)
    if device.type != "cuda":
        yield
        return
    before = _fractions.get(_index(device), 1.0)
    torch.cuda.set_per_process_memory_fraction(1.0, device)
    try:
        yield
    finally:
        _set_fraction(device, before)


def clear_cache(device: torch.device | str) -> None:
    """Frees unreferenced memory on CUDA: reference cycles, cuBLAS workspaces and torch's cache."""
    if torch.device(device).type == "cuda":
        gc.collect()
        getattr(torch._C, "_cuda_clearCublasWorkspaces", lambda: None)()
        torch.cuda.empty_cache()


def _index(device: torch.device) -> int:
    return device.index if device.index is not None else torch.cuda.current_device()


def _remember_free(index: int) -> int:
    """Free bytes before the context was created. Read once per device, from NVML, which creates no context."""
    if index not in free_at_start:
        free = None
        if not torch.cuda.is_initialized():
            free, others_at_start[index] = nvml_free(index), frozenset(_bytes_by_pid(index) or ())
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


_MAX_PROCESSES = 256
_NOT_AVAILABLE = 2**64 - 1  # NVML_VALUE_NOT_AVAILABLE


@contextmanager
def nvml(index: int) -> Iterator[tuple[Any, ctypes.c_void_p] | None]:
    """Yields (library, its handle of device `index`); None without NVML or without the device."""
    visible = [name.strip() for name in os.environ.get("CUDA_VISIBLE_DEVICES", "").split(",") if name.strip()]
    name = visible[index] if index < len(visible) else str(index)
    try:
        library = ctypes.CDLL("libnvidia-ml.so.1")
    except OSError:
        yield None
        return
    if library.nvmlInit_v2() != 0:
        yield None
        return
    try:
        handle = ctypes.c_void_p()
        if name.isdigit():
            failed = library.nvmlDeviceGetHandleByIndex_v2(ctypes.c_uint(int(name)), ctypes.byref(handle))
        else:
            failed = library.nvmlDeviceGetHandleByUUID(name.encode(), ctypes.byref(handle))
        yield None if failed else (library, handle)
    finally:
        library.nvmlShutdown()


def nvml_free(index: int) -> int | None:
    """Free bytes of a device by NVML; None if NVML does not report them."""
    memory = _NvmlMemory()
    with nvml(index) as device:
        if device is None or device[0].nvmlDeviceGetMemoryInfo(device[1], ctypes.byref(memory)):
            return None
    return memory.free


def nvml_own(index: int) -> int | None:
    """Bytes of this process on a device by NVML; None if the driver does not list bytes by process.

    In a container the driver may list this process under another pid. It is then the only process that appeared since
    before this one used the device. If others appeared at the same moment, the result stays None.
    """
    if (bytes_by_pid := _bytes_by_pid(index)) is None:
        return None
    if index not in own_pid:
        pids = [os.getpid()]
        if os.getpid() not in bytes_by_pid:
            pids = [*bytes_by_pid.keys() - others_at_start.get(index, frozenset())]
        own_pid[index] = pids[0] if len(pids) == 1 else None
    return bytes_by_pid.get(own_pid[index])


def _bytes_by_pid(index: int) -> dict[int | None, int | None] | None:
    """Processes on a device by NVML: pid -> bytes, None if not available. None if NVML does not list processes."""
    processes, count = (_NvmlProcess * _MAX_PROCESSES)(), ctypes.c_uint(_MAX_PROCESSES)
    with nvml(index) as device:
        if device is None:
            return None
        library, handle = device
        query = getattr(library, "nvmlDeviceGetComputeRunningProcesses_v3", None)
        if query is None or query(handle, ctypes.byref(count), processes):
            return None
    return {entry.pid: None if entry.used == _NOT_AVAILABLE else entry.used for entry in processes[: count.value]}
