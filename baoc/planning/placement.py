"""Staging buffers of host placement: their bytes on the device, by how many blocks may be placed on the host.

Streamed states pass through device buffers as large as the largest piece (`transfer`), which is no sum over blocks:
so the planner tries ways of going less or more far, each with the room that is enough for it, as it does with the
temporaries of a step.
"""

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass

from baoc.core.catalogue import SPECS, with_placement
from baoc.planning.cost import slab_bytes
from baoc.planning.transfer import PIECE_BYTES, buffer_bytes
from baoc.types import Block, Candidate, OptimizerSpec, Placement, RuleInfo

MOST_CAPS = 3  # sizes of slabs at which ways are told apart; each costs an allocation


@dataclass(frozen=True, slots=True, kw_only=True)
class StagingLimit:
    """How far host placement goes: streamed slabs take at most `slab_bytes`, staging buffers `device_bytes`."""

    slab_bytes: int = 0
    device_bytes: int = 0

    def admitted(
        self, pool: Mapping[str, Collection[Candidate]], *, specs: Mapping[str, OptimizerSpec]
    ) -> dict[str, tuple[Candidate, ...]]:
        """The candidates of each block that run one of `specs` and are placed no further."""
        here = {name for name, spec in specs.items() if not placed(spec)}
        return {
            block: tuple(
                c for c in options if c.spec in here or (c.spec in specs and c.cost.streamed_bytes <= self.slab_bytes)
            )
            for block, options in pool.items()
        }


def placed(spec: OptimizerSpec) -> bool:
    return spec.placement != Placement.DEVICE


def with_host(specs: Mapping[str, OptimizerSpec]) -> dict[str, OptimizerSpec]:
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
    there = [(block, spec) for block, spec in chosen if placed(spec) and block.numel]
    return buffer_bytes([slab_bytes(block, spec=spec, rule=rules[spec.rule]) for block, spec in there])


def staging_limits(
    pool: Mapping[str, Collection[Candidate]], *, specs: Mapping[str, OptimizerSpec]
) -> list[StagingLimit]:
    """From nothing placed on the host to everything that may be."""
    slabs = [[c.cost.streamed_bytes for c in options if placed(specs[c.spec])] for options in pool.values()]
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
