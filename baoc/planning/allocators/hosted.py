"""Host placement as others do it, in fp32 and without a choice: what ours must beat at the same device memory."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from baoc.errors import BadInputError
from baoc.planning.allocators.base import AllocatorTraits, make_allocation, make_problem, unmet
from baoc.types import Allocation, Candidate, Limits

STREAMED, UPDATED = "adamw@streamed", "adamw@updated"


@dataclass(frozen=True, slots=True, kw_only=True)
class HostedAllocator:
    """fp32 AdamW with all of its states on the host, where it is stepped; every `every`-th block visits the device.

    `overlap`: blocks are stepped as soon as backward is done with them, else once all of it is over; `flush_only`: then
    too, but with gradients that have come to the host by themselves as backward gave them. `rows` are what it needs of
    the catalogue. Raises NoFeasibleAllocation with its own totals, and BadInputError where a row is missing.
    """

    name: str
    description: str
    every: int | None = None  # none
    overlap: bool = True
    flush_only: bool = False
    rows: tuple[str, ...] = (UPDATED, STREAMED)

    @property
    def traits(self) -> AllocatorTraits:
        return AllocatorTraits(every_candidate=True, rows=self.rows, overlap=self.overlap, flush_only=self.flush_only)

    def __call__(self, candidates: Mapping[str, Sequence[Candidate]], *, limits: Limits, seed: int = 0) -> Allocation:
        problem = make_problem(candidates, limits=limits)
        choice = np.array([self._pick(index, row) for index, row in enumerate(problem.candidates)], dtype=np.int64)
        if not problem.feasible(choice):
            raise unmet(problem, problem.used(choice))
        return make_allocation(problem, choice, allocator=self.name)

    def _pick(self, index: int, options: Sequence[Candidate]) -> int:
        wanted = STREAMED if self.every is not None and (index + 1) % self.every == 0 else UPDATED
        for position, candidate in enumerate(options):
            if candidate.spec == wanted:
                return position
        raise BadInputError(
            f"allocator={self.name}: {wanted} does not apply to block {options[0].block}, or is not among "
            "catalogue.specs: select it there, or choose another allocator"
        )


HOSTED: tuple[HostedAllocator, ...] = (
    HostedAllocator(
        name="host_adamw",
        description="adamw kept and stepped on the host, once backward is over",
        overlap=False,
        rows=(UPDATED,),
    ),
    HostedAllocator(
        name="host_adamw_flush",
        description="adamw kept and stepped on the host once backward is over, gradients flushed there within it",
        flush_only=True,
        rows=(UPDATED,),
    ),
    HostedAllocator(
        name="host_every_kth",
        description="adamw kept on the host, every k-th block stepped on the device, the others there",
        every=2,
    ),
)
