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


FREED, ARRIVED = -1, -2  # events in the allocator's record, in place of the bytes of an allocation
SMALLEST, SMALL = 512, MIB  # bytes: the multiple that sizes are rounded up to; the largest size of the small pool
SMALL_PAGE, LARGE_PAGE = 2 * MIB, 20 * MIB


class CachingAllocator:
    """Emulates torch's CUDA allocator with expandable segments: best fit, blocks split and merged when freed.

    Follows c10/cuda/CUDACachingAllocator.cpp of torch 2.11. Reserved memory is never returned, as there is no cap.
    """

    def __init__(self) -> None:
        self.pools = (_Pool(page=SMALL_PAGE), _Pool(page=LARGE_PAGE))
        self._held: dict[Any, tuple[_Pool, int]] = {}  # pool and address
        self._log: list[tuple[int, int]] | None = None
        self.allocated_bytes = 0

    @property
    def reserved_bytes(self) -> int:
        return sum(pool.mapped for pool in self.pools)

    def allocate(self, key: Any, nbytes: int) -> None:
        if self._log is not None:
            self._log.append((key, nbytes))
        if nbytes <= 0:
            return
        size = -(-nbytes // SMALLEST) * SMALLEST
        pool = self.pools[size > SMALL]
        self._held[key] = pool, pool.take(size)
        self.allocated_bytes += size

    def free(self, key: Any) -> None:
        if self._log is not None:
            self._log.append((key, FREED))
        if key in self._held:
            pool, address = self._held.pop(key)
            self.allocated_bytes -= pool.sizes[address]
            pool.give(address)

    def record(self) -> None:
        """Records allocations and frees from here on, for `reserved_again`."""
        self._log = []
        self._start = {key: pool.sizes[address] for key, (pool, address) in self._held.items()}

    def arrived(self, gradient: int) -> None:
        """Records that the gradient in this storage was computed or accumulated into."""
        if self._log is not None:
            self._log.append((gradient, ARRIVED))

    def reserved_again(self, gradients: Mapping[int, int]) -> int:
        """Bytes reserved after two passes: the first starts without gradients, the second beside those of the first.

        Gradients of the first pass lie among its activations, and the second pass finds no room between them. The
        recorded pass started with stand-ins for the gradients: `gradients` maps their storages to bytes.
        """
        assert self._log is not None, "nothing was recorded"
        log, self._log = self._log, None
        again = CachingAllocator()
        for key, nbytes in self._start.items():
            if key not in gradients:
                again.allocate(key, nbytes)
        dropped = any(what == FREED and key in gradients for key, what in log)
        for turn in (1, 2):
            again._replay(log, turn, gradients=gradients, dropped=dropped)
        return again.reserved_bytes

    def _replay(
        self, log: Sequence[tuple[int, int]], turn: int, *, gradients: Mapping[int, int], dropped: bool
    ) -> None:
        before = [key for key in self._held if isinstance(key, tuple)]  # left by the pass before
        for key, what in log:
            if what == ARRIVED:
                if turn == 1 and not dropped and key in gradients:
                    self.allocate((0, key), gradients[key])
            elif what == FREED:
                if (turn, key) not in self._held and key in gradients:
                    for left in before:
                        self.free(left)
                    before = []
                else:
                    self.free((turn, key))
            else:
                self.allocate((turn, key), what)


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
        held, address = self.free.pop(at)
        if held > size:
            self._add(address + size, held - size)
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
            held, address = self.free.pop(before)
            size += held
        self.sizes[address] = size
        insort(self.free, (size, address))

    def _free_at(self, address: int) -> int | None:
        """Where the block at `address` stands among the free ones; None where it is taken."""
        entry = (self.sizes[address], address)
        at = bisect_left(self.free, entry)
        return at if at < len(self.free) and self.free[at] == entry else None

    def _grow(self, size: int) -> None:
        """Makes the last block the largest free one, of at least `size`."""
        last = self._free_at(self.addresses[-1]) if self.addresses else None
        held, address = (0, self.mapped) if last is None else self.free.pop(last)
        more = -(-(size - held) // self.page) * self.page
        self.mapped += more
        if last is None:
            self._add(address, more)
        else:
            self.sizes[address] = held + more
            insort(self.free, (held + more, address))

    def _add(self, address: int, size: int) -> None:
        insort(self.addresses, address)
        self.sizes[address] = size
        insort(self.free, (size, address))
