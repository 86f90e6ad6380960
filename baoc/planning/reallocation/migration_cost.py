"""The peak memory of a migration between two plans, in which old and new states exist side by side."""

from dataclasses import dataclass

from baoc.core.catalogue import SPECS
from baoc.planning.cost import cost, state_bytes
from baoc.planning.limits import savings_of_choices
from baoc.planning.planner import Planner
from baoc.types import Cost, Plan

# fp32 numbers per element of a tensor that converting its state may take beside old and new states: the average in
# fp32, expanded, rescaled, decoded again, and the difference. At most 4 were measured (tests/training/test_moves.py).
CONVERSION_FLOATS = 8


@dataclass(frozen=True, slots=True, kw_only=True)
class MigrationPeak:
    """Predicted peak of device bytes during a migration, with gradients and without them."""

    peak_bytes: int
    without_gradients_bytes: int


def migration_peak(planner: Planner, *, current: Plan, target: Plan) -> MigrationPeak | None:
    """Peak memory of a migration between two steps; None without a footprint.

    Blocks migrate one by one, those that shrink most first. Activations are freed by then; weights, gradients, averages
    and all states are in memory. The migrating block has its old and new states, and the temporaries of converting its
    largest tensor. Weights are counted in the current plan's format. So are gradients, but not with gradient release,
    as it is then unknown which of them exist.
    """
    footprint = planner.footprint
    if footprint is None:
        return None
    blocks = {block.name: block for block in planner.blocks}

    def cost_of(block: str, spec: str) -> Cost:
        return cost(blocks[block], spec=SPECS[spec], rule=planner.rules[SPECS[spec].rule])

    def state_bytes_of(block: str, spec: str) -> int:
        spec_cost = cost_of(block, spec)
        return spec_cost.state_bytes + (spec_cost.host_bytes if planner.device_is_host else 0)

    def total_bytes_of(block: str, spec: str, *, copies: int) -> int:
        return state_bytes_of(block, spec) + copies * cost_of(block, spec).weight_bytes

    def states_peak(copies: int) -> int:
        """Peak of states, less what 16-bit weights save; `copies` is 2 if gradients have the weights' format."""
        choices = current.allocation.choices
        saved = savings_of_choices(choices, blocks=planner.blocks, specs=SPECS)
        live_bytes = sum(state_bytes_of(block, spec) for block, spec in choices.items()) - copies * sum(saved.values())
        migrations = []
        for block, new_spec in target.allocation.choices.items():
            if (old_spec := choices[block]) == new_spec:
                continue
            new_bytes = state_bytes(blocks[block], spec=SPECS[new_spec], rule=planner.rules[SPECS[new_spec].rule])
            largest = max((param.numel for param in blocks[block].params), default=0)
            old_total = total_bytes_of(block, old_spec, copies=copies)
            growth = total_bytes_of(block, new_spec, copies=copies) - old_total
            migrations.append((growth, new_bytes + 4 * CONVERSION_FLOATS * largest))
        peak = live_bytes
        for growth, during_migration in sorted(migrations):
            peak = max(peak, live_bytes + during_migration)
            live_bytes += growth
        return peak

    staging = max(planner.staging_bytes(plan.allocation.choices) for plan in (current, target))
    total = footprint.resident_bytes + footprint.fixed_bytes + staging
    return MigrationPeak(
        peak_bytes=total + states_peak(1 if footprint.released else 2),
        without_gradients_bytes=total - footprint.gradients_bytes + states_peak(1),
    )
