"""Stepping blocks inside backward: gradient release, and overlap of host-placed blocks with the backward pass.

`BackwardStepper` is the common part. It has two policies. `DropGradients` (release) drops gradients as soon as they are
used, so a step never holds all of them. `KeepGradients` (overlap) copies host-placed states while the device computes.
Both step a unit as soon as all of its gradients are final. A unit is a block (release), or a piece: the blocks that
pass through a host buffer together (overlap). A step is:

1. Hooks. `_register_hooks` puts a post-accumulate hook on each parameter. Autograd runs it when the gradient is final;
   it calls `ready`, which calls the policy's `_on_final_gradient`.
2. The first gradient of a step. Release calls `_begin`, which reads the optimizer's settings once for all blocks;
   `last_backward` does so for overlap (`_prepare`).
3. Counting. Each gradient is subtracted from those that its unit still lacks. A second one before `step` is refused.
4. The step of a complete unit: `DropGradients.step_with` or `KeepGradients._step`. The finite check gives masks, and
   the unit's backend steps without the backward's autocast. `increment_version` then tells autograd that weights
   changed, because kernels write where it does not see it.
5. Groups (release on a GPU, from the second step on). `_group_blocks` puts blocks together whose gradients take at most
   `group_bytes_limit`, because a group costs the host as much time as one block, and the host has to stay ahead of the
   device. `_on_complete_block` steps a group when all of its blocks are complete.
6. `BlockwiseOptimizer.step` calls `finish`. Release steps the blocks of which some parameters have no gradient
   (`flush`), and keeps the norm of all gradients. Overlap checks that the gradients it used are unchanged; the
   optimizer's `step` then steps the other pieces.

Release excludes what needs all gradients before the first update: accumulation, skipping a step, GradScaler, averaging
over processes, and clipping by this step's norm. Overlap needs a backward that ends accumulation and is not clipped;
the caller declares it by `last_backward`.
"""

import logging
import threading
import warnings
import weakref
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence, Set
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, field
from itertools import chain
from typing import Any, Protocol

import torch
from torch import Tensor
from torch.utils.hooks import RemovableHandle
from torch.utils.weak import WeakTensorKeyDictionary

from baoc.errors import BadInputError, CheckpointError
from baoc.kernels import capturing
from baoc.optim.backends import HostedBackend, Options, StepUnit
from baoc.optim.state import LiveBlock
from baoc.parallel import refuse_several_processes
from baoc.planning.cost import grouped_bytes, stepping_groups

log = logging.getLogger(__name__)
_RELEASERS = WeakTensorKeyDictionary()  # parameter -> weak reference to the DropGradients that steps it
_ONE_BACKWARD_PER_STEP = (
    "With gradient release every backward is a step: call step() after each, with no accumulation, or build the "
    "optimizer without release"
)
_KEEP_GRADIENTS = "leave out `optimizer.last_backward()` where gradients are clipped, unscaled or dropped before step()"
_UNSCALES_ITSELF = "_step_supports_amp_scaling"  # attribute: GradScaler lets an optimizer that has it unscale by itself
Owner = Any  # a BlockwiseOptimizer, which imports this module
StreamId = tuple[int, int, int]  # of a CUDA stream: its number, device index and device type


@dataclass(frozen=True, slots=True, kw_only=True)
class GradientRelease:
    """How gradients are clipped before they are released, because none are left to clip after backward.

    Args:
        clip_norm: Limit of the Euclidean norm of all gradients, or None. Gradients are scaled by the norm of the
            *previous* step, because this step's is not known yet. The first step scales each block to its share of the
            limit, clip_norm sqrt(elements of the block / of all): one large first gradient would stay in the averages
            of squares for long.
        clip_value: Limit of the absolute value of each element, or None.
    """

    clip_norm: float | None = None
    clip_value: float | None = None

    def __post_init__(self) -> None:
        for key in ("clip_norm", "clip_value"):
            value = getattr(self, key)
            if value is not None and not value > 0:
                raise BadInputError(f"{key} of gradient release is {value}: give a positive number, or None")


@dataclass(frozen=True, slots=True, kw_only=True)
class BeforeStep:
    """A subscriber to `BlockwiseOptimizer.before_step`.

    Attributes:
        call: Called in each step, when gradients are final and their non-finite elements are 0. It may change
            parameter groups.
        wanted: Returns False while `call` does not need the coming step's gradients: backward may then step blocks.
    """

    call: Callable[[], object]
    wanted: Callable[[], bool] = lambda: True


class GradientObserver(Protocol):
    """Sees a step's final gradients, by name, which come block by block and are gone afterwards."""

    def begin_step(self) -> None: ...

    def add_gradients(self, grads: Mapping[str, Tensor], /) -> None: ...

    def end_step(self) -> None: ...


def release_settings(release: bool | GradientRelease, *, nonfinite: str) -> GradientRelease | None:
    """An optimizer's `release` argument as settings; None without release.

    Raises BadInputError for another type, and for nonfinite=skip_step, which would have to undo the steps of blocks.
    """
    if not isinstance(release, bool | GradientRelease):
        raise BadInputError(f"release={release!r}: give True, False, or GradientRelease(clip_norm=...)")
    if release is False:
        return None
    if nonfinite == "skip_step":
        raise BadInputError(
            "nonfinite=skip_step leaves all as it is if any gradient element is non-finite, but with gradient release "
            "other blocks have been stepped by then: use skip_element or raise"
        )
    return GradientRelease() if release is True else release


class BackwardStepper:
    """Base of both policies: steps units of blocks of `owner` in backward, as soon as their gradients are final. Hooks
    refer to the stepper weakly, and it to its owner."""

    late_text = ""  # when a setting acts that is changed between backward and `step`, for the warning
    stepped_text = ""  # why a call between steps is refused in the middle of one, for the error

    def __init__(self, owner: Owner):
        self._warned_late = False
        self._reset()
        self._adopt(owner)

    def _adopt(self, owner: Owner) -> None:
        self._owner = weakref.ref(owner)
        self._lock = threading.RLock()
        self._handles: dict[Tensor, RemovableHandle] = {}

    def _reset(self) -> None:
        self._options: list[Options] | None = None  # of the step in progress

    @property
    def owner(self) -> Owner:
        owner = self._owner()
        assert owner is not None, "hooks hold the stepper weakly, and the stepper is held by its owner"
        return owner

    @property
    def mid_step(self) -> bool:
        """True from the first block that is stepped, or waits to be, until `step` is called."""
        raise NotImplementedError

    def _on_final_gradient(self, param: Tensor) -> None:
        raise NotImplementedError

    def ready(self, param: Tensor) -> None:
        """Called by hooks: the gradient of `param` is final in this backward."""
        with self._lock:
            self._on_final_gradient(param)

    def _register_hooks(self, params: Iterator[Tensor]) -> None:
        """Puts a hook on each of `params` that has none yet."""
        weak_self = weakref.ref(self)

        def hook(param: Tensor) -> None:
            stepper = weak_self()
            if stepper is not None:
                stepper.ready(param)

        for param in params:
            if param not in self._handles:
                self._handles[param] = param.register_post_accumulate_grad_hook(hook)

    def check_between_steps(self, what: str) -> None:
        """Raises BadInputError in the middle of a step."""
        if self.mid_step:
            raise BadInputError(f"{what} between backward and step(): {self.stepped_text}")

    def _check_late_settings(self) -> None:
        """Has the warning given after the step if settings changed: it may be an error, which must not interrupt it."""
        if self._options is not None and self.owner.options() != self._options and not self._warned_late:
            self.owner.after_step.append(self.warn_of_late_settings)

    def warn_of_late_settings(self) -> None:
        """Warns, once, that settings changed too late for this step."""
        self.owner.after_step.remove(self.warn_of_late_settings)
        if not self._warned_late:
            self._warned_late = True
            warnings.warn(
                f"a learning rate or another setting was changed between backward and step(): {self.late_text}. Change "
                "it before",
                UserWarning,
                stacklevel=4,
            )


# -- release -----------------------------------------------------------------------------------------------------------


@dataclass(slots=True, eq=False, kw_only=True)
class _StepGroup:
    """Blocks that are stepped together; a single one until `_group_blocks` has grouped them."""

    names: tuple[str, ...]
    blocks: "list[_PendingBlock]" = field(default_factory=list)
    num_complete: int = 0  # blocks that have all of their gradients
    streams: set[StreamId] = field(default_factory=set)  # CUDA streams on which the gradients were computed


@dataclass(slots=True, eq=False, kw_only=True)
class _PendingBlock:
    """A block whose gradients backward computes."""

    live: LiveBlock
    group: _StepGroup
    num_missing: int | None = None  # parameters without a gradient yet; None before the first
    stepped: bool = False


class DropGradients(BackwardStepper):
    """Gradient release: a block is stepped when all of its trainable parameters have gradients, which are then dropped.

    `attach` registers hooks on the owner's parameters and `detach` removes them; without hooks gradients stay until
    `finish`.

    Attributes:
        observer: Sees each block's final gradients before its step.
        before_block: Called before each block's step.
        any_released: True if the newest step had a gradient.
        gradient_bytes: Bytes by which to group, of parameters that stand for larger ones.
        norm: Norm of all gradients in the last step that had some.
        params_with_gradient: `id` of the parameters whose gradient has come in this step.
    """

    late_text = "with gradient release it acts from the next backward on"
    stepped_text = "with gradient release some blocks are a step ahead of what the optimizer counts. Call step() first"

    def __init__(self, owner: Owner, settings: GradientRelease):
        self.settings = settings
        self.observer: GradientObserver | None = None
        self.before_block: Callable[[], object] | None = None
        self.any_released = False
        self.gradient_bytes: dict[Tensor, int] = {}
        self.norm: Tensor | None = None
        self._warned_hooks = False
        self._clear_index()
        super().__init__(owner)
        if settings.clip_norm is not None:
            log.warning(
                "gradients are released in backward, so they are clipped to %g by the norm of the step before, and in "
                "the first step block by block",
                settings.clip_norm,
            )

    def _clear_index(self) -> None:
        self._pending: dict[int, _PendingBlock] = {}  # `id` of a parameter -> its block
        self._groups: Mapping[str, Any] | None = None  # the registry's `step_groups` when `_pending` was made
        self._device = torch.device("cpu")

    def _adopt(self, owner: Owner) -> None:
        refuse_several_processes("release")
        super()._adopt(owner)
        gradients = sum(param.nbytes for param in owner.registry.names if param.requires_grad)
        self.group_bytes_limit = grouped_bytes(gradients) if any(param.is_cuda for param in owner.registry.names) else 0
        self.attach()

    def _reset(self) -> None:
        super()._reset()
        self.params_with_gradient: set[int] = set()
        self._mid_step = False
        # (block, bytes) of each gradient in the order in which they came; None once blocks are grouped
        self._arrivals: list[tuple[str, int]] | None = None
        self._complete_blocks: list[_PendingBlock] = []  # of one group, to be stepped together
        self._factor: Tensor | None = None  # scales all gradients, by the previous step's norm
        self._norms: dict[Tensor, Tensor] = {}  # parameter -> norm of its gradient
        self._nonfinite_before = 0  # non-finite elements known before this step
        for pending in self._pending.values():
            pending.num_missing, pending.stepped = None, False
            pending.group.num_complete, pending.group.streams = 0, set()

    def __getstate__(self) -> dict[str, Any]:
        """For copies, which begin between steps; `adopt` gives them an owner and hooks."""
        copied = {key: self.__dict__[key] for key in ("settings", "norm", "_warned_late", "_warned_hooks")}
        return {**copied, "observer": None, "before_block": None, "any_released": False, "gradient_bytes": {}}

    def adopt(self, owner: Owner) -> None:
        """Makes a copy the stepper of `owner`."""
        self._clear_index()
        self._reset()
        self._adopt(owner)

    # -- hooks

    def attach(self) -> None:
        """Puts a hook on every parameter that has state and no hook yet."""
        self._register_hooks(param for param in self.owner.registry.names if param.requires_grad)
        for param in self._handles:
            _RELEASERS[param] = weakref.ref(self)

    def detach(self) -> None:
        """Takes the hooks off: later backward passes keep gradients until `step`."""
        for param, handle in self._handles.items():
            handle.remove()
            if _releaser_of(param) is self:
                del _RELEASERS[param]
        self._handles = {}

    @contextmanager
    def held(self) -> Iterator[None]:
        """Inside, a backward steps nothing and keeps gradients. The caller reads and drops them."""
        attached = bool(self._handles)
        self.detach()
        try:
            yield
        finally:
            if attached:
                self.attach()

    @property
    def mid_step(self) -> bool:
        return self._mid_step

    @property
    def num_nonfinite(self) -> int:
        """Non-finite gradient elements found in the step in progress."""
        return self.owner.finite_check.num_nonfinite - self._nonfinite_before if self._options is not None else 0

    # -- a step

    def _on_final_gradient(self, param: Tensor) -> None:
        """Counts. It runs for each gradient while the device waits, so it makes a single dict look-up."""
        if self._options is None:
            if capturing():
                raise BadInputError(
                    "a CUDA graph cannot capture a backward that releases gradients: capture without release"
                )
            refuse_several_processes("release")
            with torch.no_grad():
                self._begin()
        key = id(param)
        pending = self._pending[key]
        if key in self.params_with_gradient or pending.stepped:
            param.grad = None
            self._refuse_second(param)
        self.params_with_gradient.add(key)
        if self._arrivals is not None and param.grad is not None:
            self._arrivals.append((pending.live.block.name, self.gradient_bytes.get(param, param.grad.nbytes)))
        if self._device.type == "cuda":
            pending.group.streams.add(current_stream_id(self._device))
        if pending.num_missing is None:
            pending.num_missing = sum([slot.param.requires_grad for slot in pending.live.slots])
        pending.num_missing -= 1
        if not pending.num_missing:
            self._on_complete_block(pending)

    def _begin(self) -> None:
        """Begins a step at its first gradient: checks the set-up, and reads the settings once for all blocks."""
        owner = self.owner
        self.any_released = False
        owner.current_unit()
        self._index_blocks()
        if owner.before_step:
            raise BadInputError(
                "before_step sees the gradients of a whole step, which are never there at once with gradient release: "
                "set optimizer.releaser.observer, which sees them by parts"
            )
        self._arrivals = [] if self.group_bytes_limit and not owner.registry.step_groups else None
        self._options, self._nonfinite_before = owner.options(), owner.finite_check.num_nonfinite
        if self.observer is not None:
            self.observer.begin_step()

    def _index_blocks(self) -> None:
        """Maps parameters to their blocks and groups, if these changed; stepped blocks stay marked."""
        registry = self.owner.registry
        if self._groups is registry.step_groups:
            return
        stepped = {pending.live.block.name for pending in self._pending.values() if pending.stepped}
        groups: dict[tuple[str, ...], _StepGroup] = {}
        self._pending = {}
        for name, live in registry.live.items():
            names = registry.step_groups.get(name, (name,))
            group = groups.setdefault(names, _StepGroup(names=names))
            group.blocks.append(_PendingBlock(live=live, group=group, stepped=name in stepped))
            self._pending |= dict.fromkeys([id(slot.param) for slot in live.slots], group.blocks[-1])
        devices = {slot.param.device for live in registry.live.values() for slot in live.slots}
        if len(devices) > 1:
            raise BadInputError(
                f"gradient release steps parameters of one device, these are on {', '.join(sorted(map(str, devices)))}:"
                " put the model on one, or train without release"
            )
        self._device = next(iter(devices), self._device)
        self._groups = registry.step_groups

    def _refuse_second(self, param: Tensor) -> None:
        raise BadInputError(
            f"{self.owner.registry.names[param]} got a second gradient before step(). {_ONE_BACKWARD_PER_STEP}"
        )

    def _on_complete_block(self, pending: _PendingBlock) -> None:
        """Steps a complete block when all of its group is complete, or when a block of another group is: missing
        gradients may not come in this step, and groups that wait for them would keep those of a whole backward."""
        self._mid_step, group = True, pending.group
        group.num_complete += 1
        if self._complete_blocks and self._complete_blocks[0].group is not group:
            incomplete_group, self._complete_blocks = self._complete_blocks, []
            self.step_with(incomplete_group)
        self._complete_blocks.append(pending)
        if group.num_complete == len(group.blocks):
            complete_group, self._complete_blocks = self._complete_blocks, []
            self.step_with(complete_group)

    @torch.no_grad()  # a backward with create_graph=True enables gradients
    def step_with(self, blocks: list[_PendingBlock]) -> None:
        """Steps blocks of one group with the gradients computed so far: masks, clips, observes, uses and drops them."""
        owner, group = self.owner, blocks[0].group
        assert self._options is not None
        unit, lives = owner.registry.backward_unit(group.names), [pending.live for pending in blocks]
        left_out = [each.live for each in group.blocks if each not in blocks] if len(blocks) < len(group.blocks) else []
        params = [slot.param for live in lives for slot in live.slots]
        with ordered_after(group.streams), _without_gradients(left_out) if left_out else nullcontext():
            self.any_released = True
            if self.before_block is not None:
                self.before_block()
            clips = self.settings.clip_norm is not None or self.settings.clip_value is not None
            gradients_are_read = clips or self.observer is not None
            masks = owner.finite_check.check(unit, step=owner.num_steps + 1, final=gradients_are_read)
            assert masks is not None, "skip_step is refused when the optimizer is built"
            for pending in blocks:
                pending.stepped = self._mid_step = True
            if clips:
                self._clip(lives)
            if self.observer is not None:
                grads = {slot.name: slot.param.grad for live in lives for slot in live.slots}
                self.observer.add_gradients({name: grad for name, grad in grads.items() if grad is not None})
            if any([live.unseeded for live in lives]):
                owner.seed(lives)
            inputs = owner.inputs(masks, options=self._options, phase=owner.num_steps + 1)
            with _without_autocast(self._device.type):
                unit.backends[0](inputs)
            # Kernels write unseen by autograd: a later backward that needs the old weights has to fail.
            torch.autograd.graph.increment_version([param for param in params if param.grad is not None])
            for param in params:
                param.grad = None

    def flush(self) -> None:
        """Steps the blocks that still have gradients: incomplete ones, and those that wait for their group."""
        blocks = self.owner.registry.live.values()
        if not any([slot.param.grad is not None for live in blocks for slot in live.slots]):
            return
        if self._options is None:
            self._begin()
        self._index_blocks()
        by_group: dict[_StepGroup, dict[_PendingBlock, None]] = {}
        for pending in dict.fromkeys(self._pending.values()):
            for slot in pending.live.slots:
                if slot.param.grad is not None:
                    if pending.stepped:
                        self._refuse_second(slot.param)
                    by_group.setdefault(pending.group, {})[pending] = None
        self._complete_blocks = []
        for unstepped in by_group.values():
            self.step_with(list(unstepped))

    def finish(self) -> None:
        """Ends the step: steps the remaining blocks, and keeps the norm of all gradients for the next clipping."""
        owner = self.owner
        if hasattr(owner, "grad_scale"):  # only GradScaler.step sets it
            raise BadInputError(
                "a GradScaler skips the whole step where a gradient overflows, but with gradient release blocks are "
                "stepped before the last gradient is known, with gradients that are scaled still: train in bf16, "
                "which needs no scaler, or without release"
            )
        if self._options is None:
            self._begin()
        self._check_late_settings()  # before anything is ended: it may raise
        self.flush()
        owner.registry.join()
        if self.observer is not None:
            self.observer.end_step()
        if owner._optimizer_step_pre_hooks and not self._warned_hooks:
            self._warned_hooks = True
            log.warning("what register_step_pre_hook was given finds no gradients: they are released in backward")
        if self._norms:  # in the order of parameters, so that the sum does not depend on that of gradients
            self.norm = _norm_of_norms([self._norms[param] for param in self._params() if param in self._norms])
        if self._arrivals:
            self._group_blocks(self._arrivals)
        self._reset()

    def _params(self) -> list[Tensor]:
        return [slot.param for live in self.owner.registry.live.values() for slot in live.slots]

    def _group_blocks(self, order: list[tuple[str, int]]) -> None:
        """Groups the blocks that are stepped together from now on. `order`: (block, gradient bytes) as they came."""
        registry = self.owner.registry
        names = dict.fromkeys(name for name, _ in order)
        groups = stepping_groups(
            order,
            num_gradients={name: sum(slot.param.requires_grad for slot in registry.live[name].slots) for name in names},
            limit=self.group_bytes_limit,
            joins=lambda *pair: registry.can_step_together([registry.live[name] for name in pair]),
        )
        registry.regroup(groups)

    # -- clipping

    def _clip(self, lives: list[LiveBlock]) -> None:
        """Clips gradients: by the previous step's norm in few launches, in the first step each block by its share."""
        by_block = [[slot.param for slot in live.slots if slot.param.grad is not None] for live in lives]
        for params in filter(None, by_block if self.norm is None else [list(chain.from_iterable(by_block))]):
            grads = [param.grad for param in params if param.grad is not None]
            if self.settings.clip_norm is not None:
                norm_dtype = torch.float64 if any(grad.dtype is torch.float64 for grad in grads) else torch.float32
                norms = torch._foreach_norm(grads, dtype=norm_dtype)  # pyright: ignore[reportPrivateImportUsage]
                self._norms |= zip(params, norms, strict=True)
                factor = self.norm_factor(self.settings.clip_norm, params=params)
                torch._foreach_mul_(grads, factor)  # pyright: ignore[reportPrivateImportUsage]
            if self.settings.clip_value is not None:
                for grad in grads:
                    grad.clamp_(-self.settings.clip_value, self.settings.clip_value)

    def norm_factor(self, limit: float, *, params: list[Tensor]) -> Tensor:
        """The factor, at most 1, for the gradients of `params`. It stays on the device, so nothing waits."""
        if self.norm is not None:
            if self._factor is None:
                norm = self.norm.to(params[0].device)  # one from a checkpoint may be on another device
                self._factor = (limit / (norm + 1e-6)).clamp(max=1.0)
            return self._factor
        numel = max(sum(param.numel() for param in self._params()), 1)
        share = sum(param.numel() for param in params) / numel
        norm = _norm_of_norms([self._norms[param] for param in params])
        return (limit * share**0.5 / (norm + 1e-6)).clamp(max=1.0)

    # -- between steps

    def check_zero_grad(self, *, set_to_none: bool) -> None:
        """Raises BadInputError if `zero_grad` would keep gradients, or drop some that were used."""
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

    def state_dict(self) -> dict[str, Any]:
        return {} if self.norm is None else {"norm": self.norm.clone()}

    def load_state_dict(self, state: Any) -> None:
        """Loads what a checkpoint has under `release`. Without a norm, the next step is clipped as a first one."""
        norm = state.get("norm") if isinstance(state, Mapping) else None
        if norm is not None and not (isinstance(norm, Tensor) and norm.ndim == 0):
            raise CheckpointError("'release' of the optimizer checkpoint has a norm that is no number: it is damaged")
        self._reset()
        self.norm = None if norm is None else norm.detach().clone()


def detach_other_releases(params: list[Tensor]) -> None:
    """Detaches the hooks of other optimizers that release gradients of any of `params`: the newest trains them."""
    for releaser in {id(r): r for p in params if (r := _releaser_of(p)) is not None}.values():
        releaser.detach()
        log.warning(
            "a new optimizer was built on parameters whose gradients another one releases: that one has stopped to"
        )


def _releaser_of(param: Tensor) -> DropGradients | None:
    ref = _RELEASERS.get(param)
    return ref() if ref is not None else None


def _norm_of_norms(norms: list[Tensor]) -> Tensor:
    """The norm of all gradients, from the norm of each."""
    dtype = norms[0].dtype
    return torch.linalg.vector_norm(torch.stack([norm if norm.dtype is dtype else norm.to(dtype) for norm in norms]))


@contextmanager
def _without_gradients(lives: Sequence[LiveBlock]) -> Iterator[None]:
    """Inside, the parameters of `lives` have no gradients."""
    grads = [(slot.param, slot.param.grad) for live in lives for slot in live.slots if slot.param.grad is not None]
    for param, _ in grads:
        param.grad = None
    try:
        yield
    finally:
        for param, grad in grads:
            param.grad = grad


def _without_autocast(device_type: str) -> AbstractContextManager[object]:
    return torch.autocast(device_type, enabled=False) if torch.is_autocast_enabled(device_type) else nullcontext()


def current_stream_id(device: torch.device) -> StreamId:
    """The current stream of a CUDA device, in a third of torch.cuda.current_stream's time, which builds an object."""
    return torch._C._cuda_getCurrentStream(device.index)


def ordered_after(streams: Set[StreamId]) -> AbstractContextManager[None]:
    """Inside, work on the current stream runs after that begun on `streams`, of the same device; afterwards they wait
    for it. Branches of a network may compute gradients on streams of their own, to which dropped memory goes back."""
    now = current_stream_id(torch.device("cuda", next(iter(streams))[1])) if streams else None
    return nullcontext() if now is None or streams == {now} else _stream_order(streams, now=now)


@contextmanager
def _stream_order(streams: Set[StreamId], *, now: StreamId) -> Iterator[None]:
    current, *others = (
        torch.cuda.Stream(stream_id=number, device_index=index, device_type=kind)
        for number, index, kind in (now, *(stream for stream in streams if stream != now))
    )
    for stream in others:
        current.wait_stream(stream)
    yield
    for stream in others:
        stream.wait_stream(current)


# -- overlap -----------------------------------------------------------------------------------------------------------


class KeepGradients(BackwardStepper):
    """Overlap: inside `last_backward`, each piece of host-placed blocks is stepped when its gradients are final. These
    stay readable until `step`, but nobody may change them, because they have been used.

    Attributes:
        num_stepped: Parameters that the last step's backward stepped.
        versions: Parameter stepped in this backward -> its gradient's version.
    """

    late_text = "blocks that were stepped in backward take it in the next step"
    stepped_text = f"some host-placed blocks have been stepped in backward. Call step() first, or {_KEEP_GRADIENTS}"

    def __init__(self, owner: Owner):
        self._active = False
        self._arrival_order: list[Tensor] = []  # parameters, in the order in which their gradients became final
        self._ordered_blocks: set[str] = set()  # blocks when the registry last learned their order
        self.num_stepped = 0
        super().__init__(owner)

    def __getstate__(self) -> dict[str, Any]:
        """Nothing: the owner builds another one for a copy."""
        return {}

    def _reset(self) -> None:
        super()._reset()
        self._piece_of: dict[Tensor, tuple[HostedBackend, int]] = {}  # parameter -> its piece
        self._num_missing: Counter[tuple[HostedBackend, int]] = Counter()  # piece -> parameters without a gradient yet
        self.versions: dict[Tensor, int] = {}

    @property
    def mid_step(self) -> bool:
        return bool(self.versions)

    @contextmanager
    def last_backward(self) -> Iterator[None]:
        """Inside, a backward steps host-placed blocks when their gradients are final, where that is possible."""
        refuse_several_processes("last_backward")
        self.check_between_steps("last_backward was entered")
        self._active = self._prepare()
        try:
            yield
        finally:
            self._active = False

    def _prepare(self) -> bool:
        """Maps each parameter to its piece. Returns False if all blocks have to wait for `step`."""
        owner = self.owner
        gradients_wanted = any(subscriber.wanted() for subscriber in owner.before_step)
        thawed = any(param.requires_grad for param in owner.registry.frozen)  # this step may add blocks for them
        if owner.releaser is not None or owner.nonfinite != "skip_element" or gradients_wanted or thawed:
            return False
        self._reset()
        self._options = owner.options()
        if self._arrival_order and self._ordered_blocks != set(owner.registry.live):
            owner.registry.reorder_host_blocks(self._arrival_order)
            self._ordered_blocks = set(owner.registry.live)
        self._arrival_order = []
        for backend in owner.registry.step_unit().backends:
            if isinstance(backend, HostedBackend):
                for index, piece in enumerate(backend.pieces):
                    params = [slot.param for live in piece.blocks for slot in live.slots if slot.param.requires_grad]
                    self._piece_of |= dict.fromkeys(params, (backend, index))
        self._num_missing = Counter(self._piece_of.values())
        self._register_hooks(iter(self._piece_of))
        if self._piece_of:
            if self.finish not in owner.before_check:
                owner.before_check.append(self.finish)
            vars(owner)[_UNSCALES_ITSELF] = True  # so that a GradScaler calls `step`, which refuses scaled gradients
        return bool(self._piece_of)

    def _on_final_gradient(self, param: Tensor) -> None:
        if not self._active or param not in self._piece_of or capturing():
            return
        piece = self._piece_of[param]
        self._arrival_order.append(param)
        self._num_missing[piece] -= 1
        if self._num_missing[piece] == 0:
            with torch.no_grad():
                self._step(*piece)
        elif self._num_missing[piece] < 0:
            raise BadInputError(
                f"{self.owner.registry.names[param]} got a second gradient inside optimizer.last_backward(): it takes "
                "one backward, the last before step(); run those before it outside"
            )

    def _step(self, backend: HostedBackend, index: int) -> None:
        owner, piece = self.owner, backend.pieces[index]
        if any(live.unseeded for live in piece.blocks):
            return
        slots = [slot for live in piece.blocks for slot in live.slots if slot.param.grad is not None]
        masks, options = {}, self._options
        assert options is not None
        if not backend.excludes_nonfinite:
            unit = StepUnit(backends=[backend], checked_params={slot.param: slot.name for slot in slots})
            masks = owner.finite_check.check(unit, step=owner.num_steps + 1, final=False) or {}
        inputs = owner.inputs(masks, options=options, phase=owner.num_steps + 1)
        with _without_autocast(slots[0].param.device.type):
            backend.step(index, inputs)
        torch.autograd.graph.increment_version([slot.param for slot in slots])  # as in `DropGradients.step_with`
        backend.stepped_in_backward.add(index)
        # `check` compares these: gradients that were used may not change.
        self.versions |= {slot.param: slot.param.grad._version for slot in slots}  # pyright: ignore

    def check(self) -> None:
        """To be called before anything is done to gradients: makes later work wait for the steps that use them.

        Raises BadInputError if a used gradient was changed or dropped.
        """
        for param, version in self.versions.items():
            if param.grad is None or param.grad._version != version:
                what = "dropped" if param.grad is None else "changed"
                raise BadInputError(
                    f"the gradient of {self.owner.registry.names[param]} was {what} between backward and step(), and "
                    f"its block was stepped in backward: {_KEEP_GRADIENTS}"
                )
        if self.versions:
            self.owner.registry.join()

    def finish(self) -> None:
        """Called by the `step` after `last_backward`, before its finite check."""
        self.check()
        owner = self.owner
        if vars(owner).pop(_UNSCALES_ITSELF, False) and hasattr(owner, "grad_scale"):
            raise BadInputError(
                "a GradScaler unscales gradients, or skips the step, when blocks have been stepped in backward with "
                f"gradients that are scaled still: {_KEEP_GRADIENTS}"
            )
        if self.mid_step:
            self._check_late_settings()
        self.num_stepped = len(self.versions)
        self._reset()
        owner.before_check.remove(self.finish)
