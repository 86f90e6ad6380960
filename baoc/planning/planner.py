"""`Planner`: turns parameters and a budget into a Plan, by way of candidates, limits, attempts and an allocator.

A Planner holds the blocks, the catalogue, the budget and the footprint of a run. `propose` is called at the start, and
again for each new gradient profile or budget; `mode=plan` calls it alone.
"""

from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from functools import partial

from baoc.core.recipes import BY_RACE, Recipe
from baoc.errors import BadInputError, InfeasibleBudgetError
from baoc.planning.allocators import ALLOCATORS, NoFeasibleAllocation
from baoc.planning.allocators.base import Allocator, allocation_of
from baoc.planning.allocators.recipe import RecipeAllocator
from baoc.planning.attempts import Attempt, all_attempts, refine, smallest_attempt
from baoc.planning.budgeted import MEASURED, BudgetedBlocks, PlannerSettings, profile_for
from baoc.planning.candidates import undominated
from baoc.planning.limits import StagingLimit
from baoc.planning.measured import basis_of, best_rate, choose_recipe, least_recipe_bytes, most_useful_bytes, told_rate
from baoc.planning.messages import nearest_refusal, reasons, refusal
from baoc.planning.risk import RISKS
from baoc.planning.transfer import pinned_bytes
from baoc.types import Allocation, Basis, Candidate, Limits, Plan, Profile, Reason, StateKind

FEW_BLOCKS = 64  # with more, attempts are solved by lagrangian, and only the best one by exact
AS_SAVED = "as the checkpoint runs it"  # basis of a plan that is kept where this version would choose another
LEAST_STATE = "least_state"
__all__ = ["AS_SAVED", "LEAST_STATE", "Planner", "PlannerSettings"]


class Planner(BudgetedBlocks):
    """Turns parameters, a budget and (later) a profile into a Plan. Raises BadInputError for unknown names."""

    def propose(self, *, risk: str | None = None, profile: Profile | None = None) -> Plan:
        """The plan of least risk within the budget. `risk` defaults to that of the settings.

        With risk=measured, each measured recipe is planned by a nested Planner with allocator=recipe, whose own
        `propose` skips the measurements. `prior` takes the place of a risk whose profile is absent, and of `measured`
        if no measured recipe fits or the allocator has no choice. Raises InfeasibleBudgetError if no plan fits.
        """
        name = asked = risk or self.settings.risk
        if asked == MEASURED:
            # Not by the profile, which this risk ignores: later decisions mostly find the plan in the cache.
            plan = self._cached((MEASURED, "plan"), (self.budget, self.footprint, self.latency), self._measured)
            if plan is not None:
                return plan
            name = "prior"
        if RISKS[name].needs and profile is None:
            name = "prior"
        plan = self._propose(risk=name, profile=profile, stand_ins=False)
        if not self._keeps_momentum(plan):
            plan = self._propose(risk=name, profile=profile, stand_ins=True)
        if asked == self.settings.risk == MEASURED and self.has_choice and plan.basis is not None:
            plan = replace(plan, basis=replace(plan.basis, text=self._why_unmeasured(plan.basis.text)))
        return plan

    def least_feasible_bytes(self) -> int:
        """Bytes, in the budget's measure, of the smallest allocation that the allocator may choose."""
        if self.allocator.traits.only_spec is not None:
            pool = self.candidates(risk="prior", profile=None)
            choices = self.allocator(pool, limits=Limits()).choices
            return self.budget_bytes_of(self._chosen(choices, risk="prior", profile=None))
        return self.budget_bytes_of(self._smallest_attempt(risk="prior", profile=None).smallest_choice())

    def least_state_plan(self) -> Plan:
        """The plan of fewest state bytes, whatever the budget: for a first step whose activations are not yet known."""
        pool = self.candidates(risk="prior", profile=None)
        chosen = [
            min(options, key=lambda c: (c.cost.host_bytes > 0, c.cost.state_bytes, c.risk.total))
            for options in pool.values()
        ]
        allocation = allocation_of(chosen, allocator=LEAST_STATE)
        plan = self._plan(allocation, pool, limits=Limits(), risk="prior", profile=None)
        return replace(plan, basis=Basis(by=LEAST_STATE, text="the least state, until a step is measured"))

    def resume_plan(
        self,
        choices: Mapping[str, str],
        *,
        risk: str,
        profile: Profile | None,
        gap: float | None = None,
        seen_to_fit: bool = False,
    ) -> Plan:
        """The plan that runs the `choices` of a checkpoint if it fits the budget, else a new proposal. `seen_to_fit`: a
        run with these choices held a memory budget, so its predicted peak does not matter."""
        risk = self.risk_of_saved(risk, profile=profile)
        pool = self.candidates(risk=risk, profile=profile)
        if set(choices) != set(pool) or any(choices[block] not in {c.spec for c in pool[block]} for block in pool):
            return self.propose(risk=risk, profile=profile)
        in_order = {block: choices[block] for block in pool}
        chosen = self._chosen(in_order, risk=risk, profile=profile)
        allocation = allocation_of(chosen, allocator=self.settings.allocator, gap=gap)
        limits = self.limits()
        plan = self._plan(allocation, pool, limits=limits, risk=risk, profile=profile)
        if risk == MEASURED:
            try:
                proposed = self.propose(risk=risk)
            except InfeasibleBudgetError:
                if not seen_to_fit:
                    raise
                return replace(plan, basis=Basis(by=MEASURED, text=AS_SAVED))
            if dict(proposed.allocation.choices) == dict(choices):
                return proposed
            plan = replace(
                plan,
                binding=proposed.binding,
                least_feasible_bytes=proposed.least_feasible_bytes,
                most_useful_bytes=proposed.most_useful_bytes,
                basis=Basis(by=MEASURED, text=AS_SAVED),
            )
        if self.budget.memory_bytes is not None or limits.state_bytes is None:
            fits = seen_to_fit or self.fits(plan)
        else:
            fits = allocation.state_bytes <= limits.state_bytes
        return plan if fits else self.propose(risk=risk, profile=profile)

    def total_risk(self, choices: Mapping[str, str], *, risk: str, profile: Profile | None) -> float:
        return sum(c.risk.total for c in self._chosen(choices, risk=risk, profile=profile))

    # -- attempts -------------------------------------------------------------------------------------------------

    def _propose(self, *, risk: str, profile: Profile | None, stand_ins: bool) -> Plan:
        """Plans every attempt and refines the least risky plan that fits. Raises InfeasibleBudgetError."""
        attempts = list(all_attempts(self, risk=risk, profile=profile, stand_ins=stand_ins))
        attempts = attempts or list(all_attempts(self, risk=risk, profile=profile, stand_ins=stand_ins, every=True))
        exact = self.allocator.name == "exact"
        approximate = ALLOCATORS["lagrangian"] if exact else self.allocator
        many_blocks = len(self.blocks) > FEW_BLOCKS or self.may_use_host
        prove_last = exact and many_blocks and len(attempts) > 1
        fitting: list[tuple[Plan, Attempt]] = []
        over_budget: list[tuple[Plan, Attempt]] = []
        refused: list[tuple[NoFeasibleAllocation, Attempt]] = []
        fitted_levels: set[tuple[int | None, StagingLimit]] = set()
        for attempt in attempts:
            level = (attempt.base_peak, attempt.staging)
            if level in fitted_levels:
                continue  # a bolder count of savings has already given a plan that fits here
            allocator = approximate if prove_last else self.allocator
            try:
                plan = self._plan_attempt(attempt, allocator=allocator, risk=risk, profile=profile)
            except NoFeasibleAllocation as error:
                refused.append((error, attempt))
                continue
            if self.fits(plan):
                fitting.append((plan, attempt))
                fitted_levels.add(level)
            else:
                over_budget.append((plan, attempt))
        if not fitting:
            best = self._smallest_plan(attempts, refused=refused, risk=risk, profile=profile)
        else:
            best, attempt = min(fitting, key=lambda e: (e[0].allocation.risk, e[0].allocation.link_s))
            if prove_last:
                proven = self._plan_attempt(attempt, allocator=self.allocator, risk=risk, profile=profile)
                # The approximate plan is reported under the allocator that was asked for, with its own gap.
                relabelled = replace(best.allocation, allocator=self.allocator.name)
                best = proven if self.fits(proven) else replace(best, allocation=relabelled)
        if not self.has_choice:
            return best
        plan_at = partial(self._plan_attempt, allocator=approximate, risk=risk, profile=profile)
        return refine(self, over_budget, fitting=best, plan_at=plan_at)

    def _plan_attempt(self, attempt: Attempt, *, allocator: Allocator, risk: str, profile: Profile | None) -> Plan:
        """The plan of one attempt. Its peak may exceed the budget, as savings may have been counted too boldly. Raises
        NoFeasibleAllocation."""
        pool = attempt.pool
        if not allocator.traits.every_candidate:
            pool = undominated(pool, with_time=self.budget.step_time is not None)
        allocation = allocator(pool, limits=attempt.limits, seed=self.settings.seed)
        return self._plan(allocation, pool, limits=attempt.limits, risk=risk, profile=profile)

    def _smallest_plan(
        self,
        attempts: Sequence[Attempt],
        *,
        refused: Sequence[tuple[NoFeasibleAllocation, Attempt]],
        risk: str,
        profile: Profile | None,
    ) -> Plan:
        """The smallest allocation, if it fits though no attempt does: charged bytes are upper bounds. Raises
        InfeasibleBudgetError otherwise."""
        smallest = self._smallest_attempt(risk=risk, profile=profile)
        chosen = smallest.smallest_choice()
        least_bytes = self.budget_bytes_of(chosen)
        bytes_decide = self.has_choice and self.budget.step_time is None
        bytes_decide = bytes_decide and (self.budget.memory_bytes is not None or self.may_use_host)
        if bytes_decide:
            allocation = allocation_of(chosen, allocator=self.settings.allocator)
            plan = self._plan(allocation, smallest.pool, limits=smallest.limits, risk=risk, profile=profile)
            if self.fits(plan):
                return plan
        if bytes_decide or not refused:
            raise refusal(self, attempts[-1].limits, least_bytes=least_bytes, refused=refused)
        raise nearest_refusal(self, attempts, refused=refused)

    def _smallest_attempt(self, *, risk: str, profile: Profile | None) -> Attempt:
        """The attempt of fewest bytes over all levels, of the budget or above it."""
        return smallest_attempt(self, all_attempts(self, risk=risk, profile=profile, every=True))

    def _keeps_momentum(self, plan: Plan) -> bool:
        """Whether roles that keep fp32 run rules with a momentum; True for an allocator without a choice."""
        if not self.has_choice:
            return True
        blocks = [block for block in self.blocks if block.role in self.settings.keep_fp32_roles]
        rules = {self.rules[self.specs[plan.allocation.choices[block.name]].rule] for block in blocks}
        return all(any(state.kind is StateKind.M for state in rule.states) for rule in rules)

    def _chosen(self, choices: Mapping[str, str], *, risk: str, profile: Profile | None) -> list[Candidate]:
        """The candidates that `choices` run. Raises KeyError for a spec that is no candidate of its block."""
        candidates = self.candidates_by_spec(risk=risk, profile=profile)
        return [candidates[block][spec] for block, spec in choices.items()]

    # -- results --------------------------------------------------------------------------------------------------

    def _measured(self) -> Plan | None:
        """The plan of the measured choice, with this planner's candidates and range of budgets. None if no measured
        recipe fits, or the allocator has no choice."""
        family = self.family
        choice = choose_recipe(self, family=family) if family is not None and self.has_choice else None
        if family is None or choice is None:
            return None
        chosen = self._chosen(choice.plan.allocation.choices, risk=MEASURED, profile=None)
        least_bytes = self._least_bytes(risk=MEASURED, profile=None)
        useful_bytes = most_useful_bytes(self, family=family)
        plan = replace(
            choice.plan,
            candidates=self.candidates(risk=MEASURED, profile=None),
            allocation=allocation_of(chosen, allocator="recipe"),
            risk_model=MEASURED,
            least_feasible_bytes=min(least_bytes, self.budget_bytes_of(chosen)),
            most_useful_bytes=useful_bytes,
            binding=self._binds(choice.plan.limits, useful_bytes=useful_bytes),
        )
        return replace(plan, basis=basis_of(choice, family=family, plan=plan, planner=self))

    def _binds(self, limits: Limits, *, useful_bytes: int) -> bool:
        """Whether the budget allows fewer bytes than the plan of least risk takes."""
        allowed = self.budget.memory_bytes if self.budget.memory_bytes is not None else limits.state_bytes
        return allowed is not None and useful_bytes > allowed

    def _plan(
        self,
        allocation: Allocation,
        pool: Mapping[str, Sequence[Candidate]],
        *,
        limits: Limits,
        risk: str,
        profile: Profile | None,
    ) -> Plan:
        """The Plan of an allocation among the candidates of `pool`. Its range of budgets is over all levels, so a plan
        that does without a spec of large temporaries is bound."""
        all_candidates = self.candidates(risk=risk, profile=profile, stand_ins=False)
        least, useful = self._cached(
            ("range", risk),
            (profile_for(risk, profile), self._seconds_per_element, self.budget, self.footprint),
            lambda: (
                self._least_bytes(risk=risk, profile=profile),
                self.budget_bytes_of(
                    [
                        min(options, key=lambda c: (c.risk.total, c.cost.link_s, c.cost.charged_bytes))
                        for options in all_candidates.values()
                    ]
                ),
            ),
        )
        host_bytes_on_device = allocation.host_bytes if self.device_is_host else 0
        state_bytes = allocation.state_bytes + host_bytes_on_device
        if isinstance(self.allocator, RecipeAllocator):
            picks = self.allocator.picks
            why = tuple(
                Reason(block=block, spec=spec, cheaper=None, dearer=None, text=picks[block].text)
                for block, spec in allocation.choices.items()
            )
        else:
            why = reasons(allocation, pool)
        return Plan(
            blocks=self.blocks,
            candidates={block: tuple(options) for block, options in pool.items()},
            allocation=allocation,
            budget=self.budget,
            limits=limits,
            risk_model=risk,
            binding=self._binds(limits, useful_bytes=useful),
            peak_bytes=self.peak_bytes(allocation.choices, state_bytes=state_bytes),
            staging_bytes=self.staging_bytes(allocation.choices),
            host_bytes=pinned_bytes(allocation.host_bytes),
            state_bytes_adamw=self.state_bytes_adamw,
            least_feasible_bytes=least,
            most_useful_bytes=useful,
            reasons=why,
            basis=self._basis(risk),
        )

    def _least_bytes(self, *, risk: str, profile: Profile | None) -> int:
        """Bytes, in the budget's measure, of the smallest plan that `propose` may return.

        With risk=measured that is a recipe, or a plan by prior risk, since specs are not mixed freely by measurements.
        If there is neither, the smallest mixture counts. A mixture beside recipes may take slightly less than is named.
        """

        def smallest(risk: str) -> int:
            return self.budget_bytes_of(self._smallest_attempt(risk=risk, profile=profile).smallest_choice())

        recipe = least_recipe_bytes(self)
        sizes = [] if recipe is None else [recipe]
        if risk != MEASURED:
            return min([smallest(risk), *sizes])
        with suppress(BadInputError):  # a block may have no candidate by prior risk
            sizes.append(smallest("prior"))
        return min(sizes) if sizes else smallest(MEASURED)

    def _basis(self, risk: str) -> Basis:
        """The basis of a plan that was not chosen by measurements."""
        if self.settings.recipe is not None:
            return self._basis_of_recipe(self.settings.recipe)
        if not self.has_choice:
            return Basis(by=self.allocator.name, text=f"{self.allocator.name}: {self.allocator.description}")
        text = f"risk={risk} ({self._risk_model(risk).description}): argued for, not shown to predict quality"
        return Basis(by=risk, text=text)

    def _why_unmeasured(self, text: str) -> str:
        """The `text` of a plan's basis, after the reason why it was not chosen by measurements."""
        why, no_measurements = "nothing was measured of this kind of network", self.family is None or self.extrapolates
        if self.settings.family is None:
            why = "nothing was measured of pretrained weights or adapters"
        elif not no_measurements:
            why = "no measured recipe of the specs on offer fits"
        if self.extrapolates and self.family is not None:
            why += f", and no recipe that was better than fp32 AdamW for {self.family.name} fits"
        races = no_measurements and self.settings.from_conf
        advice = "; mode=race tries what measured best on networks of other kinds" if races else ""
        return f"{why}, so by {text}{advice}"

    def _basis_of_recipe(self, recipe: Recipe) -> Basis:
        raced = recipe.source.startswith(BY_RACE)
        text = recipe.source.removeprefix(BY_RACE) if raced else f"{recipe.title}: the recipe that was asked for"
        family = None if self.extrapolates else self.family
        rate = None if family is None else best_rate(self, recipe, family=family)
        if rate is not None and told_rate(rate) != 1:
            text += f", at the learning rate as given; it measured best at {told_rate(rate):g} times what suits AdamW"
        if untold := recipe.untold_parts(self.blocks):
            text += f"; blocks here are not all divided by {', '.join(untold)}: the others go by a coarser key"
        return Basis(
            by="race" if raced else "recipe",
            text=text,
            recipe=recipe.name,
            lr=dict(recipe.lr),
            betas=dict(recipe.betas),
        )
