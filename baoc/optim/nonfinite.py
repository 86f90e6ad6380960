"""Finds non-finite gradient elements, zeroes them, excludes them from the step, and counts them.

"Non-finite" means not `usable`: NaN, infinity, or 2^48 and more in size (`baoc.kernels.usable`).
`NonFiniteFilter.check` alone decides whether a step is made. Under `skip_element` it returns a mask per parameter,
under `skip_step` None if the step is to be skipped, and under `raise` it raises. Without non-finite elements it costs
one reduction.
"""

import logging
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any, Literal

import torch
from torch import Tensor
from torch.utils.weak import TensorWeakRef

from baoc.errors import DivergedError, unknown_name
from baoc.kernels.usable import LIMIT, usable
from baoc.optim.backends.base import Backend, StepUnit
from baoc.optim.wrappers import refuse_sparse

log = logging.getLogger(__name__)
POLICIES = ("skip_element", "skip_step", "raise")
PATIENCE = 20  # steps in a row, after which a warning comes again, as `faults.patience` has it of losses
MAX_NAMED = 8  # parameters that a message lists, worst first: after a loss of NaN all are affected


class NonFiniteFilter:
    """Checks the gradients of each step once, and remembers the elements that the step must exclude.

    Backends that exclude non-finite elements themselves (`StepUnit.self_excluding`) are only asked for their counts:
    under `skip_element` some steps later, so that nobody waits for the device.

    Args:
        policy: One of POLICIES.

    Attributes:
        vote: Gets whether this process found non-finite elements, and returns whether any process did. It is called
            once in each `check` and `mask` of a policy that skips or raises, whatever was found, so that processes may
            ask each other.
    """

    # Of the class, because optimizers that were pickled by earlier versions have none.
    _last_attempt = -1  # number of the step, skipped ones included, that `last_nonfinite` is of
    _num_in_a_row = 0  # steps with non-finite elements, up to that one

    def __init__(self, policy: str):
        if policy not in POLICIES:
            raise unknown_name(policy, what="policy for non-finite gradients", allowed=POLICIES)
        self.policy = policy
        self.num_nonfinite = 0
        self.last_nonfinite: dict[str, int] = {}
        self.num_skipped_steps = 0
        self._masks: dict[Tensor, Tensor] = {}  # parameter -> bool mask, True where finite
        self._checked_grads: dict[Tensor, TensorWeakRef] = {}  # parameter -> the gradient that was checked
        self._backends_found_some = False  # in the present gradients
        self._pending_error = ""  # message of policy `raise`, until all processes have voted
        self.vote: Callable[[bool], bool] = bool

    def __getstate__(self) -> dict[str, Any]:
        """Leaves out what belongs to gradients, because parameters are copied without theirs."""
        return {**self.__dict__, "_masks": {}, "_checked_grads": {}, "_backends_found_some": False, "vote": bool}

    def check(self, unit: StepUnit, *, step: int, final: bool) -> dict[Tensor, Tensor] | None:
        """Decides about step number `step`: which elements it leaves out, or that it is skipped.

        Args:
            final: True if gradients are read before the step, so that backends have to mark non-finite elements.

        Returns:
            Parameter -> bool mask in its shape, True where finite, of parameters with non-finite elements. None if the
            step is to be skipped.

        Raises:
            DivergedError: Some element is non-finite and the policy is `raise`.
        """
        strict, checked = self.policy != "skip_element", unit.checked_params
        unknown = bool(checked) and any([p.grad is not None and not self._was_checked(p) for p in checked])
        unmarked = [backend for backend in unit.self_excluding if not backend.marked] if final or strict else ()
        if unknown or unmarked:
            self._find(unit, step=step, params=checked if unknown else {}, backends=unmarked)
        if not strict and (unit.self_excluding or unit.unreported_nonfinite):
            self.read(unit, step=step, wait=False)
        masks = {param: mask for param, mask in self._masks.items() if self._was_checked(param)} if self._masks else {}
        backends_found_some = self._backends_found_some
        self._masks, self._checked_grads, self._backends_found_some = {}, {}, False
        if not strict or not self.vote(bool(masks or backends_found_some or self._pending_error)):
            return masks
        if self.policy == "raise":
            self._raise(unit, step=step)
        forget_marks(unit.self_excluding)
        self.num_skipped_steps += 1
        return None

    def mask(self, unit: StepUnit, *, step: int) -> int | None:
        """Zeroes non-finite elements of the gradients; returns how many there were, None if only the device knows."""
        count = self._find(unit, step=step, params=unit.checked_params, backends=unit.self_excluding)
        if self.policy == "raise" and self.vote(bool(self._pending_error)):
            self._raise(unit, step=step)
        return count

    def read(self, unit: StepUnit, *, step: int, wait: bool) -> None:
        """Reports the counts of backends from steps before `step`. Without `wait`, only those that reached the host."""
        counts = new_nonfinite(unit, wait=wait)
        if counts:
            self._report(counts, step=step, known="before")
            if self._pending_error:
                self._raise(unit, step=step)

    def forget(self, unit: StepUnit) -> None:
        """Forgets the checked gradients, because they are gone."""
        self._masks, self._checked_grads, self._backends_found_some = {}, {}, False
        forget_marks(unit.self_excluding)

    def _find(
        self, unit: StepUnit, *, step: int, params: Mapping[Tensor, str], backends: Sequence[Backend]
    ) -> int | None:
        """Masks the gradients of `params`, lets `backends` mark theirs; returns how many elements, as `mask` does."""
        counts = self._mask(params) if params else {}
        for backend in backends:
            backend.mark()
        if backends and self.policy != "skip_element":
            backend_counts = new_nonfinite(unit, wait=True)
            self._backends_found_some = self._backends_found_some or bool(backend_counts)
            counts |= backend_counts
        if counts:
            self._report(counts, step=step, known="in")
        return sum(counts.values()) if not backends or self.policy != "skip_element" else None

    def _mask(self, names: Mapping[Tensor, str]) -> dict[str, int]:
        """Masks the gradients of `names` (parameter -> name). Returns name -> non-finite elements, if there are any."""
        params = [param for param in names if param.grad is not None]
        self._masks = {param: mask for param, mask in self._masks.items() if self._was_checked(param)}
        self._checked_grads = {param: TensorWeakRef(param.grad) for param in params if param.grad is not None}
        counts: dict[str, int] = {}
        for param in params if params and not all_finite(params, names=names) else ():
            grad = param.grad
            assert grad is not None
            finite = usable(grad)
            if num_others := int(finite.numel() - finite.sum()):
                counts[names[param]] = num_others
                grad.masked_fill_(~finite, 0.0)
                before = self._masks.get(param)
                self._masks[param] = finite if before is None else finite & before
        return counts

    @contextmanager
    def keep_checked_through_casts(self) -> Iterator[None]:
        """Inside, weights may change their type, and gradients with them: those that were checked stay so."""
        checked = [param for param in self._checked_grads if self._was_checked(param)]
        yield
        self._checked_grads |= {param: TensorWeakRef(param.grad) for param in checked if param.grad is not None}

    def _was_checked(self, param: Tensor) -> bool:
        """True if the parameter's gradient is the tensor that was checked, whatever was added to it since."""
        checked = self._checked_grads.get(param)
        return checked is not None and param.grad is not None and checked() is param.grad

    def _report(self, counts: dict[str, int], *, step: int, known: Literal["in", "before"]) -> None:
        first, last_attempt = not self.num_nonfinite, self._last_attempt
        self.num_nonfinite += sum(counts.values())
        self._last_attempt = step + self.num_skipped_steps  # a skipped step has the number of the next one
        # Blocks that are stepped in backward report one by one.
        self.last_nonfinite = {**(self.last_nonfinite if self._last_attempt == last_attempt else {}), **counts}
        worst = sorted(counts.items(), key=lambda entry: (-entry[1], entry[0]))[:MAX_NAMED]
        names = ", ".join(f"{name} ({count})" for name, count in worst)
        names += f" and {len(counts) - MAX_NAMED} more" if len(counts) > MAX_NAMED else ""
        text = (
            f"{sum(counts.values())} gradient element(s) are NaN, infinite or beyond 2^48 {known} step {step}: {names}"
        )
        if self.policy == "raise":
            self._pending_error = text
            return
        log.log(logging.WARNING if first else logging.INFO, "%s; policy: %s", text, self.policy)
        if self._last_attempt != last_attempt:
            self._num_in_a_row = self._num_in_a_row + 1 if self._last_attempt == last_attempt + 1 else 1
            if self._num_in_a_row == PATIENCE:
                log.warning(
                    "the gradients of %d steps in a row held elements that are not finite (policy: %s), so training "
                    "may stand still: lower the learning rate, or set nonfinite=raise to end where there are some",
                    PATIENCE,
                    self.policy,
                )

    def _raise(self, unit: StepUnit, *, step: int) -> None:
        text = self._pending_error or f"another process found non-finite gradients in step {step}"
        self._pending_error = ""
        self.forget(unit)
        raise DivergedError(f"{text}. Lower the learning rate, or set nonfinite=skip_element to go on without them")


def new_nonfinite(unit: StepUnit, *, wait: bool) -> dict[str, int]:
    """Parameter name -> non-finite elements that backends found since the last call."""
    counts = dict(unit.unreported_nonfinite)
    unit.unreported_nonfinite.clear()
    for backend in unit.self_excluding:
        for name, count in backend.new_nonfinite(wait=wait).items():
            counts[name] = counts.get(name, 0) + count
    return counts


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
            refuse_sparse([(names[param], param)])
        if grad.numel() and grad.device.type != "meta":
            by_device.setdefault(grad.device, []).append(grad)
    # Every device has a fast kernel for the Euclidean norm. It may reach the limit though no element does: False then
    # makes the caller check each element. Half the limit, because norms are rounded.
    norms = [torch.nn.utils.get_total_norm(grads, norm_type=2.0) for grads in by_device.values()]
    return all([bool(norm < LIMIT / 2) for norm in norms])
