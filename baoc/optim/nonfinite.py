"""Finds non-finite gradient elements, zeroes them, leaves them out of the step, and counts them.

`NonFiniteFilter.check` is the one place that decides whether a step is made. Under `skip_element` it returns a mask per
parameter, under `skip_step` None where the step is to be skipped, and under `raise` it raises. Where nothing is
found it costs one reduction. "Non-finite" means not `usable`: NaN, infinity, or 2^48 and more in size
(`baoc.kernels.usable`).
"""

import logging
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor
from torch.utils.weak import TensorWeakRef

from baoc.errors import BadInputError, DivergedError, unknown_name
from baoc.kernels.usable import LIMIT, usable
from baoc.optim.backends.base import Backend, StepUnit

log = logging.getLogger(__name__)
POLICIES = ("skip_element", "skip_step", "raise")
MAX_NAMED = 8  # tensors that a message lists, worst first; after a loss of NaN it is all of them


class NonFiniteFilter:
    """Looks at the gradients of each step once and remembers what the step must leave out.

    Backends that exclude non-finite elements themselves are only asked what they found: under `skip_element` some steps
    later, so that nobody waits for the device.

    Args:
        policy: One of POLICIES.

    Attributes:
        vote: Given whether this process found something, returns whether any did. It is called once in each `check` and
            `mask` of a policy that skips or raises, whatever was found, so that processes may ask each other.
    """

    def __init__(self, policy: str):
        if policy not in POLICIES:
            raise unknown_name(policy, what="policy for non-finite gradients", allowed=POLICIES)
        self.policy = policy
        self.num_nonfinite = 0
        self.last_nonfinite: dict[str, int] = {}
        self.num_skipped_steps = 0
        self._masks: dict[Tensor, Tensor] = {}
        self._checked_grads: dict[Tensor, TensorWeakRef] = {}  # parameter -> the gradient that was looked at
        self._backends_found_some = False  # by backends, in the gradients that are there now
        self._last_nonfinite_when = ""  # what `last_nonfinite` is of
        self._pending_error = ""  # the error of policy `raise`, until everybody has voted
        self.vote: Callable[[bool], bool] = bool

    def __getstate__(self) -> dict[str, Any]:
        """A copy comes without what was found in the gradients, as parameters are copied without theirs."""
        return {**self.__dict__, "_masks": {}, "_checked_grads": {}, "_backends_found_some": False, "vote": bool}

    def check(self, unit: StepUnit, *, step: int, final: bool) -> dict[Tensor, Tensor] | None:
        """Decides about step number `step`: which elements it leaves out, or that it is skipped.

        Args:
            final: Somebody reads the gradients before the step, so backends mark non-finite elements in them too.

        Returns:
            Parameter -> bool mask in its shape, True where finite, of those with other elements; None if the step is to
            be skipped.

        Raises:
            DivergedError: Some element is non-finite and the policy is `raise`.
        """
        strict, guarded = self.policy != "skip_element", unit.checked_params
        unknown = bool(guarded) and any([p.grad is not None and not self._was_checked(p) for p in guarded])
        unmarked = [backend for backend in unit.self_excluding if not backend.marked] if final or strict else ()
        if unknown or unmarked:
            self._find(unit, step=step, guarded=guarded if unknown else {}, marking=unmarked)
        if not strict and (unit.self_excluding or unit.unreported_nonfinite):
            self.read(unit, step=step, wait=False)
        masks = {param: mask for param, mask in self._masks.items() if self._was_checked(param)} if self._masks else {}
        found = self._backends_found_some
        self._masks, self._checked_grads, self._backends_found_some = {}, {}, False
        if not strict or not self.vote(bool(masks or found or self._pending_error)):
            return masks
        if self.policy == "raise":
            self._raise(unit, step=step)
        forget_marks(unit.self_excluding)
        self.num_skipped_steps += 1
        return None

    def mask(self, unit: StepUnit, *, step: int) -> int | None:
        """Zeroes non-finite elements of the gradients; returns how many there were, None if only the device knows."""
        count = self._find(unit, step=step, guarded=unit.checked_params, marking=unit.self_excluding)
        if self.policy == "raise" and self.vote(bool(self._pending_error)):
            self._raise(unit, step=step)
        return count

    def read(self, unit: StepUnit, *, step: int, wait: bool) -> None:
        """Counts what backends found in steps before `step`; without `wait`, only what has reached the host."""
        counts = new_nonfinite(unit, wait=wait)
        if counts:
            self._report(counts, when=f"before step {step}")
            if self._pending_error:
                self._raise(unit, step=step)

    def forget(self, unit: StepUnit) -> None:
        """The gradients that were looked at are gone."""
        self._masks, self._checked_grads, self._backends_found_some = {}, {}, False
        forget_marks(unit.self_excluding)

    def _find(
        self, unit: StepUnit, *, step: int, guarded: Mapping[Tensor, str], marking: Sequence[Backend]
    ) -> int | None:
        """Masks the gradients of `guarded`, and lets the backends of `marking` mark theirs."""
        counts = self._mask(guarded) if guarded else {}
        for backend in marking:
            backend.mark()
        if marking and self.policy != "skip_element":
            found = new_nonfinite(unit, wait=True)
            self._backends_found_some = self._backends_found_some or bool(found)
            counts |= found
        if counts:
            self._report(counts, when=f"in step {step}")
        return sum(counts.values()) if not marking or self.policy != "skip_element" else None

    def _mask(self, names: Mapping[Tensor, str]) -> dict[str, int]:
        """Masks the gradients of `names` (parameter -> name); name -> non-finite elements, where there were some."""
        params = [param for param in names if param.grad is not None]
        self._masks = {param: mask for param, mask in self._masks.items() if self._was_checked(param)}
        self._checked_grads = {param: TensorWeakRef(param.grad) for param in params if param.grad is not None}
        if not params or all_finite(params, names=names):
            return {}
        counts = {}
        for param, finite in zero_nonfinite_(params).items():
            counts[names[param]] = int(finite.numel() - finite.sum())
            before = self._masks.get(param)
            self._masks[param] = finite if before is None else finite & before
        return counts

    @contextmanager
    def keep_checked_through_casts(self) -> Iterator[None]:
        """Around a change of weights' types: a gradient that was looked at is so in the type that its weights have
        afterwards, which makes it another tensor."""
        known = [param for param in self._checked_grads if self._was_checked(param)]
        yield
        self._checked_grads |= {param: TensorWeakRef(param.grad) for param in known if param.grad is not None}

    def _was_checked(self, param: Tensor) -> bool:
        """True if the parameter's gradient is the tensor that was looked at, whatever was added to it since."""
        seen = self._checked_grads.get(param)
        return seen is not None and param.grad is not None and seen() is param.grad

    def _report(self, counts: dict[str, int], *, when: str) -> None:
        first = not self.num_nonfinite
        self.num_nonfinite += sum(counts.values())
        # Blocks that are stepped one by one report one by one.
        self.last_nonfinite = {**(self.last_nonfinite if when == self._last_nonfinite_when else {}), **counts}
        self._last_nonfinite_when = when
        most = sorted(counts.items(), key=lambda entry: (-entry[1], entry[0]))[:MAX_NAMED]
        names = ", ".join(f"{name} ({count})" for name, count in most)
        names += f" and {len(counts) - MAX_NAMED} more" if len(counts) > MAX_NAMED else ""
        text = f"{sum(counts.values())} gradient element(s) are NaN, infinite or beyond 2^48 {when}: {names}"
        if self.policy == "raise":
            self._pending_error = text
        else:
            log.log(logging.WARNING if first else logging.INFO, "%s; policy: %s", text, self.policy)

    def _raise(self, unit: StepUnit, *, step: int) -> None:
        text, self._pending_error = (
            self._pending_error or f"another process found non-finite gradients in step {step}",
            "",
        )
        self.forget(unit)
        raise DivergedError(f"{text}. Lower the learning rate, or set nonfinite=skip_element to go on without them")


def new_nonfinite(unit: StepUnit, *, wait: bool) -> dict[str, int]:
    """Parameter name -> non-finite elements that backends found since this was last asked."""
    found = dict(unit.unreported_nonfinite)
    unit.unreported_nonfinite.clear()
    for backend in unit.self_excluding:
        for name, count in backend.new_nonfinite(wait=wait).items():
            found[name] = found.get(name, 0) + count
    return found


def forget_marks(backends: Iterable[Backend]) -> None:
    for backend in backends:
        backend.forget_marks()


def all_finite(params: Iterable[Tensor], *, names: Mapping[Tensor, str]) -> bool:
    """False if some gradient element may not be finite. One read and one synchronisation per device.

    Raises BadInputError for a sparse gradient, by its parameter's name.
    """
    by_device: dict[torch.device, list[Tensor]] = {}
    for param in params:
        grad = param.grad
        assert grad is not None
        if grad.is_sparse:
            raise BadInputError(f"{names[param]} has a sparse gradient: build its layer with sparse=False")
        if grad.numel() and grad.device.type != "meta":
            by_device.setdefault(grad.device, []).append(grad)
    # The Euclidean norm is the reduction that every device has a fast kernel for. It may be large where no element
    # is, so then these are looked at one by one; half the limit, because norms are rounded.
    norms = [torch.nn.utils.get_total_norm(same, norm_type=2.0) for same in by_device.values()]
    return all([bool(norm < LIMIT / 2) for norm in norms])


def zero_nonfinite_(params: Iterable[Tensor]) -> dict[Tensor, Tensor]:
    """Zeroes the non-finite elements; returns their parameters with a bool mask, True where finite."""
    masks = {}
    for param in params:
        grad = param.grad
        if grad is None or not grad.numel():
            continue
        finite = usable(grad)
        if not bool(finite.all()):
            grad.masked_fill_(~finite, 0.0)
            masks[param] = finite
    return masks
