"""The memory of a move between two plans: old and new states side by side."""

from dataclasses import dataclass

from baoc.core.catalogue import SPECS
from baoc.planning.cost import cost, state_bytes
from baoc.planning.limits import savings_of_choices
from baoc.planning.planner import Planner
from baoc.types import Plan

# Floats per element that converting one tensor may hold beside its states: an average in fp32, expanded, rescaled,
# decoded again, and the difference. 4 were the most that was measured (tests/training/test_moves.py).
CONVERSION_FLOATS = 8


def changed_specs(now: Plan, then: Plan) -> dict[str, tuple[str, str]]:
    """Block -> (spec now, spec then), of those that differ."""
    held = now.allocation.choices
    return {block: (held[block], spec) for block, spec in then.allocation.choices.items() if held[block] != spec}


@dataclass(frozen=True, slots=True, kw_only=True)
class MigrationPeak:
    """Predicted device bytes at the worst moment of a move, with gradients and without them."""

    peak_bytes: int
    without_gradients_bytes: int


def migration_peak(planner: Planner, *, now: Plan, then: Plan) -> MigrationPeak | None:
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
        held = cost_of.state_bytes + (cost_of.host_bytes if planner.device_is_host else 0)
        return held, held + copies * cost_of.weight_bytes

    def peak(copies: int) -> int:
        """Peak of states, less what 16-bit weights save; `copies` is 2 where gradients have the weights' format."""
        choices = now.allocation.choices
        saved = savings_of_choices(choices, blocks=planner.blocks, specs=SPECS)
        held = sum(bytes_of(block, spec, copies=copies)[0] for block, spec in choices.items())
        held -= copies * sum(saved.values())
        steps = []
        for block, (source, target) in changed_specs(now, then).items():
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
    return MigrationPeak(
        peak_bytes=total + peak(1 if footprint.released else 2),
        without_gradients_bytes=total - footprint.gradients_bytes + peak(1),
    )
