"""Emulates two properties of CUDA on fake CPU tensors: autocast's dtypes and the caching allocator's reserved memory.

A torch build without CUDA cannot run autograd on fake CUDA tensors, so plans for an absent card run fake CPU tensors.
There, autocast keeps other functions in float32, and no allocator reserves memory in pages with gaps.
"""

from bisect import bisect_left, insort
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
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
        self._held: dict[Any, tuple[_Pool, _Block]] = {}
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
        pool, block = self._held.pop(key, (None, None))
        if pool is not None and block is not None:
            self.allocated_bytes -= block.size
            pool.give(block)

    def record(self) -> None:
        """Records allocations and frees from here on, for `reserved_again`."""
        self._log = []
        self._start = {key: block.size for key, (_, block) in self._held.items()}

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


@dataclass(slots=True, eq=False)
class _Block:
    """A block of a segment, linked to its neighbours by address."""

    address: int
    size: int
    free: bool = True
    previous: "_Block | None" = None
    next: "_Block | None" = None

    def __lt__(self, other: "_Block") -> bool:
        return (self.size, self.address) < (other.size, other.address)


class _Pool:
    """One expandable segment: adjacent blocks, and pages that are mapped behind them when needed."""

    def __init__(self, *, page: int):
        self.page = page
        self.mapped = 0
        self.last: _Block | None = None
        self.free: list[_Block] = []

    def take(self, size: int) -> _Block:
        """Takes the smallest free block that is large enough and splits it, or grows the segment by whole pages."""
        at = bisect_left(self.free, (size, -1), key=lambda block: (block.size, block.address))
        if at < len(self.free):
            if self.free[at] is self.last and at + 1 < len(self.free):
                at += 1  # the allocator counts the last block as large as it could grow, so others come first
            block = self.free.pop(at)
        else:
            block = self._grown(size)
        block.free = False
        if block.size > size:
            self._split(block, size)
        return block

    def give(self, block: _Block) -> None:
        """Frees `block` and merges it with its free neighbours."""
        block.free = True
        for other in (block.previous, block.next):
            if other is not None and other.free:
                self.free.pop(bisect_left(self.free, (other.size, other.address), key=lambda b: (b.size, b.address)))
                block = self._merged(min(block, other, key=lambda b: b.address))
        insort(self.free, block)

    def _grown(self, size: int) -> _Block:
        last = self.last
        has = last.size if last is not None and last.free else 0
        more = -(-(size - has) // self.page) * self.page
        if last is not None and last.free:
            self.free.remove(last)
            last.size += more
            block = last
        else:
            block = _Block(address=self.mapped, size=more, previous=last)
            if last is not None:
                last.next = block
            self.last = block
        self.mapped += more
        return block

    def _split(self, block: _Block, size: int) -> None:
        rest = _Block(address=block.address + size, size=block.size - size, previous=block, next=block.next)
        if block.next is not None:
            block.next.previous = rest
        block.next, block.size = rest, size
        if self.last is block:
            self.last = rest
        insort(self.free, rest)

    def _merged(self, left: _Block) -> _Block:
        right = left.next
        assert right is not None
        left.size += right.size
        left.next = right.next
        left.free = True
        if right.next is not None:
            right.next.previous = left
        if self.last is right:
            self.last = left
        return left
