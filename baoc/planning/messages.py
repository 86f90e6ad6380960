"""Texts of plans: why each block runs its spec (`reasons`), and why no allocation meets a budget (refusals).

A refusal is an InfeasibleBudgetError. It names what the budget allows, the least feasible amount, and what would lower
that.
"""

from collections.abc import Collection, Mapping, Sequence
from dataclasses import replace
from math import ceil

from baoc.core.blocks import partition
from baoc.errors import InfeasibleBudgetError
from baoc.planning import measured
from baoc.planning.allocators import NoFeasibleAllocation, possible
from baoc.planning.allocators.recipe import recipe_bytes, recipes_within
from baoc.planning.attempts import Attempt
from baoc.planning.budgeted import BudgetedBlocks
from baoc.planning.transfer import pinned_bytes
from baoc.types import Allocation, Budget, Candidate, Limits, Reason
from baoc.units import format_bytes

# The search for the least step time starts at 10 microseconds and multiplies by 1.05, up to about a second.
SEARCH_START_S, SEARCH_FACTOR, SEARCH_STEPS = 1e-5, 1.05, 240
MAX_RECIPES = 4  # named in a refusal
HOST_ADVICE = "states on the host, by budget.host_memory or catalogue=host"

ADVICE_MEMORY = (
    "a smaller micro_batch (activations)",
    "model.checkpointing=true (activations)",
    "a smaller model.size",
)
ADVICE_STATE = ("more catalogue.specs", "fewer roles in catalogue.keep_fp32_roles")


def more_specs(specs: Collection[str]) -> str:
    """Advice for a catalogue of these specs: which ones to add."""
    example = "" if any("+split8" in name for name in specs) else ", such as '*+split8'"
    return f"more catalogue.specs{example}, or fewer roles in catalogue.keep_fp32_roles"


def refusal(
    planner: BudgetedBlocks,
    limits: Limits,
    *,
    least_bytes: int,
    refused: Sequence[tuple[NoFeasibleAllocation, Attempt]],
) -> InfeasibleBudgetError:
    """The refusal for too little memory, on the device or on the host. `least_bytes` would do on the device for a plan
    that no measurement chose; a measured recipe may need fewer."""
    budget = planner.budget
    least_bytes = min(least_bytes, measured.least_recipe_bytes(planner) or least_bytes)
    allowed = budget.memory_bytes if budget.memory_bytes is not None else limits.state_bytes
    host_needed = _host_needed(refused)
    if planner.settings.recipe is not None and allowed is not None and limits.state_bytes is not None:
        return recipe_too_large(planner, allowed_bytes=allowed, least_bytes=least_bytes, room_bytes=limits.state_bytes)
    if allowed is None or (host_needed is not None and least_bytes <= allowed):
        assert host_needed is not None
        return too_small_host(budget, needed_bytes=host_needed, least_bytes=least_bytes)
    return too_small(planner, allowed_bytes=allowed, least_bytes=least_bytes, host_needed=host_needed)


def nearest_refusal(
    planner: BudgetedBlocks, attempts: Sequence[Attempt], *, refused: Sequence[tuple[NoFeasibleAllocation, Attempt]]
) -> InfeasibleBudgetError:
    """The refusal of the attempt that lacks fewest bytes: for too little time if its bytes fit, else for memory."""
    error, attempt = min(
        refused, key=lambda r: planner.to_budget_bytes(r[0].least_state_bytes, base_peak=r[1].base_peak)
    )
    limits = attempt.limits
    least_bytes = planner.to_budget_bytes(error.least_state_bytes, base_peak=attempt.base_peak)
    bytes_fit = limits.state_bytes is None or error.least_state_bytes <= limits.state_bytes
    # States on the host may bring the bytes within the limits, given time.
    bytes_fit = bytes_fit or (planner.may_use_host and any(a.meets_bytes and a.meets_host for a in attempts))
    host_fits = limits.host_bytes is None or error.least_host_bytes <= limits.host_bytes
    if limits.step_s is None or not bytes_fit or not host_fits:
        return refusal(planner, limits, least_bytes=least_bytes, refused=refused)
    least_step_s = error.least_step_s if not planner.may_use_host else _fastest_s(refused)
    return too_slow(planner, least_step_s=least_step_s, allowed_bytes=limits.state_bytes, least_bytes=least_bytes)


def _fastest_s(refused: Sequence[tuple[NoFeasibleAllocation, Attempt]]) -> float:
    """The fewest seconds of optimizer step with which one of the attempts is feasible, by an upward search. The limits
    of device and link may bind together, so the least seconds of each alone need not be enough."""
    seconds = max(refused[0][1].limits.step_s or 0.0, SEARCH_START_S)
    for _ in range(SEARCH_STEPS):
        for _, attempt in refused:
            limits = attempt.limits
            more = seconds - (limits.step_s or 0.0)
            wider = replace(limits, step_s=seconds, link_s=(limits.link_s or 0.0) + more)
            if possible(attempt.pool, limits=wider):
                return seconds
        seconds *= SEARCH_FACTOR
    return seconds


def _host_needed(refused: Sequence[tuple[NoFeasibleAllocation, Attempt]]) -> int | None:
    """The least pinned host memory with which an attempt would fit; None if more host memory would not help."""
    needs = [
        pinned_bytes(error.least_host_bytes)
        for error, attempt in refused
        if attempt.limits.host_bytes is not None
        and attempt.meets_bytes
        and error.least_host_bytes > attempt.limits.host_bytes
    ]
    return min(needs, default=None)


def recipe_too_large(
    planner: BudgetedBlocks, *, allowed_bytes: int, least_bytes: int, room_bytes: int
) -> InfeasibleBudgetError:
    """The refusal of a recipe: its bytes, and recipes of the catalogue that fit into `room_bytes` of state."""
    recipe, budget = planner.settings.recipe, planner.budget
    assert recipe is not None
    state_bytes = recipe_bytes(planner.blocks, recipe=recipe)
    by_part = planner.blocks
    if planner.settings.blocks_by == "auto":
        patterns = planner.settings.patterns
        by_part = partition(planner.params, declared=planner.declared, patterns=patterns, by="layer_part")
    others = recipes_within(planner.blocks, by_part=by_part, state_bytes=room_bytes)
    adamw = max(planner.state_bytes_adamw, 1)
    names = ", ".join(f"{name} ({size / adamw:.1%})" for name, size in others[:MAX_RECIPES])
    fitting = f"recipes that fit: {names}" if names else "no recipe of the catalogue fits"
    memory = budget.memory_bytes is not None
    unit = "of device memory" if memory else "of optimizer state"
    fraction = "" if memory else f" (state_fraction={least_bytes / adamw:.4f})"
    advice = (fitting, "no recipe, so that an allocator chooses", *(ADVICE_MEMORY if memory else ()))
    return InfeasibleBudgetError(
        f"budget {budget.name} cannot be met: it allows {format_bytes(allowed_bytes)} {unit} ({allowed_bytes} bytes), "
        f"and recipe={recipe.title}, which keeps {format_bytes(state_bytes)} ({state_bytes} bytes, "
        f"{state_bytes / adamw:.1%} of fp32 AdamW's) of state, needs {format_bytes(least_bytes)} ({least_bytes} bytes)"
        f"{fraction}. What would do: {'; '.join(advice)}",
        budget_bytes=allowed_bytes,
        least_feasible_bytes=least_bytes,
        advice=advice,
    )


def too_small_host(budget: Budget, *, needed_bytes: int, least_bytes: int) -> InfeasibleBudgetError:
    """The refusal of states that do not fit into the host's memory."""
    allowed = budget.host_memory_bytes or 0
    advice = ("more host memory", "narrower storage, such as @streamed rows with int8", "rows that stay on the device")
    return InfeasibleBudgetError(
        f"budget.host_memory={format_bytes(allowed)} ({allowed} bytes) cannot be met: the least feasible is "
        f"{format_bytes(needed_bytes)} ({needed_bytes} bytes) of pinned host memory, staging and whole pages included. "
        f"Give budget.host_memory={needed_bytes}b or more, or what would lower it: {'; '.join(advice[1:])}",
        budget_bytes=budget.memory_bytes or 0,
        least_feasible_bytes=least_bytes,
        advice=advice,
        least_host_bytes=needed_bytes,
    )


def too_slow(
    planner: BudgetedBlocks, *, least_step_s: float, allowed_bytes: int | None, least_bytes: int
) -> InfeasibleBudgetError:
    """The refusal if no allocation that fits the memory is as fast as step_time asks."""
    budget, latency = planner.budget, planner.latency
    assert latency is not None
    whole_s = latency.base_step_s + latency.step_s + least_step_s
    ratio = whole_s / max(latency.reference_step_s, 1e-12)
    return InfeasibleBudgetError(
        f"budget {budget.name} with step_time={budget.step_time} cannot be met: the fastest "
        f"allocation steps in {whole_s * 1e3:.3g} ms, {ratio:.3f} times the "
        f"{latency.reference_step_s * 1e3:.3g} ms of fused AdamW. Give "
        f"budget.step_time={ratio * 1.05:.2f} or more, or more memory",
        budget_bytes=allowed_bytes or 0,
        least_feasible_bytes=least_bytes,
        advice=("a larger budget.step_time", "more memory, so that slower compact specs are not needed"),
        least_step_s=whole_s,
    )


def too_small(
    planner: BudgetedBlocks, *, allowed_bytes: int, least_bytes: int, host_needed: int | None = None
) -> InfeasibleBudgetError:
    """The refusal if not even the allocation of fewest bytes fits. `host_needed`: bytes of host memory with which it
    would fit."""
    budget, footprint = planner.budget, planner.footprint
    memory = budget.memory_bytes is not None
    exact = planner.settings.allocator == "exact"
    fewer = (*ADVICE_STATE, *(() if exact else ("allocator=exact",)))
    advice = (*ADVICE_MEMORY, f"{more_specs(planner.specs)} (state)") if memory else fewer
    has_host = footprint is not None and not footprint.device.startswith("cpu")
    advice = (*advice, HOST_ADVICE) if memory and has_host and budget.host_memory_bytes is None else advice
    host = ""
    if host_needed is not None:
        host = (
            f" within budget.host_memory={format_bytes(budget.host_memory_bytes or 0)}; with "
            f"{format_bytes(host_needed)} of host memory it could be met (budget.host_memory={host_needed}b)"
        )
    unit = "of device memory" if memory else "of optimizer state"
    percent = ceil(1e4 * least_bytes / max(planner.state_bytes_adamw, 1)) / 100
    fraction = "" if memory or percent > 100 else f" (budget=state_{percent:g})"
    context = footprint.context_bytes if footprint is not None and memory else 0
    context_text = f"; the CUDA context alone takes {format_bytes(context)}" if context else ""
    return InfeasibleBudgetError(
        f"budget {budget.name} cannot be met: it allows {format_bytes(allowed_bytes)} {unit} ({allowed_bytes} bytes), "
        f"and the least feasible is {format_bytes(least_bytes)} ({least_bytes} bytes){fraction} with "
        f"allocator={planner.settings.allocator}{host}{context_text}. What would lower it: {'; '.join(advice)}",
        budget_bytes=allowed_bytes,
        least_feasible_bytes=least_bytes,
        advice=advice,
        least_host_bytes=host_needed,
    )


def reasons(allocation: Allocation, candidates: Mapping[str, Sequence[Candidate]]) -> tuple[Reason, ...]:
    return tuple(_reason(block, spec, candidates[block]) for block, spec in allocation.choices.items())


def _reason(block: str, spec: str, options: Sequence[Candidate]) -> Reason:
    chosen = next(c for c in options if c.spec == spec)
    cheaper = [c for c in options if c.cost.charged_bytes < chosen.cost.charged_bytes]
    dearer = [
        c for c in options if c.cost.charged_bytes > chosen.cost.charged_bytes and c.risk.total < chosen.risk.total
    ]
    down = max(cheaper, key=lambda c: (c.cost.charged_bytes, -c.risk.total), default=None)
    up = min(dearer, key=lambda c: (c.cost.charged_bytes, c.risk.total), default=None)
    parts = []
    if down is not None:
        saved, more = chosen.cost.charged_bytes - down.cost.charged_bytes, down.risk.total - chosen.risk.total
        parts.append(f"{down.spec} would save {format_bytes(saved)} at +{more:.2g} risk ({_terms(down)})")
    else:
        parts.append("nothing cheaper applies")
    if up is not None:
        extra, less = up.cost.charged_bytes - chosen.cost.charged_bytes, up.risk.total - chosen.risk.total
        parts.append(f"{up.spec} would cost {format_bytes(extra)} for {less:.2g} risk")
    elif chosen.risk.total <= min(c.risk.total for c in options):
        parts.append("nothing has less risk")
    return Reason(
        block=block,
        spec=spec,
        cheaper=down.spec if down else None,
        dearer=up.spec if up else None,
        text="; ".join(parts),
    )


def _terms(candidate: Candidate) -> str:
    """The two largest terms of a risk, such as `drop_m .12, quantize_v .03`."""
    ranked = sorted(candidate.risk.terms.items(), key=lambda item: -item[1])[:2]
    return ", ".join(f"{name} {value:.2g}" for name, value in ranked if value > 0) or "no term"
