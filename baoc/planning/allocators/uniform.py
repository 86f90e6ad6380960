"""One spec everywhere, as its authors publish it: what every quality claim is compared with."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np

from baoc.errors import BadInputError
from baoc.planning.allocators.base import AllocatorTraits, make_allocation, make_problem, unmet
from baoc.types import Allocation, Candidate, Limits, Role

FALLBACK = "adamw"
_OUTER = frozenset({Role.EMBEDDING, Role.HEAD, Role.NORM})


@dataclass(frozen=True, slots=True, kw_only=True)
class UniformAllocator:
    """`spec` on every block where it applies, fp32 AdamW on the others and on `kept` roles; then no choice is left.

    A block that may run neither gets its candidate of least risk. Raises NoFeasibleAllocation with its own totals, and
    BadInputError where the spec applies to no block at all: that would be an AdamW run under another name.
    """

    name: str
    spec: str
    kept: frozenset[Role] = frozenset()
    matching: bool = False  # as published: the learning rate is the rule's own, its update RMS is not matched

    @property
    def traits(self) -> AllocatorTraits:
        return AllocatorTraits(every_candidate=True, only_spec=self.spec, matching=self.matching)

    @property
    def description(self) -> str:
        but = f", {FALLBACK} on {', '.join(sorted(self.kept))}" if self.kept else ""
        matched = ", update RMS matched to AdamW's" if self.matching else ", as published"
        return f"{self.spec} wherever it applies{but}, else {FALLBACK}{matched}"

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


def _uniform(name: str, spec: str, *, kept: frozenset[Role] = frozenset()) -> UniformAllocator:
    return UniformAllocator(name=f"uniform_{name}", spec=spec, kept=kept)


_PUBLISHED: tuple[UniformAllocator, ...] = (
    _uniform("adamw", "adamw"),
    _uniform("bf16", "adamw_bf16"),
    _uniform("adamw8bit", "adamw_int8"),
    _uniform("adamw8bit_log", "adamw_int8_log"),
    _uniform("adamw8bit_root", "adamw_int8_root"),
    _uniform("adamw4bit", "adamw_int4"),
    _uniform("rmsprop", "rmsprop"),
    _uniform("rmsprop8bit", "rmsprop_int8"),
    _uniform("shared_in", "adamw_shared_in", kept=frozenset({Role.NORM})),
    _uniform("shared_out", "adamw_shared_out", kept=frozenset({Role.NORM})),
    _uniform("adafactor", "adafactor"),
    _uniform("adafactor_momentum", "adafactor_momentum"),
    _uniform("lion", "lion"),
    _uniform("lion8bit", "lion_int8"),
    _uniform("signum", "signum"),
    _uniform("signum8bit", "signum_int8"),
    _uniform("foam", "foam_l2", kept=_OUTER),  # its authors leave embeddings and head to Adam
    _uniform("foam8bit", "foam_l2_int8", kept=_OUTER),
    _uniform("foam_sq", "foam_l2_sq", kept=_OUTER),
    _uniform("foam_l3", "foam_l3", kept=_OUTER),
    _uniform("foam_l8", "foam_l8", kept=_OUTER),
    _uniform("muon", "muon", kept=_OUTER),
    _uniform("sign", "sign"),
    _uniform("column_norm", "column_norm"),
)

UNIFORM: tuple[UniformAllocator, ...] = (
    *_PUBLISHED,
    *(replace(row, name=f"{row.name}_matched", matching=True) for row in _PUBLISHED),
)
