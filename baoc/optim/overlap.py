"""Stepping host-placed blocks in the last backward of a step, so that the link works while the device computes.

`optim.release` does the same to have gradients out of the way; here they stay, so whoever looks at them before `step`
finds them, but nobody may change them: they have been used. So this is for steps without clipping and accumulation that
is not over, and the caller says when that is.
"""

import threading
import warnings
import weakref
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from torch.utils.hooks import RemovableHandle

from baoc.errors import BadInputError
from baoc.kernels import capturing
from baoc.optim.backends import HostedBackend, Options
from baoc.optim.registry import Alone
from baoc.optim.state import Slot
from baoc.parallel import refuse_ranks

if TYPE_CHECKING:
    from baoc.optim.optimizer import BlockwiseOptimizer

_ADVICE = "leave out `optimizer.last_backward()` where gradients are clipped, unscaled or dropped before step()"
_SCALING = "_step_supports_amp_scaling"  # by which GradScaler knows who unscales himself
_Place = tuple[HostedBackend, int]  # of a piece


class Ahead:
    """The hooks of one optimizer. Between steps it holds nothing but those."""

    def __init__(self, owner: "BlockwiseOptimizer"):
        self._owner = weakref.ref(owner)
        self._lock = threading.RLock()
        self._handles: dict[Tensor, RemovableHandle] = {}
        self._told_late = self._is_late = False
        self._on = self._flush_only = False
        self._finals: list[Tensor] = []  # parameters in the order in which their gradients were final
        self._learned: set[str] = set()  # blocks whose order the roster knows
        self._begin([])

    def __getstate__(self) -> dict[str, Any]:
        """Copies get hooks of their own, from whoever owns them."""
        return {}

    def _begin(self, options: list[Options]) -> None:
        self._options = options  # of the step in progress
        self._place: dict[Tensor, _Place] = {}
        self._left: dict[tuple[int, int], int] = {}  # piece -> parameters without a gradient so far
        self.versions: dict[Tensor, int] = {}  # parameter that was stepped -> version of its gradient

    @property
    def mid_step(self) -> bool:
        """True if some block was stepped and `step` was not called since."""
        return bool(self.versions)

    @contextmanager
    def last_backward(self, *, flush_only: bool = False) -> Iterator[None]:
        """Inside, a backward steps host-placed blocks as soon as their gradients are final, where that is possible."""
        refuse_ranks("last_backward")
        self._flush_only = flush_only
        self.check_between_steps("last_backward was entered")
        self._on = self._prepare()
        try:
            yield
        finally:
            self._on = False

    def _prepare(self) -> bool:
        """Notes which parameters wait for which piece; False where all blocks have to wait for `step`."""
        owner = self._owner()
        assert owner is not None
        seen = owner.observer is not None and (owner.observing is None or owner.observing())
        thawed = any(param.requires_grad for param in owner.roster.frozen)  # blocks may still come in this step
        if owner.releaser is not None or owner.nonfinite != "skip_element" or seen or thawed:
            return False
        self._begin(owner.options())
        if self._finals and self._learned != set(owner.roster.live):
            owner.roster.learn_travel(self._finals)
            self._learned = set(owner.roster.live)
        self._finals = []
        for backend in owner.roster.ready():
            if isinstance(backend, HostedBackend):
                for index, piece in enumerate(backend.pieces):
                    params = [slot.param for live in piece.blocks for slot in live.slots if slot.param.requires_grad]
                    self._place |= dict.fromkeys(params, (backend, index))
                    self._left[id(backend), index] = len(params)
        self._attach()
        if self._place:  # so that a GradScaler comes to `step` with gradients as they are, where it is refused
            vars(owner)[_SCALING] = True
        return bool(self._place)

    def _attach(self) -> None:
        me = weakref.ref(self)

        def hook(param: Tensor) -> None:
            ahead = me()
            if ahead is not None and ahead._on:
                ahead._ready(param)

        for param in self._place:
            if param not in self._handles:
                self._handles[param] = param.register_post_accumulate_grad_hook(hook)

    def _ready(self, param: Tensor) -> None:
        """The gradient of `param` is final."""
        with self._lock:
            if param not in self._place or capturing():
                return
            backend, index = self._place[param]
            self._finals.append(param)
            self._left[id(backend), index] -= 1
            if self._left[id(backend), index] == 0:
                with torch.no_grad():
                    self._step(backend, index)
            elif self._left[id(backend), index] < 0:
                owner = self._owner()
                assert owner is not None
                raise BadInputError(
                    f"{owner.roster.names[param]} got a second gradient inside optimizer.last_backward(): it takes one "
                    "backward, the last before step(); run those before it outside"
                )

    def _step(self, backend: HostedBackend, index: int) -> None:
        owner, piece = self._owner(), backend.pieces[index]
        assert owner is not None
        if any(live.unseeded for live in piece.blocks):
            return
        slots = [slot for live in piece.blocks for slot in live.slots if slot.param.grad is not None]
        if self._flush_only:
            if backend.flush(index):
                self._note(slots)
            return
        masks = {}
        if not backend.excludes_nonfinite and not backend.looks_ahead:
            unit = Alone(backend=backend, guarded={slot.param: slot.name for slot in slots})
            masks = owner._guard.take(unit, step=owner.num_steps + 1, final=False) or {}
        inputs = owner.inputs(masks, options=self._options, phase=owner.num_steps + 1)
        kind = slots[0].param.device.type
        # The backward may be inside of one.
        with torch.autocast(kind, enabled=False) if torch.is_autocast_enabled(kind) else nullcontext():
            backend.step(index, inputs, ahead=True)
        backend.done.add(index)
        torch.autograd.graph.increment_version([slot.param for slot in slots])
        self._note(slots)

    def _note(self, slots: list[Slot]) -> None:
        """Gradients that were used: they may not be changed any more."""
        self.versions |= {slot.param: slot.param.grad._version for slot in slots}  # pyright: ignore

    # -- the end of the step --------------------------------------------------------------------------------------

    def check(self) -> None:
        """To be called before anything is done to gradients; waits until those that were used are done with.

        Raises BadInputError if they are not what blocks were stepped with.
        """
        owner = self._owner()
        assert owner is not None
        for param, version in self.versions.items():
            if param.grad is None or param.grad._version != version:
                what = "dropped" if param.grad is None else "changed"
                raise BadInputError(
                    f"the gradient of {owner.roster.names[param]} was {what} between backward and step(), and its "
                    f"block was stepped in backward: {_ADVICE}"
                )
        if self.versions:
            owner.roster.join()

    def looked(self) -> None:
        """Gradients were masked, which changes nothing for blocks that were stepped: they left the same out."""
        self.versions = {param: param.grad._version for param in self.versions if param.grad is not None}

    def finish(self) -> None:
        """To be called by `step`."""
        self.check()
        owner = self._owner()
        assert owner is not None
        if vars(owner).pop(_SCALING, False) and hasattr(owner, "grad_scale"):
            raise BadInputError(
                "a GradScaler unscales gradients, or skips the step, when blocks have been stepped in backward with "
                f"gradients that are scaled still: {_ADVICE}"
            )
        self._is_late = bool(self.versions) and owner.options() != self._options
        self._begin([])

    def say_late(self) -> None:
        """Once all is done, as a warning may be an error: whether settings changed when they could not act any more."""
        if self._is_late and not self._told_late:
            self._told_late = True
            warnings.warn(
                "a learning rate or another setting was changed between backward and step(): blocks that were stepped "
                "in backward take it in the next step. Change it before",
                UserWarning,
                stacklevel=5,
            )

    def check_between_steps(self, what: str) -> None:
        """Raises BadInputError in the middle of a step."""
        if self.mid_step:
            raise BadInputError(
                f"{what} between backward and step(): some host-placed blocks have been stepped in backward. Call "
                f"step() first, or {_ADVICE}"
            )
