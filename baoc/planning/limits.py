"""Turns a memory budget into limits of sums over blocks, which allocators need.

A peak is the largest of several moments of a step, so it is not a sum over blocks. The planner therefore makes several
attempts (`planning.attempts`). Within one, bytes charged to blocks are summed, and the peak of the resulting plan then
decides. Each attempt fixes three things:

1. `temporaries_levels`: the room for a step's temporaries, which are those of the spec that needs most.
2. `StagingLimit`: how far host placement goes. Streamed states pass through device buffers as large as the largest
   piece (`transfer`).
3. `SavingsMode`: how savings of 16-bit weights are counted. From bold to safe: `copies` counts weights, gradients and
   autocast copies, as at the largest moment; `gradients` weights and gradients; `weights` what every moment saves.
"""

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import product
from typing import Literal

from baoc.core.catalogue import SPECS, with_placement
from baoc.planning.cost import slab_bytes, weight_savings
from baoc.planning.transfer import PIECE_BYTES, buffer_bytes
from baoc.types import Block, Candidate, Footprint, OptimizerSpec, Placement, RuleInfo

SavingsMode = Literal["none", "copies", "gradients", "weights"]
Pool = Mapping[str, tuple[Candidate, ...]]

MAX_LEVELS = 6  # of room for a step's temporaries; each costs an allocation
MAX_SLAB_SIZES = 3  # that limit host placement; each costs an allocation


def temporaries_levels(
    footprint: Footprint, *, specs: Collection[str], memory: int | None, most_saved: Mapping[str, int] | None = None
) -> list[tuple[int, frozenset[str]]]:
    """Levels as (peak without state, specs whose step stays below it), from few specs to all.

    There is more than one if the temporaries of a spec pass the peak of forward and backward: a plan may then do
    without this spec or leave room for it. A spec whose step passes `memory`, even with the largest savings of weights
    (`most_saved`), makes no level. At most MAX_LEVELS levels, at least the highest; with `memory` None all of them.
    """

    def peak(spec: str, saved: Mapping[str, int] | None = None) -> int:
        return footprint.peak_bytes(state_bytes=0, specs=(spec,), saved=saved)

    peaks = {spec: peak(spec) for spec in specs}
    levels = sorted(set(peaks.values()))
    if memory is not None:
        within = {level for spec, level in peaks.items() if level <= memory or peak(spec, most_saved) <= memory}
        levels = sorted(within) or levels[-1:]
        levels = _evenly_spaced(levels, most=MAX_LEVELS)
    return [(level, frozenset(spec for spec, peak in peaks.items() if peak <= level)) for level in levels]


def _evenly_spaced(values: Sequence[int], *, most: int) -> list[int]:
    """At most `most` of the ascending values, at even distances by index, the first and the last included."""
    if len(values) <= most:
        return list(values)
    return [values[i * (len(values) - 1) // (most - 1)] for i in range(most)]


SavedBytes = tuple[tuple[int, ...], ...]  # [block][weights format]


def savings_by_format(
    blocks: Collection[Block], *, specs: Mapping[str, OptimizerSpec], count: SavingsMode, footprint: Footprint
) -> SavedBytes:
    """Bytes that each weights format among `specs` saves on each block, in the savings mode `count`."""

    def counted(savings: Mapping[str, int]) -> int:
        if count == "copies" and footprint.intervals:
            return footprint.savings_at_peak(savings)
        return sum(savings.values()) * (1 if count == "weights" else 2)

    formats = _formats(specs).values()
    return tuple(tuple(counted(weight_savings(block, spec=spec)) for spec in formats) for block in blocks)


def charge_savings(
    candidates: Pool, *, blocks: Collection[Block], specs: Mapping[str, OptimizerSpec], saved: SavedBytes
) -> dict[str, tuple[Candidate, ...]]:
    """The candidates with `saved` bytes (`savings_by_format`) in their cost, fewest charged bytes first."""
    result: dict[str, tuple[Candidate, ...]] = {}
    for block, by_format in zip(blocks, saved, strict=True):
        saved_bytes = dict(zip(_formats(specs), by_format, strict=True))
        options: list[Candidate] = []
        for candidate in candidates[block.name]:
            num_bytes = saved_bytes[specs[candidate.spec].weights]
            if num_bytes:
                candidate = replace(candidate, cost=replace(candidate.cost, saved_bytes=num_bytes))
            options.append(candidate)
        result[block.name] = tuple(sorted(options, key=lambda c: (c.cost.charged_bytes, c.risk.total, c.cost.step_s)))
    return result


def _formats(specs: Mapping[str, OptimizerSpec]) -> dict[str, OptimizerSpec]:
    """Weights format -> one of the specs that have it."""
    return {spec.weights: spec for spec in specs.values()}


def largest_savings(blocks: Collection[Block], *, specs: Mapping[str, OptimizerSpec]) -> dict[str, int]:
    """Parameter name -> bytes that the smallest weights format among `specs` saves on it."""
    most: dict[str, int] = {}
    for block, spec in product(blocks, _formats(specs).values()):
        for name, nbytes in weight_savings(block, spec=spec).items():
            most[name] = max(nbytes, most.get(name, 0))
    return most


def savings_of_choices(
    choices: Mapping[str, str], *, blocks: Collection[Block], specs: Mapping[str, OptimizerSpec]
) -> dict[str, int]:
    """Parameter name -> bytes that an allocation saves on its weights."""
    return {
        name: nbytes
        for block in blocks
        for name, nbytes in weight_savings(block, spec=specs[choices[block.name]]).items()
    }


# -- host placement ---------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True, kw_only=True)
class StagingLimit:
    """How far host placement goes: streamed slabs take at most `slab_bytes`, staging buffers `device_bytes`."""

    slab_bytes: int = 0
    device_bytes: int = 0

    def admitted(
        self, pool: Mapping[str, Collection[Candidate]], *, specs: Collection[str]
    ) -> dict[str, tuple[Candidate, ...]]:
        """Block -> its candidates that run one of `specs` and keep on the host what this limit allows."""
        return {
            block: tuple(c for c in options if c.spec in specs and c.cost.streamed_bytes <= self.slab_bytes)
            for block, options in pool.items()
        }


def is_on_host(spec: OptimizerSpec) -> bool:
    return spec.placement != Placement.DEVICE


def with_streamed_twins(specs: Mapping[str, OptimizerSpec]) -> dict[str, OptimizerSpec]:
    """The specs and their streamed twins, if the catalogue has them."""
    twins = [with_placement(spec, Placement.HOST_STREAMED).name for spec in specs.values()]
    return {**specs, **{name: SPECS[name] for name in twins if name in SPECS}}


def staging_bytes(
    choices: Mapping[str, str],
    *,
    blocks: Collection[Block],
    specs: Mapping[str, OptimizerSpec],
    rules: Mapping[str, RuleInfo],
) -> int:
    """Bytes of the device buffers that an allocation needs for its streamed states."""
    chosen = [(block, specs[choices[block.name]]) for block in blocks]
    streamed = [(block, spec) for block, spec in chosen if is_on_host(spec) and block.numel]
    return buffer_bytes([slab_bytes(block, spec=spec, rule=rules[spec.rule]) for block, spec in streamed])


def staging_limits(
    pool: Mapping[str, Collection[Candidate]], *, specs: Mapping[str, OptimizerSpec]
) -> list[StagingLimit]:
    """Limits from no state on the host to all states that may be there."""
    slabs = [[c.cost.streamed_bytes for c in options if is_on_host(specs[c.spec])] for options in pool.values()]
    limits: list[StagingLimit] = []
    for max_slab in [0, *_max_slabs([size for sizes in slabs for size in sizes])]:
        largest = [max((size for size in sizes if size <= max_slab), default=0) for sizes in slabs]
        device_bytes = buffer_bytes([size for size in largest if size])
        limits.append(StagingLimit(slab_bytes=max_slab, device_bytes=device_bytes))
    return limits


def _max_slabs(sizes: Sequence[int]) -> list[int]:
    """A few slab sizes up to the largest. If slabs fill more than a piece, buffers have the size of a piece for every
    limit below it, so one is enough there."""
    distinct = sorted({size for size in sizes if size})
    if sum(distinct) <= PIECE_BYTES:
        return _evenly_spaced(distinct, most=MAX_SLAB_SIZES)
    within_piece = [size for size in distinct if size <= PIECE_BYTES]
    above_piece = [size for size in distinct if size > PIECE_BYTES]
    return [*within_piece[-1:], *_evenly_spaced(above_piece, most=MAX_SLAB_SIZES)]
