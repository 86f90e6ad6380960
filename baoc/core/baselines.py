"""Uniform baselines: one spec everywhere, as its authors publish it. `allocator=uniform_NAME` runs one.

Each has a twin `uniform_NAME_matched`: its updates are scaled to the RMS of AdamW's, so that it can run at AdamW's
learning rate.
"""

from dataclasses import dataclass, replace

from baoc.core.recipes import FALLBACK, OUTER_ROLES
from baoc.types import Role

_OUTER = frozenset(OUTER_ROLES)


@dataclass(frozen=True, slots=True, kw_only=True)
class UniformBaseline:
    """`spec` on every block to which it applies, FALLBACK on the others and on `adamw_roles`."""

    name: str
    spec: str
    adamw_roles: frozenset[Role] = frozenset()
    matching: bool = False

    @property
    def description(self) -> str:
        but = f", {FALLBACK} on {', '.join(sorted(self.adamw_roles))}" if self.adamw_roles else ""
        matched = ", update RMS matched to AdamW's" if self.matching else ", as published"
        return f"{self.spec} wherever it applies{but}, else {FALLBACK}{matched}"


_PUBLISHED: tuple[tuple[str, str, frozenset[Role]], ...] = (
    ("adamw", "adamw", frozenset()),
    ("bf16", "adamw_bf16", frozenset()),
    ("adamw8bit", "adamw_int8", frozenset()),
    ("adamw8bit_root", "adamw_int8_root", frozenset()),
    ("adamw4bit", "adamw_int4", frozenset()),
    ("rmsprop", "rmsprop", frozenset()),
    ("rmsprop8bit", "rmsprop_int8", frozenset()),
    ("shared_in", "adamw_shared_in", frozenset({Role.NORM})),
    ("shared_out", "adamw_shared_out", frozenset({Role.NORM})),
    ("adafactor", "adafactor", frozenset()),
    ("adafactor_momentum", "adafactor_momentum", frozenset()),
    ("lion", "lion", frozenset()),
    ("lion8bit", "lion_int8", frozenset()),
    ("signum", "signum", frozenset()),
    ("signum8bit", "signum_int8", frozenset()),
    ("foam", "foam_l2", _OUTER),  # its authors leave embeddings and head to Adam
    ("foam8bit", "foam_l2_int8", _OUTER),
    ("foam_l3", "foam_l3", _OUTER),
    ("muon", "muon", _OUTER),
    ("sign", "sign", frozenset()),
    ("column_norm", "column_norm", frozenset()),
)
_AS_PUBLISHED = tuple(
    UniformBaseline(name=f"uniform_{name}", spec=spec, adamw_roles=roles) for name, spec, roles in _PUBLISHED
)
UNIFORM_BASELINES: tuple[UniformBaseline, ...] = (
    *_AS_PUBLISHED,
    *(replace(baseline, name=f"{baseline.name}_matched", matching=True) for baseline in _AS_PUBLISHED),
)
