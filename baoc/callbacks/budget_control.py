"""Changes the budget of a running job: by schedule, and by a file in its folder.

Before the next optimizer step the allocation meets the new budget, or `budget.json` and the terminal say why not.
"""

import os
import stat
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import lightning as L
import torch

from baoc.callbacks.memory import MemoryMonitor
from baoc.callbacks.vote import StepVote
from baoc.core.budgets import AUTO, resolve_auto
from baoc.errors import BadInputError, CalledAloneError, InfeasibleBudgetError
from baoc.planning.planner import Planner
from baoc.planning.reallocation.budget_schedule import BudgetChange, BudgetSchedule, check_order
from baoc.profiling import free_bytes, recap_device
from baoc.tracking import files
from baoc.tracking.console import say
from baoc.types import Budget, Plan, to_plain

REQUEST_FILE, RECORD_FILE = "budget", "budget.json"
MAX_REQUEST_CHARS = 80  # characters of the file: a budget has a dozen


class BudgetControl(L.Callback):
    """Applies changes of the budget between steps. Place it before the monitors; the Trainer's strategy has to be
    BaocStrategy.

    `schedule`: see BudgetChange. `run_dir`: has `budget`, which is read, and `budget.json`, which is written. A text
    such as 6gb in `budget` asks for that budget. An empty file changes nothing; without the file the schedule counts
    again. `memory` restarts its measurement at each change. By `vote` the first of several ranks reads the file and all
    follow in one step.
    """

    def __init__(
        self,
        *,
        schedule: Sequence[BudgetChange] = (),
        run_dir: Path | None = None,
        memory: MemoryMonitor | None = None,
        vote: StepVote | None = None,
    ):
        check_order(schedule)
        self.schedule = BudgetSchedule(Budget(name="unlimited"), changes=schedule)  # the first plan has its base
        self._run_dir = run_dir
        self._memory = memory
        self._last_mark: tuple[int, int] | None = None  # the file's time and size when it was last read
        self._refused: Budget | None = None  # not tried again at every step
        self._record: dict[str, Any] = {}
        self._strategy: Any = None
        self._saved: dict[str, Any] = {}
        self._checked_step = -1
        self._vote = vote = vote or StepVote()
        vote.local_values["budget"] = lambda: float(vote.ranks.rank == 0 and self._file_state()[0] != self._last_mark)

    # -- set-up and resume ----------------------------------------------------------------------------------------

    def setup(self, trainer: L.Trainer, pl_module: L.LightningModule, stage: str) -> None:
        strategy: Any = trainer.strategy
        if stage == "fit" and self._begin not in strategy.plan_listeners:
            self._strategy = strategy
            strategy.plan_listeners.insert(0, self._begin)
            strategy.resume_listeners.append(lambda _, plan: self._record_plan(plan))
            strategy.reallocation_listeners.append(lambda _, plan, __: self._record_plan(plan))

    def _begin(self, planner: Planner, plan: Plan) -> None:
        """Refuses a schedule that cannot be met. A resume restores the budget that was in force at the checkpoint.

        The checkpoint's allocation is loaded after this and has to meet the budget that it was made for.
        """
        self.schedule.base = base = planner.budget
        known = base.memory_bytes if base.name == AUTO else None
        least = -int(self._strategy.ranks.all_reduce_max(-free_bytes(self._strategy.root_device))[0])
        self.schedule.free_bytes = least if known is None else known
        for change in self.schedule.changes:
            self._refuse_infeasible(planner, change)
        saved, self._saved = self._saved, {}
        why = self._restore(planner, saved) if saved else "the budget of the run"
        self._begin_record(step=saved.get("step", 0), budget=planner.budget, why=why, plan=plan)

    def _restore(self, planner: Planner, saved: Mapping[str, Any]) -> str:
        """Restores the budget that was in force at the checkpoint; returns the reason for the budget now.

        If the run was given another budget, nothing is restored. `auto` is what is free now.
        """
        both_auto = saved["base"]["name"] == planner.budget.name == AUTO
        if saved["base"] != to_plain(planner.budget) and not both_auto:
            return "the budget of the run"
        planner.budget, why = Budget(**saved["in_force"]), "as when the checkpoint was taken"
        if both_auto:
            planner.budget, why = self.schedule.budget_at(saved.get("step", 0))
        self._strategy.budget = planner.budget
        if planner.budget != self.schedule.base:
            recap_device(self._strategy.root_device, budget=planner.budget)
        return why

    def _refuse_infeasible(self, planner: Planner, change: BudgetChange) -> None:
        try:
            planner.with_budget(resolve_auto(change.budget, free_bytes=self.schedule.free_bytes or 0)).propose()
        except InfeasibleBudgetError as error:
            raise InfeasibleBudgetError(
                f"budget.schedule, step {change.step}: {error}",
                budget_bytes=error.budget_bytes,
                least_feasible_bytes=error.least_feasible_bytes,
                advice=error.advice,
            ) from None

    def state_dict(self) -> dict[str, Any]:
        reallocator = self._strategy.reallocator
        return {
            "step": reallocator.step,
            "base": to_plain(self.schedule.base),
            "in_force": to_plain(reallocator.planner.budget),
        }

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        self._saved = state_dict

    def on_train_start(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        """Names the changes that never come, because the run ends before."""
        for step in (change.step for change in self.schedule.changes):
            if 0 < trainer.max_steps <= step:
                say(
                    f"budget.schedule, step {step} never comes: step {trainer.max_steps} is the last "
                    "(trainer.max_steps)"
                )

    # -- between two steps ----------------------------------------------------------------------------------------

    def on_train_batch_start(
        self, trainer: L.Trainer, pl_module: L.LightningModule, batch: Any, batch_idx: int
    ) -> None:
        if trainer.global_step == self._checked_step:  # in the middle of accumulation, or after a skipped step
            return
        self._checked_step = trainer.global_step
        step = trainer.global_step
        if self._vote.outcome("budget"):
            self._follow_file()
        budget, why = self.schedule.budget_at(step)
        self._apply(budget, why=why, step=step)

    def _apply(self, budget: Budget, *, why: str, step: int) -> None:
        reallocator = self._strategy.reallocator
        planner = reallocator.planner
        if budget in (planner.budget, self._refused):
            return
        memory, before = budget.memory_bytes, planner.budget.memory_bytes
        wider = before is not None and (memory is None or memory > before)
        try:
            if wider:
                recap_device(self._strategy.root_device, budget=budget)
            reallocator.rebudget(budget, why=f"budget {budget.name}: {why}")
        except (BadInputError, InfeasibleBudgetError) as error:
            if isinstance(error, CalledAloneError):  # the other ranks go on under their own budget
                raise
            self._refused = budget
            if wider:
                recap_device(self._strategy.root_device, budget=planner.budget)
            self._write_record(refused=str(error))
            say(f"step {step}: the budget stays {planner.budget.name}: {error}")
            return
        self._refused = None
        self._strategy.budget = budget
        if self._strategy.root_device.type == "cuda":
            torch.cuda.empty_cache()  # what was freed is other processes' now
            recap_device(self._strategy.root_device, budget=budget)
        if self._memory is not None:
            self._memory.restart(budget, predicted_bytes=reallocator.plan.peak_bytes, step=step)
        self._begin_record(step=step, budget=budget, why=why, plan=reallocator.plan)
        say(f"step {step}: budget {budget.name} is in force ({why})")

    def _file_state(self) -> tuple[tuple[int, int] | None, int]:
        """The file's modification time and size, None without a file; and its mode."""
        try:
            found = None if self._run_dir is None else (self._run_dir / REQUEST_FILE).stat()
        except OSError:
            found = None
        return (None, 0) if found is None else ((found.st_mtime_ns, found.st_size), found.st_mode)

    def _new_request(self) -> str | None:
        """The new text of the file, "" where it was removed; None where nothing changed."""
        mark, mode = self._file_state()
        if self._run_dir is None or mark == self._last_mark:
            return None
        text = "" if mark is None else _request_text(self._run_dir / REQUEST_FILE, mode=mode)
        if mark is not None and not text.strip():  # `echo 6gb > budget` empties the file before it writes
            return None
        self._last_mark = mark
        return text

    def _follow_file(self) -> None:
        path = (self._run_dir or Path()) / REQUEST_FILE
        text = self._vote.ranks.broadcast_result(self._new_request)
        if text is None:
            return
        try:
            self.schedule.request(text)
        except BadInputError as error:
            self._write_record(refused=f"{path} is not followed: {error}")
            say(f"{path} is not followed: {error}")
            return
        self._refused = None  # a request is tried even if it was refused before
        if self._record.get("refused"):
            self._write_record(refused=None)

    def _begin_record(self, *, step: int, budget: Budget, why: str, plan: Plan) -> None:
        """Begins a new `budget.json`: the budget in force, since when and why. Later requests may be refused in it."""
        self._record = {"schema": 1, "pid": os.getpid(), "step": step, "budget": budget, "why": why, "refused": None}
        self._record_plan(plan)

    def _record_plan(self, plan: Plan) -> None:
        """Writes the plan that meets the budget now; decisions and checkpoints replace it under the same budget."""
        self._record["state_bytes"] = plan.allocation.state_bytes
        self._record["peak_bytes_predicted"] = plan.peak_bytes
        self._write_record(refused=self._record["refused"])

    def _write_record(self, *, refused: str | None) -> None:
        self._record["refused"] = refused
        if self._run_dir is not None:
            files.write_json(self._run_dir / RECORD_FILE, self._record)


def _request_text(path: Path, *, mode: int) -> str:
    """What the file asks for, fit to be shown: its beginning, control characters escaped. Only a regular file is
    opened, because a pipe would block."""
    if not stat.S_ISREG(mode):
        return "(no file)"
    try:
        with path.open(errors="replace") as file:
            text = file.read(MAX_REQUEST_CHARS + 1).strip()
    except OSError as error:
        return f"({error.strerror})"
    shown = text if text.isprintable() else repr(text)
    return f"{shown[:MAX_REQUEST_CHARS]}..." if len(shown) > MAX_REQUEST_CHARS else shown
