"""Changes the specs of blocks during training; their states are converted, not lost.

1. What asks for a new plan: statistics of gradients, once, after `reallocation.warmup_steps` (`decide`); another budget
   (`rebudget`); parameters that came after the plan and take more memory than it has left for them (`_learn_late`).
2. `Planner.propose` makes the plan. By statistics it is taken where it lowers the risk, else whatever its risk.
3. `_fit_of` checks that the move itself stays within the memory budget (`planning/reallocation/migration_cost.py`).
4. `BlockwiseOptimizer.migrate` converts the states of one block after the other.

`Reallocator` hooks into the optimizer's step (`attach`), so it serves Lightning and plain loops alike.
"""

from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor, nn

from baoc.config.schema import ReallocationConfig
from baoc.core.recipes import Tuning, tuning_of
from baoc.errors import BadInputError, CheckpointError, InfeasibleBudgetError
from baoc.optim import BeforeStep, BlockwiseOptimizer
from baoc.optim.groups import named_params, resolve_spec
from baoc.optim.shards import largest_shard
from baoc.parallel import SINGLE_PROCESS, Ranks, refuse_several_processes
from baoc.planning.planner import Planner
from baoc.planning.reallocation.conversion import has_all_blocks, restore_plan
from baoc.planning.reallocation.late_params import ADAMW_BYTES, FP32_BYTES, LatePlan, plan_late
from baoc.planning.reallocation.migration_cost import migration_peak
from baoc.profiling import GradientProfiler, describe, device_peak_bytes
from baoc.training.late_step import LateStep
from baoc.types import (
    BlockMove,
    Budget,
    Moments,
    ParamInfo,
    Plan,
    Profile,
    Reallocation,
    read_plain,
    to_plain,
)
from baoc.units import format_bytes

Listener = Callable[[Reallocation, Plan, Profile | None], None]


@dataclass(frozen=True, slots=True, kw_only=True)
class _MoveFit:
    """How a move fits: after gradients are dropped, or not at all, for the reason in `blocked`."""

    blocked: str = ""
    drops_gradients: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class _Verdict:
    """What one decision found, and what is to be done."""

    profile: Profile
    proposal: Plan
    accepted: bool
    why: str
    risk_before: float
    drops_gradients: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class _Saved:
    """What a checkpoint keeps of a reallocator. Those of earlier versions lack what has a default."""

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
    planned: bool | None = None  # None, before 2026-11-30: as if it was of least state to be measured
    late: Mapping[str, str] = field(default_factory=dict[str, str])
    state_bytes: int | None = None
    profiler: Mapping[str, Any]  # as GradientProfiler has it


def _brief(plan: Plan) -> Plan:
    """The plan with the chosen candidates alone, for ranks that only carry it out: all of them are megabytes."""
    chosen = plan.allocation.choices
    kept = {block: tuple(c for c in held if c.spec == chosen[block]) for block, held in plan.candidates.items()}
    return replace(plan, candidates=kept)


class Reallocator:
    """Holds the plan in force and moves the optimizer to later ones.

    `plan` is the plan in force, `profile` the statistics of gradients it rests on, None before there are any.
    `profiler` samples gradients until the decision by them, and is None afterwards. `listeners` are called after each
    decision, accepted or not. `tracked` wraps decisions and migrations, each under its name, so that whoever measures
    memory can include them. `moving` wraps migrations too, and is told whether weights change their type. Of several
    `ranks` the first proposes, from its own profile, and all of them move.
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
        self.late: dict[str, ParamInfo] = {}  # parameters that came after the plan was made
        self.late_bytes = 0  # of their state, which the plan does not have
        self.late_peak_bytes = 0  # the most held by a step that was measured as they came; on CUDA before it, too
        self._late_step: LateStep | None = None  # which is measured now
        self._late_came = False  # in the step that runs, so that the next one is measured
        self.late_specs: dict[str, str] = {}  # of these, and of those that a checkpoint had and that are still to come
        self.deferred_budget: Budget | None = None  # of memory, to be planned for once a first step has been measured
        self.continues_saved_plan = False  # with the allocation of a checkpoint under the same budget
        self.planner = planner
        self.optimizer = optimizer
        self.plan = plan
        self.settings = settings
        self.profiler = profiler
        self.profile: Profile | None = None
        self.listeners: list[Listener] = []
        self.peak_listeners: list[Callable[[int], object]] = []  # told of `late_peak_bytes` as it comes
        self.siblings: Sequence[Reallocator] = ()  # of the other optimizers of one loop, on the same device
        self.memory_phase: Callable[[str], AbstractContextManager[Any]] = nullcontext
        self.around_migration: Callable[[bool], AbstractContextManager[Any]] = (
            nullcontext  # True where weights change type
        )
        self._saved_bytes: int | None = None  # of states in the checkpoint that was loaded
        self.step = 0
        self.last_decision = 0
        self.profiled_since_step = (
            0  # the step after which the profiler began; later than 0 where a resumed run starts it anew
        )
        self.num_accepted = 0

    def __getstate__(self) -> dict[str, Any]:
        """For copies: without the profiler, whose buffers are views of each other, without who listens, and without the
        optimizer: whoever copies tells it of the copy's."""
        listening: dict[str, Any] = {"listeners": [], "peak_listeners": []}
        listening |= {"memory_phase": nullcontext, "around_migration": nullcontext}
        listening |= {"network": None, "_late_step": None, "siblings": ()}
        return {**self.__dict__, "profiler": None, "optimizer": None, **listening}

    # -- what the training loop calls -----------------------------------------------------------------------------

    def attach(self) -> None:
        """Hooks into the optimizer's step: gradients are seen when they are final, decisions come after the update."""
        if self.optimizer.releaser is None:
            self.optimizer.before_step.append(BeforeStep(call=self.observe, wanted=lambda: self.profiler is not None))
        elif self.profiler is not None:
            self.optimizer.releaser.observer = self
        self.optimizer.after_step.append(self.after_step)
        self.optimizer.register_load_state_dict_post_hook(lambda _: self._measure_late(again=True))
        self.optimizer.late_planner = self.plan_late

    def plan_late(self, infos: Sequence[ParamInfo]) -> Mapping[str, str]:
        """Parameter -> spec of those that come late, within what the budget leaves for them; see `late_params`."""
        network = None if self.network is None else self.network()
        if network is not None:
            known = {info.name: info for info in describe(network)}
            infos = [replace(known.get(info.name, info), group=info.group) for info in infos]
        params = named_params(self.optimizer.param_groups)
        if any(info.whole not in (None, info.shape) for block in self.planner.blocks for info in block.params):
            infos = [largest_shard(info, param=params[info.name][0]) for info in infos]  # as the plan counts the others
        late = self._late_plan(infos)
        self.late.update((info.name, info) for info in infos)
        self.late_bytes += late.state_bytes
        self._count_late(late.added_bytes)
        if self.planner.budget.memory_bytes is not None and self.deferred_budget is None:
            self._late_came = True
            if all(params[info.name][0].grad is None for info in infos):  # else in the very step that brought them
                self._measure_late()
        return late.specs

    def _measure_late(self, *, again: bool = False) -> None:
        """Measures the coming step; `again`: from now on, where one is measured already."""
        self._note_peak(
            device_peak_bytes(self._device)
        )  # which begins anew, as the step before ends and the next one begins
        if self._late_step is not None:
            self._late_step.close(self.optimizer)
        elif again:
            return
        network = None if self.network is None else self.network()
        self._late_came = False
        others = [one.optimizer.state for one in self.siblings]
        self._late_step = LateStep(self.optimizer, network=network, budget=self.planner.budget, others=others)

    def _learn_late(self) -> None:
        """After the first whole step with late parameters: what it held more than was predicted is counted, and where
        that passes the budget all states make room. Raises InfeasibleBudgetError where they cannot."""
        assert self._late_step is not None
        (step, self._late_step), held = (self._late_step, None), self.optimizer.state_bytes()
        self._note_peak(step.peak_bytes)
        footprint = step.finish(self.optimizer, budget=self.planner.budget)
        (seen,) = self.ranks.all_reduce_max(footprint.peak_bytes(state_bytes=held))
        self._count_late(max(int(seen) - self.plan.peak_bytes, 0))
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
        self.replan(why=f"a step with {len(self.late)} parameters that came late took {format_bytes(int(seen))}")

    @property
    def _device(self) -> torch.device:
        return next(iter(self.optimizer.registry.names)).device

    def _note_peak(self, num_bytes: int) -> None:
        """Keeps what was held at most before a peak begins anew, for each verdict on this device."""
        for one in (self, *self.siblings):
            one.late_peak_bytes = max(one.late_peak_bytes, num_bytes)
            for listener in one.peak_listeners:
                listener(num_bytes)

    def replan_late(self, *, share: float | None = None) -> None:
        """Moves late parameters to the specs of their checkpoint, or within a share of AdamW's state."""
        counted = self.late_bytes + FP32_BYTES * sum(info.numel for info in self.late.values())
        late = self._late_plan(list(self.late.values()), share=share, counted=counted)
        self.late_bytes = late.state_bytes
        self._count_late(late.added_bytes - counted)
        blocks = {name: [slot.name for slot in live.slots] for name, live in self.optimizer.registry.live.items()}
        own = {name: late.specs[names[0]] for name, names in blocks.items() if names[0] in late.specs}
        self._moved(own, moments={})

    def _late_plan(self, infos: Sequence[ParamInfo], *, share: float | None = None, counted: int = 0) -> LatePlan:
        """`counted`: bytes of theirs that the predicted peak has already."""
        settings, least = self.planner.settings, self.deferred_budget is not None
        saved = self.late_specs if share is None else {}
        plan = replace(self.plan, peak_bytes=self.plan.peak_bytes - counted)
        late = plan_late(infos, plan=plan, settings=settings, saved=saved, least=least, share=share)
        self.late_specs.update(late.specs)
        return late

    def _count_late(self, num_bytes: int) -> None:
        """Puts bytes of late parameters into the predicted peak, whose footprint is from before they came."""
        if self.planner.footprint is not None:
            others = self.planner.footprint.others_bytes + num_bytes
            self.planner.footprint = replace(self.planner.footprint, others_bytes=others)
            self.plan = replace(self.plan, peak_bytes=self.plan.peak_bytes + num_bytes)

    @property
    def has_gradients(self) -> bool:
        """Whether a backward pass came before this step; without one it tells nothing of memory."""
        if self.optimizer.releaser is not None:
            return self.optimizer.releaser.any_released
        return any(param.grad is not None for param in self.optimizer.registry.names)

    @property
    def late_bytes_adamw(self) -> int:
        return ADAMW_BYTES * sum(info.numel for info in self.late.values())

    def observe(self) -> None:
        """Samples the final gradients of the coming step; to be called after clipping, before the update."""
        if self.profiler is not None:
            self.profiler.observe(step=self.step)

    def begin_step(self) -> None:
        """As `observe`, where gradients are released: they come by parts, between this and `end_step`."""
        if self.profiler is not None:
            self.profiler.begin_step(step=self.step)

    def add_gradients(self, grads: Mapping[str, Tensor], /) -> None:
        if self.profiler is not None:
            self.profiler.add_gradients(grads)

    def end_step(self) -> None:
        if self.profiler is not None:
            if (
                self.profiler.samples_this_step
            ):  # whose temporaries are charged in place of gradients, which have to be gone
                self.optimizer.registry.pipelines.drain()
            self.profiler.end_step()

    def _stop_observing(self) -> None:
        if self.profiler is not None:
            self.profiler.free()
            self.profiler = None
        if self.optimizer.releaser is not None:
            self.optimizer.releaser.observer = None

    def after_step(self) -> None:
        """Counts the step and, once the warm-up is over, decides by its gradients."""
        if self.ranks is SINGLE_PROCESS:
            refuse_several_processes("decision")
        self.step += 1
        if self._late_step is not None and self.has_gradients:
            self._learn_late()
        if self._late_came:
            self._measure_late()
        if self.profiler is not None and self.step - self.profiled_since_step >= self.settings.warmup_steps:
            with self.memory_phase("decision"):
                self.decide()

    # -- a decision by gradients ----------------------------------------------------------------------------------

    def decide(self) -> Reallocation:
        """Proposes by the statistics of gradients and moves if that lowers the risk. They take the place of priors: the
        rest of the run has the gain, and all that is lost is young states, so any gain counts."""
        verdict = self.ranks.broadcast_result(
            self._verdict, for_others=lambda v: replace(v, proposal=_brief(v.proposal))
        )
        self.last_decision, self.profile = self.step, verdict.profile
        if verdict.drops_gradients:
            self.optimizer.zero_grad(set_to_none=True)
        event = self._move_or_stay(
            verdict.proposal,
            trigger=self.settings.mode,
            accepted=verdict.accepted,
            why=verdict.why,
            risk_before=verdict.risk_before,
        )
        self._stop_observing()
        self._tell(event)
        return event

    def _verdict(self) -> _Verdict:
        """A proposal from the profile, and whether to move: it saves risk, and fits on the way. Nothing is changed
        yet."""
        assert self.profiler is not None
        profile = self.profiler.profile()
        proposal = self.planner.propose(profile=profile)
        risk_before = self.planner.total_risk(self.plan.allocation.choices, risk=proposal.risk_model, profile=profile)
        risk, after = self.planner.settings.risk, proposal.allocation.risk
        change = f"{risk} risk {risk_before:.4g} -> {after:.4g}"
        fit = _MoveFit()
        if dict(proposal.allocation.choices) == dict(self.plan.allocation.choices):
            accepted, why = False, f"{risk} risk confirms the allocation in use"
        elif risk_before <= after:
            accepted, why = False, f"{change} saves nothing"
        else:
            fit = self._fit_of(proposal, memory=self.planner.budget.memory_bytes)
            accepted, why = not fit.blocked, fit.blocked or change
        return _Verdict(
            profile=profile,
            proposal=proposal,
            accepted=accepted,
            why=why,
            risk_before=risk_before,
            drops_gradients=fit.drops_gradients,
        )

    # -- limits that change ---------------------------------------------------------------------------------------

    def rebudget(self, budget: Budget, *, why: str) -> Reallocation:
        """Puts another budget in force and moves to the allocation that meets it.

        To be called between two steps. Raises InfeasibleBudgetError or BadInputError where it cannot be met; budget and
        plan then stay as they are.
        """
        planner, before = self.planner, self.planner.budget
        if budget.memory_bytes is not None and planner.footprint is None:
            raise BadInputError(
                f"budget {budget.name} limits device memory, but this run has no footprint to plan it with: give a "
                "state fraction such as state_25"
            )
        planner.budget = budget
        try:
            # A move down starts from what the budget before allowed.
            memory = [limit for limit in (before.memory_bytes, budget.memory_bytes) if limit is not None]
            return self.replan(why=why, trigger="budget", limit=max(memory) if len(memory) == 2 else None)
        except BaseException:
            planner.budget = before
            raise

    def replan(
        self, *, why: str, trigger: str = "limits", limit: int | None = None, stays: bool = False
    ) -> Reallocation:
        """Proposes anew because the budget or the footprint changed, and moves whatever the risk: limits come first.

        `limit`: bytes that the move itself may not pass, if any. `stays`: at the allocation in force, which was seen
        to fit. Raises InfeasibleBudgetError where nothing meets them; the plan in force then stays.
        """
        plan = self.plan

        def proposed() -> Plan:
            if not stays:
                return self.planner.propose(profile=self.profile)
            held = plan.allocation
            given = {"risk": plan.risk_model, "profile": self.profile, "gap": held.gap}
            kept = self.planner.resume_plan(held.choices, seen_to_fit=True, **given)
            same = dict(kept.allocation.choices) == dict(held.choices)
            return replace(kept, basis=plan.basis) if same else kept

        proposal = self.ranks.broadcast_result(proposed, for_others=_brief)
        risk_before = self.planner.total_risk(
            self.plan.allocation.choices, risk=proposal.risk_model, profile=self.profile
        )
        fit = self._fit_of(proposal, memory=limit)
        if fit.blocked:
            raise InfeasibleBudgetError(
                f"budget {self.planner.budget.name} would hold, but {fit.blocked}",
                budget_bytes=self.planner.budget.memory_bytes or 0,
                least_feasible_bytes=proposal.least_feasible_bytes,
            )
        if fit.drops_gradients:
            self.optimizer.zero_grad(set_to_none=True)
        event = self._move_or_stay(proposal, trigger=trigger, accepted=True, why=why, risk_before=risk_before)
        self._tell(event)
        return event

    # -- the move -------------------------------------------------------------------------------------------------

    def _fit_of(self, proposal: Plan, *, memory: int | None) -> _MoveFit:
        """How nothing passes `memory` bytes while blocks move. Where room is short, gradients go first: they have been
        used, and the next backward pass makes new ones."""
        predicted = migration_peak(self.planner, now=self.plan, then=proposal)
        if predicted is None or memory is None or predicted.peak_bytes <= memory:
            return _MoveFit()
        if predicted.without_gradients_bytes <= memory:
            return _MoveFit(drops_gradients=True)
        return _MoveFit(
            blocked=f"moving to it would hold {format_bytes(predicted.without_gradients_bytes)} for a moment, of "
            f"{format_bytes(memory)} allowed"
        )

    def _move_or_stay(
        self, proposal: Plan, *, trigger: str, accepted: bool, why: str, risk_before: float
    ) -> Reallocation:
        """Puts `proposal` in force if it was accepted, else prices the plan in force anew; tells which, as an event."""
        bytes_before = self.optimizer.state_bytes()
        moves = self._migrate(proposal) if accepted else ()
        if accepted:
            self.num_accepted += 1
            self.plan = proposal
        else:
            allocation = replace(self.plan.allocation, risk=risk_before)
            risk_model, candidates = proposal.risk_model, proposal.candidates
            self.plan = replace(self.plan, risk_model=risk_model, candidates=candidates, allocation=allocation)
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
        """Moves the optimizer, block by block."""
        texts = {reason.block: reason.text for reason in proposal.reasons}
        with self.memory_phase("migration"):
            moments = self.profiler.second_moments() if self.profiler is not None else {}
            self.optimizer.retune(tuning_of(proposal))
            done = self._moved(proposal.allocation.choices, moments=moments)
        return tuple(replace(move, why=texts.get(move.block, "")) for move in done)

    def _moved(self, choices: Mapping[str, str], *, moments: Mapping[str, Moments]) -> tuple[BlockMove, ...]:
        live = self.optimizer.registry.live
        cast = any(live[block].spec.weights != resolve_spec(spec).weights for block, spec in choices.items())
        with self.around_migration(cast):
            return tuple(self.optimizer.migrate(choices, moments=moments))

    # -- who listens ----------------------------------------------------------------------------------------------

    def report_resume(self, moves: Sequence[BlockMove], *, notes: Sequence[str]) -> None:
        """After a resume that was no mere continuation: an event that says what changed and what became of each block.

        `moves`: what the optimizer's loading converted, its states by now those of the plan in force.
        """
        if not moves and not notes:
            return
        held = self.optimizer.state_bytes()
        before = self._saved_bytes if self._saved_bytes is not None else held
        event = Reallocation(
            step=self.step,
            trigger="resume",
            accepted=bool(moves),
            why="; ".join(notes) or "the checkpoint was made for another plan",
            moves=tuple(moves),
            state_bytes_before=before,
            state_bytes_after=held,
            risk_before=self.plan.allocation.risk,
            risk_after=self.plan.allocation.risk,
        )
        self._tell(event)

    def _tell(self, event: Reallocation) -> None:
        for listener in self.listeners:
            listener(event, self.plan, self.profile)

    # -- resume ---------------------------------------------------------------------------------------------------

    def state_dict(self, *, copies: bool = True) -> dict[str, Any]:
        """Tensors, numbers, strings, lists and dicts only, so `weights_only` loading takes it. `copies`: see
        `GradientProfiler.state_dict`."""
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

    def load_state_dict(self, state: dict[str, Any]) -> list[str]:
        """Goes on where `state` was taken: the saved allocation is taken over if budget, catalogue and blocks are the
        same. What changed is planned for anew, statistics that mean nothing here start anew, and both are returned, to
        be said.

        The optimizer's states are loaded by the optimizer, after this. Raises CheckpointError where `state` is damaged,
        and InfeasibleBudgetError where neither the saved allocation nor any other fits, both with nothing changed.
        """
        saved = _read(state)
        profile = saved.profile
        notes: list[str] = []
        if profile is not None and not has_all_blocks(profile, planner=self.planner):
            profile = None
            notes.append("statistics of gradients start anew, as they are of other blocks or specs")
        footprint = self.planner.footprint
        if saved.last_decision and self.profiler is not None:
            self.planner.count_profile(0, temporary_bytes=0)
        known = {
            "saved": saved.budget,
            "risk_model": saved.risk_model,
            "gap": saved.gap,
            "awaited": self.deferred_budget,
        }
        try:
            plan, changed = self.ranks.broadcast_result(
                lambda: restore_plan(self.planner, saved.choices, profile=profile, **known)
            )
        except BaseException:
            self.planner.footprint = footprint
            raise
        self.step, self.num_accepted = saved.step, saved.num_accepted
        self.profile, self.last_decision = profile, saved.last_decision
        self.profiled_since_step = saved.watched_from if saved.profiler else self.step
        self._saved_bytes = saved.state_bytes
        if saved.last_decision:
            self._stop_observing()
        planned = saved.planned
        if planned is None:
            planned = saved.choices != dict(self.planner.least_state_plan().allocation.choices)
        self.continues_saved_plan = self.step > 0 and planned and not changed
        if saved.profiler and self.profiler is None and self.settings.mode == "once":
            notes.append("statistics of gradients are left out, as this optimizer has decided already")
        notes = changed + notes
        self.plan = _as_tuned(plan, saved)
        self.late_specs = dict(saved.late) if not changed else {}
        if self.late and self.late_specs:
            self.replan_late()
        self.optimizer.retune(tuning_of(self.plan))
        self._moved(self.plan.allocation.choices, moments={})
        if self.profiler is not None and saved.profiler:
            try:
                self.profiler.load_state_dict(saved.profiler)
            except CheckpointError:
                self.profiled_since_step = self.step
                notes += [] if any("start anew" in note for note in notes) else ["statistics of gradients start anew"]
        return notes


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


def _as_tuned(plan: Plan, saved: _Saved) -> Plan:
    """A plan that goes on with the saved choices keeps their rates and betas, whatever a newer table gives."""
    tuning = saved.tuning  # None in a checkpoint of before there were any
    if tuning is None or plan.basis is None or dict(plan.allocation.choices) != saved.choices:
        return plan
    return replace(plan, basis=replace(plan.basis, lr=tuning.lr, betas=tuning.betas))
