"""Families of fused rules that see a matrix: shared v, Adafactor, column norms, Muon and FOAM. Needs no Triton.

Bytes of state per parameter of a (rows, cols) matrix with m in fp32 / bf16 / int8: shared v 4 / 2 / 1.0625 and one
vector; Adafactor two vectors, plus m if it has one; column norms none; Muon m; FOAM of level l 8 / 4 / 2.125 over 2^l.
"""

from collections.abc import Callable
from functools import partial
from math import prod

from baoc.kernels.triton.kinds import (
    M_CODECS,
    M_SCALE,
    PACKED,
    PACKED_GROUP,
    V_CODECS,
    V_SCALE,
    Family,
    Kind,
    LaunchConfig,
    M,
    Options,
    Row,
    RuleKind,
    Shape,
    V,
    adam_row,
    codec_bytes,
    register,
    sign_row,
)

FOLD_TILE = 32  # folded numbers of a program are a multiple of this, the quantiser's group
_DECAY, _ALPHA = 0.8, 0.25  # as baoc.optim.rules.adafactor and baoc.optim.rules.foam
_SHORTEST_LINE, _LONGEST_LINE = 128, 16384  # elements of a line that one program steps


# -- shared v, column norms and Adafactor -------------------------------------------------------------------------


def stored(shape: Shape) -> tuple[int, int]:
    """The matrix as it lies in memory: (lines, elements of a line)."""
    return (shape.cols, shape.rows) if shape.transposed else (shape.rows, shape.cols)


def shares_lines(rule: str, shape: Shape) -> bool:
    """Whether shared v (or the column norm) is one number per line in memory; else it is one per position in a line."""
    return (rule == "adamw_shared_in") != shape.transposed


def whole_lines(rule: str, shape: Shape) -> bool:
    """Whether a program steps a complete line: lines are complete groups, and neither too short nor too long."""
    length = stored(shape)[1]
    fits = length % PACKED_GROUP == 0 and _SHORTEST_LINE <= length <= _LONGEST_LINE
    return not rule.startswith("adafactor") and shares_lines(rule, shape) and fits


def adafactor_row(options: Options, step: int, *, has_m: bool) -> Row:
    """`adam_row` for Adafactor: the weight of g^2 is step^-.8, and inv_bc2 is m's correction, which clipping uses."""
    beta1 = options.betas[0]
    correction = 1 / (1 - beta1**step) if has_m else 1.0
    decay = 1 - options.lr * options.weight_decay
    return (decay, options.lr, 1 - beta1, 0.0, step**-_DECAY, correction, 0.0, 1.0)


def _m_sizes(kind: Kind, shape: Shape) -> dict[str, int]:
    return codec_bytes(kind.m, shape.numel, name="m") if kind.traits.has_m else {}


def _shared_sizes(kind: Kind, shape: Shape) -> dict[str, int]:
    length = shape.rows if kind.rule == "adamw_shared_in" else shape.cols
    return _m_sizes(kind, shape) | {"v": 4 * length}


def _adafactor_sizes(kind: Kind, shape: Shape) -> dict[str, int]:
    return _m_sizes(kind, shape) | {"v_row": 4 * shape.rows, "v_col": 4 * shape.cols}


def _launch_config(kind: Kind, fp32_params: bool) -> LaunchConfig:
    """The fastest configs on an H100, by experiments/benchmarks/matrix_step.py."""
    if kind.traits.has_m and kind.m in ("fp32", "root4"):
        return LaunchConfig(chunk=512, warps=4, vector=4)
    return LaunchConfig(chunk=1024, warps=4, vector=4) if fp32_params else LaunchConfig(chunk=256, warps=1, vector=8)


def _parts_launch_config(kind: Kind, fp32_params: bool) -> LaunchConfig:
    """The fastest configs on an H200 for matrices stepped by chunks. One warp, because waiting for others costs more
    than it saves; few registers, so that many programs fit; four chunks share the loads of a tensor's rows."""
    if fp32_params or (kind.traits.has_m and kind.m == "fp32"):
        packed = kind.traits.has_m and kind.m == "root4"
        return LaunchConfig(chunk=256, warps=1, vector=4, registers=80 if packed else 64, repeat=4)
    return LaunchConfig(chunk=256, warps=1, vector=8, registers=64, repeat=4)


def _lines_launch_config(kind: Kind, fp32_params: bool) -> LaunchConfig:
    """The fastest configs for matrices that are mostly stepped by complete lines."""
    if not fp32_params and not (kind.traits.has_m and kind.m in ("fp32", "root4")):
        return LaunchConfig(chunk=256, warps=1, vector=8, registers=64)
    return _launch_config(kind, fp32_params)


def _chunks(shape: Shape, config: LaunchConfig) -> int:
    return -(-shape.numel // (config.chunk * config.repeat))


def _programs(rule: str) -> Callable[[Shape, LaunchConfig], int]:
    return lambda shape, config: (
        -(-stored(shape)[0] // config.repeat) if whole_lines(rule, shape) else _chunks(shape, config)
    )


for _rule in ("adamw_shared_in", "adamw_shared_out"):
    register(
        Family(
            module="baoc.kernels.triton.matrix",
            rules={_rule: RuleKind(has_m=True, has_v=False, counts_steps=True, row=adam_row)},
            columns={"m": M, "m.scale": M_SCALE, "v": V},
            sizes=_shared_sizes,
            programs=_programs(_rule),
            launch_config=_lines_launch_config if _rule == "adamw_shared_in" else _parts_launch_config,
        )
    )

register(
    Family(
        module="baoc.kernels.triton.matrix",
        rules={"column_norm": RuleKind(has_m=False, has_v=False, counts_steps=False, row=sign_row)},
        columns={},
        sizes=_m_sizes,
        programs=_programs("column_norm"),
        launch_config=_launch_config,
    )
)

register(
    Family(
        module="baoc.kernels.triton.matrix",
        rules={
            name: RuleKind(has_m=has_m, has_v=False, counts_steps=True, row=partial(adafactor_row, has_m=has_m))
            for name, has_m in (("adafactor", False), ("adafactor_momentum", True))
        },
        columns={"m": M, "m.scale": M_SCALE, "v_row": V, "v_col": V_SCALE},
        sizes=_adafactor_sizes,
        programs=_chunks,
        launch_config=_parts_launch_config,
    )
)

register(
    Family(
        module="baoc.kernels.triton.muon",
        rules={"muon": RuleKind(has_m=True, has_v=False, counts_steps=False, row=sign_row)},
        columns={"m": M, "m.scale": M_SCALE},
        sizes=_m_sizes,
        programs=_chunks,
        launch_config=_launch_config,
        takes_workspace=True,
    )
)


# -- FOAM -----------------------------------------------------------------------------------------------------------

FOLDS: dict[str, int] = {f"foam_l{level}": 2**level for level in (1, 2, 3)}  # rule -> elements of a fold
_FOLD_M, _FOLD_V = (tuple(name for name in codecs if name not in PACKED) for codecs in (M_CODECS, V_CODECS))


def folded(rule: str, shape: Shape) -> tuple[int, int]:
    """Shape of the folded states: (fan_out, fan_in / fold), rounded up."""
    return shape.rows, -(-shape.cols // FOLDS[rule])


def entries(rule: str, config: LaunchConfig) -> int:
    """Folded numbers of a program."""
    return max(FOLD_TILE, config.chunk // FOLDS[rule])


def foam_row(options: Options, step: int) -> Row:
    """`adam_row` for FOAM: the bias corrections of m and v are in `size`."""
    (beta1, beta2), lr = options.betas, options.lr
    per_lr = _ALPHA * (1 - beta2**step) ** 0.5 / (1 - beta1**step)
    return (1 - lr * options.weight_decay, lr * per_lr, 1 - beta1, beta2, 1 - beta2, 1.0, options.eps, per_lr)


def _foam_sizes(kind: Kind, shape: Shape) -> dict[str, int]:
    rows, cols = folded(kind.rule, shape)
    return codec_bytes(kind.m, rows * cols, name="m") | codec_bytes(kind.v, rows * cols, name="v")


def _foam_launch_config(kind: Kind, fp32_params: bool) -> LaunchConfig:
    """The fastest configs on an H200. One warp holds complete groups, so that nothing is exchanged between warps."""
    fold = FOLDS[kind.rule]
    if not fp32_params:
        return LaunchConfig(chunk=256, warps=1, vector=8, registers=64)
    if kind.m in ("fp32", "bf16"):
        return LaunchConfig(chunk=256, warps=1, vector=4, registers=64)
    return LaunchConfig(chunk=256, warps=1, vector=4, registers=80 if fold == 2 else 64, repeat=1 if fold == 2 else 4)


def _foam_programs(rule: str) -> Callable[[Shape, LaunchConfig], int]:
    return lambda shape, config: -(-prod(folded(rule, shape)) // (entries(rule, config) * config.repeat))


for _rule in FOLDS:
    register(
        Family(
            module="baoc.kernels.triton.foam",
            rules={_rule: RuleKind(has_m=True, has_v=True, counts_steps=True, row=foam_row)},
            m=_FOLD_M,
            v=_FOLD_V,
            columns={"m": M, "m.scale": M_SCALE, "v": V, "v.scale": V_SCALE},
            sizes=_foam_sizes,
            programs=_foam_programs(_rule),
            launch_config=_foam_launch_config,
        )
    )
