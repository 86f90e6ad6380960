"""Says why a block runs what it runs: the next cheaper and dearer candidate, and the terms that decided."""

from collections.abc import Mapping, Sequence

from baoc.types import Allocation, Candidate, Reason
from baoc.units import format_bytes


def reasons(allocation: Allocation, candidates: Mapping[str, Sequence[Candidate]]) -> tuple[Reason, ...]:
    """One Reason per block of the allocation, in its order."""
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
        saved = chosen.cost.charged_bytes - down.cost.charged_bytes
        parts.append(
            f"{down.spec} would save {format_bytes(saved)} at +{_delta(chosen, down):.2g} risk ({_terms(down)})"
        )
    else:
        parts.append("nothing cheaper applies")
    if up is not None:
        extra = up.cost.charged_bytes - chosen.cost.charged_bytes
        parts.append(f"{up.spec} would cost {format_bytes(extra)} for {_delta(chosen, up):.2g} risk")
    elif chosen.risk.total <= min(c.risk.total for c in options):
        parts.append("nothing has less risk")
    return Reason(
        block=block,
        spec=spec,
        cheaper=down.spec if down else None,
        dearer=up.spec if up else None,
        text="; ".join(parts),
    )


def _delta(chosen: Candidate, other: Candidate) -> float:
    return other.risk.total - chosen.risk.total


def _terms(candidate: Candidate, most: int = 2) -> str:
    """The largest terms of a risk, as `drop_m .12, quantize .03`."""
    ranked = sorted(candidate.risk.terms.items(), key=lambda item: -item[1])[:most]
    return ", ".join(f"{name} {value:.2g}" for name, value in ranked if value > 0) or "no term"
