"""Reports of `BaocStrategy` and `BaocOptimizer`: the plan, each migration, and at the end whether the budget held.

They go to the terminal, and to loggers if the loop has some. `baoc.training.run` has its own reports and run folder.
"""

import os
from collections.abc import Callable, Mapping
from typing import Any

import torch

from baoc.parallel import SINGLE_PROCESS, current_rank
from baoc.profiling import device_peak_bytes
from baoc.tracking.console import budget_verdict, print_reallocation, rank_peaks_text, say, step_time_line, summary_text
from baoc.training.reallocator import Reallocator
from baoc.types import Plan, Profile, Reallocation
from baoc.units import format_bytes, gib

LogMetrics = Callable[[Mapping[str, float]], object]


class Narrator:
    """Reports one reallocator's plan, migrations and result. `verbose=False` prints nothing.

    Attributes:
        log: Called with metrics for the plan, for each decision and at the end.
        first_step_bytes: Peak of the first step on a CPU, if measured. CUDA has a peak of its own.
        by_rank: Peaks of all ranks gathered last, after steps 1, 2, 4 and so on and at calls of `gather_peaks`;
            the verdict is of the largest. Empty for a single process.
        alone: False if another optimizer's memory is missing in the peak on a CPU.
    """

    def __init__(
        self, reallocator: Reallocator, *, name: str, verbose: bool, device: torch.device, log: LogMetrics | None = None
    ):
        self.reallocator, self.name, self.device, self.log = reallocator, name, device, log
        ranks = current_rank()
        self.verbose = verbose and (ranks is None or ranks.rank == "0")
        self.first_step_bytes: int | None = None
        self.alone = True
        self.by_rank: tuple[int, ...] = ()
        self.layers_summary = ""  # see Session
        self.num_moves = 0  # reallocations that moved blocks
        self._stepped = self._begun = self._resumed = False
        self._pid = os.getpid()
        reallocator.optimizer.after_step.append(self._count)
        reallocator.listeners.append(self._moved)

    def __getstate__(self) -> dict[str, Any]:
        """For copies, which report nothing."""
        return {**self.__dict__, "log": None, "verbose": False}

    # -- values ---------------------------------------------------------------------------------------------------

    @property
    def plan(self) -> Plan:
        return self.reallocator.plan

    @property
    def peak_bytes(self) -> int | None:
        """The largest peak of any rank so far; None if it was not measured."""
        return max((held for held in (self._own_bytes, *self.by_rank) if held), default=None)

    @property
    def _own_bytes(self) -> int | None:
        own = device_peak_bytes(self.device) if self.device.type == "cuda" else self.first_step_bytes or 0
        return max(own, self.reallocator.late_peak_bytes) or None

    def gather_peaks(self) -> None:
        """Updates `by_rank`. A collective."""
        ranks = self.reallocator.ranks
        if ranks is not SINGLE_PROCESS:
            self.by_rank = tuple(int(held) for held in ranks.all_gather_number(self._own_bytes or 0))

    @property
    def budget_met(self) -> bool | None:
        """True if the limit on memory or state holds; None without such a limit, or without a peak."""
        limit, held = self._limit_and_held()
        return None if limit is None or held is None else held <= limit

    def _limit_and_held(self) -> tuple[int | None, int | None]:
        """The budget's limit and the bytes held, of memory or of state."""
        plan, late = self.plan, self.reallocator
        if plan.budget.memory_bytes is not None:
            limit, held = plan.budget.memory_bytes, self.peak_bytes
            is_complete = self.alone or self.device.type == "cuda" or (held or 0) > limit
            return limit, held if is_complete else None
        limit = plan.limits.state_bytes
        if limit is not None and late.late:  # of which each has the same share
            limit += int((plan.budget.state_fraction or 0) * late.late_bytes_adamw)
        return limit, self._state_bytes

    @property
    def _state_bytes(self) -> int:
        return self.plan.allocation.state_bytes + self.reallocator.late_bytes

    @property
    def _share(self) -> float:
        """State over the state of fp32 AdamW."""
        return self._state_bytes / max(self.plan.state_bytes_adamw + self.reallocator.late_bytes_adamw, 1)

    def values(self) -> dict[str, float]:
        plan = self.plan
        values = {
            "memory/state_gib": gib(self._state_bytes),
            "memory/state_fraction": self._share,
            "risk/total": plan.allocation.risk,
            "allocation/num_reallocations": float(self.num_moves),
        }
        if (peak := self.peak_bytes) is not None:
            values["memory/peak_gib"] = gib(peak)
            values |= {f"memory/peak_gib_rank_{rank}": gib(held) for rank, held in enumerate(self.by_rank)}
        limit, held = self._limit_and_held()
        if limit is not None and held is not None:
            values |= {"budget/slack_gib": gib(limit - held), "budget/met": float(held <= limit)}
        return values

    def summary(self) -> str:
        """The plan in force as a table by role and spec, its totals, and state and peak beside the budget."""
        step, table = self.reallocator.step, summary_text(self.plan, title=f"{self.name}: the plan in force")
        return f"{table}\nafter {step} step{'' if step == 1 else 's'}: {'; '.join(self.verdict_lines())}"

    def verdict_lines(self) -> list[str]:
        """Clauses on state, on the peak beside its prediction, and on the budget."""
        plan, peak = self.plan, self.peak_bytes
        late = f", {len(self.reallocator.late)} parameters came late" if self.reallocator.late else ""
        lines = [f"state {format_bytes(self._state_bytes)} ({self._share:.1%} of fp32 AdamW's{late})"]
        memory = plan.budget.memory_bytes is not None
        if self.reallocator.planner.footprint is not None and (memory or peak is not None):
            measured = "not measured" if peak is None else format_bytes(peak)
            each = rank_peaks_text(self.by_rank if any(self.by_rank) else ())
            in_first = self.device.type != "cuda" and not self.reallocator.late_peak_bytes  # no later one is looked at
            when = " in its first step" if in_first and peak is not None else ""
            lines.append(f"peak {measured}{when}{each}, {format_bytes(plan.peak_bytes)} predicted")
        limit, held = self._limit_and_held()
        if self.reallocator.deferred_budget is not None:
            verdict = "not planned for, as not every optimizer has stepped yet"
        elif limit is None:
            limited = self.reallocator.planner.budget.memory_bytes is not None
            verdict = "no plan was made that meets it" if limited else "no limit on memory or state"
        elif held is None:
            both = "not judged, because no peak of this and the other optimizer together is measured"
            verdict = f"{format_bytes(limit)}, {'to be judged once a peak is measured' if self.alone else both}"
        else:
            verdict = budget_verdict(limit, used_bytes=held, met=held <= limit, memory=memory, binding=plan.binding)
        lines.append(f"budget {plan.budget.name}: {verdict}")
        if (time := step_time_line(plan)) is not None:
            lines.append(f"{time}, not measured in training")
        return lines

    # -- reporting ------------------------------------------------------------------------------------------------

    def begin(self) -> None:
        """Reports the plan, before the first step."""
        if self.verbose:
            say(summary_text(self.plan, title=f"{self.name}: plan for budget {self.plan.budget.name}") + "\n")
            if self.layers_summary:
                say(f"{self.name}: {self.layers_summary}")
        self._begun = True
        self._log()

    def resumed(self) -> None:
        """Reports that states were loaded, unless at step 0, when a wrapper such as accelerate only moves them."""
        self._resumed = self.reallocator.step > 0
        if self.verbose and self._resumed:
            say(f"{self.name}: resumed after step {self.reallocator.step}; {self.plan!r}")

    def conclude(self) -> None:
        """Reports the verdict, if there were steps since it was last reported."""
        steps = self.reallocator.step
        if not self._stepped or os.getpid() != self._pid:
            return
        self._stepped = False
        if self.verbose:
            moved = f"{self.num_moves or 'no'} reallocation{'s' if self.num_moves > 1 else ''}"
            say("; ".join([f"{self.name}: {steps} steps, {moved}", *self.verdict_lines()]))
        self._log()

    def _count(self) -> None:
        self._stepped = True
        step = self.reallocator.step
        if step & (step - 1) == 0:  # a peak is mostly reached in the first steps
            self.gather_peaks()

    def _moved(self, event: Reallocation, plan: Plan, profile: Profile | None) -> None:
        is_first = not self._begun  # a plan that was made after the first step was measured
        if is_first:
            self.begin()
            if not self._resumed:
                return
        self.num_moves += bool(event.moves)
        if self.verbose:
            if event.trigger == "resume" and not event.moves and self.reallocator.deferred_budget is not None:
                say(f"step {event.step}, resume: {event.why}")  # what moves is told after the first step
            else:
                print_reallocation(event)
            if event.accepted and not is_first:
                say(summary_text(plan, title=f"{self.name}: plan from step {event.step} on") + "\n")
        self._log()

    def _log(self) -> None:
        if self.log is not None and self.verbose:
            self.log(self.values())


def loggers_of(trainer: Any, *, prefix: str = "") -> LogMetrics:
    """Logs to every logger of a Lightning Trainer, under the step that its own metrics are logged under."""

    def log(values: Mapping[str, float]) -> None:
        named = {prefix + key: value for key, value in values.items()}
        for logger in trainer.loggers:
            logger.log_metrics(named, step=trainer.fit_loop.epoch_loop._batches_that_stepped)

    return log
