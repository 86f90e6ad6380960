"""Fused steps held against the eager rules and codecs: the cases, on any device, for the tests and for the benchmark.

Every step starts from equal states, so a difference is that of one step. What may differ, and why: the kernel fuses
multiply and add, multiplies by reciprocals and takes sqrt, exp2 and log2 of the device, each good to one or two units
in the last place of fp32. So numbers agree to a few 1e-7, and a code differs by one where a number lies that near to
the boundary between two codes: a share of about (codes x 1e-6), for a scale about 2^-14.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from baoc.core.catalogue import STORAGES
from baoc.kernels import FusedTable, Kind, LaunchConfig, Shape
from baoc.kernels.triton.kinds import ELEMENTWISE, GROUP, PACKED
from baoc.kernels.usable import usable
from baoc.optim.codecs import CODEC_IMPLS, Codec, lanes
from baoc.optim.rules import RULES, RuleContext
from baoc.optim.weights import merge_weights, round_at_random_, split_weights_
from baoc.types import StateLayout
from tests.support.fused_step import engine_of, fused_step

SIZES = (1, 7, 255, 256, 257, 0, 1300)
SMALL_CONFIG = LaunchConfig(chunk=512, warps=1)
RTOL = 1e-6  # fp32 numbers, of the largest in the tensor's step
CORRECTIONS = {"split8": torch.int8}
ODD_CODES = 2e-3  # share of codes that may differ by one
State = dict[str, Tensor]


@dataclass(frozen=True, slots=True, kw_only=True)
class Options:
    lr: float = 1e-2
    betas: tuple[float, float] = (0.9, 0.95)
    eps: float = 1e-8
    weight_decay: float = 0.1


@dataclass(slots=True, kw_only=True)
class Case:
    """What is stepped, and how."""

    rule: str
    storage: str = "fp32"
    param: torch.dtype = torch.float32
    grad: torch.dtype = torch.float32
    weights: str = "native"
    device: str = "cpu"
    sizes: Sequence[int] = SIZES
    config: LaunchConfig | None = SMALL_CONFIG
    options: Sequence[Options] = (Options(), Options(lr=3e-3, betas=(0.8, 0.999), weight_decay=0.0))

    @property
    def name(self) -> str:
        names = (self.rule, self.storage, self.weights, self.param, self.grad)
        return "-".join(str(name).removeprefix("torch.") for name in names)

    @property
    def kind(self) -> Kind:
        storage = STORAGES[self.storage]
        return Kind(rule=self.rule, m=storage.m, v=storage.v, weights=self.weights)


def all_cases(
    device: str = "cpu", *, sizes: Sequence[int] = SIZES, config: LaunchConfig | None = SMALL_CONFIG
) -> list[Case]:
    """Every rule in every storage, for fp32 and bf16 parameters; mixed gradients and split weights for some."""
    float32, bfloat16 = torch.float32, torch.bfloat16
    cases = []
    for rule in ELEMENTWISE.rules:
        for storage in STORAGES if rule != "sign" else ("fp32",):
            cases += [Case(rule=rule, storage=storage, param=p, grad=p) for p in (float32, bfloat16)]
    return _finished(cases, device=device, sizes=sizes, config=config)


def few_elementwise_cases() -> list[Case]:
    """Of `all_cases` those among which a rule meets every codec of its states, types of parameters alternating.

    AdamW has m and v in every storage; what others share with it, they have in two storages, one of each type.
    """
    others = {
        "rmsprop": ("fp32", "int8_root"),
        "lion": ("bf16", "int8"),
        "signum": ("int4", "int8_root"),
        "sign": ("fp32",) * 2,
    }
    cases = []
    for rule in ELEMENTWISE.rules:
        for column, storage in enumerate(others.get(rule, STORAGES)):
            dtype = (torch.float32, torch.bfloat16)[column % 2]
            cases.append(Case(rule=rule, storage=storage, param=dtype, grad=dtype))
    return _finished(cases, device="cpu", sizes=SIZES, config=SMALL_CONFIG)


def _finished(cases: list[Case], *, device: str, sizes: Sequence[int], config: LaunchConfig | None) -> list[Case]:
    """With mixed gradients and split weights, for some rules."""
    float32, bfloat16 = torch.float32, torch.bfloat16
    if hasattr(Tensor, "grad_dtype"):  # before it, torch refuses gradients of another type
        cases += [Case(rule="adamw", storage="int8", param=bfloat16, grad=float32)]
        cases += [Case(rule="adamw", param=bfloat16, grad=float32, weights="split8")]
    cases += [Case(rule=r, storage="int8", param=bfloat16, grad=bfloat16, weights="split8") for r in ("adamw", "lion")]
    cases += [Case(rule="adamw", param=bfloat16, grad=bfloat16, weights=w) for w in ("bf16_sr",)]
    for case in cases:
        case.device, case.sizes, case.config = device, sizes, config
    return cases


class Twin:
    """The same parameters and states twice: `step` runs the kernel on one and the eager path on the other."""

    def __init__(self, case: Case, *, seed: int = 0):
        self.case, self.kind = case, case.kind
        self.random = torch.Generator().manual_seed(seed)
        self.shapes = self._shapes()
        self.params = [self._param(shape).requires_grad_() for shape in self.shapes]
        self.states = [self._state(index, param=param) for index, param in enumerate(self.params)]
        self.groups = [i % len(case.options) for i in range(len(self.params))]
        self.matches = [torch.tensor([1.0, 1.0], device=case.device) for _ in self.params]
        self.table = FusedTable(
            self.params,
            kind=self.kind,
            states=self.states,
            groups=self.groups,
            matches=self.matches,
            shapes=self.shapes,
            seeds=range(len(self.params)) if case.weights == "bf16_sr" else None,
            config=case.config,
        )
        self.engine = engine_of(self.table)
        self.eager = self.copy()
        self.phase = 0

    def _shapes(self) -> list[Shape]:
        return [Shape(numel=size) for size in self.case.sizes]

    def _param(self, shape: Shape) -> Tensor:
        return self._randn(shape.numel, self.case.param)

    def _kept(self, index: int) -> dict[str, tuple[Codec, tuple[int, ...]]]:
        """Codec and shape of each state of a tensor."""
        codecs = {"m": self.kind.m, "v": self.kind.v}
        shape = (self.shapes[index].numel,)
        return {decl.name: (CODEC_IMPLS[codecs[decl.name]], shape) for decl in RULES[self.case.rule].info.states}

    def _context(self, index: int, **given: Any) -> RuleContext:
        return RuleContext(**given)

    def _randn(self, size: int, dtype: torch.dtype, *, spread: float = 0.0) -> Tensor:
        values = torch.randn(size, generator=self.random)
        if spread:
            values = values * torch.exp2(spread * torch.randn(size, generator=self.random))
        return values.to(self.case.device, dtype)

    def _state(self, index: int, *, param: Tensor) -> State:
        state: State = {}
        for name, (codec, shape) in self._kept(index).items():
            state |= {f"{name}{part}": tensor for part, tensor in codec.allocate(shape, param.device).items()}
        if self.kind.weights in CORRECTIONS:
            state["correction"] = torch.zeros_like(param, dtype=CORRECTIONS[self.kind.weights])
        return state

    def copy(self) -> tuple[list[Tensor], list[State], Tensor]:
        params = [param.detach().clone() for param in self.params]
        return params, [{k: t.clone() for k, t in s.items()} for s in self.states], self.table.steps.clone()

    def new_gradients(self, *, idle: Sequence[int] = ()) -> None:
        """Gradients over some orders of magnitude, a tenth of them exactly zero; none for `idle` tensors."""
        for index, param in enumerate(self.params):
            grad = self._randn(param.numel(), torch.float32, spread=2.0) * 1e-3
            grad[torch.rand(param.numel(), generator=self.random).to(grad.device) < 0.1] = 0.0
            param.grad = None if index in idle else grad.to(self.case.grad) if self.case.grad != torch.float32 else None
            if index not in idle and self.case.grad == torch.float32:
                if self.case.param != torch.float32:
                    param.grad_dtype = torch.float32
                param.grad = grad

    def step(
        self, *, factors: Sequence[float] | None = None, marked: bool = False, track: bool = True
    ) -> Tensor | None:
        """One step of both, from the eager one's states. Returns the fused sums of squares if `track`.

        `factors` multiply the updates; `marked`: elements of the gradients that are -0.0 are left out.
        """
        self.load(self.eager)
        self.phase += 1
        for match, factor in zip(self.matches, factors or (), strict=False):
            match.copy_(torch.tensor([factor, 1.0]))
        sums = fused_step(
            self.table,
            options=self.case.options,
            thresholds=lanes(self.phase, torch.device("cpu")),
            phase=self.phase,
            matched=factors is not None,
            track=track,
            marked=marked,
        )
        for index, param in enumerate(self.params):
            if param.grad is not None:
                mask = ~((param.grad == 0) & param.grad.signbit()) if marked else None
                self._step_eager(index, grad=param.grad, factor=factors[index] if factors else None, mask=mask)
        return sums

    def load(self, source: tuple[list[Tensor], list[State], Tensor]) -> None:
        """Takes over parameters and states, as a backend that goes on where the other stopped."""
        params, states, steps = source
        with torch.no_grad():
            for own, other in zip(self.params, params, strict=True):
                own.copy_(other)
        for own, other in zip(self.states, states, strict=True):
            for key, tensor in own.items():
                tensor.copy_(other[key])
        self.table.steps.copy_(steps)

    def _step_eager(self, index: int, *, grad: Tensor, factor: float | None, mask: Tensor | None) -> None:
        params, states, steps = self.eager
        param, state, options = params[index], states[index], self.case.options[self.groups[index]]
        rule, kept = RULES[self.case.rule], self._kept(index)
        steps[index] += self.kind.traits.counts_steps
        finite = usable(grad) if mask is None else usable(grad) & mask
        grad = torch.where(finite, grad.to(torch.float32), 0.0)
        parts = {name: {p: state[f"{name}{p}"] for p in ("", ".scale") if f"{name}{p}" in state} for name in kept}
        values = {name: codec.decode(parts[name], shape).clone() for name, (codec, shape) in kept.items()}
        old = {name: tensor.clone() for name, tensor in values.items()}
        (beta1, beta2), step = options.betas, int(steps[index])
        ctx = self._context(index, step=step, beta1=beta1, beta2=beta2, eps=options.eps, finite=finite)
        direction = rule.direction(grad, states=values, ctx=ctx)
        update = direction.update().clone()
        full = {decl.name for decl in rule.info.states if decl.layout is StateLayout.FULL}
        for name, (codec, _) in kept.items():
            now = torch.where(finite, values[name], old[name]) if name in full else values[name]
            codec.encode_(parts[name], now, phase=self.phase if name.startswith("v") or codec.info.phased else None)
        split = self.kind.weights in CORRECTIONS
        work = merge_weights(param, state["correction"]) if split else param.to(torch.float32)
        size = options.lr / direction.divisor * (1.0 if factor is None else factor)
        new = torch.where(finite, work * (1 - options.lr * options.weight_decay) - size * update, work)
        if split:
            split_weights_(param, state["correction"], values=new, thresholds=lanes(self.phase, new.device))
        elif self.kind.weights == "bf16_sr":
            round_at_random_(param, values=new, seed=index, phase=self.phase)
        else:
            param.copy_(new)
        self.square = (torch.where(finite, update, 0.0) / direction.divisor).square().sum()


def check_equal(twin: Twin, *, rtol: float = RTOL, loose: float = 0.0) -> float:
    """Raises AssertionError unless both agree as the module's text says; returns the share of odd codes.

    `loose`: of the largest, what one number of a tensor or one in 10^4 may be off by, where differences of nearly equal
    numbers are divided by small ones.
    """
    params, states, steps = twin.eager
    found: list[tuple[int, int]] = []
    where = twin.case.name
    # A weight near zero has another sign after one odd code of 4 bits, which bf16 tells as thousands of its own apart
    loose_bf16 = loose if {twin.kind.m, twin.kind.v} & set(PACKED) else 0.0
    assert torch.equal(twin.table.steps, steps), where
    for index, (own, other) in enumerate(zip(twin.params, params, strict=True)):
        state, expected = twin.states[index], states[index]
        if twin.kind.weights in CORRECTIONS:
            a, b = merge_weights(own.detach(), state["correction"]), merge_weights(other, expected["correction"])
            close = rtol + (2.0**-8 / 127 if twin.kind.weights == "split8" else 0.0)  # a code
            _compare_numbers(a, b, rtol=close, atol=rtol * 0.1, loose=loose, where=f"{where} weights {index}")
        else:
            given = {"where": f"{where} param {index}", "rtol": rtol, "loose": loose, "loose_bf16": loose_bf16}
            found.append(_compare(own.detach(), other, **given))
        for key, tensor in state.items():
            if key != "correction":
                codec = twin.kind.m if key.startswith("m") else twin.kind.v
                moved = _moved_scales(state, expected, key=key, codec=codec)
                own, other = _unpacked(tensor, codec), _unpacked(expected[key], codec)
                given = {"where": f"{where} {key} {index}", "rtol": rtol, "loose": loose, "moved": moved}
                scales, codes = (codec, "") if key.endswith(".scale") else ("", codec)
                found.append(_compare(own, other, **given, scales_of=scales, codes_of=codes))
    share = sum(odd for odd, _ in found) / max(sum(total for _, total in found), 1)
    assert share <= ODD_CODES, f"{where}: {share:.1e} of the codes differ"
    return share


def _compare_numbers(a: Tensor, b: Tensor, *, rtol: float, atol: float, loose: float, where: str) -> None:
    """`atol` and `loose` are of the largest number of b."""
    distance, largest = (a - b).abs(), float(b.abs().max()) if b.numel() else 0.0
    off = ~(distance <= rtol * b.abs() + atol * largest)
    num_off, worst = int(off.sum()), float(distance.max()) if b.numel() else 0.0
    text = f"{where}: {num_off} of {b.numel()} numbers are off, by up to {worst:.2e} where the largest is {largest:.2e}"
    assert num_off <= (max(1, b.numel() // 10_000) if loose else 0), text
    assert not num_off or worst <= loose * largest, text


def _moved_scales(state: dict[str, Tensor], expected: dict[str, Tensor], *, key: str, codec: str) -> Tensor:
    """By how much more than rounding makes it codes (bytes of two, in 4 bits) may differ because of their scale.

    A number on the boundary between two scales may take either. They are 1/256 of each other apart, and so are codes
    that are proportional to the number, as those of sqrt8: near 255 by one. A group of lattice4 on the boundary between
    two lattices may take either too, whose codes have nothing in common; few groups are (`ODD_CODES`).
    """
    scale = state.get(f"{key}.scale")
    if scale is None:
        return torch.zeros((), dtype=torch.int16)
    codes = state[key]
    own, other = scale.view(torch.int16), expected[f"{key}.scale"].view(torch.int16)
    moved = (own != other).to(torch.int16)
    if codec == "lattice4":
        moved = torch.where((own & 3) != (other & 3), 14, moved)
    moved = moved.reshape(-1).repeat_interleave(GROUP)[: codes.numel()]
    return moved if codec in PACKED else moved.view(codes.shape)


def _compare(
    a: Tensor,
    b: Tensor,
    *,
    where: str,
    rtol: float,
    loose: float,
    loose_bf16: float = 0.0,
    moved: Tensor | None = None,
    scales_of: str = "",
    codes_of: str = "",
) -> tuple[int, int]:
    """Odd codes and all codes; numbers in fp32 are no codes."""
    assert a.dtype is b.dtype and a.shape == b.shape, where
    if a.dtype is torch.float32:
        _compare_numbers(a, b, rtol=rtol, atol=rtol * 0.1, loose=loose, where=where)
        return 0, 0
    codes, expected = _codes(a), _codes(b)
    gap = (codes - expected).abs()
    if scales_of == "lattice4":  # four times an exponent, in steps of its lattice, and which of four lattices that is
        step = torch.where((codes & 3) == (expected & 3), 4 * (8 >> (codes & 3)), 1)
        neighbours = ((codes & 3) - (expected & 3)).abs() == 1
        gap = torch.where((gap == step) | neighbours, 1, gap)
    off = torch.zeros_like(gap, dtype=torch.bool)  # one number, or one in 10^4, as `_compare_numbers` has it
    if a.dtype is torch.bfloat16 and b.numel():  # what nearly cancelled is known to a part of the largest
        distance, largest = (a.to(torch.float32) - b.to(torch.float32)).abs(), float(b.abs().max())
        gap = torch.where(distance <= rtol * 0.1 * largest, gap.clamp(max=1), gap)
        off = (gap > 1) & (distance <= loose_bf16 * largest)
        off &= int(off.sum()) <= max(1, off.numel() // 10_000)
    if codes_of == "root8m":  # likewise: 3e-8 of its group's largest is code 2, the same below zero -2
        shares = [c.to(torch.float32).div(127).pow(4).copysign(c) for c in (codes, expected)]
        gap = torch.where((shares[0] - shares[1]).abs() <= rtol * 0.1, gap.clamp(max=1), gap)
    beyond = gap if moved is None else gap - moved.to(gap.device, gap.dtype)
    wrong = (beyond > 1) & ~off
    assert not bool(wrong.any()), (
        f"{where}: {int(wrong.sum())} of {gap.numel()} codes are up to {int(gap[wrong].max())} apart: "
        f"{a[wrong][:4].tolist()} where {b[wrong][:4].tolist()} is expected"
    )
    return int(gap.count_nonzero()), gap.numel()


def _unpacked(tensor: Tensor, codec: str) -> Tensor:
    """Codes of 4 bits apart from each other, those of m with their sign; others as they are."""
    if codec not in PACKED or tensor.dtype is not torch.uint8:
        return tensor
    codes = torch.stack((tensor & 15, tensor >> 4)).to(torch.int32)
    return torch.where(codes > 7, codes - 16, codes) if codec == "root4" else codes


def _codes(tensor: Tensor) -> Tensor:
    """Codes as int32; bf16 numbers as their place among all bf16 numbers."""
    if tensor.dtype is not torch.bfloat16:
        return tensor.to(torch.int32)
    bits = tensor.view(torch.int16).to(torch.int32)
    return torch.where(bits < 0, -(bits & 0x7FFF), bits)
