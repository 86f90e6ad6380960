"""What is said where no allocation meets a budget: what it allows, what the least is, and what would lower it."""

from baoc.errors import InfeasibleBudgetError
from baoc.types import Budget, Footprint, LatencyTable
from baoc.units import format_bytes

ADVICE_MEMORY = (
    "a smaller micro_batch (activations)",
    "model.checkpointing=true (activations)",
    "a smaller model.size",
    "more catalogue.specs, such as '*+split8', or fewer roles in catalogue.keep_fp32_roles (state)",
)
ADVICE_STATE = (
    "more catalogue.specs",
    "fewer roles in catalogue.keep_fp32_roles",
    "allocator=exact, if another was set",
)


def too_slow(
    budget: Budget, *, latency: LatencyTable, least_step_s: float, allowed_bytes: int | None, least_bytes: int
) -> InfeasibleBudgetError:
    """No allocation that fits the memory is as fast as step_time asks."""
    whole_s = latency.base_step_s + least_step_s
    ratio = whole_s / max(latency.reference_step_s, 1e-12)
    return InfeasibleBudgetError(
        f"budget {budget.name} with step_time={budget.step_time} cannot be met: the fastest "
        f"allocation steps in {whole_s * 1e3:.3g} ms, {ratio:.3f} times the "
        f"{latency.reference_step_s * 1e3:.3g} ms of fused AdamW. Give "
        f"budget.step_time={ratio * 1.05:.2f} or more, or more memory",
        budget_bytes=allowed_bytes or 0,
        least_feasible_bytes=least_bytes,
        advice=("a larger budget.step_time", "more memory, so that slower compact specs are not needed"),
    )


def too_small(
    budget: Budget,
    *,
    allowed_bytes: int,
    least_bytes: int,
    state_bytes_adamw: int,
    allocator: str,
    footprint: Footprint | None,
) -> InfeasibleBudgetError:
    """Not even the allocation of fewest bytes fits; a footprint tells which part of a memory budget takes most."""
    memory = budget.memory_bytes is not None
    advice = ADVICE_MEMORY if memory else ADVICE_STATE
    unit = "of device memory" if memory else "of optimizer state"
    fraction = "" if memory else f" (state_fraction={least_bytes / max(state_bytes_adamw, 1):.4f})"
    context = footprint.context_bytes if footprint is not None and memory else 0
    taken = f"; the CUDA context alone takes {format_bytes(context)}" if context else ""
    return InfeasibleBudgetError(
        f"budget {budget.name} cannot be met: it allows {format_bytes(allowed_bytes)} {unit} ({allowed_bytes} bytes), "
        f"and the least feasible is {format_bytes(least_bytes)} ({least_bytes} bytes){fraction} with "
        f"allocator={allocator}{taken}. What would lower it: {'; '.join(advice)}",
        budget_bytes=allowed_bytes,
        least_feasible_bytes=least_bytes,
        advice=advice,
    )
