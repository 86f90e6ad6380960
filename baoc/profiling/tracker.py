"""Counts the bytes of live tensor storages at every operator: how peak memory is defined where there is no GPU.

Resident set size cannot say what a step needs: it holds the allocator's free lists and the interpreter. Storages can.
"""

import weakref
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import (
    TorchDispatchMode,
    _get_current_dispatch_mode,  # pyright: ignore[reportPrivateUsage]
    _pop_mode,  # pyright: ignore[reportPrivateUsage]
    _push_mode,  # pyright: ignore[reportPrivateUsage]
)

from baoc.profiling.as_on_cuda import CachingAllocator


class MemoryTracker(TorchDispatchMode):
    """Live bytes and their peak, over all storages seen by operators that run inside `with tracker:`.

    A storage counts once, whatever views and aliases it has, from the operator that first returns or receives it until
    it is freed (also outside the `with`); a resize is followed. Nothing is kept alive: a weak reference per storage
    tells of its end, so tensors that autograd saves count for as long as the graph holds them. Tensors that exist
    already are told with `prime`; else they join at their first use. `device` limits the count to one device type, meta
    included; None counts all. Not seen: workspace that a kernel allocates and frees inside one operator. With an
    `allocator` bytes are those that it would hold for them, and `reserved_bytes` what it would have reserved.

    May be entered many times; `peak_bytes` goes on until `reset_peak`. For one thread at a time.
    """

    def __init__(self, *, device: str | torch.device | None = None, allocator: CachingAllocator | None = None):
        super().__init__()
        self._allocator = allocator
        self._device = torch.device(device).type if device is not None else None
        self._live: dict[int, tuple[weakref.ref[Any], int]] = {}  # address of the storage -> (its end, its bytes)
        self._left_out: dict[int, weakref.ref[Any]] = {}
        self._composite: dict[Any, bool] = {}
        self._resize: Callable[..., Any] | None = None
        self._depth = 0
        self._current = 0
        self._peak = 0

    @property
    def current_bytes(self) -> int:
        """Bytes of the storages that are alive now, of those that were seen."""
        return self._current

    @property
    def peak_bytes(self) -> int:
        """The largest `current_bytes` since the start or the last `reset_peak`."""
        return self._peak

    @property
    def reserved_bytes(self) -> int:
        """What the allocator has reserved by now, as it gives nothing back; without one, `peak_bytes`."""
        return self._peak if self._allocator is None else self._allocator.reserved_bytes

    def reset_peak(self) -> None:
        self._peak = self._current

    def prime(self, *held: Any) -> "MemoryTracker":
        """Counts what is alive already: modules (parameters, buffers, gradients), tensors, and containers of these."""
        for value in held:
            self._prime(value)
        self._peak = max(self._peak, self._current)
        return self

    def leave_out(self, *tensors: Tensor) -> "MemoryTracker":
        """Does not count these: the pages of a file that is mapped, which the system takes back when it likes."""
        for tensor in tensors:
            storage = tensor.untyped_storage()
            key = storage._cdata
            self._left_out[key] = weakref.ref(storage, lambda _, key=key: self._left_out.pop(key, None))
        return self

    def _prime(self, value: Any) -> None:
        if isinstance(value, nn.Module):
            self.prime(*value.parameters(), *value.buffers())
        elif isinstance(value, Tensor):
            self._see(value)
            if value.is_leaf and value.grad is not None:
                self._see(value.grad)
        elif isinstance(value, Mapping):
            self.prime(*value.values())
        elif isinstance(value, Iterable) and not isinstance(value, str | bytes):
            self.prime(*value)

    # -- following operators --------------------------------------------------------------------------------------

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        if self._is_composite(func):
            # inference mode hands composite operators over whole; their parts allocate, so they must be seen
            with self:
                out = func.decompose(*args, **kwargs)
            if out is not NotImplemented:
                return out
        self._see_all(args)
        if kwargs:
            self._see_all(kwargs.values())
        out = func(*args, **kwargs)
        if isinstance(out, Tensor):
            self._see(out)
        elif isinstance(out, list | tuple):
            self._see_all(out)
        if self._current > self._peak:
            self._peak = self._current
        return out

    def _is_composite(self, func: Any) -> bool:
        """Whether `func` is made of parts here. One with a kernel of its own (silu_backward) runs that, as untracked:
        its parts would round differently, so a step would not be the same step when it is tracked."""
        known = self._composite.get(func)
        if known is None:
            backend = {"meta": "Meta"}.get(self._device or "cpu", (self._device or "cpu").upper())
            has_kernel = torch._C._dispatch_has_kernel_for_dispatch_key
            known = (
                func.namespace != "prim"  # what fake tensors ask of themselves
                and has_kernel(func.name(), "CompositeImplicitAutograd")
                and not has_kernel(func.name(), backend)
            )
            self._composite[func] = known
        return known

    def _see_all(self, values: Iterable[Any]) -> None:
        for value in values:
            if isinstance(value, Tensor):
                self._see(value)
            elif isinstance(value, list | tuple):
                self._see_all(value)

    def _see(self, tensor: Tensor) -> None:
        if self._device is not None and tensor.device.type != self._device:
            return
        if tensor.layout is torch.strided:
            self._count(tensor.untyped_storage())
        elif tensor.layout is torch.sparse_coo:
            self._see_all((tensor._indices(), tensor._values()))

    def _count(self, storage: torch.UntypedStorage) -> None:
        key = storage._cdata
        if key in self._left_out:
            return
        nbytes = storage.nbytes()
        known = self._live.get(key)
        if known is not None:
            if known[1] != nbytes:
                self._live[key] = (known[0], nbytes)
                self._grow(key, before=known[1], after=nbytes)
            return
        self._live[key] = (weakref.ref(storage, lambda _: self._forget(key)), nbytes)
        self._grow(key, before=0, after=nbytes)

    def _forget(self, key: int) -> None:
        self._grow(key, before=self._live.pop(key)[1], after=0)

    def _grow(self, key: int, *, before: int, after: int) -> None:
        if self._allocator is None:
            self._current += after - before
            return
        self._allocator.free(key)
        self._allocator.allocate(key, after)
        self._current = self._allocator.allocated_bytes

    # -- entering: UntypedStorage.resize_ is no operator, so it is wrapped meanwhile --------------------------------

    def __enter__(self) -> "MemoryTracker":
        if self._depth == 0:
            self._resize = torch.UntypedStorage.resize_
            torch.UntypedStorage.resize_ = self._resizing(self._resize)  # pyright: ignore[reportAttributeAccessIssue]
        self._depth += 1
        super().__enter__()
        return self

    def __exit__(self, *exc: Any) -> None:
        super().__exit__(*exc)
        self._depth -= 1
        if self._depth == 0:
            torch.UntypedStorage.resize_ = self._resize  # pyright: ignore[reportAttributeAccessIssue]

    def leave(self) -> None:
        """As the end of `with`, whenever it comes: modes that were entered after this one stay. Of this thread."""
        above = []
        while (mode := _get_current_dispatch_mode()) is not None and mode is not self:
            above.append(_pop_mode())
        if mode is self:
            self.__exit__(None, None, None)
        for other in reversed(above):
            _push_mode(other)

    def _resizing(self, original: Callable[..., Any]) -> Callable[..., Any]:
        def resize_(storage: torch.UntypedStorage, size: int) -> Any:
            out = original(storage, size)
            if storage._cdata in self._live:
                self._count(storage)
                self._peak = max(self._peak, self._current)
            return out

        return resize_


@contextmanager
def untracked() -> Iterator[None]:
    """Inside, no tracker sees operators: for reading data, which is no part of what a step holds on its device."""
    above: list[TorchDispatchMode] = []
    while (mode := _get_current_dispatch_mode()) is not None:
        above.append(mode)
        _pop_mode()
    try:
        yield
    finally:
        for mode in reversed(above):
            _push_mode(mode)


class PeakMeter:
    """Live and peak bytes on one device, by its own definition: tracked storages, or on CUDA the allocator's.

    With an `allocator`, tracked storages as if it held them.
    """

    def __init__(self, device: torch.device, *held: Any, allocator: CachingAllocator | None = None):
        self.device = device
        self._tracker = None
        self._allocator = allocator
        if device.type != "cuda":
            self._tracker = MemoryTracker(device=device, allocator=allocator).prime(*held)

    def __enter__(self) -> "PeakMeter":
        if self._tracker is not None:
            self._tracker.__enter__()
        else:
            torch.cuda.empty_cache()
        self.reset_peak()
        return self

    def __exit__(self, *exc: Any) -> None:
        if self._tracker is not None:
            self._tracker.__exit__(*exc)

    def forget(self) -> None:
        """Gives back what is reserved and not in use, which would count as the peak of what comes next."""
        if self._tracker is None:
            torch.cuda.empty_cache()

    def record(self) -> None:
        """From here on the allocator, if it is imitated, writes down what it is asked for."""
        if self._allocator is not None:
            self._allocator.record()

    def reserved_again(self, gradients: Mapping[int, int]) -> int:
        """See `CachingAllocator.reserved_again`; 0 without one."""
        return 0 if self._allocator is None else self._allocator.reserved_again(gradients)

    def arrived(self, param: Tensor) -> None:
        """`param` has its gradient."""
        if self._allocator is not None and param.grad is not None:
            self._allocator.arrived(param.grad.untyped_storage()._cdata)

    def leave(self) -> None:
        """As the end of `with`, also where modes were entered after it that are still on."""
        if self._tracker is not None:
            self._tracker.leave()

    def reset_peak(self) -> None:
        if self._tracker is not None:
            self._tracker.reset_peak()
        else:
            torch.cuda.reset_peak_memory_stats(self.device)

    @property
    def current_bytes(self) -> int:
        return self._tracker.current_bytes if self._tracker is not None else self._told("allocated_bytes", "current")

    @property
    def peak_bytes(self) -> int:
        """On CUDA, and with an allocator, of reserved memory, as that is what other processes lose."""
        if self._tracker is not None:
            return self._tracker.reserved_bytes
        return self._told("reserved_bytes", "peak")

    @property
    def peak_allocated_bytes(self) -> int:
        return self._tracker.peak_bytes if self._tracker is not None else self._told("allocated_bytes", "peak")

    def _told(self, what: str, when: str) -> int:
        """By the allocator; torch's own functions flatten and sort all of its numbers first, which a look at every
        gradient of a network would wait for."""
        stats: Any = torch.cuda.memory_stats_as_nested_dict(self.device)
        return stats[what]["all"][when] if stats else 0
