"""One spec everywhere, as its authors publish it: what every quality claim is compared with."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from baoc.core.baselines import FALLBACK, UNIFORM_BASELINES, UniformBaseline
from baoc.errors import BadInputError
from baoc.planning.allocators.base import AllocatorTraits, make_allocation, make_problem, unmet
from baoc.types import Allocation, Candidate, Limits


@dataclass(frozen=True, slots=True, kw_only=True)
class UniformAllocator(UniformBaseline):
    """`spec` on every block where it applies, fp32 AdamW on the others and on `kept` roles; then no choice is left.

    A block that may run neither gets its candidate of least risk. Raises NoFeasibleAllocation with its own totals, and
    BadInputError where the spec applies to no block at all: that would be an AdamW run under another name.
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
        problem = make_problem(candidates, limits=limits)
        choice = np.array([self._pick(options) for options in problem.candidates], dtype=np.int64)
        if not problem.feasible(choice):
            raise unmet(problem, problem.used(choice))
        return make_allocation(problem, choice, allocator=self.name)

    def _runs(self, options: Sequence[Candidate]) -> bool:
        return any(candidate.spec == self.spec and candidate.role not in self.kept for candidate in options)

    def _pick(self, options: Sequence[Candidate]) -> int:
        by_spec = {candidate.spec: index for index, candidate in enumerate(options)}
        if self._runs(options):
            return by_spec[self.spec]
        if FALLBACK in by_spec:
            return by_spec[FALLBACK]
        return min(range(len(options)), key=lambda index: (options[index].risk.total, index))


UNIFORM: tuple[UniformAllocator, ...] = tuple(
    UniformAllocator(name=row.name, spec=row.spec, kept=row.kept, matching=row.matching) for row in UNIFORM_BASELINES
)
