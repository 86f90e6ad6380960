"""What the fused step can do: rule x storage x weights, and how a launch is cut. Needs no Triton."""

from dataclasses import dataclass
from typing import Protocol

M_CODECS = ("fp32", "bf16", "softsign8", "log8m")
V_CODECS = ("fp32", "bf16", "sqrt8", "log8v")
GROUP = 32  # elements that share a scale


@dataclass(frozen=True, slots=True, kw_only=True)
class RuleKind:
    """A rule as the kernel sees it."""

    has_m: bool
    has_v: bool
    counts_steps: bool


RULE_KINDS: dict[str, RuleKind] = {
    "adamw": RuleKind(has_m=True, has_v=True, counts_steps=True),
    "rmsprop": RuleKind(has_m=False, has_v=True, counts_steps=True),
    "lion": RuleKind(has_m=True, has_v=False, counts_steps=False),
    "signum": RuleKind(has_m=True, has_v=False, counts_steps=False),
    "sign": RuleKind(has_m=False, has_v=False, counts_steps=False),
}


class Options(Protocol):
    """A parameter group's settings in one step."""

    @property
    def lr(self) -> float: ...
    @property
    def betas(self) -> tuple[float, float]: ...
    @property
    def eps(self) -> float: ...
    @property
    def weight_decay(self) -> float: ...


@dataclass(frozen=True, slots=True, kw_only=True)
class Kind:
    """What one table steps. `m` and `v` name codecs and are looked at only where the rule has that state.

    `weights`: "native" (fp32 or bf16 as the parameter is) or "split8" (bf16 parameter with an int8 correction).
    """

    rule: str
    m: str = "fp32"
    v: str = "fp32"
    weights: str = "native"

    def __post_init__(self) -> None:
        if self.rule not in RULE_KINDS:
            raise ValueError(f"no kernel for rule {self.rule!r}: fused rules are {', '.join(RULE_KINDS)}")
        if self.m not in M_CODECS or self.v not in V_CODECS:
            raise ValueError(f"m is kept as {self.m!r}, v as {self.v!r}: m may be {M_CODECS}, v {V_CODECS}")
        if self.weights not in ("native", "split8"):
            raise ValueError(f"weights is {self.weights!r}: it may be native or split8")

    @property
    def traits(self) -> RuleKind:
        return RULE_KINDS[self.rule]

    @property
    def keys(self) -> dict[str, int]:
        """State key -> bytes per element of the payloads; a scale counts its bytes per element of the group."""
        keys: dict[str, int] = {}
        for name, present, codec in (("m", self.traits.has_m, self.m), ("v", self.traits.has_v, self.v)):
            if present:
                keys[name] = {"fp32": 4, "bf16": 2}.get(codec, 1)
                if codec not in ("fp32", "bf16"):
                    keys[f"{name}.scale"] = 2
        if self.weights == "split8":
            keys["correction"] = 1
        return keys


@dataclass(frozen=True, slots=True, kw_only=True)
class Cut:
    """How a launch is cut: elements per program, warps per program, elements that a thread loads at once.

    `vector` 4 keeps fp32, bf16 and int8 accesses in one layout, so that nothing passes through shared memory; 8 suits
    launches without any fp32 tensor.
    """

    chunk: int = 1024
    warps: int = 4
    vector: int = 4

    def __post_init__(self) -> None:
        if self.chunk % (GROUP * self.vector) or self.chunk & (self.chunk - 1):
            raise ValueError(
                f"a chunk of {self.chunk} elements: it must be a power of two of at least {GROUP * self.vector}"
            )
