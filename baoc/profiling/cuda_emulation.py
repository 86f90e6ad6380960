"""Emulates two properties of CUDA on fake CPU tensors: autocast's dtypes and the caching allocator's reserved memory.

A torch build without CUDA cannot run autograd on fake CUDA tensors, so plans for an absent card run fake CPU tensors.
There, autocast keeps other functions in float32, and no allocator reserves memory in pages with gaps.
"""

from bisect import bisect_left, insort
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode

from baoc.units import MIB

# torch/docs/source/amp.md, "CUDA Ops that can autocast to float32": autocast on the CPU leaves them in bf16.
_FLOAT32 = {
    *("acos", "asin", "cosh", "erfinv", "exp", "expm1", "log", "log10", "log1p", "log2", "logsumexp", "pow", "__pow__"),
    *("__rpow__", "reciprocal", "__rdiv__", "__rtruediv__", "rsqrt", "sinh", "tan", "softplus", "softmin", "norm"),
    *("normalize", "renorm", "dist", "cdist", "pdist", "layer_norm", "group_norm", "cosine_similarity", "interpolate"),
    *("binary_cross_entropy_with_logits", "cosine_embedding_loss", "cross_entropy", "hinge_embedding_loss"),
    *("huber_loss", "kl_div", "l1_loss", "margin_ranking_loss", "mse_loss", "multi_margin_loss", "nll_loss"),
    *("multilabel_margin_loss", "poisson_nll_loss", "smooth_l1_loss", "soft_margin_loss", "triplet_margin_loss"),
}
_FLOAT32_OUT = {"cumprod", "cumsum", "log_softmax", "prod", "softmax", "sum"}  # float32 by their argument `dtype`


class CudaAutocast(TorchFunctionMode):
    """Inside `torch.autocast("cpu")`, functions compute in the dtypes of `torch.autocast("cuda")`."""

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        name = getattr(func, "__name__", "")
        if not (name in _FLOAT32 or name in _FLOAT32_OUT) or not torch.is_autocast_enabled("cpu"):
            return func(*args, **kwargs)
        with torch.autocast("cpu", enabled=False):
            if name in _FLOAT32_OUT and args and _is_half(args[0]) and kwargs.get("dtype") is None:
                return func(*args, **{**kwargs, "dtype": torch.float32})
            return func(*map(_to_float32, args), **{key: _to_float32(value) for key, value in kwargs.items()})


def _is_half(value: Any) -> bool:
    return isinstance(value, Tensor) and value.dtype in (torch.bfloat16, torch.float16)


def _to_float32(value: Any) -> Any:
    return value.float() if _is_half(value) else value


FREED, ARRIVED = -1, -2  # events in the allocator's log, in place of the bytes of an allocation
ROUNDING_BYTES = 512  # sizes are rounded up to a multiple of it
MAX_SMALL_BYTES = MIB  # the largest size that the pool of small blocks serves
SMALL_PAGE, LARGE_PAGE = 2 * MIB, 20 * MIB  # by which the pools grow; a cap counts in small pages


class CachingAllocator:
    """Emulates torch's CUDA allocator with expandable segments: best fit, blocks split and merged when freed.

    Follows c10/cuda/CUDACachingAllocator.cpp of torch 2.11. Reserved memory is never returned, as there is no cap.
    """

    def __init__(self) -> None:
        self.pools = (_Pool(page=SMALL_PAGE), _Pool(page=LARGE_PAGE))
        self._blocks: dict[Any, tuple[_Pool, int]] = {}  # key of an allocation -> pool and address
        self._log: list[tuple[int, int]] | None = None  # (key, bytes or event), while a pass is recorded
        self.allocated_bytes = 0

    @property
    def reserved_bytes(self) -> int:
        return sum(pool.mapped for pool in self.pools)

    def allocate(self, key: Any, nbytes: int) -> None:
        if self._log is not None:
            self._log.append((key, nbytes))
        if nbytes <= 0:
            return
        size = -(-nbytes // ROUNDING_BYTES) * ROUNDING_BYTES
        pool = self.pools[size > MAX_SMALL_BYTES]
        self._blocks[key] = pool, pool.take(size)
        self.allocated_bytes += size

    def free(self, key: Any) -> None:
        if self._log is not None:
            self._log.append((key, FREED))
        if key in self._blocks:
            pool, address = self._blocks.pop(key)
            self.allocated_bytes -= pool.sizes[address]
            pool.give(address)

    def record(self) -> None:
        """Records allocations and frees from here on, for `reserved_by_two_passes`."""
        self._log = []
        self._start = {key: pool.sizes[address] for key, (pool, address) in self._blocks.items()}

    def record_gradient(self, gradient: int) -> None:
        """Records that the gradient in the storage `gradient` was computed or accumulated into."""
        if self._log is not None:
            self._log.append((gradient, ARRIVED))

    def reserved_by_two_passes(self, gradients: Mapping[int, int]) -> int:
        """Replays the recorded pass twice in a new allocator and returns the bytes that this reserves.

        The first pass starts without gradients, the second one next to those of the first. These lie among the
        activations of the first pass, so that the second pass may not fit into the gaps. The recorded pass itself
        started with zero gradients: `gradients` maps their storages to bytes.
        """
        assert self._log is not None, "nothing was recorded"
        log, self._log = self._log, None
        replay = CachingAllocator()
        for key, nbytes in self._start.items():
            if key not in gradients:
                replay.allocate(key, nbytes)
        dropped = any(event == FREED and key in gradients for key, event in log)
        for number in (1, 2):
            replay._run_pass(log, number, gradients=gradients, dropped=dropped)
        return replay.reserved_bytes

    def _run_pass(
        self, log: Sequence[tuple[int, int]], number: int, *, gradients: Mapping[int, int], dropped: bool
    ) -> None:
        """Runs pass `number` of a log. Keys are (pass, key); of gradients that the first pass accumulates, (0, key).

        `dropped`: the loop sets gradients to None before backward, which then allocates new ones.
        """
        of_pass_before = [key for key in self._blocks if isinstance(key, tuple)]
        for key, event in log:
            if event == ARRIVED:
                if number == 1 and not dropped and key in gradients:
                    self.allocate((0, key), gradients[key])
            elif event == FREED:
                if (number, key) not in self._blocks and key in gradients:
                    for old in of_pass_before:
                        self.free(old)
                    of_pass_before = []
                else:
                    self.free((number, key))
            else:
                self.allocate((number, key), event)


class _Pool:
    """One expandable segment: adjacent blocks by address, and pages that are mapped behind them when needed."""

    def __init__(self, *, page: int):
        self.page = page
        self.mapped = 0
        self.addresses: list[int] = []  # of all blocks, ascending
        self.sizes: dict[int, int] = {}  # by address
        self.free: list[tuple[int, int]] = []  # (size, address), ascending

    def take(self, size: int) -> int:
        """Takes the smallest free block that is large enough and splits it, or grows the segment by whole pages."""
        at = bisect_left(self.free, (size, -1))
        if at == len(self.free):
            self._grow(size)
            at = -1
        elif self.free[at][1] == self.addresses[-1] and at + 1 < len(self.free):
            at += 1  # the allocator counts the last block as large as it could grow, so others come first
        free_size, address = self.free.pop(at)
        if free_size > size:
            self._add(address + size, free_size - size)
        self.sizes[address] = size
        return address

    def give(self, address: int) -> None:
        """Frees a block and merges it with its free neighbours."""
        at, size = bisect_left(self.addresses, address), self.sizes[address]
        if at + 1 < len(self.addresses) and (after := self._free_at(self.addresses[at + 1])) is not None:
            size += self.sizes.pop(self.addresses.pop(at + 1))
            self.free.pop(after)
        if at and (before := self._free_at(self.addresses[at - 1])) is not None:
            self.sizes.pop(self.addresses.pop(at))
            size_before, address = self.free.pop(before)
            size += size_before
        self.sizes[address] = size
        insort(self.free, (size, address))

    def _free_at(self, address: int) -> int | None:
        """Index of the block at `address` in `free`; None if it is in use."""
        entry = (self.sizes[address], address)
        at = bisect_left(self.free, entry)
        return at if at < len(self.free) and self.free[at] == entry else None

    def _grow(self, size: int) -> None:
        """Makes the last block the largest free one, of at least `size`."""
        last = self._free_at(self.addresses[-1]) if self.addresses else None
        free_size, address = (0, self.mapped) if last is None else self.free.pop(last)
        growth = -(-(size - free_size) // self.page) * self.page
        self.mapped += growth
        if last is None:
            self._add(address, growth)
        else:
            self.sizes[address] = free_size + growth
            insort(self.free, (free_size + growth, address))

    def _add(self, address: int, size: int) -> None:
        insort(self.addresses, address)
        self.sizes[address] = size
        insort(self.free, (size, address))
