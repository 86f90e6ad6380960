"""Gradient release: each block is stepped in the backward pass, as soon as its gradients are final, and drops them.

So no more gradients are alive at once than those of the blocks that are not final yet, instead of all. On a GPU small
blocks are stepped together from the second step on, as far as that takes at most 1 MiB more. What a step is
stays the same: mask, clip, observe, update, block by block; `Optimizer.step` then only finishes it. What has to know
all gradients before the first update cannot be had: accumulation, skipping a step, GradScaler, averaging over
processes, and the norm of this step to clip by.
"""

import logging
import threading
import warnings
import weakref
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, nullcontext
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from torch.utils.hooks import RemovableHandle
from torch.utils.weak import WeakTensorKeyDictionary

from baoc.errors import BadInputError, CheckpointError
from baoc.kernels import capturing
from baoc.optim import seeding
from baoc.optim.backends import Options
from baoc.optim.registry import Alone
from baoc.optim.release_groups import StreamId, in_order, stream_now, together
from baoc.optim.release_settings import GradientRelease, PartObserver
from baoc.optim.state import LiveBlock
from baoc.parallel import refuse_ranks

if TYPE_CHECKING:
    from baoc.optim.optimizer import BlockwiseOptimizer

log = logging.getLogger(__name__)
_OWNERS = WeakTensorKeyDictionary()  # parameter -> weak reference to the Releaser that steps it
_TOGETHER_BYTES = 64 * 2**20  # of gradients whose blocks are stepped together: a launch costs as much for one tensor
_ADVICE = (
    "With gradient release every backward is a step: call step() after each, with no accumulation, or build the "
    "optimizer without release"
)


def take_from_others(params: list[Tensor]) -> None:
    """Ends the release of any optimizer that steps one of `params` in backward: the newest one trains them."""
    for releaser in {id(r): r for p in params if (r := _owner_of(p)) is not None}.values():
        releaser.detach()
        log.warning(
            "a new optimizer was built on parameters whose gradients another one releases: that one has stopped to"
        )


def _owner_of(param: Tensor) -> "Releaser | None":
    ref = _OWNERS.get(param)
    return ref() if ref is not None else None


class Releaser:
    """Steps the blocks of `owner` in backward. `attach` puts hooks on its parameters, `detach` takes them off.

    A block is stepped when all of its trainable parameters had a gradient, and at `finish` where some had none. While
    detached, gradients stay until `finish`. `observer` sees gradients by parts.
    """

    def __init__(self, owner: "BlockwiseOptimizer", settings: GradientRelease):
        self.settings = settings
        self.observer: PartObserver | None = None
        self.before_block: Callable[[], object] | None = None  # called when a block is about to be stepped
        self.sizes: dict[Tensor, int] = {}  # bytes of gradients by which to group, where small ones stand for them
        self.norm: Tensor | None = None  # of the gradients of the last step that had some
        self._told_late = self._told_hooks = self._is_late = False
        self._reset()
        self.adopt(owner)
        if settings.clip_norm is not None:
            log.warning(
                "gradients are released in backward, so they are clipped to %g by the norm of the step before, and in "
                "the first step block by block",
                settings.clip_norm,
            )

    def adopt(self, owner: "BlockwiseOptimizer") -> None:
        """Makes it the releaser of `owner`, which may be a copy."""
        refuse_ranks("release")
        self._owner = weakref.ref(owner)
        self._lock = threading.RLock()
        self._handles: dict[Tensor, RemovableHandle] = {}
        on_gpu = any(param.is_cuda for param in owner.roster.names)
        self.together_bytes = _TOGETHER_BYTES if on_gpu else 0
        self.attach()

    def _reset(self) -> None:
        self._options: list[Options] | None = None  # of the step in progress
        self._got: set[Tensor] = set()  # parameters that had their gradient in it
        self._left: dict[str, int] = {}  # block -> parameters that still have none
        self._stepped: set[str] = set()
        self._order: list[tuple[str, int]] = []  # block and bytes of each gradient as it came, until groups are known
        self._whole: dict[tuple[str, ...], int] = {}  # group -> blocks of it that are whole
        self._waiting: list[LiveBlock] = []  # whole blocks of one group, to be stepped together
        self._streams: dict[str, set[StreamId]] = {}  # block -> CUDA streams that its gradients came on
        self._factor: Tensor | None = None  # of all gradients, by the norm of the step before
        self._norms: dict[Tensor, Tensor] = {}
        self._num_bad = 0  # non-finite elements known before it

    def __getstate__(self) -> dict[str, Any]:
        """For copies, which get an owner and hooks of their own, and begin between two steps."""
        kept = {key: self.__dict__[key] for key in ("settings", "norm", "_told_late", "_told_hooks")}
        return {**kept, "observer": None, "before_block": None, "sizes": {}}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state)
        self._is_late = False
        self._reset()

    # -- hooks ----------------------------------------------------------------------------------------------------

    def attach(self) -> None:
        """Puts a hook on every parameter that has state and none yet."""
        me = weakref.ref(self)

        def hook(param: Tensor) -> None:
            releaser = me()
            if releaser is not None:
                releaser._ready(param)

        roster = self._live_owner().roster
        self._block_of = {slot.param: name for name, live in roster.live.items() for slot in live.slots}
        for param in roster.names:
            if param not in self._handles and param.requires_grad:
                self._handles[param] = param.register_post_accumulate_grad_hook(hook)
                _OWNERS[param] = me

    def detach(self) -> None:
        """Takes the hooks off: from the next backward on gradients are kept until `step`."""
        for param, handle in self._handles.items():
            handle.remove()
            if _owner_of(param) is self:
                del _OWNERS[param]
        self._handles = {}

    @contextmanager
    def held(self) -> Iterator[None]:
        """Inside, a backward steps nothing: gradients stay where they are, and whoever looks at them drops them."""
        attached = bool(self._handles)
        self.detach()
        try:
            yield
        finally:
            if attached:
                self.attach()

    def _live_owner(self) -> "BlockwiseOptimizer":
        owner = self._owner()
        assert owner is not None, "hooks hold the releaser weakly, and the releaser is held by its owner"
        return owner

    @property
    def mid_step(self) -> bool:
        """True if some block was stepped, or is to be, and `step` was not called since."""
        return bool(self._stepped or self._whole)

    @property
    def num_nonfinite(self) -> int:
        """Non-finite gradient elements found in the step in progress."""
        return self._live_owner()._guard.num_nonfinite - self._num_bad if self._options is not None else 0

    # -- a step ---------------------------------------------------------------------------------------------------

    def _ready(self, param: Tensor) -> None:
        """The gradient of `param` is final, as far as this backward goes."""
        with self._lock:
            name = self._block_of[param]
            if param in self._got or name in self._stepped:
                param.grad = None
                self._refuse_second(param)
            if self._options is None:
                self._begin_in_backward()
            self._got.add(param)
            roster = self._live_owner().roster
            if self.together_bytes and not roster.groups and param.grad is not None:
                self._order.append((name, self.sizes.get(param, param.grad.nbytes)))
            live, left = roster.live[name], self._left.get(name)
            if left is None:
                left = sum(slot.param.requires_grad for slot in live.slots)
            self._left[name] = left - 1
            if param.is_cuda:
                self._streams.setdefault(name, set()).add(stream_now(param.device))
            if left == 1:
                self._is_whole(live)

    def _begin_in_backward(self) -> None:
        if capturing():
            raise BadInputError(
                "a CUDA graph cannot capture a backward that releases gradients: capture without release"
            )
        refuse_ranks("release")
        with torch.no_grad():
            self.begin()

    def _is_whole(self, live: LiveBlock) -> None:
        """A block has its gradients: it is stepped, with its group when that has all of them.

        A group that another one overtakes is not waited for: what it misses may not come in this step, and groups that
        wait for a frozen or skipped block each would keep the gradients of a whole backward.
        """
        group = self._group_of(live)
        if self._waiting and self._group_of(self._waiting[0]) != group:
            self._step_waiting()
        self._waiting.append(live)
        self._whole[group] = self._whole.get(group, 0) + 1
        if self._whole[group] == len(group):
            self._step_waiting()

    def _group_of(self, live: LiveBlock) -> tuple[str, ...]:
        return self._live_owner().roster.groups.get(live.block.name, (live.block.name,))

    def _step_waiting(self) -> None:
        lives, self._waiting = self._waiting, []
        by_group: dict[tuple[str, ...], list[LiveBlock]] = {}
        for live in lives:
            by_group.setdefault(self._group_of(live), []).append(live)
        with torch.no_grad():  # as a backward that makes a graph has not
            for group, members in by_group.items():
                self._step(members, group=group)

    def _group(self) -> None:
        """Who is stepped with whom from now on, by the order in which gradients came."""
        roster = self._live_owner().roster
        names = dict.fromkeys(name for name, _ in self._order)
        groups = together(
            self._order,
            left={name: sum(slot.param.requires_grad for slot in roster.live[name].slots) for name in names},
            limit=self.together_bytes,
            joins=lambda a, b: roster.can_join(roster.live[a], others=[roster.live[b]]),
        )
        roster.regroup(groups)

    def _refuse_second(self, param: Tensor) -> None:
        raise BadInputError(f"{self._live_owner().roster.names[param]} got a second gradient before step(). {_ADVICE}")

    def begin(self) -> None:
        """A step begins, at its first gradient: learning rates and the rest are read once for all blocks."""
        owner = self._live_owner()
        owner.roster.ready()
        self._refuse_devices()
        if owner.observer is not None:
            raise BadInputError(
                "observer sees the gradients of a whole step, which are never there at once with gradient release: "
                "set optimizer.releaser.observer, which sees them by parts"
            )
        self._options, self._num_bad = owner.options(), owner._guard.num_nonfinite
        if self.observer is not None:
            self.observer.begin_parts()

    def _refuse_devices(self) -> None:
        devices = {param.device for param in self._block_of}
        if len(devices) > 1:
            names = ", ".join(sorted(map(str, devices)))
            raise BadInputError(
                f"gradient release steps parameters of one device, these are on {names}: put the model on one, or "
                "train without release"
            )

    def _step(self, lives: list[LiveBlock], *, group: tuple[str, ...]) -> None:
        """One step of some blocks of a group with the gradients that their parameters have, which are then dropped."""
        owner = self._live_owner()
        others = [owner.roster.live[name] for name in group if len(lives) < len(group)]
        streams = set().union(*(self._streams.get(live.block.name, ()) for live in lives))
        aside = _set_aside([slot.param for live in others if live not in lives for slot in live.slots])
        with in_order(streams), aside:
            self.step_with(lives, unit=owner.roster.alone(group))

    def step_with(self, lives: list[LiveBlock], *, unit: Alone) -> None:
        owner = self._live_owner()
        assert self._options is not None
        if self.before_block is not None:
            self.before_block()
        looks = self.observer is not None or self.settings != GradientRelease()
        masks = owner._guard.take(unit, step=owner.num_steps + 1, final=looks)
        assert masks is not None, "skip_step is refused when the optimizer is built"
        self._stepped.update(live.block.name for live in lives)
        slots = [slot for live in lives for slot in live.slots if slot.param.grad is not None]
        by_norm, by_value = self.settings.clip_norm is not None, self.settings.clip_value is not None
        if by_norm and self.norm is not None and slots[0].param.is_cuda:
            self._clip_together([slot.param for slot in slots])
            by_norm = False
        if by_norm or by_value:
            for live in lives:
                self._clip([slot.param for slot in live.slots if slot.param.grad is not None])
        if self.observer is not None:
            self.observer.see_part({slot.name: slot.param.grad for slot in slots})  # pyright: ignore
        unseeded = [live for live in lives if live.unseeded]
        if unseeded:
            seeding.seed(unseeded, roster=owner.roster, param_groups=owner.param_groups)
        kind = slots[0].param.device.type
        with torch.autocast(kind, enabled=False) if torch.is_autocast_enabled(kind) else nullcontext():
            unit.backend(owner.inputs(masks, options=self._options, phase=owner.num_steps + 1))
        # Kernels write where autograd does not see it: a backward that still needs the old weights is told.
        torch.autograd.graph.increment_version([slot.param for slot in slots])
        for slot in slots:
            slot.param.grad = None

    def _clip(self, params: list[Tensor]) -> None:
        grads = [param.grad for param in params if param.grad is not None]
        if self.settings.clip_norm is not None and grads and params[0] not in self._norms:
            for param, grad in zip(params, grads, strict=True):
                wide = torch.float64 if grad.dtype is torch.float64 else torch.float32
                self._norms[param] = torch.linalg.vector_norm(grad, dtype=wide)
            factor = self.norm_factor(self.settings.clip_norm, params=params)
            for grad in grads:
                grad.mul_(factor.to(grad.device))
        if self.settings.clip_value is not None:
            for grad in grads:
                grad.clamp_(-self.settings.clip_value, self.settings.clip_value)

    def _clip_together(self, params: list[Tensor]) -> None:
        """By norm as `_clip` does, in few launches, where the norm to go by is known."""
        assert self.settings.clip_norm is not None
        grads = [param.grad for param in params if param.grad is not None]
        wide = torch.float64 if any(grad.dtype is torch.float64 for grad in grads) else torch.float32
        norms = torch._foreach_norm(grads, dtype=wide)  # pyright: ignore[reportPrivateImportUsage]
        self._norms |= zip(params, norms, strict=True)
        factor = self.norm_factor(self.settings.clip_norm, params=params)
        torch._foreach_mul_(grads, factor)  # pyright: ignore[reportPrivateImportUsage]

    def norm_factor(self, limit: float, *, params: list[Tensor]) -> Tensor:
        """What to multiply the gradients of a block by; no number is waited for."""
        if self.norm is not None:
            if self._factor is None:
                norm = self.norm.to(params[0].device)  # a checkpoint's may be elsewhere, where other roundings are
                self._factor = (limit / (norm + 1e-6)).clamp(max=1.0)
            return self._factor
        numel = max(sum(param.numel() for param in self._block_of), 1)
        share = sum(param.numel() for param in params) / numel
        norm = _total([self._norms[param] for param in params])
        return (limit * share**0.5 / (norm + 1e-6)).clamp(max=1.0)

    def flush(self) -> None:
        """Steps the blocks that wait for gradients which this step does not bring, or for others to be stepped with."""
        roster = self._live_owner().roster
        left = [live for live in roster.live.values() if _has_gradient(live)]
        if left and self._options is None:
            self.begin()
        for live in left:
            if live.block.name in self._stepped:
                self._refuse_second(next(slot.param for slot in live.slots if slot.param.grad is not None))
        self._waiting = left
        self._step_waiting()

    def finish(self) -> None:
        """Ends the step: what is left is stepped, and the norm of all gradients is that of the previous step now."""
        owner = self._live_owner()
        if hasattr(owner, "grad_scale"):  # left by GradScaler.step, and by nobody else
            raise BadInputError(
                "a GradScaler skips the whole step where a gradient overflows, but with gradient release blocks are "
                "stepped before the last gradient is known, with gradients that are scaled still: train in bf16, "
                "which needs no scaler, or without release"
            )
        if self._options is None:
            self.begin()
        self._is_late = owner.options() != self._options  # before anything is ended: it may raise
        self.flush()
        owner.roster.join()
        if self.observer is not None:
            self.observer.finish_parts()
        if owner._optimizer_step_pre_hooks and not self._told_hooks:
            self._told_hooks = True
            log.warning("what register_step_pre_hook was given finds no gradients: they are released in backward")
        self._take_norm()
        if self._order:
            self._group()
        self._reset()

    def say_late(self) -> None:
        """Once all is done, as a warning may be an error: whether settings changed when they could not act any more."""
        if self._is_late and not self._told_late:
            self._told_late = True
            warnings.warn(
                "a learning rate or another setting was changed between backward and step(): with gradient release "
                "it acts from the next backward on. Change it before",
                UserWarning,
                stacklevel=5,
            )

    def _take_norm(self) -> None:
        """In the order of parameters, whatever order their gradients came in. Usable ones have a finite norm."""
        norms = [self._norms[param] for param in self._block_of if param in self._norms]
        if norms:
            self.norm = _total(norms)

    def forget(self) -> None:
        """The step in progress counts for nothing any more: states were loaded over it."""
        self._reset()

    def check_zeroing(self, *, set_to_none: bool) -> None:
        """Raises BadInputError where `zero_grad` cannot mean what it says."""
        if not set_to_none:
            raise BadInputError(
                "zero_grad(set_to_none=False) keeps gradients, which gradient release drops: leave it out"
            )
        if self.mid_step:
            raise BadInputError(
                "zero_grad() was called between backward and step(): with gradient release the gradients that it is to "
                "discard have been stepped. Call step() after each backward, and run a backward that is no step inside "
                "`with optimizer.releaser.held():`"
            )

    # -- checkpoints ----------------------------------------------------------------------------------------------

    def check_between_steps(self, what: str) -> None:
        """Raises BadInputError in the middle of a step."""
        if self.mid_step:
            raise BadInputError(
                f"{what} between backward and step(): with gradient release some blocks are a step ahead of what the "
                "optimizer counts. Call step() first"
            )

    def state_dict(self) -> dict[str, Any]:
        return {} if self.norm is None else {"norm": self.norm.clone()}

    def load_state_dict(self, state: Any) -> None:
        """`state` is what a checkpoint has under `release`; without any the next step is a first one for clipping."""
        norm = state.get("norm") if isinstance(state, Mapping) else None
        if norm is not None and not (isinstance(norm, Tensor) and norm.ndim == 0):
            raise CheckpointError("'release' of the optimizer checkpoint has a norm that is no number: it is damaged")
        self._reset()
        self.norm = None if norm is None else norm.detach().clone()


def _total(norms: list[Tensor]) -> Tensor:
    """Norm of all, from those of the parts."""
    dtype = norms[0].dtype
    return torch.linalg.vector_norm(torch.stack([norm if norm.dtype is dtype else norm.to(dtype) for norm in norms]))


@contextmanager
def _set_aside(params: list[Tensor]) -> Iterator[None]:
    """Inside, `params` have no gradients."""
    grads = [(param, param.grad) for param in params if param.grad is not None]
    for param, _ in grads:
        param.grad = None
    try:
        yield
    finally:
        for param, grad in grads:
            param.grad = grad


def _has_gradient(live: LiveBlock) -> bool:
    return any(slot.param.grad is not None for slot in live.slots)
