"""Changes the specs of blocks during training; their states are converted, not lost.

1. Three events ask for a new plan: gradient statistics, once, after `reallocation.warmup_steps` (`decide`); another
   budget (`rebudget`); parameters that came after the plan and take more memory than it left for them
   (`_finish_late_step`).
2. `Planner.propose` makes the plan. Of a decision by statistics it is taken if it lowers the risk, else in any case.
3. `_migration_fit` checks that the migration itself stays within the memory budget
   (`planning/reallocation/migration_cost.py`).
4. `BlockwiseOptimizer.migrate` converts the states of one block after the other.

`Reallocator` hooks into the optimizer's step (`attach`), so it serves Lightning and plain loops alike.
"""

from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field, replace
from typing import Any, cast

import torch
from torch import Tensor, nn

from baoc.config.schema import ReallocationConfig
from baoc.core.catalogue import SPECS
from baoc.core.recipes import Tuning, tuning_of
from baoc.errors import BadInputError, CheckpointError, InfeasibleBudgetError
from baoc.optim import BeforeStep, BlockwiseOptimizer
from baoc.optim.groups import named_params, resolve_spec
from baoc.optim.shards import largest_shard
from baoc.parallel import SINGLE_PROCESS, Ranks, check_same_on_ranks, refuse_several_processes
from baoc.planning.budgeted import MEASURED
from baoc.planning.planner import AS_SAVED, LEAST_STATE, Planner
from baoc.planning.reallocation.conversion import binds, choices_with_head, restore_plan
from baoc.planning.reallocation.late_params import ADAMW_BYTES, FP32_BYTES, LatePlan, plan_late
from baoc.planning.reallocation.migration_cost import migration_peak
from baoc.profiling import GradientProfiler, describe, device_peak_bytes
from baoc.profiling.late_step import LateStep
from baoc.types import Basis, BlockMove, Budget, Moments, ParamInfo, Plan, Profile, Reallocation, read_plain, to_plain
from baoc.units import format_bytes

Listener = Callable[[Reallocation, Plan, Profile | None], None]


@dataclass(frozen=True, slots=True, kw_only=True)
class _MigrationFit:
    """Whether a migration fits into memory: as it is, only after gradients are dropped, or not, for `blocked_by`."""

    blocked_by: str = ""
    drops_gradients: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class _Decision:
    """A decision by gradient statistics, before anything is changed."""

    profile: Profile
    proposal: Plan
    accepted: bool
    why: str
    risk_before: float
    fit: _MigrationFit


@dataclass(frozen=True, slots=True, kw_only=True)
class _Saved:
    """The checkpoint of a reallocator. Fields with a default are missing in those of earlier versions."""

    step: int
    last_decision: int
    num_accepted: int
    risk_model: str
    choices: Mapping[str, str]
    gap: float | None
    profile: Profile | None
    watched_from: int = 0
    tuning: Tuning | None = None
    budget: Budget | None = None
    # False for a provisional plan. None in checkpoints from before 2026-11-30: provisional if its choices are those of
    # `planner.least_state_plan()`.
    planned: bool | None = None
    late: Mapping[str, str] = field(default_factory=dict[str, str])
    state_bytes: int | None = None
    profiler: Mapping[str, Any]  # GradientProfiler's state


class Reallocator:
    """Holds the plan in force and migrates the optimizer to later ones.

    Attributes:
        plan: The plan in force.
        profile: The gradient statistics that it rests on; None before there are any.
        profiler: Samples gradients until the decision by them; None afterwards.
        listeners: Called after each decision, accepted or not.
        peak_listeners: Called with each new `late_peak_bytes`.
        memory_phase: Wraps decisions and migrations, with their name, for whoever measures memory.
        around_migration: Wraps migrations; its argument is True if weights change their type.
        ranks: Rank 0 proposes, from its own profile; all ranks migrate.
        siblings: The reallocators of the other optimizers of the loop, on the same device.
        deferred_budget: A memory budget that is planned for once the first step has been measured.
        continues_saved_plan: The plan is a checkpoint's, under the same budget.
        profiled_since_step: The step after which the profiler began; above 0 if a resumed run starts it anew.
        late: Parameters that came after the plan was made, by name.
        late_specs: Their specs, and those of late parameters of a checkpoint that are still to come.
        late_bytes: Bytes of their states, which the plan does not include.
        late_peak_bytes: The most that a step held while late parameters were measured; on CUDA also before it.
    """

    def __init__(
        self,
        *,
        planner: Planner,
        optimizer: BlockwiseOptimizer,
        plan: Plan,
        settings: ReallocationConfig,
        profiler: GradientProfiler | None,
        ranks: Ranks = SINGLE_PROCESS,
        network: Callable[[], nn.Module | None] | None = None,
    ):
        self.ranks, self.network = ranks, network
        self.planner = planner
        self.optimizer = optimizer
        self.plan = plan
        self.settings = settings
        self.profiler = profiler
        self.profile: Profile | None = None
        self.listeners: list[Listener] = []
        self.peak_listeners: list[Callable[[int], object]] = []
        self.siblings: Sequence[Reallocator] = ()
        self.memory_phase: Callable[[str], AbstractContextManager[Any]] = nullcontext
        self.around_migration: Callable[[bool], AbstractContextManager[Any]] = nullcontext
        self.deferred_budget: Budget | None = None
        self.continues_saved_plan = False
        self._outgrown_budget: Budget | None = None  # of a checkpoint whose plan runs the first step alone
        self.step = 0
        self.last_decision = 0
        self.profiled_since_step = 0
        self.num_accepted = 0
        self._saved_state_bytes: int | None = None  # of the checkpoint that was loaded
        self._ran_at = None if _is_provisional(plan) else tuning_of(plan) or Tuning()  # None: not known
        self.late: dict[str, ParamInfo] = {}
        self.late_specs: dict[str, str] = {}
        self.late_bytes = 0
        self.late_peak_bytes = 0
        self._late_arrived = False  # during the present step, so the next one is measured
        self._late_step: LateStep | None = None  # the measurement that is running

    def __getstate__(self) -> dict[str, Any]:
        """For copies: without what belongs to the loop, the optimizer, and the profiler, whose buffers are views."""
        left_out: dict[str, Any] = {"profiler": None, "optimizer": None, "network": None, "_late_step": None}
        left_out |= {"listeners": [], "peak_listeners": [], "siblings": ()}
        left_out |= {"memory_phase": nullcontext, "around_migration": nullcontext}
        return {**self.__dict__, **left_out}

    # -- hooks into the optimizer's step --------------------------------------------------------------------------

    def attach(self) -> None:
        """Registers with the optimizer: `observe` runs on the final gradients, `after_step` after the update."""
        if self.optimizer.releaser is None:
            self.optimizer.before_step.append(BeforeStep(call=self.observe, wanted=lambda: self.profiler is not None))
        elif self.profiler is not None:
            self.optimizer.releaser.observer = self
        self.optimizer.after_step.append(self.after_step)
        self.optimizer.register_load_state_dict_post_hook(lambda _: self._restart_late_measurement())
        self.optimizer.late_planner = self.plan_late

    def observe(self) -> None:
        """Samples the final gradients of the coming step, after clipping and before the update."""
        if self.profiler is not None:
            self.profiler.observe(step=self.step)

    def begin_step(self) -> None:
        """In place of `observe` under gradient release: gradients follow in parts, until `end_step`."""
        if self.profiler is not None:
            self.profiler.begin_step(step=self.step)

    def add_gradients(self, grads: Mapping[str, Tensor], /) -> None:
        if self.profiler is not None:
            self.profiler.add_gradients(grads)

    def end_step(self) -> None:
        if self.profiler is not None:
            if self.profiler.samples_this_step:
                # The plan charges the profiler's temporaries in place of gradients, which have to be gone.
                for pipeline in self.optimizer.registry.pipelines:
                    pipeline.drain()
            self.profiler.end_step()

    def after_step(self) -> None:
        """Counts the step and, once the warm-up is over, decides by its gradients."""
        if self.ranks is SINGLE_PROCESS:
            refuse_several_processes("decision")
        self.step += 1
        if self._late_step is not None and self.has_gradients:
            self._finish_late_step()
        if self._late_arrived:
            self._start_late_measurement()
        if self.profiler is not None and self.step - self.profiled_since_step >= self.settings.warmup_steps:
            with self.memory_phase("decision"):
                self.decide()

    @property
    def has_gradients(self) -> bool:
        """True if a backward pass came before this step; otherwise the step says nothing of memory."""
        if self.optimizer.releaser is not None:
            return self.optimizer.releaser.any_released
        return any(param.grad is not None for param in self.optimizer.registry.names)

    # -- a decision by gradient statistics ------------------------------------------------------------------------

    def decide(self) -> Reallocation:
        """Proposes by the gradient statistics, and migrates if that lowers the risk by anything: states are young, so
        migrating costs little, and the rest of the run gains."""
        decision = self.ranks.broadcast_result(
            self._decide_by_profile, for_others=lambda d: replace(d, proposal=_with_chosen_candidates(d.proposal))
        )
        self.last_decision, self.profile = self.step, decision.profile
        if decision.fit.drops_gradients:
            self.optimizer.zero_grad(set_to_none=True)
        trigger, accepted, why = self.settings.mode, decision.accepted, decision.why
        event = self._apply(
            decision.proposal, trigger=trigger, accepted=accepted, why=why, risk_before=decision.risk_before
        )
        self._stop_observing()
        self._notify(event)
        return event

    def _stop_observing(self) -> None:
        if self.profiler is not None:
            self.profiler.free()
            self.profiler = None
        if self.optimizer.releaser is not None:
            self.optimizer.releaser.observer = None

    def _decide_by_profile(self) -> _Decision:
        """Proposes from the profile. Accepts a proposal of lower risk whose migration fits; changes nothing yet."""
        assert self.profiler is not None
        profile = self.profiler.profile()
        proposal = self.planner.propose(profile=profile)
        risk_before = self.planner.total_risk(self.plan.allocation.choices, risk=proposal.risk_model, profile=profile)
        risk, after = self.planner.settings.risk, proposal.allocation.risk
        change = f"{risk} risk {risk_before:.4g} -> {after:.4g}"
        fit = _MigrationFit()
        if dict(proposal.allocation.choices) == dict(self.plan.allocation.choices):
            accepted, why = False, f"{risk} risk confirms the allocation in use"
        elif risk_before <= after:
            accepted, why = False, f"{change} saves nothing"
        else:
            fit = self._migration_fit(proposal, memory=self.planner.budget.memory_bytes)
            accepted, why = not fit.blocked_by, fit.blocked_by or change
        return _Decision(
            profile=profile, proposal=proposal, accepted=accepted, why=why, risk_before=risk_before, fit=fit
        )

    # -- limits that change ---------------------------------------------------------------------------------------

    def rebudget(self, budget: Budget, *, why: str) -> Reallocation:
        """Puts another budget in force and migrates to an allocation that meets it. Call it between two steps.

        Raises InfeasibleBudgetError or BadInputError if it cannot be met; budget and plan then stay as they are.
        """
        self.ranks.meet("rebudget()")
        check_same_on_ranks({"budget": to_plain(budget)}, among=self.ranks)
        planner, before = self.planner, self.planner.budget
        if budget.memory_bytes is not None and planner.footprint is None:
            raise BadInputError(
                f"budget {budget.name} limits device memory, but this run has no footprint to plan it with: give a "
                "state fraction such as state_25"
            )
        planner.budget = budget
        try:
            # A migration to a smaller budget starts from what the old one allowed.
            limits = [limit for limit in (before.memory_bytes, budget.memory_bytes) if limit is not None]
            return self.replan(why=why, trigger="budget", limit=max(limits) if len(limits) == 2 else None)
        except BaseException:
            planner.budget = before
            raise

    def replan(
        self, *, why: str, trigger: str = "limits", limit: int | None = None, stays: bool = False
    ) -> Reallocation:
        """Proposes anew because the budget or the footprint changed, and migrates whatever the risk.

        Args:
            limit: Bytes that the migration itself may not exceed, if any.
            stays: Keep the allocation in force, which was seen to fit.

        Raises:
            InfeasibleBudgetError: Nothing meets the limits; the plan in force then stays.
        """
        plan = self.plan

        def propose() -> Plan:
            if not stays:
                proposal = self.planner.propose(profile=self.profile)
            else:
                choices, gap = plan.allocation.choices, plan.allocation.gap
                proposal = self.planner.resume_plan(
                    choices, seen_to_fit=True, risk=plan.risk_model, profile=self.profile, gap=gap
                )
            same = dict(proposal.allocation.choices) == dict(plan.allocation.choices)
            return replace(proposal, basis=plan.basis) if same and not _is_provisional(plan) else proposal

        proposal = self.ranks.broadcast_result(propose, for_others=_with_chosen_candidates)
        risk_before = self.planner.total_risk(
            self.plan.allocation.choices, risk=proposal.risk_model, profile=self.profile
        )
        fit = self._migration_fit(proposal, memory=limit)
        if fit.blocked_by:
            raise InfeasibleBudgetError(
                f"budget {self.planner.budget.name} would hold, but {fit.blocked_by}",
                budget_bytes=self.planner.budget.memory_bytes or 0,
                least_feasible_bytes=proposal.least_feasible_bytes,
            )
        if fit.drops_gradients:
            self.optimizer.zero_grad(set_to_none=True)
        event = self._apply(proposal, trigger=trigger, accepted=True, why=why, risk_before=risk_before)
        event = replace(event, accepted=not stays or bool(event.moves))
        self._notify(event)
        return event

    # -- migration ------------------------------------------------------------------------------------------------

    def _migration_fit(self, proposal: Plan, *, memory: int | None) -> _MigrationFit:
        """Whether the device stays within `memory` bytes while blocks migrate; gradients, which were used, go first."""
        predicted = migration_peak(self.planner, current=self.plan, target=proposal)
        if predicted is None or memory is None or predicted.peak_bytes <= memory:
            return _MigrationFit()
        if predicted.without_gradients_bytes <= memory:
            return _MigrationFit(drops_gradients=True)
        return _MigrationFit(
            blocked_by=f"moving to it would hold {format_bytes(predicted.without_gradients_bytes)} for a moment, of "
            f"{format_bytes(memory)} allowed"
        )

    def _apply(self, proposal: Plan, *, trigger: str, accepted: bool, why: str, risk_before: float) -> Reallocation:
        """Puts `proposal` in force if it was accepted, else prices the plan in force anew; returns the event."""
        bytes_before = self.optimizer.state_bytes()
        moves = self._migrate(proposal) if accepted else ()
        self.num_accepted += bool(moves)  # not a plan that keeps all specs
        if accepted:
            self.plan = proposal
            why = "; ".join([why, *self._rates_note()])
        else:
            self.plan = replace(
                self.plan,
                risk_model=proposal.risk_model,
                candidates=proposal.candidates,
                allocation=replace(self.plan.allocation, risk=risk_before),
            )
        return Reallocation(
            step=self.step,
            trigger=trigger,
            accepted=accepted,
            why=why,
            moves=moves,
            state_bytes_before=bytes_before,
            state_bytes_after=self.optimizer.state_bytes(),
            risk_before=risk_before,
            risk_after=self.plan.allocation.risk,
        )

    def _migrate(self, proposal: Plan) -> tuple[BlockMove, ...]:
        reasons = {reason.block: reason.text for reason in proposal.reasons}
        with self.memory_phase("migration"):
            moments = self.profiler.second_moments() if self.profiler is not None else {}
            self.optimizer.retune(tuning_of(proposal))
            moves = self._migrate_blocks(proposal.allocation.choices, moments=moments)
        return tuple(replace(move, why=reasons.get(move.block, "")) for move in moves)

    def _migrate_blocks(self, choices: Mapping[str, str], *, moments: Mapping[str, Moments]) -> tuple[BlockMove, ...]:
        """Migrates these blocks to the specs chosen for them, inside `around_migration`."""
        live = self.optimizer.registry.live
        casts = any(live[block].spec.weights != resolve_spec(spec).weights for block, spec in choices.items())
        with self.around_migration(casts):
            return tuple(self.optimizer.migrate(choices, moments=moments))

    def _notify(self, event: Reallocation) -> None:
        for listener in self.listeners:
            listener(event, self.plan, self.profile)

    # -- late parameters ------------------------------------------------------------------------------------------
    #
    # Parameters that a loop adds or unfreezes after the plan was made have activations that no plan counts. The step
    # that brings them calls `plan_late` for their specs. `LateStep` measures the next whole step. After that,
    # `_finish_late_step` counts what it held beyond the prediction and, if that exceeds the budget, replans.

    def plan_late(self, infos: Sequence[ParamInfo]) -> Mapping[str, str]:
        """Parameter -> spec for late parameters, within what the budget leaves for them; see `late_params`."""
        network = None if self.network is None else self.network()
        if network is not None:
            described = {info.name: info for info in describe(network)}
            infos = [replace(described.get(info.name, info), group=info.group) for info in infos]
        params = named_params(self.optimizer.param_groups)
        if any(info.whole not in (None, info.shape) for block in self.planner.blocks for info in block.params):
            infos = [largest_shard(info, param=params[info.name][0]) for info in infos]  # as the plan counts the others
        late = self._choose_late_specs(infos)
        self.late.update((info.name, info) for info in infos)
        self.late_bytes += late.state_bytes
        self._count_late(late.added_bytes)
        if self.planner.budget.memory_bytes is not None and self.deferred_budget is None:
            self._late_arrived = True
            if all(params[info.name][0].grad is None for info in infos):  # else they came in mid-step
                self._start_late_measurement()
        return late.specs

    def _start_late_measurement(self) -> None:
        """Measures the coming step, in place of a measurement that is running."""
        self._record_peak(device_peak_bytes(self._device))  # the measurement resets it
        if self._late_step is not None:
            self._late_step.close(self.optimizer)
        network = None if self.network is None else self.network()
        self._late_arrived = False
        others = [sibling.optimizer.state for sibling in self.siblings]
        self._late_step = LateStep(self.optimizer, network=network, budget=self.planner.budget, others=others)

    def _restart_late_measurement(self) -> None:
        """After states were loaded: a measurement that is running begins anew."""
        if self._late_step is not None:
            self._start_late_measurement()
        else:
            self._record_peak(device_peak_bytes(self._device))

    def _finish_late_step(self) -> None:
        """After the first whole step with late parameters: counts what it held beyond the prediction. If that exceeds
        the budget, all states make room; raises InfeasibleBudgetError if they cannot."""
        assert self._late_step is not None
        step, self._late_step = self._late_step, None
        state_bytes = self.optimizer.state_bytes()
        self._record_peak(step.peak_bytes)
        footprint = step.finish(self.optimizer, budget=self.planner.budget)
        (peak_bytes,) = self.ranks.all_reduce_max(footprint.peak_bytes(state_bytes=state_bytes))
        self._count_late(max(int(peak_bytes) - self.plan.peak_bytes, 0))
        limit = self.planner.budget.memory_bytes  # None: lifted while the step ran
        if limit is None or self.plan.peak_bytes <= limit:
            return
        room = limit - self.plan.peak_bytes + self.plan.allocation.state_bytes + self.late_bytes
        if room <= 0:
            raise InfeasibleBudgetError(
                f"{len(self.late)} parameters came after the plan was made, and a step with them takes "
                f"{format_bytes(limit - room)} without any optimizer state, of {format_bytes(limit)} in budget "
                f"{self.planner.budget.name}: take fewer samples per forward, unfreeze fewer, or give a larger budget",
                budget_bytes=limit,
                least_feasible_bytes=limit - room,
            )
        self.replan_late(share=min(1.0, room / (self.planner.state_bytes_adamw + self.late_bytes_adamw)))
        self.replan(why=f"a step with {len(self.late)} parameters that came late took {format_bytes(int(peak_bytes))}")

    @property
    def _device(self) -> torch.device:
        return next(iter(self.optimizer.registry.names)).device

    @property
    def late_bytes_adamw(self) -> int:
        return ADAMW_BYTES * sum(info.numel for info in self.late.values())

    def _record_peak(self, num_bytes: int) -> None:
        """Records the device's peak before it is reset, for all reallocators of this device."""
        for reallocator in (self, *self.siblings):
            reallocator.late_peak_bytes = max(reallocator.late_peak_bytes, num_bytes)
            for listener in reallocator.peak_listeners:
                listener(num_bytes)

    def replan_late(self, *, share: float | None = None) -> None:
        """Migrates late parameters: to the specs of their checkpoint, or within a share of fp32 AdamW's state."""
        counted = self.late_bytes + FP32_BYTES * sum(info.numel for info in self.late.values())
        late = self._choose_late_specs(list(self.late.values()), share=share, counted=counted)
        self.late_bytes = late.state_bytes
        self._count_late(late.added_bytes - counted)
        first_params = {name: live.slots[0].name for name, live in self.optimizer.registry.live.items()}
        choices = {name: late.specs[first] for name, first in first_params.items() if first in late.specs}
        if share is not None:  # a step has used the gradients, whose place conversions may need
            self.optimizer.zero_grad(set_to_none=True)
        self._migrate_blocks(choices, moments={})

    def _choose_late_specs(
        self, infos: Sequence[ParamInfo], *, share: float | None = None, counted: int = 0
    ) -> LatePlan:
        """`counted`: bytes of these parameters that the predicted peak already includes."""
        late = plan_late(
            infos,
            plan=replace(self.plan, peak_bytes=self.plan.peak_bytes - counted),
            settings=self.planner.settings,
            saved=self.late_specs if share is None else {},
            least=self.deferred_budget is not None,
            share=share,
        )
        self.late_specs.update(late.specs)
        return late

    def _count_late(self, num_bytes: int) -> None:
        """Adds bytes of late parameters to the footprint, which is from before they came, and to the predicted peak."""
        if self.planner.footprint is not None:
            others = self.planner.footprint.others_bytes + num_bytes
            self.planner.footprint = replace(self.planner.footprint, others_bytes=others)
            self.plan = replace(self.plan, peak_bytes=self.plan.peak_bytes + num_bytes)

    # -- resume ---------------------------------------------------------------------------------------------------

    def state_dict(self, *, copies: bool = True) -> dict[str, Any]:
        """Returns plain values and tensors, as `weights_only` loading needs. `copies`: see GradientProfiler's."""
        saved = _Saved(
            step=self.step,
            last_decision=self.last_decision,
            num_accepted=self.num_accepted,
            risk_model=self.plan.risk_model,
            choices=self.plan.allocation.choices,
            gap=self.plan.allocation.gap,
            profile=self.profile,
            watched_from=self.profiled_since_step,
            tuning=tuning_of(self.plan) or Tuning(),
            budget=self.deferred_budget or self.planner.budget,
            planned=self.deferred_budget is None or self.continues_saved_plan,
            late=self.late_specs,
            state_bytes=self.optimizer.state_bytes(),
            profiler={},
        )
        return {**to_plain(saved), "profiler": self.profiler.state_dict(copies=copies) if self.profiler else {}}

    def load_state_dict(self, state: dict[str, Any], *, blocks: object = None) -> list[str]:
        """Continues a run; returns notes for the user on what could not be continued.

        The saved allocation is adopted if budget, catalogue and blocks are the same, else planned anew. Gradient
        statistics of other blocks or specs start anew. Load the optimizer's states after this, into the optimizer.
        `blocks`: those of the optimizer's checkpoint, if it has them: a block that became the head is then known.

        Raises:
            CheckpointError: `state` is damaged; nothing has changed.
            InfeasibleBudgetError: Neither the saved allocation nor another one fits; nothing has changed.
        """
        saved = self.ranks.run_or_raise_on_all(lambda: _read(state))
        check_same_on_ranks({"checkpoint": {"step": saved.step, "specs": saved.choices}}, among=self.ranks)
        choices, notes = choices_with_head(
            saved.choices,
            members=_members(blocks),
            planner=self.planner,
            risk=self.planner.risk_of_saved(saved.risk_model, profile=None),
            plan=self.plan if self.deferred_budget is None else None,
        )
        saved = replace(saved, choices=choices)
        profile, profile_dropped = saved.profile, False
        if profile is not None and any(block.name not in profile.stats for block in self.planner.blocks):
            profile, profile_dropped = None, True
            notes.append("statistics of gradients start anew, as they are of other blocks or specs")
        footprint = self.planner.footprint
        if saved.last_decision and self.profiler is not None:  # it has decided, so that the profiler goes
            self.planner.count_profile(0, temporary_bytes=0)

        def adopt() -> tuple[Plan, list[str]]:
            return restore_plan(
                self.planner,
                saved.choices,
                profile=profile,
                saved=saved.budget,
                risk_model=saved.risk_model,
                gap=saved.gap,
                deferred=self.deferred_budget,
            )

        try:
            plan, changes = self.ranks.broadcast_result(adopt)
        except BaseException:
            self.planner.footprint = footprint
            raise
        self.step, self.num_accepted = saved.step, saved.num_accepted
        self.profile, self.last_decision = profile, saved.last_decision
        self.profiled_since_step = saved.watched_from if saved.profiler else self.step
        self._saved_state_bytes = saved.state_bytes
        if saved.last_decision:
            self._stop_observing()
        if (planned := saved.planned) is None:
            planned = saved.choices != dict(self.planner.least_state_plan().allocation.choices)
        self.continues_saved_plan = self.step > 0 and planned and not changes
        runs_on = self.step > 0 and planned and dict(plan.allocation.choices) == saved.choices
        self._outgrown_budget = saved.budget if self.deferred_budget is not None and runs_on and changes else None
        if saved.profiler and self.profiler is None and self.settings.mode == "once":
            notes.append("statistics of gradients are left out, as this optimizer has decided already")
        self.plan, self._ran_at = _with_saved_tuning(plan, saved), saved.tuning if planned else None
        notes += self._rates_note()
        self.late_specs = dict(saved.late) if not changes else {}
        if self.late and self.late_specs:
            self.replan_late()
        self.optimizer.retune(tuning_of(self.plan))
        self._migrate_blocks(self.plan.allocation.choices, moments={})
        if self.profiler is not None and saved.profiler:
            try:
                self.profiler.load_state_dict(saved.profiler)
            except CheckpointError:
                self.profiled_since_step = self.step
                if not profile_dropped:
                    notes.append("statistics of gradients start anew")
        return changes + notes

    def judge_outgrown_budget(self) -> None:
        """Once a step is measured: whether a checkpoint's plan goes on under another budget, see `restore_plan`."""
        outgrown, self._outgrown_budget = self._outgrown_budget, None
        if outgrown is not None and self.planner.risk_of_saved(self.plan.risk_model, profile=self.profile) == MEASURED:
            self.continues_saved_plan = not self.ranks.broadcast_result(lambda: binds(outgrown, planner=self.planner))

    def _rates_note(self) -> list[str]:
        """A clause that names both rates, where what was trained goes on at others than it ran at."""
        if _is_provisional(self.plan):
            return []
        before, self._ran_at = self._ran_at, (after := tuning_of(self.plan) or Tuning())
        rules = {name: SPECS[spec].rule for name, spec in self.plan.allocation.choices.items()}
        run = [(live.block, rules.get(name, live.spec.rule)) for name, live in self.optimizer.registry.live.items()]
        if before is None or not self.step or all(before.of(b, rule=r) == after.of(b, rule=r) for b, r in run):
            return []  # a multiple that no block runs at has not changed anything
        return [f"what ran at {before.text} goes on at {after.text}"]

    def report_resume(self, moves: Sequence[BlockMove], *, notes: Sequence[str]) -> None:
        """Notifies listeners of a resume that changed something: by `moves`, the conversions that loading the optimizer
        made, or by what the `notes` of `load_state_dict` say."""
        if not moves and not notes:
            return
        state_bytes = self.optimizer.state_bytes()
        self._notify(
            Reallocation(
                step=self.step,
                trigger="resume",
                accepted=bool(moves),
                why="; ".join(notes) or "the checkpoint was made for another plan",
                moves=tuple(moves),
                state_bytes_before=state_bytes if self._saved_state_bytes is None else self._saved_state_bytes,
                state_bytes_after=state_bytes,
                risk_before=self.plan.allocation.risk,
                risk_after=self.plan.allocation.risk,
            )
        )


def _with_chosen_candidates(plan: Plan) -> Plan:
    """The plan without candidates that were not chosen, for other ranks: all candidates are megabytes."""
    choices = plan.allocation.choices
    chosen = {
        block: tuple(candidate for candidate in candidates if candidate.spec == choices[block])
        for block, candidates in plan.candidates.items()
    }
    return replace(plan, candidates=chosen)


def _read(state: object) -> _Saved:
    try:
        saved = read_plain(_Saved, state, partial=True)
        if min(saved.step, saved.last_decision, saved.num_accepted, saved.watched_from) < 0:
            raise ValueError("a step or count is below 0")
    except ValueError as error:
        raise CheckpointError(
            f"'online' of the optimizer checkpoint is damaged: {error}; use another checkpoint, or leave 'online' out "
            "to load the states alone"
        ) from error
    return saved


def _members(blocks: object) -> dict[str, list[str]]:
    """Block -> parameter names. Empty where `blocks` is damaged, which the optimizer's own loading reports."""
    try:
        return {name: list(entry["params"]) for name, entry in cast(Any, blocks or {}).items()}
    except (AttributeError, KeyError, TypeError):
        return {}


def _with_saved_tuning(plan: Plan, saved: _Saved) -> Plan:
    """The plan with the saved rates and betas, if it has the saved choices, whatever a newer table gives; a recipe that
    is asked for brings its own. Its basis then holds no measurements, as these are of the newer rates."""
    tuning = saved.tuning  # None in checkpoints of earlier versions
    if tuning is None or plan.basis is None or plan.basis.by == "recipe":
        return plan
    if dict(plan.allocation.choices) != saved.choices or tuning == (tuning_of(plan) or Tuning()):
        return plan
    text = f"{AS_SAVED}, at {tuning.text}"
    return replace(plan, basis=Basis(by=plan.basis.by, text=text, lr=tuning.lr, betas=tuning.betas))


def _is_provisional(plan: Plan) -> bool:
    return plan.basis is not None and plan.basis.by == LEAST_STATE
