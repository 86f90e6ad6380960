"""The cost of a move: the risk while new states warm up, and the memory of old and new states side by side."""

from collections.abc import Mapping
from dataclasses import dataclass

from baoc.core.catalogue import SPECS
from baoc.planning.cost import cost, state_bytes
from baoc.planning.limits import saved_by
from baoc.planning.planner import Planner
from baoc.types import Plan, Profile, RuleInfo, StateKind, StateLayout

# Steps until an average that starts anew is worth having: 1 / (1 - beta1), and the age at which migration takes a v
# that was seeded (optim.migrate.SEED_AGE).
RECOVERY_STEPS = {StateKind.M: 10, StateKind.V: 100}
WIDENED = 0.5  # share of a state that was kept per row, column or fold and is now wanted per element
# Floats per element that converting one tensor may hold beside its states: an average in fp32, expanded, rescaled,
# decoded again, and the difference. 4 were the most that was measured (tests/training/test_moves.py).
CONVERSION_FLOATS = 8


def lost_steps(source: RuleInfo, target: RuleInfo) -> float:
    """Steps of full risk that a block pays for moving from `source` to `target`: those in which lost states warm up."""
    lost = 0.0
    for kind, steps in RECOVERY_STEPS.items():
        wanted = [decl for decl in target.states if decl.kind is kind]
        held = [decl for decl in source.states if decl.kind is kind]
        if wanted and not held:
            lost += steps
        elif any(decl.layout is StateLayout.FULL for decl in wanted) and not any(
            decl.layout is StateLayout.FULL for decl in held
        ):
            lost += WIDENED * steps
    return lost


def moved_specs(now: Plan, then: Plan) -> dict[str, tuple[str, str]]:
    """Block -> (spec now, spec then), of those that differ."""
    held = now.allocation.choices
    return {block: (held[block], spec) for block, spec in then.allocation.choices.items() if held[block] != spec}


def migration_risk(
    planner: Planner, *, now: Plan, then: Plan, profile: Profile, horizon: int, left: Mapping[str, str]
) -> float:
    """Predicted risk of moving from plan to plan, in the unit of an allocation's risk.

    While its new states warm up, a block counts as risky as its riskiest candidate. That risk is spread over the
    `horizon`, the steps over which the gain of the move is counted. A block that returns to the spec it `left` at the
    last move pays for both moves.
    """
    pool = planner.candidates(risk=then.risk_model, profile=profile)
    total = 0.0
    for block, (source, target) in moved_specs(now, then).items():
        risks = {candidate.spec: candidate.risk.total for candidate in pool[block]}
        steps = lost_steps(planner.rules[SPECS[source].rule], planner.rules[SPECS[target].rule])
        share = min(steps / horizon, 1.0) * (2 if left.get(block) == target else 1)
        total += share * (max(risks.values()) - risks[target])
    return total


@dataclass(frozen=True, slots=True, kw_only=True)
class MovePeak:
    """Predicted device bytes at the worst moment of a move, with gradients and without them."""

    peak_bytes: int
    without_gradients_bytes: int


def move_peak(planner: Planner, *, now: Plan, then: Plan) -> MovePeak | None:
    """Peak memory of moving from plan to plan between two steps; None without a footprint.

    Blocks move one by one, those that shrink most first. Activations are freed by then. Weights, gradients, averages
    and all states are in memory; the moving block holds its old and new states, and the temporaries of converting its
    largest tensor. Weights count in the format of the plan in force. So do gradients, unless backward releases them:
    which of them exist is unknown then.
    """
    footprint = planner.footprint
    if footprint is None:
        return None
    by_name = {block.name: block for block in planner.blocks}

    def bytes_of(block: str, spec: str, *, copies: int) -> tuple[int, int]:
        cost_of = cost(by_name[block], spec=SPECS[spec], rule=planner.rules[SPECS[spec].rule])
        held = cost_of.state_bytes + (cost_of.host_bytes if planner.host_counts else 0)
        return held, held + copies * cost_of.weight_bytes

    def peak(copies: int) -> int:
        """Peak of states, less what 16-bit weights save; `copies` is 2 where gradients have the weights' format."""
        choices = now.allocation.choices
        saved = saved_by(choices, blocks=planner.blocks, specs=SPECS)
        held = sum(bytes_of(block, spec, copies=copies)[0] for block, spec in choices.items())
        held -= copies * sum(saved.values())
        steps = []
        for block, (source, target) in moved_specs(now, then).items():
            _, new_total = bytes_of(block, target, copies=copies)
            new_bytes = state_bytes(by_name[block], spec=SPECS[target], rule=planner.rules[SPECS[target].rule])
            largest = max((param.numel for param in by_name[block].params), default=0)
            growth = new_total - bytes_of(block, source, copies=copies)[1]
            steps.append((growth, new_bytes + 4 * CONVERSION_FLOATS * largest))
        most = held
        for growth, beside in sorted(steps):
            most = max(most, held + beside)
            held += growth
        return most

    fixed = footprint.fixed_bytes
    staging = max(planner.staging_bytes(plan.allocation.choices) for plan in (now, then))
    total = footprint.resident_bytes + fixed + staging
    return MovePeak(
        peak_bytes=total + peak(1 if footprint.released else 2),
        without_gradients_bytes=total - footprint.gradients_bytes + peak(1),
    )
