"""`Planner`: parameters and a budget in, a Plan out, through blocks, candidates, costs, risks, limits and allocation.

A Planner holds what does not change during a run (blocks, catalogue, budget, footprint). `propose` is called at the
start with priors by role, and again for each new gradient profile; `mode=plan` runs it alone.
"""

from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import partial

from baoc.core.recipes import BY_RACE
from baoc.planning.allocators import ALLOCATORS, NoFeasibleAllocation
from baoc.planning.allocators.base import Allocator, allocation_of
from baoc.planning.allocators.recipe import RecipeAllocator
from baoc.planning.attempts import Attempt, all_attempts, refine, smallest_attempt
from baoc.planning.budgeted import MEASURED, BudgetedBlocks, PlannerSettings, profile_for
from baoc.planning.candidates import undominated
from baoc.planning.limits import StagingLimit
from baoc.planning.measured import basis_of, best_rate, choose_recipe, most_useful_bytes
from baoc.planning.messages import last_resort, reasons
from baoc.planning.risk import RISKS
from baoc.planning.transfer import pinned_bytes
from baoc.types import (
    Allocation,
    Basis,
    Candidate,
    Limits,
    Plan,
    Profile,
    Reason,
    StateKind,
)

FEW_BLOCKS = 64  # with more, every level is tried by prices, and only the best one proven
__all__ = ["Planner", "PlannerSettings"]


class Planner(BudgetedBlocks):
    """Turns parameters, a budget and (later) a profile into a Plan.

    Raises BadInputError for unknown names, InfeasibleBudgetError from `propose` where no allocation meets the budget.
    """

    def least_feasible_bytes(self) -> int:
        """What the allocation of fewest bytes that the allocator may choose takes in the budget's own measure."""
        if self.allocator.traits.only_spec is not None:
            pool = self.candidates(risk="prior", profile=None)
            choices = self.allocator(pool, limits=Limits()).choices
            return self.budget_bytes_of(self._chosen(choices, risk="prior", profile=None))
        attempts = all_attempts(self, risk="prior", profile=None, every=True)
        return self.budget_bytes_of(smallest_attempt(self, attempts).smallest_choice())

    def propose(self, *, risk: str | None = None, profile: Profile | None = None) -> Plan:
        """The allocation of least risk within the budget. `risk` defaults to the settings' one.

        A risk that needs a profile falls back to `prior` while there is none, and so does `measured` where nothing that
        was measured fits, or an allocator leaves no choice. Raises InfeasibleBudgetError.
        """
        name = risk or self.settings.risk
        if name == MEASURED:
            basis = (self.budget, self.footprint, self.latency)  # no profile: a later decision mostly finds it made
            plan = self._cached((MEASURED, "plan"), basis, self._measured)
            if plan is not None:
                return plan
            name = "prior"
        if RISKS[name].needs and profile is None:
            name = "prior"
        plan = self._propose(risk=name, profile=profile, stand_ins=False)
        return plan if self._keeps_momentum(plan) else self._propose(risk=name, profile=profile, stand_ins=True)

    def _keeps_momentum(self, plan: Plan) -> bool:
        """Whether roles that keep fp32 did not lose their momentum by it, where the allocator had a choice."""
        if not self._has_choice:
            return True
        kept = [block for block in self.blocks if block.role in self.settings.keep_fp32_roles]
        rules = {self.rules[self.specs[plan.allocation.choices[block.name]].rule] for block in kept}
        return all(any(state.kind is StateKind.M for state in rule.states) for rule in rules)

    def _propose(self, *, risk: str, profile: Profile | None, stand_ins: bool) -> Plan:
        name, allocator = risk, self.allocator
        given = {"risk": name, "profile": profile, "stand_ins": stand_ins}
        attempts = list(all_attempts(self, **given)) or list(all_attempts(self, **given, every=True))
        many = len(self.blocks) > FEW_BLOCKS or self.may_use_host
        quick = len(attempts) > 1 and many and allocator.name == "exact"
        found: list[tuple[Plan, Attempt]] = []
        beyond: list[tuple[Plan, Attempt]] = []
        refused: list[tuple[NoFeasibleAllocation, Attempt]] = []
        settled: set[tuple[int | None, StagingLimit]] = (
            set()
        )  # levels on which savings, counted boldly, have led to a plan that fits
        for one in attempts:
            if (one.base_peak, one.staging) in settled:
                continue
            by = ALLOCATORS["lagrangian"] if quick else allocator
            try:
                plan = self._attempt(one, allocator=by, risk=name, profile=profile)
            except NoFeasibleAllocation as error:
                refused.append((error, one))
                continue
            if self.fits(plan):
                found.append((plan, one))
                settled.add((one.base_peak, one.staging))
            else:
                beyond.append((plan, one))
        by = ALLOCATORS["lagrangian"] if allocator.name == "exact" else allocator
        attempt = partial(self._attempt, allocator=by, risk=name, profile=profile)
        if not found:
            plan = last_resort(self, attempts, refused=refused, risk=name, profile=profile)
            return plan if allocator.traits.every_candidate else refine(self, beyond, found=plan, attempt=attempt)
        plan, one = min(found, key=lambda e: (e[0].allocation.risk, e[0].allocation.link_s))
        if quick:
            proven = self._attempt(one, allocator=allocator, risk=name, profile=profile)
            plan = (
                proven if self.fits(proven) else replace(plan, allocation=replace(plan.allocation, allocator="exact"))
            )
        return plan if allocator.traits.every_candidate else refine(self, beyond, found=plan, attempt=attempt)

    def _measured(self) -> Plan | None:
        """The plan of the measured choice, among the planner's own candidates and with its own range of budgets; None
        where nothing that was measured fits, or there is no choice."""
        family = self.family
        choice = choose_recipe(self, family=family) if family is not None and self._has_choice else None
        if family is None or choice is None:
            return None
        plan = self.plan_for(choice.plan.allocation.choices, risk=MEASURED, limits=choice.plan.limits)
        useful = self._cached(
            (MEASURED, "range"), (self.footprint, self.budget), lambda: most_useful_bytes(self, family=family)
        )
        allowed = self.budget.memory_bytes if self.budget.memory_bytes is not None else plan.limits.state_bytes
        return replace(
            plan,
            reasons=choice.plan.reasons,
            most_useful_bytes=useful,
            binding=allowed is not None and useful > allowed,
            basis=basis_of(choice, family=family, plan=plan, planner=self),
        )

    def plan_for(self, choices: Mapping[str, str], *, risk: str, limits: Limits) -> Plan:
        """The plan that runs `choices`, whatever it takes."""
        chosen = self._chosen(choices, risk=risk, profile=None)
        everything = self.candidates(risk=risk, profile=None)
        return self.plan_of(
            allocation_of(chosen, allocator="recipe"), everything, limits=limits, risk=risk, profile=None
        )

    def _chosen(self, choices: Mapping[str, str], *, risk: str, profile: Profile | None) -> list[Candidate]:
        """The candidates that `choices` run. Raises KeyError where one is none."""
        everything = self.candidates(risk=risk, profile=profile)
        by_spec = {block: {c.spec: c for c in options} for block, options in everything.items()}
        return [by_spec[block][spec] for block, spec in choices.items()]

    def _attempt(self, one: Attempt, *, allocator: Allocator, risk: str, profile: Profile | None) -> Plan:
        """The plan of one try, which need not fit: savings may have been counted too boldly."""
        pool = (
            one.pool
            if allocator.traits.every_candidate
            else undominated(one.pool, with_time=self.budget.step_time is not None)
        )
        allocation = allocator(pool, limits=one.limits, seed=self.settings.seed)
        return self.plan_of(allocation, pool, limits=one.limits, risk=risk, profile=profile)

    def resume_plan(
        self,
        choices: Mapping[str, str],
        *,
        risk: str,
        profile: Profile | None,
        gap: float | None = None,
        seen_to_fit: bool = False,
    ) -> Plan:
        """The plan that runs `choices` (from a checkpoint) if they are predicted or `seen_to_fit` the budget, else a
        new proposal."""
        risk = self.risk_of_saved(risk, profile=profile)
        everything = self.candidates(risk=risk, profile=profile)
        by_spec = {block: {c.spec: c for c in options} for block, options in everything.items()}
        if set(choices) == set(by_spec) and all(choices[block] in by_spec[block] for block in by_spec):
            chosen = [by_spec[block][choices[block]] for block in by_spec]
            allocation = allocation_of(chosen, allocator=self.settings.allocator, gap=gap)
            limits = self.limits()
            plan = self.plan_of(allocation, everything, limits=limits, risk=risk, profile=profile)
            if risk == MEASURED:
                proposed = self.propose(risk=risk)
                if dict(proposed.allocation.choices) == dict(choices):
                    return proposed
            whole = self.budget.memory_bytes is not None or limits.state_bytes is None
            if seen_to_fit or self.fits(plan) if whole else allocation.state_bytes <= (limits.state_bytes or 0):
                return plan
        return self.propose(risk=risk, profile=profile)

    def least_state_plan(self) -> Plan:
        """The plan of fewest state bytes, whatever the budget: for a first step whose activations are not yet known."""
        pool = self.candidates(risk="prior", profile=None)
        chosen = [
            min(options, key=lambda c: (c.cost.host_bytes > 0, c.cost.state_bytes, c.risk.total))
            for options in pool.values()
        ]
        allocation = allocation_of(chosen, allocator="least_state")
        plan = self.plan_of(allocation, pool, limits=Limits(), risk="prior", profile=None)
        return replace(plan, basis=Basis(by="least_state", text="the least state, until a step is measured"))

    def total_risk(self, choices: Mapping[str, str], *, risk: str, profile: Profile | None) -> float:
        """Risk of an allocation that is already in use, under another risk model or a newer profile."""
        return sum(c.risk.total for c in self._chosen(choices, risk=risk, profile=profile))

    # -- results --------------------------------------------------------------------------------------------------

    def plan_of(
        self,
        allocation: Allocation,
        pool: Mapping[str, Sequence[Candidate]],
        *,
        limits: Limits,
        risk: str,
        profile: Profile | None,
    ) -> Plan:
        """A plan with its range of budgets over all levels: one that does without a spec is bound by that."""
        everything = self.candidates(risk=risk, profile=profile, stand_ins=False)
        least, useful = self._cached(
            ("range", risk),
            (profile_for(risk, profile), self._seconds_per_element, self.budget, self.footprint),
            lambda: (
                self.budget_bytes_of(
                    smallest_attempt(self, all_attempts(self, risk=risk, profile=profile, every=True)).smallest_choice()
                ),
                self.budget_bytes_of([min(options, key=_by_risk) for options in everything.values()]),
            ),
        )
        allowed = self.budget.memory_bytes if self.budget.memory_bytes is not None else limits.state_bytes
        shared = allocation.host_bytes if self.device_is_host else 0
        picks = self.allocator.picks if isinstance(self.allocator, RecipeAllocator) else None
        return Plan(
            blocks=self.blocks,
            candidates={block: tuple(options) for block, options in pool.items()},
            allocation=allocation,
            budget=self.budget,
            limits=limits,
            risk_model=risk,
            binding=allowed is not None and useful > allowed,
            peak_bytes=self.peak_bytes(allocation.choices, state_bytes=allocation.state_bytes + shared),
            staging_bytes=self.staging_bytes(allocation.choices),
            host_bytes=pinned_bytes(allocation.host_bytes),
            state_bytes_adamw=self.state_bytes_adamw,
            least_feasible_bytes=least,
            most_useful_bytes=useful,
            reasons=reasons(allocation, pool)
            if picks is None
            else tuple(
                Reason(block=block, spec=spec, cheaper=None, dearer=None, text=picks[block].text)
                for block, spec in allocation.choices.items()
            ),
            basis=self._basis(risk),
        )

    def _basis(self, risk: str) -> Basis:
        """The basis of a plan that was not chosen by measurements."""
        recipe = self.settings.recipe
        if recipe is not None:
            raced = recipe.source.startswith(BY_RACE)
            text = recipe.source.removeprefix(BY_RACE) if raced else f"{recipe.title}: the recipe that was asked for"
            measured = None if self.extrapolates or recipe.lr else self.family
            rate = 1.0 if measured is None else best_rate(self, recipe, family=measured)
            if rate != 1:
                text += f", at the learning rate as given; it measured best at {rate:.3g} times what suits AdamW"
            by, lr, betas = "race" if raced else "recipe", dict(recipe.lr), dict(recipe.betas)
            return Basis(by=by, text=text, recipe=recipe.name, lr=lr, betas=betas)
        if not self._has_choice:
            return Basis(by=self.allocator.name, text=f"{self.allocator.name}: {self.allocator.description}")
        text = f"risk={risk} ({self._risk_model(risk).description}): argued for, not shown to predict quality"
        if self.settings.risk == MEASURED:
            unknown = self.family is None or self.extrapolates
            why = (
                "nothing was measured of this kind of network"
                if unknown
                else "no measured recipe of the specs on offer fits"
            )
            if self.settings.family is None:
                why = "nothing was measured of pretrained weights or adapters"
            if self.extrapolates and self.family is not None:
                why += f", and no recipe that was better than fp32 AdamW for {self.family.name} fits"
            races = unknown and self.settings.from_conf
            tried = "; mode=race tries what measured best on networks of other kinds" if races else ""
            text = f"{why}, so by {text}{tried}"
        return Basis(by=risk, text=text)


def _by_risk(candidate: Candidate) -> tuple[float, float, int]:
    cost = candidate.cost
    return candidate.risk.total, cost.link_s, cost.charged_bytes
