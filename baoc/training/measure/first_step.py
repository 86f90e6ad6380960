"""Measures the memory of the first real step, for loops whose step could not be run before training.

That step runs on the plan of least state and without the budget's cap; afterwards the budget is planned for. So it is
for `BaocOptimizer` without a probe, for modules that step several optimizers, and where a module's step fails alone.
"""

import weakref
from collections.abc import Sequence
from contextlib import ExitStack, suppress
from dataclasses import replace

from baoc.errors import BadInputError, InfeasibleBudgetError
from baoc.optim import seeding
from baoc.profiling import FirstStepMemory, clear_cache, context_bytes, uncapped
from baoc.profiling.memory import use_expandable_segments
from baoc.training.late_step import subscribe
from baoc.training.reallocator import Reallocator
from baoc.training.session import Session
from baoc.types import Footprint


class FirstStep:
    """From before the optimizers are built to the end of their first step. `close` where that never comes.

    Several optimizers of one loop, a session each, share the budget: of what it leaves beside forward and backward each
    gets a part by the bytes that fp32 AdamW would keep for it. `peak_bytes` is what the first step held, once it is
    over.
    """

    def __init__(self, *sessions: Session):
        self._sessions = sessions
        self._cap = ExitStack()  # the first step is a look: what passes the budget is refused by number after it
        self._memory: FirstStepMemory | None = None
        self._hooks = ExitStack()  # and what measures: all that is to end with the owner, at the latest
        self._reallocators: list[weakref.ref[Reallocator]] = []
        self.peak_bytes: int | None = None
        device, budget = sessions[0].device, sessions[0].budget
        use_expandable_segments(device)
        self._cap.enter_context(uncapped(device, budget=budget))

    def begin(self, *reallocators: Reallocator, owner: object) -> None:
        """Measures from now on, or from when states are loaded; ends with `owner`."""
        self._reallocators = [weakref.ref(each) for each in reallocators]
        self._measure()
        # Not `self.close`: the registry of finalizers would keep sessions, their module and so the owner itself.
        weakref.finalize(owner, _close, self._hooks, self._cap).atexit = False
        for reallocator in reallocators:
            reallocator.deferred_budget = self._sessions[0].budget
            hook = reallocator.optimizer.register_load_state_dict_post_hook(lambda _: self._measure())
            self._hooks.callback(hook.remove)

    def _measure(self) -> None:
        if self._memory is not None:
            self._memory.stop()
        params = [param for session in self._sessions for param in session.params.values()]
        optimizers = [one.optimizer for ref in self._reallocators if (one := ref()) is not None]
        context = context_bytes(self._sessions[0].device)
        held = [session.module for session in self._sessions if session.module is not None]
        held = [*held, *(optimizer.state for optimizer in optimizers)]
        self._memory = FirstStepMemory(params, existing=held, context_bytes=context)
        self._hooks.callback(self._memory.stop)
        for optimizer in optimizers:
            subscribe(self._memory, optimizer, ends=self._hooks)

    def close(self) -> None:
        self._memory = None
        _close(self._hooks, self._cap)

    def learn(self, *reallocators: Reallocator) -> None:
        """After the very first step: the memory of its forward and backward is known, so the budget is planned for.

        `reallocators`: one for each session. Raises InfeasibleBudgetError where nothing meets the budget, and
        BadInputError where the model was moved since.
        """
        assert self._memory is not None
        memory, device, budget = self._memory, self._sessions[0].device, self._sessions[0].budget
        now = next(iter(self._sessions[0].params.values())).device
        if now.type != device.type:
            self.close()
            raise BadInputError(
                f"the model has moved to {now} since its optimizer was built on {device}, whose memory budget "
                f"{budget.name} was to hold: move the model first, then build the optimizer"
            )
        state_bytes = sum(reallocator.optimizer.state_bytes() for reallocator in reallocators)
        footprint = memory.finish(state_bytes=state_bytes)
        self._memory = None
        self._hooks.close()
        self.peak_bytes = footprint.forward_backward_bytes + state_bytes
        profilers = [one.profiler for one in reallocators if one.profiler is not None]
        held = sum(profiler.nbytes for profiler in profilers)
        temporary = max((profiler.temporary_bytes() for profiler in profilers), default=0)
        for session, reallocator in zip(self._sessions, reallocators, strict=True):
            reallocator.planner.footprint = session.largest_on_ranks(
                _with_seeds(session.complete(footprint), session=session)
            )
            reallocator.planner.budget, reallocator.deferred_budget = budget, None
            reallocator.planner.count_profile(held, temporary_bytes=temporary)
            if reallocator.optimizer.releaser is not None:
                reallocator.optimizer.releaser.before_block = None
        seen = footprint.peak_bytes(state_bytes=state_bytes) - footprint.reserve_bytes
        (seen,) = self._sessions[0].ranks.all_reduce_max(seen)  # all stay, or all are planned for anew
        fitted = budget.memory_bytes is None or seen <= budget.memory_bytes
        staying = [reallocator for reallocator in reallocators if reallocator.continues_saved_plan and fitted]
        clear_cache(device)  # states get memory of their own, not gaps between gradients
        with self._cap:
            leave_to_others(reallocators, staying=staying)
            for reallocator in reallocators:
                why = "the first step told what forward and backward need"
                reallocator.replan(why=why, stays=reallocator in staying)


def _without_state(footprint: Footprint) -> int:
    """The peak of a step of the spec that takes least for itself."""
    temporaries = footprint.step_temporary_bytes
    return footprint.peak_bytes(state_bytes=0, specs=sorted(temporaries, key=temporaries.__getitem__)[:1])


def _shared(footprint: Footprint, *, among: int) -> Footprint:
    """The footprint of one of several optimizers. 16-bit gradients save at the step alone, and states come in their
    place: of the room that forward and backward leave below the step, each optimizer may fill its part by that."""
    temporary = min(footprint.step_temporary_bytes.values(), default=0)
    step = footprint.resident_bytes + max(temporary, footprint.profile_temporary_bytes)
    room = 0 if footprint.released else max(step - footprint.forward_backward_bytes, 0)
    return replace(footprint, forward_backward_bytes=footprint.forward_backward_bytes + room - room // among)


def _with_seeds(footprint: Footprint, *, session: Session) -> Footprint:
    """The footprint with what it takes to start v of another spec from the second step's gradient."""
    needed = seeding.temporary_bytes(session.params.values())
    temporaries = {name: max(held, needed) for name, held in footprint.step_temporary_bytes.items()}
    return replace(footprint, step_temporary_bytes=temporaries)


def _close(hooks: ExitStack, cap: ExitStack) -> None:
    hooks.close()
    cap.close()


def leave_to_others(reallocators: Sequence[Reallocator], *, staying: Sequence[Reallocator]) -> None:
    """Has each count what others keep, late parameters too. Those `staying` at their allocation keep what they have. Of
    what the budget then leaves beside forward and backward, each other one gets the least that it needs, and a part of
    the rest by the bytes that AdamW's states have beyond that. What is too little for all is so for the first one."""
    footprints: dict[Reallocator, Footprint] = {}
    for one in reallocators:
        if one.planner.footprint is not None:
            one.planner.footprint = footprints[one] = _shared(one.planner.footprint, among=len(reallocators))
    bare = {one: _without_state(footprint) for one, footprint in footprints.items()}
    kept = sum(one.optimizer.state_bytes() for one in staying)
    moving = [one for one in reallocators if one not in staying]
    several = len(moving) > 1 or any(one.late for one in moving)
    least = {one: one.planner.least_feasible_bytes() - bare[one] if several else 0 for one in moving}
    more = {one: max(one.planner.state_bytes_adamw - held, 0) for one, held in least.items()}
    late = {one: one.late_bytes_adamw - one.late_bytes for one in moving}  # which came at the least
    held = kept + sum(least.values()) + sum(one.late_bytes for one in moving)
    whole = max(sum(more.values()) + sum(late.values()), 1)
    room = (reallocators[0].planner.budget.memory_bytes or 0) - max(bare.values()) - held
    room = min(max(room, 0), whole)
    for one, footprint in footprints.items():
        if one in staying:
            others = held - one.plan.allocation.state_bytes + room + max(bare.values()) - bare[one]
        else:
            others = held - least[one] + room - room * more[one] // whole + max(bare.values()) - bare[one]
            if one.late:
                share = (one.late_bytes + room * late[one] / whole) / one.late_bytes_adamw
                with suppress(InfeasibleBudgetError):  # they stay at the least
                    one.replan_late(share=min(share, 1.0))
        one.planner.footprint = replace(footprint, others_bytes=max(others, 0))
