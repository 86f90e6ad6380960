"""Measures the first real step of a loop, where nobody could measure one before: it runs on the plan of least state,
outside of the cap, and the budget is planned for when its memory is known."""

import weakref
from contextlib import ExitStack
from typing import Any

from baoc.errors import BadInputError
from baoc.optim import BlockwiseOptimizer
from baoc.profiling import FirstStepMemory, context_bytes, uncapped
from baoc.profiling.memory import settle_allocator
from baoc.training.reallocation import Reallocator
from baoc.training.session import Session


class FirstStep:
    """From before the optimizer is built to the end of its first step. `close` where that never comes.

    `peak_bytes` is what the first step held, once it is over.
    """

    def __init__(self, session: Session):
        self._session = session
        self._cap = ExitStack()  # the first step is a look: what passes the budget is refused by number after it
        self._memory: FirstStepMemory | None = None
        self.peak_bytes: int | None = None
        settle_allocator(session.device)
        self._cap.enter_context(uncapped(session.device, budget=session.budget))

    @property
    def is_over(self) -> bool:
        return self._memory is None

    def begin(self, optimizer: BlockwiseOptimizer) -> None:
        """Measures from now on; ends with `optimizer`, to which nothing here refers but weakly."""
        self._memory = FirstStepMemory(
            list(self._session.params.values()), context_bytes=context_bytes(self._session.device)
        )
        weakref.finalize(optimizer, self._memory.stop)
        weakref.finalize(optimizer, self._cap.close).atexit = False
        if optimizer.releaser is not None:
            optimizer.releaser.before_block = self._memory.note_block

    def close(self) -> None:
        if self._memory is not None:
            self._memory.stop()
            self._memory = None
        self._cap.close()

    def learn(self, optimizer: Any, *, reallocator: Reallocator) -> None:
        """After the very first step: the memory of its forward and backward is known, so the budget is planned for.

        Raises InfeasibleBudgetError where nothing meets it, and BadInputError where the model was moved since.
        """
        if self._memory is None:
            return
        memory, session, self._memory = self._memory, self._session, None
        now = next(iter(session.params.values())).device
        if now.type != session.device.type:
            memory.stop()
            self._cap.close()
            raise BadInputError(
                f"the model has moved to {now} since its optimizer was built on {session.device}, whose memory "
                f"budget {session.budget.name} was to hold: move the model first, then build the optimizer"
            )
        planner, profiler, state_bytes = reallocator.planner, reallocator.profiler, optimizer.state_bytes()
        planner.footprint = session.complete(memory.finish(state_bytes=state_bytes))
        held = state_bytes if session.device.type == "cuda" else 0
        self.peak_bytes = planner.footprint.forward_backward_bytes + held
        if profiler is not None:
            planner.count_profile(profiler.nbytes, temporary_bytes=profiler.temporary_bytes())
        if optimizer.releaser is not None:
            optimizer.releaser.before_block = None
        planner.budget = session.budget
        with self._cap:
            reallocator.replan(why="the first step told what forward and backward need")
