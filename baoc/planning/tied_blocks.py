"""Segments: neighbouring blocks that behave alike, given to the allocator as one, which then runs one spec."""

from collections.abc import Mapping, Sequence
from dataclasses import fields, replace

from baoc.core.blocks import merge_similar
from baoc.types import Allocation, Block, Candidate, Cost, Profile, Risk


def tied(
    pool: Mapping[str, Sequence[Candidate]], *, blocks: Sequence[Block], profile: Profile, penalty: float
) -> dict[str, tuple[Candidate, ...]]:
    """Candidates of whole segments, a segment named by its blocks joined with '+'."""
    segments = merge_similar(blocks, stats=profile.stats, penalty=penalty)
    return {"+".join(names): joined("+".join(names), [pool[name] for name in names]) for names in segments}


def untied(allocation: Allocation, pool: Mapping[str, Sequence[Candidate]]) -> Allocation:
    """The allocation of segments as one of blocks, in the order of `pool`."""
    choices = {block: spec for names, spec in allocation.choices.items() for block in names.split("+")}
    return replace(allocation, choices={block: choices[block] for block in pool})


def joined(name: str, options: Sequence[Sequence[Candidate]]) -> tuple[Candidate, ...]:
    """The specs that every block of a group may run, with costs and risks added up, cheapest first."""
    by_spec = [{c.spec: c for c in block} for block in options]
    shared = [spec for spec in by_spec[0] if all(spec in block for block in by_spec[1:])]
    merged = []
    for spec in shared:
        parts = [block[spec] for block in by_spec]
        terms = {t: sum(p.risk.terms.get(t, 0.0) for p in parts) for t in parts[0].risk.terms}
        cost = Cost(**{field.name: sum(getattr(p.cost, field.name) for p in parts) for field in fields(Cost)})
        risk = Risk(total=sum(p.risk.total for p in parts), terms=terms)
        merged.append(Candidate(block=name, spec=spec, cost=cost, risk=risk))
    return tuple(sorted(merged, key=lambda c: c.cost.charged_bytes))
