"""Progressive relaxation: late in training, blocks whose gradients have calmed down give up state, step by step.

A block is calm where its gradient RMS has fallen to a share of its value at the first decision. It then offers its next
cheaper candidate, unless the newest profile finds that one risky. The bytes saved are taken off the budget, so that
later decisions do not spend them again.
"""

from collections.abc import Mapping, Sequence
from dataclasses import replace

from baoc.types import Budget, Candidate, Plan, Profile


def calm_blocks(reference: Profile, now: Profile, *, share: float) -> dict[str, float]:
    """Block -> its gradient RMS in `now` over that in `reference`, of the blocks where this is `share` or less."""
    found = {}
    for block, before in reference.stats.items():
        after = now.stats.get(block)
        if after is not None and before.grad_rms > 0 and after.grad_rms / before.grad_rms <= share:
            found[block] = after.grad_rms / before.grad_rms
    return found


def offers(
    plan: Plan, pool: Mapping[str, Sequence[Candidate]], *, calm: Mapping[str, float], max_risk: float
) -> dict[str, Candidate]:
    """Calm block -> its next cheaper candidate that adds at most `max_risk` of the range of risks in its `pool`."""
    found = {}
    for block in calm:
        options = pool[block]
        held = next((c for c in options if c.spec == plan.allocation.choices[block]), None)
        if held is None:
            continue
        worst = max(c.risk.total for c in options) - min(c.risk.total for c in options)
        cheaper = [
            c
            for c in options
            if c.cost.charged_bytes < held.cost.charged_bytes and c.risk.total - held.risk.total <= max_risk * worst
        ]
        if cheaper:
            found[block] = max(cheaper, key=lambda c: (c.cost.charged_bytes, -c.risk.total))
    return found


def lowered(budget: Budget, *, plan: Plan, saved_bytes: int) -> Budget:
    """The budget less what is given up: what the plan holds minus `saved_bytes`, in the budget's own measure."""
    if budget.memory_bytes is not None:
        left = min(budget.memory_bytes, plan.peak_bytes) - saved_bytes
        return replace(budget, name=f"{left}b", memory_bytes=left)
    # half a byte more, so that rounding down gives these bytes again
    left = (plan.allocation.state_bytes - saved_bytes + 0.5) / plan.state_bytes_adamw
    return replace(budget, name=f"state_{100 * left:.4g}", state_fraction=left)
