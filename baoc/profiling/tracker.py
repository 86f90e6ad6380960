"""Measures live and peak tensor memory: by counting storages at each operator, or on CUDA by torch's allocator.

The resident set size would not do on the CPU, as it includes the allocator's free lists and the interpreter. Nor would
`torch.distributed._tools.MemTracker`, which cannot reset its peak within a step.
"""

import weakref
from collections.abc import Callable, Iterable, Mapping
from typing import Any

import torch
from torch import Tensor, nn
from torch._ops import OpOverload
from torch.utils._python_dispatch import (
    TorchDispatchMode,
    _get_current_dispatch_mode,  # pyright: ignore[reportPrivateUsage]
    _pop_mode,  # pyright: ignore[reportPrivateUsage]
    _push_mode,  # pyright: ignore[reportPrivateUsage]
)

from baoc.optim.shards import local_shard
from baoc.profiling.cuda_emulation import CachingAllocator


class MemoryTracker(TorchDispatchMode):
    """Live bytes and their peak over all storages that operators inside `with tracker:` return or receive.

    A storage counts once, however many views it has, from the first operator that sees it until it is freed, even after
    the `with`. Resizes are followed. The tracker keeps only weak references, so tensors saved by autograd
    count as long as the graph holds them. Existing tensors count from `count_existing`, or from their first use.
    Workspace that a kernel allocates and frees inside one operator is not counted.

    The tracker may be entered many times; `peak_bytes` continues until `reset_peak`. Use it from one thread at a time.

    Args:
        device: counts only this device type, "meta" included; None counts all.
        allocator: an emulated allocator; bytes are then rounded as it rounds, and `reserved_bytes` is what it reserves.
    """

    def __init__(self, *, device: str | torch.device | None = None, allocator: CachingAllocator | None = None):
        super().__init__()
        self._allocator = allocator
        self._device = torch.device(device).type if device is not None else None
        self._live: dict[int, tuple[weakref.ref[Any], int]] = {}  # storage's address -> (weak reference, bytes)
        self._ignored: dict[int, weakref.ref[Any]] = {}
        self._composite: dict[Any, bool] = {}  # operator -> whether it is decomposed, see `_is_composite`
        self._resize: Callable[..., Any] | None = None  # torch's own UntypedStorage.resize_, while it is patched
        self._depth = 0
        self._current = 0
        self._peak = 0

    @property
    def current_bytes(self) -> int:
        return self._current

    @property
    def peak_bytes(self) -> int:
        """The largest `current_bytes` since the start or the last `reset_peak`."""
        return self._peak

    @property
    def reserved_bytes(self) -> int:
        """Bytes that the emulated allocator has reserved, which it never returns; `peak_bytes` without one."""
        return self._peak if self._allocator is None else self._allocator.reserved_bytes

    def reset_peak(self) -> None:
        self._peak = self._current

    def count_existing(self, *existing: Any) -> "MemoryTracker":
        """Counts existing tensors: modules (parameters, buffers, gradients), tensors, and containers of these."""
        for value in existing:
            self._count_value(value)
        self._peak = max(self._peak, self._current)
        return self

    def ignore(self, *tensors: Tensor) -> "MemoryTracker":
        """Excludes `tensors` of a memory-mapped file, whose pages the system may take back at any time."""
        for tensor in tensors:
            storage = tensor.untyped_storage()
            key = storage._cdata
            self._ignored[key] = weakref.ref(storage, lambda _, key=key: self._ignored.pop(key, None))
        return self

    def _count_value(self, value: Any) -> None:
        if isinstance(value, nn.Module):
            self.count_existing(*value.parameters(), *value.buffers())
        elif isinstance(value, Tensor):
            self._count_tensor(value)
            if value.is_leaf and value.grad is not None:
                self._count_tensor(value.grad)
        elif isinstance(value, Mapping):
            self.count_existing(*value.values())
        elif isinstance(value, Iterable) and not isinstance(value, str | bytes):
            self.count_existing(*value)

    # -- following operators --------------------------------------------------------------------------------------

    supports_higher_order_operators = True

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        if isinstance(func, OpOverload) and self._is_composite(func):
            # Inference mode does not decompose composite operators, but the operators inside them allocate.
            with self:
                out = func.decompose(*args, **kwargs)
            if out is not NotImplemented:
                return out
        self._count_all(args)
        if kwargs:
            self._count_all(kwargs.values())
        out = func(*args, **kwargs)
        if isinstance(out, Tensor):
            self._count_tensor(out)
        elif isinstance(out, list | tuple):
            self._count_all(out)
        if self._current > self._peak:
            self._peak = self._current
        return out

    def _is_composite(self, func: Any) -> bool:
        """Whether `func` runs as a composition of other operators on this device.

        An operator with a kernel of its own (silu_backward) is not decomposed: its parts would round differently, and
        a tracked step must compute the same numbers.
        """
        composite = self._composite.get(func)
        if composite is None:
            backend = {"meta": "Meta"}.get(self._device or "cpu", (self._device or "cpu").upper())
            has_kernel = torch._C._dispatch_has_kernel_for_dispatch_key
            composite = (
                func.namespace != "prim"  # queries of fake tensors
                and has_kernel(func.name(), "CompositeImplicitAutograd")
                and not has_kernel(func.name(), backend)
            )
            self._composite[func] = composite
        return composite

    def _count_all(self, values: Iterable[Any]) -> None:
        for value in values:
            if isinstance(value, Tensor):
                self._count_tensor(value)
            elif isinstance(value, list | tuple):
                self._count_all(value)

    def _count_tensor(self, tensor: Tensor) -> None:
        if type(tensor) is not Tensor:
            tensor = local_shard(tensor)
        if self._device is not None and tensor.device.type != self._device:
            return
        if tensor.layout is torch.strided:
            self._count_storage(tensor.untyped_storage())
        elif tensor.layout is torch.sparse_coo:
            self._count_all((tensor._indices(), tensor._values()))

    def _count_storage(self, storage: torch.UntypedStorage) -> None:
        key = storage._cdata
        if key in self._ignored or getattr(storage, "is_alias", False):  # memory that another storage has
            return
        nbytes = storage.nbytes()
        counted = self._live.get(key)
        if counted is not None:
            reference, nbytes_before = counted
            if nbytes_before != nbytes:
                self._live[key] = (reference, nbytes)
                self._change(key, before=nbytes_before, after=nbytes)
            return
        reference = weakref.ref(storage, lambda _: self._change(key, before=self._live.pop(key)[1], after=0))
        self._live[key] = (reference, nbytes)
        self._change(key, before=0, after=nbytes)

    def _change(self, key: int, *, before: int, after: int) -> None:
        if self._allocator is None:
            self._current += after - before
            return
        self._allocator.free(key)
        self._allocator.allocate(key, after)
        self._current = self._allocator.allocated_bytes

    # -- entering: UntypedStorage.resize_ is not an operator, so it is patched inside the `with` -----------------------

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

    def exit_out_of_order(self) -> None:
        """Exits the mode on this thread although modes that were entered later are still active; these stay active."""
        above: list[Any] = []
        while (mode := _get_current_dispatch_mode()) is not None and mode is not self:
            above.append(_pop_mode())
        try:
            if mode is self:
                self.__exit__(None, None, None)
        finally:
            for other in reversed(above):
                _push_mode(other)

    def _resizing(self, original: Callable[..., Any]) -> Callable[..., Any]:
        def resize_(storage: torch.UntypedStorage, size: int) -> Any:
            out = original(storage, size)
            if storage._cdata in self._live:
                self._count_storage(storage)
                self._peak = max(self._peak, self._current)
            return out

        return resize_


class PeakMeter:
    """Live and peak bytes on one device, inside `with`: of torch's allocator on CUDA, of a MemoryTracker elsewhere.

    Args:
        existing: tensors and modules to count from the start.
        allocator: emulates the reserved memory of a card, see MemoryTracker.
    """

    def __init__(self, device: torch.device, *existing: Any, allocator: CachingAllocator | None = None):
        self.device = device
        self._tracker = None
        self.allocator = allocator
        if device.type != "cuda":
            self._tracker = MemoryTracker(device=device, allocator=allocator).count_existing(*existing)

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

    def empty_cache(self) -> None:
        """Empties torch's cache on CUDA, which would otherwise count in the next peak of reserved memory."""
        if self._tracker is None:
            torch.cuda.empty_cache()

    def exit_out_of_order(self) -> None:
        if self._tracker is not None:
            self._tracker.exit_out_of_order()

    def reset_peak(self) -> None:
        if self._tracker is not None:
            self._tracker.reset_peak()
        else:
            torch.cuda.reset_peak_memory_stats(self.device)

    @property
    def current_bytes(self) -> int:
        return self._tracker.current_bytes if self._tracker is not None else self._stat("allocated_bytes", "current")

    @property
    def peak_bytes(self) -> int:
        """Peak of reserved memory on CUDA and with an emulated allocator; of live storages elsewhere."""
        if self._tracker is not None:
            return self._tracker.reserved_bytes
        return self._stat("reserved_bytes", "peak")

    @property
    def peak_allocated_bytes(self) -> int:
        return self._tracker.peak_bytes if self._tracker is not None else self._stat("allocated_bytes", "peak")

    def _stat(self, statistic: str, moment: str) -> int:
        """Reads one statistic of the CUDA allocator. `torch.cuda.memory_stats` flattens and sorts all of them, which is
        too slow to be done at every gradient."""
        stats: Any = torch.cuda.memory_stats_as_nested_dict(self.device)
        return stats[statistic]["all"][moment] if stats else 0
