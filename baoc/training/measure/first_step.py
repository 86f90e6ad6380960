"""Measures the memory of the first real step, for loops whose step could not be run before training.

That step runs on the plan of least state and without the budget's cap; afterwards the budget is planned for. This
serves `BaocOptimizer` without a probe, modules that step several optimizers, and modules whose step failed in a probe.
"""

import weakref
from collections.abc import Sequence
from contextlib import ExitStack, suppress
from dataclasses import replace

from baoc.errors import BadInputError, InfeasibleBudgetError
from baoc.optim import seeding
from baoc.profiling import FirstStepMemory, clear_cache, context_bytes, uncapped
from baoc.profiling.late_step import subscribe
from baoc.profiling.memory import use_expandable_segments
from baoc.training.reallocator import Reallocator
from baoc.training.session import Session
from baoc.types import Footprint


class FirstStep:
    """Measures from before the optimizers are built to the end of their first step. Call `close` if that never comes.

    Several optimizers of one loop, with a session each, share the budget: what it leaves beside forward and backward is
    split in proportion to the bytes of fp32 AdamW's states. `peak_bytes`: the peak of the first step, after it.
    """

    def __init__(self, *sessions: Session):
        self._sessions = sessions
        self._cap = ExitStack()  # the first step runs without a cap; a budget that it exceeds is refused after it
        self._memory: FirstStepMemory | None = None
        self._hooks = ExitStack()  # of the measurement; they end with the owner at the latest
        self._reallocators: list[weakref.ref[Reallocator]] = []
        self.peak_bytes: int | None = None
        device, budget = sessions[0].device, sessions[0].budget
        use_expandable_segments(device)
        self._cap.enter_context(uncapped(device, budget=budget))

    def begin(self, *reallocators: Reallocator, owner: object) -> None:
        """Starts measuring, and again when states are loaded. Ends when `owner` is deleted."""
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
        modules = [session.module for session in self._sessions if session.module is not None]
        states = [optimizer.state for optimizer in optimizers]
        self._memory = FirstStepMemory(params, existing=[*modules, *states], context_bytes=context)
        self._hooks.callback(self._memory.stop)
        for optimizer in optimizers:
            subscribe(self._memory, optimizer, ends=self._hooks)

    def close(self) -> None:
        self._memory = None
        _close(self._hooks, self._cap)

    def learn(self, *reallocators: Reallocator) -> None:
        """After the first step: plans for the budget, one of `reallocators` for each session. Raises
        InfeasibleBudgetError if nothing meets it, and BadInputError if the model was moved meanwhile."""
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
        profile_bytes = sum(profiler.nbytes for profiler in profilers)
        temporary_bytes = max((profiler.temporary_bytes() for profiler in profilers), default=0)
        for session, reallocator in zip(self._sessions, reallocators, strict=True):
            complete, seeds = session.complete(footprint), seeding.temporary_bytes(session.params.values())
            temporaries = {name: max(held, seeds) for name, held in complete.step_temporary_bytes.items()}
            # v is seeded from the second step's gradient
            complete = replace(complete, step_temporary_bytes=temporaries)
            reallocator.planner.footprint = session.largest_on_ranks(complete)
            reallocator.planner.budget, reallocator.deferred_budget = budget, None
            reallocator.planner.count_profile(profile_bytes, temporary_bytes=temporary_bytes)
            reallocator.judge_outgrown_budget()
            if reallocator.optimizer.releaser is not None:
                reallocator.optimizer.releaser.before_block = None
        own_peak = footprint.peak_bytes(state_bytes=state_bytes) - footprint.reserve_bytes
        (peak_bytes,) = self._sessions[0].ranks.all_reduce_max(own_peak)  # so that all ranks stay, or all replan
        fitted = budget.memory_bytes is None or peak_bytes <= budget.memory_bytes
        staying = [reallocator for reallocator in reallocators if reallocator.continues_saved_plan and fitted]
        clear_cache(device)  # so that states do not fill gaps between gradients
        with self._cap:
            leave_to_others(reallocators, staying=staying)
            for reallocator in reallocators:
                why = "the first step told what forward and backward need"
                reallocator.replan(why=why, stays=reallocator in staying)


def _shared(footprint: Footprint, *, among: int) -> Footprint:
    """The footprint of one of several optimizers. bf16 gradients save memory in the optimizer's step only, and states
    take their place: of what the step's peak is above that of forward and backward, each may fill its part."""
    temporary = min(footprint.step_temporary_bytes.values(), default=0)
    step = footprint.resident_bytes + max(temporary, footprint.profile_temporary_bytes)
    room = 0 if footprint.released else max(step - footprint.forward_backward_bytes, 0)
    return replace(footprint, forward_backward_bytes=footprint.forward_backward_bytes + room - room // among)


def _close(hooks: ExitStack, cap: ExitStack) -> None:
    hooks.close()
    cap.close()


def leave_to_others(reallocators: Sequence[Reallocator], *, staying: Sequence[Reallocator]) -> None:
    """Sets `others_bytes` of each reallocator's footprint, so that several optimizers share the budget.

    Those `staying` at their allocation keep their bytes. Of what the budget then leaves beside forward and backward,
    each other one gets the least that it needs, and a share of the rest in proportion to the bytes of AdamW's states
    beyond that. If there is too little for all, the first one's plan is refused.
    """
    footprints: dict[Reallocator, Footprint] = {}
    for one in reallocators:
        if one.planner.footprint is not None:
            one.planner.footprint = footprints[one] = _shared(one.planner.footprint, among=len(reallocators))
    stateless: dict[Reallocator, int] = {}  # peaks without states, of steps with the spec of the smallest temporaries
    for one, footprint in footprints.items():
        temporaries = footprint.step_temporary_bytes
        smallest = sorted(temporaries, key=temporaries.__getitem__)[:1]
        stateless[one] = footprint.peak_bytes(state_bytes=0, specs=smallest)
    staying_bytes = sum(one.optimizer.state_bytes() for one in staying)
    moving = [one for one in reallocators if one not in staying]
    several = len(moving) > 1 or any(one.late for one in moving)
    least = {one: one.planner.least_feasible_bytes() - stateless[one] if several else 0 for one in moving}
    beyond_least = {one: max(one.planner.state_bytes_adamw - num_bytes, 0) for one, num_bytes in least.items()}
    late_beyond_least = {one: one.late_bytes_adamw - one.late_bytes for one in moving}  # late ones came at the least
    held = staying_bytes + sum(least.values()) + sum(one.late_bytes for one in moving)
    total = max(sum(beyond_least.values()) + sum(late_beyond_least.values()), 1)
    base = max(stateless.values())
    room = (reallocators[0].planner.budget.memory_bytes or 0) - base - held
    room = min(max(room, 0), total)
    for one, footprint in footprints.items():
        if one in staying:
            others = held - one.plan.allocation.state_bytes + room + base - stateless[one]
        else:
            others = held - least[one] + room - room * beyond_least[one] // total + base - stateless[one]
            if one.late:
                share = (one.late_bytes + room * late_beyond_least[one] / total) / one.late_bytes_adamw
                with suppress(InfeasibleBudgetError):  # late parameters then stay at the least
                    one.replan_late(share=min(share, 1.0))
        one.planner.footprint = replace(footprint, others_bytes=max(others, 0))
