"""The one path of every allocation after the first: propose, check, migrate.

The training loop calls two methods: `observe` when a step's gradients are final, `after_step` when the step is done.
Nothing here knows Lightning; the strategy and the plain-loop drop-in use the same object.
"""

from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager, nullcontext
from dataclasses import replace
from typing import Any

from torch import Tensor

from baoc.errors import BadInputError
from baoc.online.relaxation import RelaxationSettings, calm_blocks, lowered, offers
from baoc.online.triggers import TRIGGERS, Moment, ReallocationSettings
from baoc.optim import BlockwiseOptimizer
from baoc.planner import Planner
from baoc.profiling import GradientProfiler
from baoc.types import Budget, Candidate, Footprint, Plan, Profile, Reallocation, profile_from_plain, to_plain

Listener = Callable[[Reallocation, Plan, Profile | None], None]


class Reallocator:
    """Watches gradients, asks the planner again when its trigger fires, and moves the optimizer to what was accepted.

    `listeners` are called after each decision, accepted or not. `tracked` wraps a migration, so that whoever measures
    memory can include it. The plan in force is `plan`, the profile it rests on `profile`.
    """

    def __init__(
        self,
        *,
        planner: Planner,
        optimizer: BlockwiseOptimizer,
        plan: Plan,
        settings: ReallocationSettings,
        profiler: GradientProfiler | None,
    ):
        self.planner = planner
        self.optimizer = optimizer
        self.plan = plan
        self.settings = settings
        self.profiler = profiler
        self.profile: Profile | None = None
        self.first_profile: Profile | None = None  # of the first decision
        self.listeners: list[Listener] = []
        self.tracked: Callable[[], AbstractContextManager[Any]] = nullcontext
        self.step = 0
        self.last_decision = 0
        self.num_accepted = 0
        self._watched = False  # the step in progress, where it comes by parts

    def __getstate__(self) -> dict[str, Any]:
        """For copies: without the profiler, whose buffers are views of each other, and without who listens."""
        return {**self.__dict__, "profiler": None, "listeners": [], "tracked": nullcontext}

    def attach(self) -> None:
        """Hooks into the optimizer's step: gradients are seen when they are final, decisions come after the update."""
        if self.optimizer.releaser is not None:
            self.optimizer.releaser.observer = self
        else:
            self.optimizer.observer = self.observe
        self.optimizer.register_step_post_hook(lambda *_: self.after_step())

    @property
    def watching(self) -> bool:
        """True while gradients are still sampled: a profile is needed, and a later decision may come."""
        if self.profiler is None or self.settings.mode == "off":
            return False
        return self.last_decision == 0 or self.settings.mode != "once"

    def observe(self) -> None:
        """Samples the final gradients of the coming step; to be called after clipping, before the update."""
        if self.watching:
            assert self.profiler is not None
            self.profiler.observe(step=self.step)

    def begin_parts(self) -> None:
        """As `observe`, where gradients are released: they come by parts, between this and `finish_parts`."""
        self._watched = self.watching
        if self._watched:
            assert self.profiler is not None
            self.profiler.begin_parts(step=self.step)

    def see_part(self, grads: Mapping[str, Tensor], /) -> None:
        if self._watched:
            assert self.profiler is not None
            self.profiler.see_part(grads)

    def finish_parts(self) -> None:
        if self._watched:
            assert self.profiler is not None
            self.profiler.finish_parts()
        self._watched = False

    def observe_half(self, *, fraction: float) -> None:
        """To be called before clipping, with `fraction` of a step's micro-batches in the gradients, and at the last.

        Noise is then taken from the two parts of one step instead of from consecutive steps.
        """
        if self.watching:
            assert self.profiler is not None
            self.profiler.observe_half(step=self.step, fraction=fraction)

    def after_step(self) -> None:
        """Counts the step and, where the trigger says so, decides again."""
        self.step += 1
        if not self.watching:
            return
        assert self.profiler is not None
        now = Moment(
            step=self.step,
            last_decision=self.last_decision,
            profile=self.profiler.profile,
            reference=self.profile,
        )
        if TRIGGERS[self.settings.mode](self.settings, now):
            self.decide(trigger=self.settings.mode)

    def decide(self, *, trigger: str) -> Reallocation:
        """Proposes from the newest profile and moves if that lowers the risk by more than the threshold."""
        assert self.profiler is not None
        first = self.last_decision == 0
        profile = self.profiler.profile()
        self.last_decision = self.step
        self.profile = profile
        self.first_profile = self.first_profile or profile
        risk = self.planner.settings.risk
        proposal = self.planner.propose(profile=profile)
        before = self.planner.price(self.plan.allocation.choices, risk=proposal.risk_model, profile=profile)
        after = proposal.allocation.risk
        needed = 0.0 if first else self.settings.min_gain * abs(before)
        changed = dict(proposal.allocation.choices) != dict(self.plan.allocation.choices)
        accepted = changed and before - after > needed
        if not changed:
            why = f"{risk} risk confirms the allocation in use"
        elif accepted:
            why = f"{risk} risk {before:.4g} -> {after:.4g}"
        else:
            why = f"{risk} risk {before:.4g} -> {after:.4g} is less than the threshold of {needed:.2g}"
        self.optimizer.set_target_rms(
            {block: stats.update_rms for block, stats in profile.stats.items() if stats.update_rms > 0}
        )
        event = self._move(proposal, trigger=trigger, accepted=accepted, why=why, before=before)
        if not self.watching:
            self.profiler.release()
        for listener in self.listeners:
            listener(event, self.plan, profile)
        return event

    def rebudget(self, budget: Budget, *, why: str, footprint: Footprint | None = None) -> Reallocation:
        """Puts another budget (or a footprint that grew) in force and moves to the allocation that meets it.

        To be called between two steps. Raises InfeasibleBudgetError or BadInputError where it cannot be met; budget,
        footprint and plan then stay as they are.
        """
        planner = self.planner
        before = planner.budget, planner.footprint
        if budget.memory_bytes is not None and planner.footprint is None:
            raise BadInputError(
                f"budget {budget.name} limits device memory, but this run has no footprint to plan it with: give a "
                "state fraction such as state_25"
            )
        planner.budget, planner.footprint = budget, footprint or planner.footprint
        try:
            return self.replan(why=why, trigger="budget")
        except BaseException:
            planner.budget, planner.footprint = before
            raise

    def relax(self, settings: RelaxationSettings) -> tuple[Budget, dict[str, float]] | None:
        """The budget less what calm blocks can do without, and those blocks with how calm each is; None where none can.

        To be put in force by `rebudget`, which then decides by the newest profile.
        """
        if self.profiler is None or self.first_profile is None or not self.watching:
            return None
        now = self.profiler.profile()
        calm = calm_blocks(self.first_profile, now, share=settings.calm)
        pool = self.planner.candidates(risk=self.planner.settings.risk, profile=now)
        found = offers(self.plan, pool, calm=calm, max_risk=settings.max_risk)
        if not found:
            return None
        self.profile = now
        held = {c.block: c.cost.state_bytes for options in pool.values() for c in options if self._runs(c)}
        saved = sum(held[block] - candidate.cost.state_bytes for block, candidate in found.items())
        lower = lowered(self.planner.budget, plan=self.plan, saved_bytes=saved)
        return lower, {block: calm[block] for block in found}

    def _runs(self, candidate: Candidate) -> bool:
        return self.plan.allocation.choices[candidate.block] == candidate.spec

    def replan(self, *, why: str, trigger: str = "limits") -> Reallocation:
        """Proposes anew because the budget or the footprint changed, and moves whatever the risk: limits come first.

        Raises InfeasibleBudgetError where nothing meets them; the plan in force then stays.
        """
        known = self.profile is not None
        proposal = self.planner.propose(risk=None if known else "prior", profile=self.profile)
        before = self.planner.price(self.plan.allocation.choices, risk=proposal.risk_model, profile=self.profile)
        event = self._move(proposal, trigger=trigger, accepted=True, why=why, before=before)
        for listener in self.listeners:
            listener(event, self.plan, self.profile)
        return event

    def _move(self, proposal: Plan, *, trigger: str, accepted: bool, why: str, before: float) -> Reallocation:
        bytes_before = self.optimizer.state_bytes()
        moves = ()
        if accepted:
            self.num_accepted += 1
            texts = {reason.block: reason.text for reason in proposal.reasons}
            with self.tracked():
                moments = self.profiler.moments() if self.profiler is not None else {}
                done = self.optimizer.migrate(proposal.allocation.choices, moments=moments)
            moves = tuple(replace(move, why=texts.get(move.block, "")) for move in done)
            self.plan = proposal
        else:
            self.plan = replace(self.plan, risk_model=proposal.risk_model, candidates=proposal.candidates)
            self.plan = replace(self.plan, allocation=replace(self.plan.allocation, risk=before))
        return Reallocation(
            step=self.step,
            trigger=trigger,
            accepted=accepted,
            why=why,
            moves=moves,
            state_bytes_before=bytes_before,
            state_bytes_after=self.optimizer.state_bytes(),
            risk_before=before,
            risk_after=self.plan.allocation.risk,
        )

    # -- resume ---------------------------------------------------------------------------------------------------

    def state_dict(self) -> dict[str, Any]:
        """Tensors, numbers, strings, lists and dicts only, so `weights_only` loading takes it."""
        return {
            "step": self.step,
            "last_decision": self.last_decision,
            "num_accepted": self.num_accepted,
            "risk_model": self.plan.risk_model,
            "profile": to_plain(self.profile) if self.profile is not None else {},
            "first_profile": to_plain(self.first_profile) if self.first_profile is not None else {},
            "choices": dict(self.plan.allocation.choices),
            "gap": self.plan.allocation.gap,
            "profiler": self.profiler.state_dict() if self.profiler is not None and self.watching else {},
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Goes on where `state` was taken: the saved allocation is taken over if it meets today's budget.

        The optimizer's states are loaded by the optimizer, after this. Raises InfeasibleBudgetError where neither the
        saved allocation nor any other fits.
        """
        self.step = state["step"]
        self.num_accepted = state["num_accepted"]
        self.profile = profile_from_plain(state["profile"]) if state["profile"] else None
        first = state.get("first_profile")  # checkpoints of earlier versions have none
        self.first_profile = profile_from_plain(first) if first else self.profile
        self.last_decision = state["last_decision"]
        if self.profiler is not None and not self.watching:
            self.profiler.release()
        if self.profiler is not None:
            self.planner.count_profile(self.profiler.nbytes)
        self.plan = self.planner.adopt(
            state["choices"], risk=state["risk_model"], profile=self.profile, gap=state["gap"]
        )
        self.optimizer.migrate(self.plan.allocation.choices)
        if self.profiler is not None and state["profiler"]:
            self.profiler.load_state_dict(state["profiler"])
