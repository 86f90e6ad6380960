"""What host placement needs beside the states themselves: room to pass through, by how far it may go.

Streamed states pass through device buffers as large as the largest piece (`transfer`), which is no sum over blocks:
so the planner tries ways of going less or more far, each with the room that is enough for it, as it does with the
temporaries of a step. Weights and gradients of blocks that the host updates pass through buffers of its own,
unless gradients are flushed: these wait on the host, all at once.
"""

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass

from baoc.core.catalogue import SPECS, with_placement
from baoc.errors import BadInputError
from baoc.planning.candidates import off_host
from baoc.planning.cost import passing_bytes, slab_bytes
from baoc.planning.transfer import PIECE_BYTES, buffer_bytes
from baoc.types import Block, Candidate, OptimizerSpec, Placement, RuleInfo

MOST_CAPS = 3  # sizes of slabs at which ways are told apart; each costs an allocation


@dataclass(frozen=True, slots=True, kw_only=True)
class Way:
    """Streamed blocks have slabs of at most `slab_bytes`, and the host updates some or (not `updated`) none.

    `device_bytes` and `host_bytes` are enough for all staging of such an allocation.
    """

    slab_bytes: int = 0
    updated: bool = False
    device_bytes: int = 0
    host_bytes: int = 0

    def admitted(
        self, pool: Mapping[str, Collection[Candidate]], *, specs: Mapping[str, OptimizerSpec]
    ) -> dict[str, tuple[Candidate, ...]]:
        """The candidates of each block that run one of `specs` and are placed no further."""
        streamed = {name for name, spec in specs.items() if spec.placement == Placement.HOST_STREAMED}
        updated = {name for name, spec in specs.items() if spec.placement == Placement.HOST_UPDATED}
        free = specs.keys() - streamed - (set[str]() if self.updated else updated)
        return {
            block: tuple(
                c for c in options if c.spec in free or (c.spec in streamed and c.cost.in_bytes <= self.slab_bytes)
            )
            for block, options in pool.items()
        }


def placed(spec: OptimizerSpec) -> bool:
    return spec.placement != Placement.DEVICE


def with_host(specs: Mapping[str, OptimizerSpec]) -> dict[str, OptimizerSpec]:
    """The rows and their streamed twins, where the catalogue has such.

    Rows that the host steps are chosen by name alone: measured on an H100's host, its processors take five times as
    long for packed states as the link does, and 1.4 times for fp32 (experiments/results/host_placement_step.csv).
    """
    twins = [with_placement(spec, Placement.HOST_STREAMED).name for spec in specs.values()]
    return {**specs, **{name: SPECS[name] for name in twins if name in SPECS}}


def check_named(patterns: Sequence[str], *, rules: Mapping[str, RuleInfo]) -> None:
    """Raises BadInputError for a row that was named and that no host can step: it would never be chosen."""
    for name in patterns:
        spec = SPECS.get(name)
        if spec is not None and (why := off_host(spec, rule=rules[spec.rule])):
            device = with_placement(spec, Placement.DEVICE).name
            raise BadInputError(f"catalogue.specs names {name}: {why}. Name {device}@streamed or {device}")


def staging_bytes(
    choices: Mapping[str, str],
    *,
    blocks: Collection[Block],
    specs: Mapping[str, OptimizerSpec],
    rules: Mapping[str, RuleInfo],
    flushed: bool = False,
) -> tuple[int, int]:
    """Bytes of the buffers that an allocation needs on the device and on the host.

    `flushed`: gradients of updated blocks wait on the host until they are stepped, all of them at once.
    """
    slabs: list[int] = []
    passing: list[int] = []
    for block in blocks:
        spec = specs[choices[block.name]]
        if not block.numel or not placed(spec):
            continue
        if spec.placement == Placement.HOST_UPDATED:
            passing.append(passing_bytes(block, spec=spec))
        else:
            slabs.append(slab_bytes(block, spec=spec, rule=rules[spec.rule]))
    return buffer_bytes(slabs), _updating_bytes(passing, flushed=flushed)


def _updating_bytes(passing: Sequence[int], *, flushed: bool) -> int:
    """Host bytes of updated blocks beside their states; half of what passes are gradients."""
    return buffer_bytes(passing) + (sum(passing) // 2 if flushed else 0)


def ways(
    pool: Mapping[str, Collection[Candidate]],
    *,
    blocks: Collection[Block],
    specs: Mapping[str, OptimizerSpec],
    host_counts: bool,
    flushed: bool = False,
) -> list[Way]:
    """From nothing placed on the host to everything that may be. `host_counts`: staging there is charged, too."""
    if not any(map(placed, specs.values())):
        return [Way()]
    slabs: dict[str, list[int]] = {}
    passing: list[int] = []
    for block in blocks:
        mine = [c for c in pool[block.name] if placed(specs[c.spec])]
        slabs[block.name] = [c.cost.in_bytes for c in mine if specs[c.spec].placement == Placement.HOST_STREAMED]
        updated = [specs[c.spec] for c in mine if specs[c.spec].placement == Placement.HOST_UPDATED]
        passing += [max(passing_bytes(block, spec=spec) for spec in updated)] if updated else []
    found: list[Way] = []
    for cap in [0, *_caps([size for sizes in slabs.values() for size in sizes])]:
        largest = [max((size for size in sizes if size <= cap), default=0) for sizes in slabs.values()]
        room = buffer_bytes([size for size in largest if size])
        for updated in (False, True) if passing and (host_counts or not cap) else (bool(passing),):
            host = _updating_bytes(passing, flushed=flushed) if updated else 0
            found.append(Way(slab_bytes=cap, updated=updated, device_bytes=room, host_bytes=host))
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
