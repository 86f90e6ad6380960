"""Measures the first real step of a loop, where nobody could measure one before: it runs on the plan of least state,
outside of the cap, and the budget is planned for when its memory is known."""

import weakref
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import replace

from baoc.errors import BadInputError
from baoc.optim import BlockwiseOptimizer
from baoc.profiling import FirstStepMemory, context_bytes, uncapped
from baoc.profiling.memory import settle_allocator
from baoc.training.reallocator import Reallocator
from baoc.training.session import Session


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
        self.peak_bytes: int | None = None
        device, budget = sessions[0].device, sessions[0].budget
        settle_allocator(device)
        self._cap.enter_context(uncapped(device, budget=budget))

    def begin(self, *optimizers: BlockwiseOptimizer) -> None:
        """Measures from now on; ends with the first of `optimizers`, to which nothing here refers but weakly."""
        params = [param for session in self._sessions for param in session.params.values()]
        self._memory = FirstStepMemory(params, context_bytes=context_bytes(self._sessions[0].device))
        weakref.finalize(optimizers[0], self._memory.stop)
        weakref.finalize(optimizers[0], self._cap.close).atexit = False
        for optimizer in optimizers:
            if optimizer.releaser is not None:
                optimizer.releaser.before_block = self._memory.note_block

    def close(self) -> None:
        if self._memory is not None:
            self._memory.stop()
            self._memory = None
        self._cap.close()

    def learn(self, *reallocators: Reallocator) -> None:
        """After the very first step: the memory of its forward and backward is known, so the budget is planned for.

        `reallocators`: one for each session. Raises InfeasibleBudgetError where nothing meets the budget, and
        BadInputError where the model was moved since.
        """
        assert self._memory is not None
        memory, device, budget = self._memory, self._sessions[0].device, self._sessions[0].budget
        self._memory = None
        now = next(iter(self._sessions[0].params.values())).device
        if now.type != device.type:
            memory.stop()
            self._cap.close()
            raise BadInputError(
                f"the model has moved to {now} since its optimizer was built on {device}, whose memory budget "
                f"{budget.name} was to hold: move the model first, then build the optimizer"
            )
        state_bytes = sum(reallocator.optimizer.state_bytes() for reallocator in reallocators)
        footprint = memory.finish(state_bytes=state_bytes)
        self.peak_bytes = footprint.forward_backward_bytes + (state_bytes if device.type == "cuda" else 0)
        profilers = [one.profiler for one in reallocators if one.profiler is not None]
        held = sum(profiler.nbytes for profiler in profilers)
        temporary = max((profiler.temporary_bytes() for profiler in profilers), default=0)
        for session, reallocator in zip(self._sessions, reallocators, strict=True):
            reallocator.planner.footprint = session.largest(session.complete(footprint))
            reallocator.planner.count_profile(held, temporary_bytes=temporary)
            if reallocator.optimizer.releaser is not None:
                reallocator.optimizer.releaser.before_block = None
        others = _bytes_of_others(reallocators, limit=budget.memory_bytes)
        with self._cap:
            for reallocator, taken in zip(reallocators, others, strict=True):
                memory_bytes = None if budget.memory_bytes is None else budget.memory_bytes - taken
                reallocator.planner.budget = replace(budget, memory_bytes=memory_bytes)
                reallocator.replan(why="the first step told what forward and backward need")


def _bytes_of_others(reallocators: Sequence[Reallocator], *, limit: int | None) -> list[int]:
    """What each has to leave to the others of a memory limit; 0 for one alone."""
    if limit is None or len(reallocators) == 1:
        return [0] * len(reallocators)
    planners = [reallocator.planner for reallocator in reallocators]
    base = max(planner.footprint.peak_bytes(state_bytes=0) for planner in planners if planner.footprint is not None)
    whole = sum(planner.state_bytes_adamw for planner in planners)
    room = max(limit - base, 0)
    return [room - room * planner.state_bytes_adamw // whole for planner in planners]
