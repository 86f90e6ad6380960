"""`allocator=uniform_NAME`: one spec everywhere, as its authors publish it. Quality claims are compared with these."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from baoc.core.baselines import UNIFORM_BASELINES, UniformBaseline
from baoc.core.recipes import FALLBACK
from baoc.errors import BadInputError
from baoc.planning.allocators.base import AllocatorTraits, allocate_first_wanted
from baoc.types import Allocation, Candidate, Limits


@dataclass(frozen=True, slots=True, kw_only=True)
class UniformAllocator(UniformBaseline):
    """`spec` on every block to which it applies, fp32 AdamW on the others and on `adamw_roles`.

    A block that may run neither gets its candidate of least risk. Raises NoFeasibleAllocation with these totals, as
    nothing is left to choose, and BadInputError if the spec applies to no block, which would be a run of AdamW.
    """

    @property
    def traits(self) -> AllocatorTraits:
        return AllocatorTraits(every_candidate=True, only_spec=self.spec, matching=self.matching)

    def __call__(self, candidates: Mapping[str, Sequence[Candidate]], *, limits: Limits, seed: int = 0) -> Allocation:
        if not any(self._runs(options) for options in candidates.values()):
            raise BadInputError(
                f"allocator={self.name}: {self.spec} applies to none of the {len(candidates)} blocks (or is not among "
                "catalogue.specs): select it there, or choose another allocator"
            )
        return allocate_first_wanted(
            candidates,
            limits=limits,
            allocator=self.name,
            wanted=lambda options: (*([self.spec] if self._runs(options) else []), FALLBACK),
        )

    def _runs(self, options: Sequence[Candidate]) -> bool:
        return any(candidate.spec == self.spec and candidate.role not in self.adamw_roles for candidate in options)


UNIFORM: tuple[UniformAllocator, ...] = tuple(
    UniformAllocator(name=row.name, spec=row.spec, adamw_roles=row.adamw_roles, matching=row.matching)
    for row in UNIFORM_BASELINES
)
