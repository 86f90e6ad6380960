"""Finding and excluding non-finite gradient elements, at the price of one reduction where there are none."""

import logging
from collections.abc import Iterable, Mapping
from typing import Any

import torch
from torch import Tensor
from torch.utils.weak import TensorWeakRef

from baoc.errors import BadInputError, TrainingFailedError, unknown_name

log = logging.getLogger(__name__)
POLICIES = ("skip_element", "skip_step", "raise")


class Guard:
    """Looks at the gradients of each step once, remembers what the step must leave out, and counts it."""

    def __init__(self, policy: str):
        if policy not in POLICIES:
            raise unknown_name(policy, what="policy for non-finite gradients", allowed=POLICIES)
        self.policy = policy
        self.num_nonfinite = 0
        self.last_nonfinite: dict[str, int] = {}
        self.num_skipped_steps = 0
        self._masks: dict[Tensor, Tensor] = {}
        self._seen: dict[Tensor, TensorWeakRef] = {}  # parameter -> the gradient that was looked at

    def __getstate__(self) -> dict[str, Any]:
        """A copy comes without what was found in the gradients, as parameters are copied without theirs."""
        return {**self.__dict__, "_masks": {}, "_seen": {}}

    def forget(self) -> None:
        """The gradients that were looked at are gone."""
        self._masks, self._seen = {}, {}

    def look(self, names: Mapping[Tensor, str], *, step: int) -> int:
        """Zeroes non-finite elements of the gradients of `names` (parameter -> name); returns how many there were."""
        params = [param for param in names if param.grad is not None]
        self._masks = {param: mask for param, mask in self._masks.items() if self._knows(param)}
        self._seen = {param: TensorWeakRef(param.grad) for param in params if param.grad is not None}
        if _all_finite(params, names=names):
            return 0
        counts = {}
        for param, finite in _mask(params).items():
            counts[names[param]] = int(finite.numel() - finite.sum())
            before = self._masks.get(param)
            self._masks[param] = finite if before is None else finite & before
        if counts:
            self._report(counts, step=step)
        return sum(counts.values())

    def take(self, names: Mapping[Tensor, str], *, step: int) -> dict[Tensor, Tensor] | None:
        """Parameter -> True where finite, of those with other elements; None if the step is to be skipped."""
        if not all(param.grad is None or self._knows(param) for param in names):
            self.look(names, step=step)
        masks = {param: mask for param, mask in self._masks.items() if self._knows(param)}
        self.forget()
        if masks and self.policy == "skip_step":
            self.num_skipped_steps += 1
            return None
        return masks

    def _knows(self, param: Tensor) -> bool:
        """True if the parameter's gradient is the tensor that was looked at, whatever was added to it since."""
        seen = self._seen.get(param)
        return seen is not None and param.grad is not None and seen() is param.grad

    def _report(self, counts: dict[str, int], *, step: int) -> None:
        first = not self.num_nonfinite
        self.num_nonfinite += sum(counts.values())
        self.last_nonfinite = counts
        names = ", ".join(f"{name} ({count})" for name, count in counts.items())
        text = f"{sum(counts.values())} gradient element(s) are NaN or infinite in step {step}: {names}"
        if self.policy == "raise":
            self.forget()
            raise TrainingFailedError(
                f"{text}. Lower the learning rate, or set nonfinite=skip_element to go on without them"
            )
        log.log(logging.WARNING if first else logging.INFO, "%s; policy: %s", text, self.policy)


def _all_finite(params: Iterable[Tensor], *, names: Mapping[Tensor, str]) -> bool:
    """False if some gradient element may not be finite. One read and one synchronisation per device."""
    by_device: dict[torch.device, list[Tensor]] = {}
    for param in params:
        grad = param.grad
        assert grad is not None
        if grad.is_sparse:
            raise BadInputError(f"{names[param]} has a sparse gradient: build its layer with sparse=False")
        if grad.numel() and grad.device.type != "meta":
            by_device.setdefault(grad.device, []).append(grad)
    # The Euclidean norm is the reduction that every device has a fast kernel for. It may overflow where nothing is
    # infinite, so what is not finite here is looked at element by element.
    norms = [torch.nn.utils.get_total_norm(same, norm_type=2.0) for same in by_device.values()]
    return all(bool(norm.isfinite()) for norm in norms)


def _mask(params: Iterable[Tensor]) -> dict[Tensor, Tensor]:
    """Zeroes the non-finite elements; returns their parameters with a bool mask, True where finite."""
    masks = {}
    for param in params:
        grad = param.grad
        if grad is None or not grad.numel():
            continue
        finite = grad.isfinite()
        if not bool(finite.all()):
            grad.masked_fill_(~finite, 0.0)
            masks[param] = finite
    return masks
