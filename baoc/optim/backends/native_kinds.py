"""What the native step needs to know: which kind steps a parameter, its settings in a step, and thresholds."""

from functools import lru_cache
from math import log

import torch
from torch import Tensor

from baoc.core.catalogue import CODECS, STORAGES
from baoc.kernels.cpp import CODECS as NATIVE_CODECS
from baoc.kernels.cpp import CODES, THRESHOLDS, NativeKind, Settings
from baoc.kernels.cpp import WEIGHTS as NATIVE_WEIGHTS
from baoc.optim.backends.base import Options
from baoc.optim.codecs.base import lanes
from baoc.optim.codecs.grouped import Log8M, Log8V
from baoc.optim.rules import RULES
from baoc.optim.rules.base import decl_named
from baoc.optim.state import Slot
from baoc.types import Axis, OptimizerSpec, RuleInfo, StateLayout

SIGNS = ("lion", "signum", "sign")  # their updates have an RMS of at most 1
_ELEMENTWISE = ("adamw", "rmsprop", *SIGNS)
_SHARED = {"adamw_shared_in": "adamw_shared_out", "adamw_shared_out": "adamw_shared_in"}  # and with the matrix turned
_LION_DECAY = 0.99  # as baoc.optim.rules.sign
_FOAM_ALPHA = 0.25  # as baoc.optim.rules.foam
_CPU = torch.device("cpu")


def refusal(spec: OptimizerSpec) -> str:
    """Why there is no native step for the spec; empty if there is."""
    rule, storage = RULES[spec.rule].info, STORAGES[spec.storage]
    if not (rule.name in _ELEMENTWISE or rule.name in _SHARED or fold_of(rule) > 1):
        return f"there is no native step for rule {rule.name}"
    unknown = {storage.codec(decl) for decl in rule.states} - set(NATIVE_CODECS)
    if unknown:
        return f"there is no native step for states kept as {', '.join(sorted(unknown))}"
    if spec.weights not in ("native", *NATIVE_WEIGHTS):
        return f"there is no native step for {spec.weights} weights"
    return ""


def fold_of(rule: RuleInfo) -> int:
    """Elements that one state of FOAM stands for; 1 of other rules."""
    folded = rule.name.startswith("foam") and rule.states[0].layout is StateLayout.FOLDED
    return 2 ** decl_named(rule, "m").level if folded else 1


def kind_of(slot: Slot) -> NativeKind:
    """The native step of one parameter."""
    rule, codecs = slot.rule.info, {kept.decl.name: kept.codec.info.name for kept in slot.kept}
    name, fold, weights = rule.name, fold_of(rule), slot.weights
    if fold > 1:
        name = "foam_in" if rule.states[0].axis is Axis.FAN_IN else "foam_out"
    elif slot.info.transposed:
        name = _SHARED.get(name, name)
    if weights in ("native", "bf16"):
        weights = "bf16" if slot.param.dtype is torch.bfloat16 else "fp32"
    return NativeKind(
        rule=name,
        m=codecs.get("m", "fp32"),
        v=codecs.get("v", "fp32"),
        weights=weights,
        fold=fold,
        of_squares=fold > 1 and decl_named(rule, "v").of_squares,
    )


def stored_shape(slot: Slot) -> tuple[int, int]:
    """(rows, columns) of the matrix as it lies in memory; one row where there is no matrix."""
    rows, cols = slot.matrix or (1, slot.param.numel())
    return (cols, rows) if slot.info.transposed else (rows, cols)


def settings_of(rule: RuleInfo, options: Options, *, step: int) -> tuple[Settings, float]:
    """Settings of a rule in one step, and the divisor of its update."""
    (beta1, beta2), lr = options.betas, options.lr
    decay = 1 - lr * options.weight_decay
    if rule.name in SIGNS:
        return Settings(decay=decay, size=-lr, w1=1 - beta1, w2=1 - min(beta2, _LION_DECAY)), 1.0
    divisor, bc2 = 1 - beta1**step, (1 - beta2**step) ** 0.5
    if rule.name == "rmsprop":
        divisor = 1.0
    elif fold_of(rule) > 1:
        divisor = divisor / bc2 / _FOAM_ALPHA
    size = -(lr / divisor)
    return Settings(decay=decay, size=size, w1=1 - beta1, b2=beta2, w2=1 - beta2, bc2=bc2, eps=options.eps), divisor


@lru_cache(maxsize=1)
def code_values() -> Tensor:
    """fp32 [2, CODES]: what the logarithmic codes of m, and of the root of v, stand for at a scale of 1."""
    codes = torch.arange(CODES, dtype=torch.float32, device=_CPU)
    signed = torch.where(codes < CODES // 2, codes, codes - CODES)
    return torch.stack([Log8M(CODECS["log8m"]).restore(signed), Log8V(CODECS["log8v"]).restore(codes)])


@lru_cache(maxsize=4)
def thresholds_of(phase: int) -> Tensor:
    """fp32 [THRESHOLDS]: the lanes of a step, then one half in place of each, as the codecs of v want them."""
    plain = lanes(phase, _CPU)
    found = torch.cat([_as_codecs_want(plain), _as_codecs_want(torch.full_like(plain, 0.5))])
    assert found.numel() == THRESHOLDS
    return found


def _as_codecs_want(plain: Tensor) -> Tensor:
    """Thresholds, fp32 [32], followed by what the logarithmic codecs make of them: fp32 [192]."""
    octaves = 2 * Log8V.octaves / 254
    log8v = torch.log1p(plain * (2.0**octaves - 1)) / log(2.0**octaves)
    per_unit = torch.tensor([[8.0], [4.0], [2.0], [1.0]], device=_CPU) / 4  # octaves of v, for k = 0 ... 3
    lattice = torch.log1p((torch.exp2(per_unit) - 1) * plain).div_(per_unit * log(2))
    return torch.cat([plain, log8v, lattice.view(-1)])
