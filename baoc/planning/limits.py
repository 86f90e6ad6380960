"""Turns a memory budget into limits that are sums over blocks, the only ones that allocators understand.

A peak is the largest of several moments of a step, so it is no sum over blocks. The planner therefore makes several
attempts (`planning.attempts`). Within one attempt the charged bytes are sums, and the peak of the resulting plan then
decides. Each attempt fixes three things:

1. `levels`: the room for a step's temporaries, which are those of the spec that needs most.
2. `StagingLimit`: how far host placement goes. Streamed states pass through device buffers as large as the largest
   piece (`transfer`).
3. `Savings`: how the bytes that 16-bit weights save are counted, boldest first. `copies` are weights, gradients and
   autocast's copies, as at the largest moment; `gradients` weights and gradients; `weights` hold at every moment.
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

MAX_LEVELS = 6  # of room for the temporaries of a step; each costs an allocation
MOST_CAPS = 3  # sizes of slabs at which ways of host placement are told apart; each costs an allocation


def temporaries_levels(
    footprint: Footprint, *, specs: Collection[str], memory: int | None, most_saved: Mapping[str, int] | None = None
) -> list[tuple[int, frozenset[str]]]:
    """(Peak without state, specs whose step stays below it), from few specs to all.

    More than one level only where some spec's temporaries would pass the peak of forward and backward; then a plan may
    either do without that spec or leave room for it. A spec whose step passes `memory` even where weights save what
    they can (`most_saved`, see `largest_savings`) makes no level. MAX_LEVELS of the others; where there is none, the
    highest of all; where `memory` is None, every level.
    """

    def peak(spec: str, saved: Mapping[str, int] | None = None) -> int:
        return footprint.peak_bytes(state_bytes=0, specs=(spec,), saved=saved)

    peaks = {spec: peak(spec) for spec in specs}
    found = sorted(set(peaks.values()))
    if memory is not None:
        within = {least for spec, least in peaks.items() if least <= memory or peak(spec, most_saved) <= memory}
        found = sorted(within) or found[-1:]
        if len(found) > MAX_LEVELS:
            found = [found[i * (len(found) - 1) // (MAX_LEVELS - 1)] for i in range(MAX_LEVELS)]
    return [(level, frozenset(spec for spec, peak in peaks.items() if peak <= level)) for level in found]


Saved = tuple[tuple[int, ...], ...]  # bytes saved: [block][weights format]


def savings_by_format(
    blocks: Collection[Block], *, specs: Mapping[str, OptimizerSpec], count: SavingsMode, footprint: Footprint
) -> Saved:
    """Bytes that each weights format among `specs` saves on each block, counted as `count` says."""

    def counted(less: Mapping[str, int]) -> int:
        if count == "copies" and footprint.intervals:
            return footprint.savings_at_peak(less)
        return sum(less.values()) * (1 if count == "weights" else 2)

    formats = _formats(specs).values()
    return tuple(tuple(counted(weight_savings(block, spec=spec)) for spec in formats) for block in blocks)


def charge_savings(
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
        self, pool: Mapping[str, Collection[Candidate]], *, specs: Mapping[str, OptimizerSpec]
    ) -> dict[str, tuple[Candidate, ...]]:
        """The candidates of each block that run one of `specs` and are placed no further."""
        here = {name for name, spec in specs.items() if not is_on_host(spec)}
        return {
            block: tuple(
                c for c in options if c.spec in here or (c.spec in specs and c.cost.streamed_bytes <= self.slab_bytes)
            )
            for block, options in pool.items()
        }


def is_on_host(spec: OptimizerSpec) -> bool:
    return spec.placement != Placement.DEVICE


def with_streamed_twins(specs: Mapping[str, OptimizerSpec]) -> dict[str, OptimizerSpec]:
    """The rows and their streamed twins, where the catalogue has such."""
    twins = [with_placement(spec, Placement.HOST_STREAMED).name for spec in specs.values()]
    return {**specs, **{name: SPECS[name] for name in twins if name in SPECS}}


def staging_bytes(
    choices: Mapping[str, str],
    *,
    blocks: Collection[Block],
    specs: Mapping[str, OptimizerSpec],
    rules: Mapping[str, RuleInfo],
) -> int:
    """Bytes of the device's buffers that an allocation needs."""
    chosen = [(block, specs[choices[block.name]]) for block in blocks]
    there = [(block, spec) for block, spec in chosen if is_on_host(spec) and block.numel]
    return buffer_bytes([slab_bytes(block, spec=spec, rule=rules[spec.rule]) for block, spec in there])


def staging_limits(
    pool: Mapping[str, Collection[Candidate]], *, specs: Mapping[str, OptimizerSpec]
) -> list[StagingLimit]:
    """From nothing placed on the host to everything that may be."""
    slabs = [[c.cost.streamed_bytes for c in options if is_on_host(specs[c.spec])] for options in pool.values()]
    found: list[StagingLimit] = []
    for cap in [0, *_caps([size for sizes in slabs for size in sizes])]:
        largest = [max((size for size in sizes if size <= cap), default=0) for sizes in slabs]
        found.append(StagingLimit(slab_bytes=cap, device_bytes=buffer_bytes([size for size in largest if size])))
    return found


def _caps(sizes: Sequence[int]) -> list[int]:
    """A few sizes up to the largest; below that of a piece, room depends on slabs only where all are one piece."""
    found = sorted({size for size in sizes if size})
    if sum(found) > PIECE_BYTES:
        below, above = [size for size in found if size <= PIECE_BYTES], [size for size in found if size > PIECE_BYTES]
        return [*below[-1:], *_few(above)]
    return _few(found)


def _few(sizes: Sequence[int]) -> list[int]:
    many = len(sizes) > MOST_CAPS
    return [sizes[i * (len(sizes) - 1) // (MOST_CAPS - 1)] for i in range(MOST_CAPS)] if many else list(sizes)
