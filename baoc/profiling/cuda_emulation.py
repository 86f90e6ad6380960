"""Lets fake tensors of a CPU flow as they would on a CUDA device: autocast's types, and the caching allocator's pages.

A build of torch without CUDA cannot run autograd on fake CUDA tensors, so a plan for an absent card uses the CPU's. Two
things differ there: which functions autocast runs in float32, and that memory is reserved in pages, with gaps.
"""

from bisect import bisect_left, insort
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode

from baoc.units import MIB

# torch/docs/source/amp.md, "CUDA Ops that can autocast to float32": what CPUs leave in bf16 is done in float32 there.
_FLOAT32 = {
    *("acos", "asin", "cosh", "erfinv", "exp", "expm1", "log", "log10", "log1p", "log2", "logsumexp", "pow", "__pow__"),
    *("__rpow__", "reciprocal", "__rdiv__", "__rtruediv__", "rsqrt", "sinh", "tan", "softplus", "softmin", "norm"),
    *("normalize", "renorm", "dist", "cdist", "pdist", "layer_norm", "group_norm", "cosine_similarity", "interpolate"),
    *("binary_cross_entropy_with_logits", "cosine_embedding_loss", "cross_entropy", "hinge_embedding_loss"),
    *("huber_loss", "kl_div", "l1_loss", "margin_ranking_loss", "mse_loss", "multi_margin_loss", "nll_loss"),
    *("multilabel_margin_loss", "poisson_nll_loss", "smooth_l1_loss", "soft_margin_loss", "triplet_margin_loss"),
}
_FLOAT32_OUT = {"cumprod", "cumsum", "log_softmax", "prod", "softmax", "sum"}  # these take the type of their result


class CudaAutocast(TorchFunctionMode):
    """Inside of `torch.autocast("cpu")`, functions take the types that `torch.autocast("cuda")` gives them."""

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
            return func(*map(_whole, args), **{key: _whole(value) for key, value in kwargs.items()})


def _is_half(value: Any) -> bool:
    return isinstance(value, Tensor) and value.dtype in (torch.bfloat16, torch.float16)


def _whole(value: Any) -> Any:
    return value.float() if _is_half(value) else value


FREED, ARRIVED = -1, -2  # in what an allocator has recorded, where else bytes stand
SMALLEST, SMALL = 512, MIB  # bytes: what sizes are rounded up to, and what still is of the small pool
SMALL_PAGE, LARGE_PAGE = 2 * MIB, 20 * MIB


class CachingAllocator:
    """What torch's CUDA allocator would hold with expandable segments: best fit, split, joined again when freed.

    After c10/cuda/CUDACachingAllocator.cpp of torch 2.11. Nothing is given back, as there is no cap here.
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
        """From here on what is asked for is written down, for `reserved_again`."""
        self._log = []
        self._start = {key: block.size for key, (_, block) in self._held.items()}

    def arrived(self, gradient: int) -> None:
        """The gradient that lies in this storage has come, or had something added."""
        if self._log is not None:
            self._log.append((gradient, ARRIVED))

    def reserved_again(self, gradients: Mapping[int, int]) -> int:
        """What would be reserved after a pass without gradients in the beginning and one beside those of the first.

        `gradients`: storage -> bytes of stand-ins that were there from the start of what was recorded, in their place.
        Those of a first pass come to lie among its activations, and the second one's find no room between them.
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
        before = [key for key in self._held if isinstance(key, tuple)]  # what the turn before left
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
    """A stretch of a segment, between its neighbours."""

    address: int
    size: int
    free: bool = True
    previous: "_Block | None" = None
    next: "_Block | None" = None

    def __lt__(self, other: "_Block") -> bool:
        return (self.size, self.address) < (other.size, other.address)


class _Pool:
    """One expandable segment: blocks that lie side by side, and pages that are mapped behind them when needed."""

    def __init__(self, *, page: int):
        self.page = page
        self.mapped = 0
        self.last: _Block | None = None
        self.free: list[_Block] = []

    def take(self, size: int) -> _Block:
        """The smallest free block that is large enough, split; else the segment grows by whole pages."""
        at = bisect_left(self.free, (size, -1), key=lambda block: (block.size, block.address))
        if at < len(self.free):
            if self.free[at] is self.last and at + 1 < len(self.free):
                at += 1  # a block that could grow counts as large as it could be, so others come first
            block = self.free.pop(at)
        else:
            block = self._grown(size)
        block.free = False
        if block.size > size:
            self._split(block, size)
        return block

    def give(self, block: _Block) -> None:
        """Free again, and one with its free neighbours."""
        block.free = True
        for other in (block.previous, block.next):
            if other is not None and other.free:
                self.free.pop(bisect_left(self.free, (other.size, other.address), key=lambda b: (b.size, b.address)))
                block = self._joined(min(block, other, key=lambda b: b.address))
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

    def _joined(self, left: _Block) -> _Block:
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
