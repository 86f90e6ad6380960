"""Fused steps of rules that see a matrix held against the eager ones, as `kernel_cases` does for the elementwise rules.

What may differ is what that module says, and what comes of summing in another order: a mean of numbers that cancel is
known to a few 1e-7 of the numbers, not of itself.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from baoc.core.catalogue import STORAGES
from baoc.kernels import LaunchConfig, Shape
from baoc.kernels.triton.matrix_kinds import FOLDS
from baoc.optim.codecs import CODEC_IMPLS, Codec
from baoc.optim.rules import RULES, RuleContext
from baoc.types import StateDecl, StateLayout
from tests.support.kernel_cases import Case, Twin, check_equal

# (rows, cols, transposed): lines that are whole groups and not, short and long (one longer than a chunk), odd, of one
# row or column.
SHAPES = (
    (3, 160, False),
    (37, 50, False),
    (1, 300, False),
    (70, 1, False),
    (40, 33, True),
    (160, 5, True),
    (48, 128, False),
    (2, 2, False),
    (2, 1100, False),
)
COVERING = ((3, 160, False), (37, 50, False), (40, 33, True))  # whole groups, parts of groups, transposed
MEANS = ("adamw_shared_in", "adamw_shared_out", "adafactor", "adafactor_momentum", "column_norm")
MATRIX_RULES = (*MEANS, *FOLDS)
RTOL, LOOSE = 5e-6, 1e-4


def check_close(twin: "MatrixTwin") -> float:
    """`check_equal` with the tolerances of rules that sum."""
    return check_equal(twin, rtol=RTOL, loose=LOOSE)


@dataclass(slots=True, kw_only=True)
class MatrixCase(Case):
    config: LaunchConfig | None = None
    shapes: Sequence[tuple[int, int, bool]] = SHAPES


def matrix_cases(
    device: str = "cpu", *, shapes: Sequence[tuple[int, int, bool]] = SHAPES, config: LaunchConfig | None = None
) -> list[MatrixCase]:
    """Every rule in every storage that its kernel knows; bf16 parameters and other weights for some."""
    float32, bfloat16 = torch.float32, torch.bfloat16
    cases = []
    for rule in MATRIX_RULES:
        storages = tuple(STORAGES) if rule in MEANS else ("fp32", "bf16", "int8", "int8_root")
        storages = ("fp32",) if rule in ("adafactor", "column_norm") else storages
        cases += [MatrixCase(rule=rule, storage=storage) for storage in storages]
        cases += [MatrixCase(rule=rule, storage=s, param=bfloat16, grad=bfloat16) for s in storages[::4]]
    if hasattr(Tensor, "grad_dtype"):
        cases += [MatrixCase(rule=rule, param=bfloat16, grad=float32) for rule in ("adamw_shared_in", "foam_l2")]
    for rule in (*MEANS, "foam_l1", "foam_l2"):
        cases += [MatrixCase(rule=rule, param=bfloat16, grad=bfloat16, weights=w) for w in ("split8", "bf16_sr")]
    for case in cases:
        case.device, case.shapes, case.config = device, shapes, config
    return cases


def few_cases() -> list[MatrixCase]:
    """The cases among which every branch of the kernels is taken.

    The first case of a rule sees every shape, its others, of another storage, type or weights, those of `COVERING`:
    so each pair (rule, shape) is there, and each pair of a rule or a shape of those with storage and weights.
    """
    float32, bfloat16 = torch.float32, torch.bfloat16
    chosen = [
        ("adamw_shared_in", "fp32", float32, "native"), ("adamw_shared_in", "int8", float32, "native"),
        ("adamw_shared_in", "bf16", bfloat16, "split8"), ("adamw_shared_out", "fp32", float32, "native"),
        ("adamw_shared_out", "int8", bfloat16, "native"), ("adafactor", "fp32", float32, "native"),
        ("adafactor", "fp32", bfloat16, "split8"), ("adafactor_momentum", "fp32", float32, "native"),
        ("adafactor_momentum", "int8", float32, "native"), ("column_norm", "fp32", float32, "native"),
        ("column_norm", "fp32", bfloat16, "split8"), ("foam_l1", "fp32", float32, "native"),
        ("foam_l1", "int8", bfloat16, "bf16_sr"), ("foam_l2", "int8", float32, "native"),
        ("foam_l3", "bf16", float32, "native"), ("foam_l2", "fp32", bfloat16, "split8"),
        ("foam_l3", "int8", float32, "native"), ("foam_l1", "int8_root", float32, "native"),
        ("adamw_shared_in", "int4", float32, "native"), ("adafactor_momentum", "int4", float32, "native"),
    ]  # fmt: skip
    seen: set[str] = set()
    cases = [
        MatrixCase(
            rule=rule, storage=storage, param=dtype, grad=dtype, weights=weights,
            config=LaunchConfig(chunk=512 if rule in FOLDS else 1024, warps=1),  # few programs, for the interpreter
        )
        for rule, storage, dtype, weights in chosen
    ]  # fmt: skip
    for case in cases:
        if case.rule in seen:
            case.shapes = COVERING
        seen.add(case.rule)
    return cases


class MatrixTwin(Twin):
    """As `Twin`, of matrices; each tensor is a block."""

    case: MatrixCase

    def _shapes(self) -> list[Shape]:
        return [Shape(numel=rows * cols, rows=rows, cols=cols, transposed=t) for rows, cols, t in self.case.shapes]

    def _param(self, shape: Shape) -> Tensor:
        stored = (shape.cols, shape.rows) if shape.transposed else (shape.rows, shape.cols)
        return self._randn(shape.numel, self.case.param).view(stored)

    def _kept(self, index: int) -> dict[str, tuple[Codec, tuple[int, ...]]]:
        kept: dict[str, tuple[Codec, tuple[int, ...]]] = {}
        for decl in RULES[self.case.rule].info.states:
            coded = decl.layout in (StateLayout.FULL, StateLayout.FOLDED)
            codec = (self.kind.m if decl.name == "m" else self.kind.v) if coded else "fp32"
            kept[decl.name] = (CODEC_IMPLS[codec], _state_shape(decl, self.shapes[index]))
        return kept

    def _context(self, index: int, **given: Any) -> RuleContext:
        """Without a mask where all is finite, as the eager backend has it."""
        shape, finite = self.shapes[index], given.pop("finite")
        finite = None if bool(finite.all()) else finite
        return RuleContext(**given, finite=finite, matrix=(shape.rows, shape.cols), transposed=shape.transposed)

    def new_gradients(self, *, idle: Sequence[int] = ()) -> None:
        """As `Twin`'s, with scales that differ by line."""
        for index, param in enumerate(self.params):
            by_line = torch.exp2(torch.randn(len(param), 1, generator=self.random)).to(param.device)
            grad = self._randn(param.numel(), torch.float32, spread=1.0).view(param.shape) * by_line * 1e-3
            grad[(torch.rand(param.shape, generator=self.random) < 0.1).to(grad.device)] = 0.0
            if index not in idle and self.case.grad is not self.case.param:
                param.grad_dtype = self.case.grad
            param.grad = None if index in idle else grad.to(self.case.grad)


def _state_shape(decl: StateDecl, shape: Shape) -> tuple[int, ...]:
    """`StateDecl.shape`, for matrices of which a side may be 1."""
    rows, cols, fold = shape.rows, shape.cols, 2**decl.level
    if decl.layout is StateLayout.FULL:
        return (cols, rows) if shape.transposed else (rows, cols)
    if decl.layout is StateLayout.FOLDED:
        return (rows, -(-cols // fold))
    return (rows,) if decl.layout is StateLayout.PER_ROW else (cols,)
