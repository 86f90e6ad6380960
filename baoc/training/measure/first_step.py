"""Measures the memory of the first real step, for loops whose step could not be run before training.

That step runs on the plan of least state and without the budget's cap; afterwards the budget is planned for. So it is
for `BaocOptimizer` without a probe, for modules that step several optimizers, and where a module's step fails alone.
"""

import weakref
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import replace

from baoc.errors import BadInputError
from baoc.optim import seeding
from baoc.profiling import FirstStepMemory, clear_cache, context_bytes, uncapped
from baoc.profiling.memory import settle_allocator
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
        settle_allocator(device)
        self._cap.enter_context(uncapped(device, budget=budget))

    def begin(self, *reallocators: Reallocator, owner: object) -> None:
        """Measures from now on, or from when states are loaded; ends with `owner`."""
        self._reallocators = [weakref.ref(each) for each in reallocators]
        self._measure()
        # Not `self.close`: the registry of finalizers would keep sessions, their module and so the owner itself.
        weakref.finalize(owner, _close, self._hooks, self._cap).atexit = False
        for reallocator in reallocators:
            reallocator.awaited = self._sessions[0].budget
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
        self._memory = FirstStepMemory(params, held=held, context_bytes=context)
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
            reallocator.planner.footprint = session.largest(_with_seeds(session.complete(footprint), session=session))
            reallocator.planner.budget, reallocator.awaited = budget, None
            reallocator.planner.count_profile(held, temporary_bytes=temporary)
            if reallocator.optimizer.releaser is not None:
                reallocator.optimizer.releaser.before_block = None
        seen = footprint.peak_bytes(state_bytes=state_bytes) - footprint.reserve_bytes
        (seen,) = self._sessions[0].ranks.most(seen)  # all stay, or all are planned for anew
        fitted = budget.memory_bytes is None or seen <= budget.memory_bytes
        staying = [reallocator for reallocator in reallocators if reallocator.goes_on and fitted]
        clear_cache(device)  # states get memory of their own, not gaps between gradients
        with self._cap:
            _leave_to_others(reallocators, staying=staying)
            for reallocator in reallocators:
                why = "the first step told what forward and backward need"
                reallocator.replan(why=why, stays=reallocator in staying)


def _without_state(footprint: Footprint) -> int:
    """The peak of a step of the spec that takes least for itself."""
    temporaries = footprint.step_temporary_bytes
    return footprint.peak_bytes(state_bytes=0, specs=sorted(temporaries, key=temporaries.__getitem__)[:1])


def _with_seeds(footprint: Footprint, *, session: Session) -> Footprint:
    """The footprint with what it takes to start v of another spec from the second step's gradient."""
    needed = seeding.temporary_bytes(session.params.values())
    temporaries = {name: max(held, needed) for name, held in footprint.step_temporary_bytes.items()}
    return replace(footprint, step_temporary_bytes=temporaries)


def _close(hooks: ExitStack, cap: ExitStack) -> None:
    hooks.close()
    cap.close()


def _leave_to_others(reallocators: Sequence[Reallocator], *, staying: Sequence[Reallocator]) -> None:
    """Has each count what others keep, late parameters too. Those `staying` at their allocation keep what they have; of
    what the budget then leaves beside forward and backward, each other one gets its part by AdamW's bytes."""
    planners = [reallocator.planner for reallocator in reallocators]
    footprints = [planner.footprint for planner in planners if planner.footprint is not None]
    limit, base = planners[0].budget.memory_bytes, max(map(_without_state, footprints))
    kept = sum(one.optimizer.state_bytes() for one in staying)
    moving = [one for one in reallocators if one not in staying]
    whole = sum(one.planner.state_bytes_adamw + one.late_bytes_adamw for one in moving)
    room = max((limit or 0) - base - kept, 0)
    for one, footprint in zip(reallocators, footprints, strict=True):
        if one in staying:
            others = kept - one.plan.allocation.state_bytes + min(room, whole)
        else:
            own = one.planner.state_bytes_adamw
            others = kept + min(room - room * own // whole, whole - own)
            if one.late:
                one.replan_late(share=min(1.0, room / whole))
        one.planner.footprint = replace(footprint, others_bytes=max(others, 0))
