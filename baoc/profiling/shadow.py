"""Shadow runs: candidate specs step the sampled slices with their real rules and codecs, beside fp32 AdamW.

They measure how far a spec's update is from AdamW's on the same gradients. Risk weights turn the distances into a risk
(docs/methods.md#risk).
"""

from collections.abc import Sequence
from dataclasses import dataclass
from math import prod
from typing import Any

import torch
from torch import Tensor

from baoc.core.catalogue import CODECS, PACKED_GROUP, SPECS, STORAGES
from baoc.optim.codecs import CODEC_IMPLS
from baoc.optim.rules import RULES, RuleContext
from baoc.planning.candidates import applies
from baoc.profiling.slices import Slices
from baoc.types import Block, OptimizerSpec, ParamInfo, Role, RuleInfo, StateDecl, StateKind, StateLayout

TERMS = ("cosine", "rel_error", "vmetric", "descent_next")
MATRICES = 2  # measured per block, evenly spread: rules that need matrices step each one by itself
_ALIGN = PACKED_GROUP  # elements; the groups of every codec divide it
BURN_IN = 2  # samples that are not measured: an average of one or two gradients is close to the gradient


def bytes_per_element(specs: Sequence[OptimizerSpec]) -> float:
    """Upper estimate of the bytes that shadow runs of `specs` hold per sampled element, reference included."""
    total = 0.0
    for spec in (SPECS["adamw"], *specs):
        storage = STORAGES[spec.storage]
        total += 4.0 + sum(_element_bytes(decl, codec=storage.codec(decl)) for decl in RULES[spec.rule].info.states)
    return total


def _element_bytes(decl: StateDecl, *, codec: str) -> float:
    if decl.layout in (StateLayout.PER_ROW, StateLayout.PER_COLUMN):
        return 0.5  # one fp32 value for at least 8 elements
    return CODECS[codec].nbytes(2**12) / 2**12 / (2**decl.level if decl.layout is StateLayout.FOLDED else 1)


def elementwise(info: RuleInfo) -> bool:
    """True for a rule that steps each element by itself, so that all slices can be stepped as one vector.

    A rule that reduces over a tensor declares `needs_matrix` or a state layout other than FULL.
    """
    return not info.needs_matrix and not info.hidden_only and all(d.layout is StateLayout.FULL for d in info.states)


@dataclass(frozen=True, slots=True, kw_only=True)
class _Unit:
    """A tensor that a rule steps: a piece of the buffer, or all of it. `starts`: offsets of its states."""

    param: ParamInfo
    start: int
    starts: tuple[int, ...]


class ShadowRun:
    """One spec on all blocks it applies to. `update` holds its last update direction, 0 elsewhere.

    The states of all units lie in one encoded tensor, so that the codec runs once. The part of a unit starts with a new
    quantisation group, so groups are those of the optimizer.
    """

    def __init__(self, spec: OptimizerSpec, *, slices: Slices, device: torch.device):
        self.spec = spec
        self.rule = RULES[spec.rule]
        self.decls = self.rule.info.states
        storage = STORAGES[spec.storage]
        self.codecs = [CODEC_IMPLS[storage.codec(decl)] for decl in self.decls]
        self.covers = [applies(block, spec=spec, rule=self.rule.info) is None for block in slices.blocks]
        self.update = slices.new(device)
        whole = ParamInfo(name="all", shape=(slices.numel,), dtype="float32", role=Role.OTHER)
        placed = [(whole, 0)]
        if not elementwise(self.rule.info):
            placed = [
                (piece.sampled, piece.offset)
                for piece, chosen in zip(slices.pieces, _chosen(slices), strict=True)
                if chosen and self.covers[piece.block]
            ]
        sizes = [0] * len(self.decls)
        self.units: list[_Unit] = []
        for param, start in placed:
            self.units.append(_Unit(param=param, start=start, starts=tuple(sizes)))
            for index, decl in enumerate(self.decls):
                sizes[index] += -(-prod(decl.shape(param)) // _ALIGN) * _ALIGN
        self.states = [codec.allocate((size,), device) for codec, size in zip(self.codecs, sizes, strict=True)]
        self._sizes = sizes

    def step(self, flat: Tensor, *, count: int, betas: tuple[float, float], eps: float) -> None:
        """Steps every unit on the gradients in `flat`; `count` starts at 1."""
        values = [
            codec.decode(parts, (size,))
            for codec, parts, size in zip(self.codecs, self.states, self._sizes, strict=True)
        ]
        for unit in self.units:
            ctx = RuleContext(
                step=count if self.rule.info.counts_steps else 0,
                beta1=betas[0],
                beta2=betas[1],
                eps=eps,
                matrix=unit.param.matrix_shape,
                transposed=unit.param.transposed,
            )
            self._step_unit(unit, flat, values, ctx)
        for decl, codec, parts, value in zip(self.decls, self.codecs, self.states, values, strict=True):
            # as in the optimizer
            phased = decl.kind is StateKind.V or codec.info.phased
            codec.encode_(parts, value, phase=count if phased else None)

    def _step_unit(self, unit: _Unit, flat: Tensor, values: Sequence[Tensor], ctx: RuleContext) -> None:
        states: dict[str, Tensor] = {}
        for decl, start, value in zip(self.decls, unit.starts, values, strict=True):
            shape = decl.shape(unit.param)
            states[decl.name] = value[start : start + prod(shape)].view(shape)
        piece = slice(unit.start, unit.start + unit.param.numel)
        direction = self.rule.direction(flat[piece].view(unit.param.shape), states=states, ctx=ctx)
        target = self.update[piece].view(unit.param.shape)
        if direction.denominator is None:
            torch.mul(direction.numerator, 1 / direction.divisor, out=target)
        else:
            torch.div(direction.numerator, direction.denominator, out=target).div_(direction.divisor)

    def tensors(self) -> list[Tensor]:
        """All its tensors in a fixed order."""
        return [self.update, *(part for parts in self.states for part in parts.values())]


class Shadow:
    """Steps `specs` on the buffer of `slices` and sums four terms per block and spec.

    With u_ref AdamW's update and u the spec's, scaled to the same RMS over the block's slices if its rule is matched:
    - cosine: 1 - cos(u, u_ref)
    - rel_error: ||u - u_ref|| / ||u_ref||
    - vmetric: the same in the norm sum(sqrt(v) x^2)
    - descent_next: the lost share of AdamW's descent on the *next* gradient, (D_ref - D) / max(D_ref, s), with
      D = sum_t <g_{t+1}, u_t> and s = sqrt(sum_t <g_{t+1}, u_ref,t>^2), which bounds it where D_ref is lost in noise.

    The first three are means over the samples after BURN_IN. Every spec is measured on the same MATRICES of a block.
    """

    def __init__(
        self,
        slices: Slices,
        *,
        specs: Sequence[OptimizerSpec],
        betas: tuple[float, float],
        eps: float,
        device: torch.device,
    ):
        self._slices, self._betas, self._eps = slices, betas, eps
        self._reference = ShadowRun(SPECS["adamw"], slices=slices, device=device)
        self._runs = [ShadowRun(spec, slices=slices, device=device) for spec in specs]
        shape = (len(slices.blocks), len(specs))
        self._sums = torch.zeros((4, *shape), dtype=torch.float64, device=device)  # three terms, then the descent
        self._scale = torch.ones(shape, dtype=torch.float64, device=device)  # of the last updates
        self._descent = torch.zeros((2, shape[0]), dtype=torch.float64, device=device)  # of AdamW, and its squares
        self._chosen = torch.tensor([float(chosen) for chosen in _chosen(slices)], dtype=torch.float64, device=device)
        matched = [run.rule.info.matched for run in self._runs]
        self._matched = torch.tensor(matched, device=device, dtype=torch.bool)
        self.num_samples = 0
        self._num_next = 0

    @property
    def nbytes(self) -> int:
        return sum(tensor.nbytes for tensor in self.tensors())

    def tensors(self) -> list[Tensor]:
        """Every tensor it holds."""
        return [*self._tensors(), self._chosen, self._matched]

    @property
    def spec_names(self) -> list[str]:
        return [run.spec.name for run in self._runs]

    @property
    def num_calls(self) -> int:
        """Rule steps per sample, to which its time is proportional."""
        return sum(len(run.units) for run in (self._reference, *self._runs))

    def observe_next(self, flat: Tensor) -> None:
        """Takes the gradient of the step after a sample; further calls before the next sample have no effect."""
        if self.num_samples <= BURN_IN or self._num_next == self.num_samples:
            return
        self._num_next = self.num_samples
        reference = self._block_sums(flat * self._reference.update)
        self._descent[0] += reference
        self._descent[1] += reference.square()
        gained = [self._block_sums(flat * run.update) for run in self._runs]
        if gained:
            self._sums[3] += torch.stack(gained, dim=1) * self._scale

    def observe(self, flat: Tensor) -> None:
        """Steps the reference and every spec on the gradients in `flat` and adds to the sums."""
        self.num_samples += 1
        for run in (self._reference, *self._runs):
            run.step(flat, count=self.num_samples, betas=self._betas, eps=self._eps)
        if self.num_samples <= BURN_IN or not self._runs:
            return
        reference = self._reference.update
        metric = self._reference.states[1][""][: len(flat)].sqrt()  # of v
        weighted = metric * reference
        base = self._block_sums(reference * reference), self._block_sums(weighted * reference)
        columns: list[Tensor] = []
        for run in self._runs:
            update = run.update
            products = (update * update, update * reference, metric * update * update, weighted * update)
            columns.append(torch.stack([self._block_sums(product) for product in products]))
        self._add_terms(torch.stack(columns, dim=2), rr=base[0].unsqueeze(1), vrr=base[1].unsqueeze(1))

    def _add_terms(self, sums: Tensor, *, rr: Tensor, vrr: Tensor) -> None:
        """`sums`: [4, blocks, specs] of u u, u r, sqrt(v) u u and sqrt(v) u r; `rr`, `vrr`: [blocks, 1] of r r."""
        uu, ur, vuu, vur = sums
        scale = torch.where(self._matched & (uu > 0), (rr / uu).sqrt(), 1.0)
        self._scale.copy_(scale)
        cosine = 1 - torch.where(uu > 0, ur / (uu * rr).sqrt(), 0.0)
        error = (scale.square() * uu - 2 * scale * ur + rr) / rr
        v_error = (scale.square() * vuu - 2 * scale * vur + vrr) / vrr
        terms = torch.stack([cosine.clamp_(min=0.0), error.clamp_(min=0.0).sqrt_(), v_error.clamp_(min=0.0).sqrt_()])
        self._sums[:3] += torch.where(rr > 0, terms, 0.0)  # a block without gradient loses nothing

    def _block_sums(self, flat: Tensor) -> Tensor:
        return self._slices.block_sums(self._slices.sums(flat) * self._chosen)

    def terms(self) -> dict[str, dict[str, dict[str, float]]]:
        """Block -> spec -> term -> value for the specs that apply; empty before the first sample after BURN_IN."""
        measured = self.num_samples - BURN_IN
        if measured < 1:
            return {}
        means = (self._sums[:3] / measured).tolist()
        gained = self._sums[3].tolist()
        descent, squares = self._descent.tolist()
        found: dict[str, dict[str, dict[str, float]]] = {}
        for b, block in enumerate(self._slices.blocks):
            found[block.name] = {}
            for s, run in enumerate(self._runs):
                if not run.covers[b]:
                    continue
                terms = {name: means[i][b][s] for i, name in enumerate(TERMS[:3])}
                under = max(descent[b], squares[b] ** 0.5)
                if self._num_next > BURN_IN:
                    terms["descent_next"] = (descent[b] - gained[b][s]) / under if under > 0 else 0.0
                found[block.name][run.spec.name] = terms
        return found

    # -- resume ---------------------------------------------------------------------------------------------------

    def _tensors(self) -> list[Tensor]:
        runs = [tensor for run in (self._reference, *self._runs) for tensor in run.tensors()]
        return [*runs, self._sums, self._scale, self._descent]

    def state_dict(self, *, copies: bool = True) -> dict[str, Any]:
        """See `GradientProfiler.state_dict`."""
        return {
            "num_samples": self.num_samples,
            "num_next": self._num_next,
            "tensors": [tensor.to("cpu", copy=copies) for tensor in self._tensors()],
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Restores a state of the same specs on the same slices."""
        self.num_samples, self._num_next = state["num_samples"], state["num_next"]
        for mine, theirs in zip(self._tensors(), state["tensors"], strict=True):
            mine.copy_(theirs)


def _chosen(slices: Slices) -> list[bool]:
    """Whether each piece is measured: all vectors, and MATRICES evenly spread matrices of each block."""
    chosen = [True] * len(slices.pieces)
    for index in range(len(slices.blocks)):
        order = {param.name: i for i, param in enumerate(slices.blocks[index].params)}
        matrices = [i for i, piece in enumerate(slices.pieces) if piece.matrix and piece.block == index]
        matrices.sort(key=lambda i: order[slices.pieces[i].param.name])
        kept = {matrices[i * len(matrices) // MATRICES] for i in range(min(MATRICES, len(matrices)))}
        if len(matrices) > MATRICES:
            for i in matrices:
                chosen[i] = i in kept
    return chosen


def is_reference(spec: OptimizerSpec) -> bool:
    """True for fp32 AdamW in any weight format and placement: shadow runs are measured against it."""
    return (spec.rule, spec.storage) == ("adamw", "fp32")


def shadowed(specs: Sequence[OptimizerSpec], *, blocks: Sequence[Block]) -> list[OptimizerSpec]:
    """The specs that apply to any of `blocks`, without fp32 AdamW, whose distance from itself is 0."""
    return [
        spec
        for spec in specs
        if not is_reference(spec)
        and any(applies(block, spec=spec, rule=RULES[spec.rule].info) is None for block in blocks)
    ]
