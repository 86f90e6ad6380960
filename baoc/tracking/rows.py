"""Rows of the allocation table, for the terminal and W&B: one per block, or, in a deep model, one per group of
layers."""

import re
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import TypeVar

from baoc.types import Block, Candidate, Plan, Reason
from baoc.units import format_bytes

Number = TypeVar("Number", int, float)
COLLAPSE_ABOVE = 24  # number of blocks up to which each has its own row


@dataclass(frozen=True, slots=True, kw_only=True)
class PlanRow:
    """One row of the allocation table, for `num_blocks` blocks."""

    block: str
    role: str
    spec: str
    num_params: int
    state_bytes: int | None  # None if the plan has no candidate of that spec
    risk: float | None
    why: str
    num_blocks: int = 1
    host_bytes: int = 0


def plan_rows(plan: Plan) -> list[PlanRow]:
    """One row per block, in the plan's order."""
    reasons = {reason.block: reason for reason in plan.reasons}
    rows = []
    for block in plan.blocks:
        spec = plan.allocation.choices[block.name]
        candidates = plan.candidates.get(block.name, ())
        chosen = next((candidate for candidate in candidates if candidate.spec == spec), None)
        rows.append(
            PlanRow(
                block=block.name,
                role=block.role.value,
                spec=spec,
                num_params=block.numel,
                state_bytes=chosen.cost.state_bytes if chosen else None,
                risk=chosen.risk.total if chosen else None,
                host_bytes=chosen.cost.host_bytes if chosen else 0,
                why=_explain_choice(chosen, candidates=candidates, reason=reasons.get(block.name)),
            )
        )
    return rows


def collapsed_rows(plan: Plan) -> list[PlanRow]:
    """`plan_rows`; if there are more than COLLAPSE_ABOVE blocks, those of one spec whose names differ in the layer's
    number only share a row. Its bytes, parameters and risk are sums; its reason is the first block's."""
    rows = plan_rows(plan)
    if len(rows) <= COLLAPSE_ABOVE:
        return rows
    groups: dict[tuple[str, str], list[tuple[Block, PlanRow]]] = {}
    for block, row in zip(plan.blocks, rows, strict=True):
        groups.setdefault((_pattern(block), row.spec), []).append((block, row))
    return [_merge_rows(pattern, members) for (pattern, _), members in groups.items()]


def role_rows(plan: Plan) -> list[PlanRow]:
    """One row per role and spec, the one of most parameters first."""
    groups: dict[tuple[str, str], list[PlanRow]] = {}
    for row in plan_rows(plan):
        groups.setdefault((row.role, row.spec), []).append(row)
    merged = [_sum_rows(rows, block=role, why="") for (role, _), rows in groups.items()]
    return sorted(merged, key=lambda row: -row.num_params)


def _total(values: Sequence[Number | None]) -> Number | None:
    """The sum; None if a summand is None."""
    known = [value for value in values if value is not None]
    return sum(known[1:], start=known[0]) if known and len(known) == len(values) else None


def _explain_choice(chosen: Candidate | None, *, candidates: Sequence[Candidate], reason: Reason | None) -> str:
    """The next cheaper and dearer spec, the bytes and risk that each would change, and the cheaper one's largest risk
    term."""
    if reason is None:
        return ""
    by_spec = {candidate.spec: candidate for candidate in candidates}
    cheaper, dearer = by_spec.get(reason.cheaper or ""), by_spec.get(reason.dearer or "")
    if chosen is None or (cheaper is None and dearer is None):
        return reason.text
    parts = []
    if cheaper is not None:
        saved = format_bytes(chosen.cost.charged_bytes - cheaper.cost.charged_bytes)
        term = max(cheaper.risk.terms, key=lambda name: cheaper.risk.terms[name], default="")
        added = cheaper.risk.total - chosen.risk.total
        parts.append(f"{cheaper.spec}: -{saved}, risk {added:+.2g}{f' ({term})' if term else ''}")
    if dearer is not None:
        extra = format_bytes(dearer.cost.charged_bytes - chosen.cost.charged_bytes)
        parts.append(f"{dearer.spec}: +{extra}, risk {dearer.risk.total - chosen.risk.total:+.2g}")
    return "; ".join(parts)


def _pattern(block: Block) -> str:
    """The block's name with its layer's number replaced by *."""
    if block.depth is None:
        return block.name
    return re.sub(rf"(?<!\d){block.depth}(?!\d)", "*", block.name, count=1)


def _merge_rows(pattern: str, members: Sequence[tuple[Block, PlanRow]]) -> PlanRow:
    rows = [row for _, row in members]
    if len(rows) == 1:
        return rows[0]
    depths = sorted({block.depth for block, _ in members if block.depth is not None})
    why = f"{rows[0].why} (first of {len(rows)})" if rows[0].why else ""
    return _sum_rows(rows, block=pattern.replace("*", f"{{{_format_ranges(depths)}}}", 1), why=why)


def _sum_rows(rows: Sequence[PlanRow], *, block: str, why: str) -> PlanRow:
    return replace(
        rows[0],
        block=block,
        num_params=sum(row.num_params for row in rows),
        state_bytes=_total([row.state_bytes for row in rows]),
        risk=_total([row.risk for row in rows]),
        why=why,
        num_blocks=len(rows),
        host_bytes=sum(row.host_bytes for row in rows),
    )


def _format_ranges(numbers: Sequence[int]) -> str:
    """[0, 1, 2, 5] -> "0-2,5"."""
    parts: list[list[int]] = []
    for number in numbers:
        if parts and number == parts[-1][-1] + 1:
            parts[-1].append(number)
        else:
            parts.append([number])
    return ",".join(str(part[0]) if len(part) == 1 else f"{part[0]}-{part[-1]}" for part in parts)
