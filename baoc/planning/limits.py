"""Turns a memory budget into limits that are sums over blocks, the only ones that allocators understand.

A peak is the largest of several moments of a step, so it is no sum over blocks. The planner therefore makes several
attempts (`planning.attempts`): each fixes the room for a step's temporaries (`levels`), how far host placement goes
(`placement.StagingLimit`), and how the bytes that 16-bit weights save are counted (`Savings`). Within one attempt the
charged bytes are sums, and the peak of the resulting plan then decides. Savings are counted boldest first: `copies`
(weights, gradients and autocast's copies, as at the largest moment), then `gradients` (weights and gradients), then
`weights` alone, which holds at every moment.
"""

from collections.abc import Collection, Mapping
from dataclasses import replace
from itertools import product
from typing import Literal

from baoc.planning.cost import saved
from baoc.types import Block, Candidate, Footprint, OptimizerSpec

Savings = Literal["none", "copies", "gradients", "weights"]
Pool = Mapping[str, tuple[Candidate, ...]]

MAX_LEVELS = 6  # of room for the temporaries of a step; each costs an allocation


def levels(
    footprint: Footprint, *, specs: Collection[str], memory: int | None, most_saved: Mapping[str, int] | None = None
) -> list[tuple[int, frozenset[str]]]:
    """(Peak without state, specs whose step stays below it), from few specs to all.

    More than one level only where some spec's temporaries would pass the peak of forward and backward; then a plan may
    either do without that spec or leave room for it. A spec whose step passes `memory` even where weights save what
    they can (`most_saved`, see `most_saved_by`) makes no level. MAX_LEVELS of the others; where there is none, the
    highest of all; where `memory` is None, every level.
    """
    peaks = {spec: footprint.peak_bytes(state_bytes=0, specs=(spec,)) for spec in specs}
    found = sorted(set(peaks.values()))
    if memory is not None:
        over = [spec for spec in specs if peaks[spec] > memory]
        lost = {s for s in over if footprint.peak_bytes(state_bytes=0, specs=(s,), saved=most_saved) > memory}
        found = sorted({peaks[spec] for spec in specs if spec not in lost}) or found[-1:]
        if len(found) > MAX_LEVELS:
            found = [found[i * (len(found) - 1) // (MAX_LEVELS - 1)] for i in range(MAX_LEVELS)]
    return [(level, frozenset(spec for spec, peak in peaks.items() if peak <= level)) for level in found]


Saved = tuple[tuple[int, ...], ...]  # bytes saved: [block][weights format]


def savings(
    blocks: Collection[Block], *, specs: Mapping[str, OptimizerSpec], count: Savings, footprint: Footprint
) -> Saved:
    """Bytes that each weights format among `specs` saves on each block, counted as `count` says."""

    def counted(less: Mapping[str, int]) -> int:
        if count == "copies" and footprint.intervals:
            return footprint.saved_at_most(less)
        return sum(less.values()) * (1 if count == "weights" else 2)

    formats = _formats(specs).values()
    return tuple(tuple(counted(saved(block, spec=spec)) for spec in formats) for block in blocks)


def charged(
    candidates: Pool, *, blocks: Collection[Block], specs: Mapping[str, OptimizerSpec], saved: Saved
) -> dict[str, tuple[Candidate, ...]]:
    """The candidates charged for their state less what their weights save (see `savings`), cheapest first."""
    found: dict[str, tuple[Candidate, ...]] = {}
    for block, less in zip(blocks, saved, strict=True):
        by_weights = dict(zip(_formats(specs), less, strict=True))
        made: list[Candidate] = []
        for candidate in candidates[block.name]:
            saves = by_weights[specs[candidate.spec].weights]
            made.append(replace(candidate, cost=replace(candidate.cost, saved_bytes=saves)) if saves else candidate)
        found[block.name] = tuple(sorted(made, key=lambda c: (c.cost.charged_bytes, c.risk.total, c.cost.step_s)))
    return found


def _formats(specs: Mapping[str, OptimizerSpec]) -> dict[str, OptimizerSpec]:
    """Weights format -> a spec that has it."""
    return {spec.weights: spec for spec in specs.values()}


def most_saved_by(blocks: Collection[Block], *, specs: Mapping[str, OptimizerSpec]) -> dict[str, int]:
    """Parameter name -> bytes that the smallest weights format among `specs` saves on it."""
    most: dict[str, int] = {}
    for block, spec in product(blocks, _formats(specs).values()):
        for name, nbytes in saved(block, spec=spec).items():
            most[name] = max(nbytes, most.get(name, 0))
    return most


def saved_by(
    choices: Mapping[str, str], *, blocks: Collection[Block], specs: Mapping[str, OptimizerSpec]
) -> dict[str, int]:
    """Parameter name -> bytes that an allocation saves on its weights."""
    return {name: nbytes for block in blocks for name, nbytes in saved(block, spec=specs[choices[block.name]]).items()}
