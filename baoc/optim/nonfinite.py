"""Finding and excluding non-finite gradient elements, at the price of one reduction where there are none."""

import logging
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

from torch import Tensor
from torch.utils.weak import TensorWeakRef

from baoc.errors import DivergedError, unknown_name
from baoc.optim.backends import Backend
from baoc.optim.finite import all_finite, mask_
from baoc.optim.registry import Alone, Roster

log = logging.getLogger(__name__)
POLICIES = ("skip_element", "skip_step", "raise")
MOST_NAMED = 8  # tensors that a message lists, worst first; after a loss of NaN it is all of them


class Guard:
    """Looks at the gradients of each step once, remembers what the step must leave out, and counts it.

    Backends that exclude non-finite elements themselves are only asked what they found: under `skip_element` some steps
    later, so that nobody waits for the device.
    """

    def __init__(self, policy: str):
        if policy not in POLICIES:
            raise unknown_name(policy, what="policy for non-finite gradients", allowed=POLICIES)
        self.policy = policy
        self.num_nonfinite = 0
        self.last_nonfinite: dict[str, int] = {}
        self.num_skipped_steps = 0
        self._masks: dict[Tensor, Tensor] = {}
        self._seen: dict[Tensor, TensorWeakRef] = {}  # parameter -> the gradient that was looked at
        self._found = False  # by backends, in the gradients that are there now
        self._when = ""  # what `last_nonfinite` is of

    def __getstate__(self) -> dict[str, Any]:
        """A copy comes without what was found in the gradients, as parameters are copied without theirs."""
        return {**self.__dict__, "_masks": {}, "_seen": {}, "_found": False}

    def forget(self, roster: Roster | Alone) -> None:
        """The gradients that were looked at are gone."""
        self._masks, self._seen, self._found = {}, {}, False
        roster.forget_marks()

    def look(self, roster: Roster | Alone, *, step: int) -> int | None:
        """Zeroes non-finite elements of the gradients; returns how many there were, None if only the device knows."""
        return self._find(roster, step=step, guarded=True, marking=roster.marking)

    def _find(self, roster: Roster | Alone, *, step: int, guarded: bool, marking: Sequence[Backend]) -> int | None:
        """`guarded`: look at the gradients that nobody else does; `marking`: backends that are to mark theirs."""
        counts = self._look(roster.guarded) if guarded else {}
        for backend in marking:
            backend.mark()
        if marking and self.policy != "skip_element":
            found = roster.new_bad(wait=True)
            self._found = self._found or bool(found)
            counts |= found
        if counts:
            self._report(counts, when=f"in step {step}", roster=roster)
        return sum(counts.values()) if not marking or self.policy != "skip_element" else None

    def _look(self, names: Mapping[Tensor, str]) -> dict[str, int]:
        """Masks the gradients of `names` (parameter -> name); name -> non-finite elements, where there were some."""
        params = [param for param in names if param.grad is not None]
        self._masks = {param: mask for param, mask in self._masks.items() if self._knows(param)}
        self._seen = {param: TensorWeakRef(param.grad) for param in params if param.grad is not None}
        if not params or all_finite(params, names=names):
            return {}
        counts = {}
        for param, finite in mask_(params).items():
            counts[names[param]] = int(finite.numel() - finite.sum())
            before = self._masks.get(param)
            self._masks[param] = finite if before is None else finite & before
        return counts

    def take(self, roster: Roster | Alone, *, step: int, final: bool) -> dict[Tensor, Tensor] | None:
        """Parameter -> True where finite, of those with other elements; None if the step is to be skipped.

        `final`: somebody reads the gradients before the step, so backends mark them too.
        """
        strict = self.policy != "skip_element"
        guarded = roster.guarded
        unknown = bool(guarded) and any(param.grad is not None and not self._knows(param) for param in guarded)
        unmarked = [backend for backend in roster.marking if not backend.marked] if final or strict else ()
        if unknown or unmarked:
            self._find(roster, step=step, guarded=unknown, marking=unmarked)
        if not strict:
            self.read(roster, step=step, wait=False)
        masks = {param: mask for param, mask in self._masks.items() if self._knows(param)}
        found = self._found
        self._masks, self._seen, self._found = {}, {}, False
        if strict and (masks or found):
            roster.forget_marks()
            self.num_skipped_steps += 1
            return None
        return masks

    def read(self, roster: Roster | Alone, *, step: int, wait: bool) -> None:
        """Takes note of what backends found in steps before `step`."""
        counts = roster.new_bad(wait=wait)
        if counts:
            self._report(counts, when=f"before step {step}", roster=roster)

    @contextmanager
    def through_cast(self) -> Iterator[None]:
        """Around a change of weights' types: a gradient that was looked at is so in the type that its weights have
        afterwards, which makes it another tensor."""
        known = [param for param in self._seen if self._knows(param)]
        yield
        self._seen |= {param: TensorWeakRef(param.grad) for param in known if param.grad is not None}

    def _knows(self, param: Tensor) -> bool:
        """True if the parameter's gradient is the tensor that was looked at, whatever was added to it since."""
        seen = self._seen.get(param)
        return seen is not None and param.grad is not None and seen() is param.grad

    def _report(self, counts: dict[str, int], *, when: str, roster: Roster | Alone) -> None:
        first = not self.num_nonfinite
        self.num_nonfinite += sum(counts.values())
        # Blocks that are stepped one by one report one by one.
        self.last_nonfinite = {**(self.last_nonfinite if when == self._when else {}), **counts}
        self._when = when
        most = sorted(counts.items(), key=lambda entry: (-entry[1], entry[0]))[:MOST_NAMED]
        names = ", ".join(f"{name} ({count})" for name, count in most)
        names += f" and {len(counts) - MOST_NAMED} more" if len(counts) > MOST_NAMED else ""
        text = f"{sum(counts.values())} gradient element(s) are NaN, infinite or beyond 2^48 {when}: {names}"
        if self.policy == "raise":
            self.forget(roster)
            raise DivergedError(f"{text}. Lower the learning rate, or set nonfinite=skip_element to go on without them")
        log.log(logging.WARNING if first else logging.INFO, "%s; policy: %s", text, self.policy)
