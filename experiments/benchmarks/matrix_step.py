"""Time of one step of the rules that see a matrix, over all tensors of a model, beside torch's fused AdamW.

    python experiments/benchmarks/matrix_step.py  # 3 minutes of an H200 -> matrix_step.csv

Most of the time is compiling, in parallel. A step is what an optimizer runs: matrices by the rule, RMS-matched, and
vectors by fp32 AdamW, all in one graph. The floor moves gradients once, weights and states both ways, at the speed of a
device copy. kernel_check.py holds the kernels against their twins.
"""

import argparse
import subprocess
import sys
from collections.abc import Sequence
from math import prod
from pathlib import Path
from statistics import median

import torch
from torch import Tensor

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT))

from baoc.core.catalogue import STORAGES
from baoc.kernels import Engine, FusedTable, Kind, LaunchConfig, Shape, polar
from baoc.optim.backends import Options
from baoc.optim.backends.fused import kernel_lanes
from baoc.optim.codecs import CODEC_IMPLS
from baoc.optim.matching import DEFAULT_TARGET
from baoc.optim.rules import RULES
from baoc.types import ParamInfo, Role
from experiments.benchmarks.optimizer_step import (
    DEVICE,
    MODELS,
    Row,
    copy_gbps,
    events_ms,
    host_us,
    make_params,
    show,
    time_torch,
    versions,
)
from experiments.benchmarks.shared import free_memory, results_folder, write_rows

FLOAT32, BFLOAT16 = torch.float32, torch.bfloat16
# rule, storage, weights; parameters and gradients are fp32 where weights are native, else bf16
SPECS: list[tuple[str, str, str]] = [
    ("adamw_shared_in", "fp32", "native"), ("adamw_shared_in", "int8", "native"), ("adamw_shared_in", "int8", "split8"),
    ("adamw_shared_out", "fp32", "native"), ("adamw_shared_out", "int8", "native"),
    ("adamw_shared_out", "int8", "split8"), ("adafactor", "fp32", "native"), ("adafactor", "fp32", "split8"),
    ("adafactor_momentum", "fp32", "native"), ("adafactor_momentum", "int8", "native"),
    ("foam_l1", "fp32", "native"), ("foam_l2", "fp32", "native"), ("foam_l2", "int8", "native"),
    ("foam_l2", "int8", "split8"), ("foam_l3", "int8", "native"),
    ("adamw", "int4", "native"),
    ("adamw", "int4", "split8"), ("adamw", "int8_root", "native"), ("adamw", "int8_root", "split8"),
    ("muon", "fp32", "native"), ("muon", "int8", "split8"),
]  # fmt: skip
# A side of embeddings, heads and patches, which Muon leaves to others; its rows have floors of bytes alone, and under
# `cut` the rate of its products.
OUTER_SIDES = (1, 3, 1000, 32000)
WORKERS = 12
LEAST_PACKED = 4096


def name_of(spec: tuple[str, str, str]) -> str:
    rule, storage, weights = spec
    return rule + ("" if storage == "fp32" else f"_{storage}") + ("" if weights == "native" else f"+{weights}")


def make_engine(
    spec: tuple[str, str, str], shapes: Sequence[tuple[int, ...]], *, config: LaunchConfig | None = None
) -> Engine:
    """Matrices by the rule, others by fp32 AdamW; each tensor is a block."""
    rule, storage, weights = spec
    members: dict[Kind, list[tuple[Tensor, ParamInfo]]] = {}
    for param in make_params(list(shapes), FLOAT32 if weights == "native" else BFLOAT16):
        info = ParamInfo(name="w", shape=tuple(param.shape), dtype="float32", role=Role.MLP)
        takes_part = info.matrix_shape is not None or not RULES[rule].info.needs_matrix
        takes_part = takes_part and not (RULES[rule].info.hidden_only and set(param.shape) & set(OUTER_SIDES))
        small = storage == "int4" and param.numel() < LEAST_PACKED
        scheme = STORAGES["fp32" if small or not takes_part else storage]
        kind = Kind(rule=rule if takes_part else "adamw", m=scheme.m, v=scheme.v, weights=weights)
        members.setdefault(kind, []).append((param, info))
    return Engine(
        [make_table(kind, rows, config=config if kind.rule == rule else None) for kind, rows in members.items()]
    )


def make_table(
    kind: Kind, members: Sequence[tuple[Tensor, ParamInfo]], *, config: LaunchConfig | None = None
) -> FusedTable:
    params = [param for param, _ in members]
    shapes = []
    for param, info in members:
        rows, cols = info.matrix_shape or (0, 0)
        shapes.append(Shape(numel=param.numel(), rows=rows, cols=cols))
    matched = RULES[kind.rule].info.matched
    return FusedTable(
        params,
        kind=kind,
        states=[make_state(kind, param, info) for param, info in members],
        matches=[torch.full((2,), DEFAULT_TARGET, device=DEVICE) for _ in params] if matched else None,
        shapes=shapes,
        config=config,
    )


def make_state(kind: Kind, param: Tensor, info: ParamInfo) -> dict[str, Tensor]:
    state = {"correction": torch.zeros_like(param, dtype=torch.int8)} if kind.weights == "split8" else {}
    for decl in RULES[kind.rule].info.states:
        codec = "fp32" if decl.layout.startswith("per_") else kind.m if decl.name == "m" else kind.v
        parts = CODEC_IMPLS[codec].allocate(decl.shape(info), DEVICE)
        state |= {f"{decl.name}{part}": tensor for part, tensor in parts.items()}
    return state


def least_bytes(engine: Engine) -> int:
    """Bytes that a step must move."""
    total = 0
    for table in engine.tables:
        total += 3 * sum(param.numel() * param.element_size() for param in table.params)
        total += 2 * sum(sum(table.kind.sizes(shape).values()) for shape in table.shapes)
    return total


def operations(lines: int, length: int) -> float:
    """Floating-point operations of one matrix's products; of symmetric products only the half that is computed."""
    short, long = sorted((lines, length))
    total = 0.0
    for steps in polar.STRETCHES:
        # p at each step, q at all but the first, and two for the next X X^T at all but the last
        squares = 4 * steps - 3
        total += short * short * long + squares * short**3 + 2 * short * short * long
    return total


def products(engine: Engine) -> float:
    """Floating-point operations of Muon's products, 0 of other rules."""
    total = 0.0
    for table in engine.tables:
        if table.kind.rule == "muon":
            for shape in table.shapes:
                total += operations(shape.rows, shape.cols)
    return total


def time_spec(model: str, spec: tuple[str, str, str], *, gbps: float) -> Row:
    engine = make_engine(spec, MODELS[model])
    options, phase = (Options(lr=1e-3, betas=(0.9, 0.95), eps=1e-8, weight_decay=0.1),), iter(range(1, 10_000))
    matched = any(table.matches[0] is not None for table in engine.tables)

    def step() -> None:
        now = next(phase)
        engine.stage(options, thresholds=kernel_lanes(now), phase=now)
        engine.run(matched=matched)

    times, alone = events_ms(step), events_ms(lambda: engine.run(matched=matched))
    nbytes, num = least_bytes(engine), sum(map(prod, MODELS[model]))
    extra = sum(table.nbytes for table in engine.tables) / num
    flops = products(engine)
    cut = f"{flops / median(alone) / 1e9:.0f}TFLOP/s" if flops else f"+{extra:.3f}B"
    return Row(
        model=model, optimizer=name_of(spec), cut=cut, bytes_per_element=round(nbytes / num, 3), ms=median(times),
        min_ms=min(times), launch_ms=median(alone), host_us=host_us(step), floor_ms=nbytes / gbps / 1e6,
    )  # fmt: skip


def warm(part: int, parts: int) -> None:
    """Compiles what a share of the specs needs, on one tensor of each shape."""
    for spec in SPECS[part::parts]:
        for shapes in MODELS.values():
            engine = make_engine(spec, list(dict.fromkeys(shape for shape in shapes if prod(shape) < 2**25)))
            engine.stage((Options(lr=0.0, betas=(0.9, 0.95), eps=1e-8, weight_decay=0.0),), thresholds=kernel_lanes(1))
            engine.run(matched=any(table.matches[0] is not None for table in engine.tables))
            torch.cuda.synchronize()


def warm_in_parallel() -> None:
    running = [subprocess.Popen([sys.executable, __file__, "--warm", f"{i}/{WORKERS}"]) for i in range(WORKERS)]
    if any([process.wait() for process in running]):
        sys.exit("a kernel does not compile or run: see above")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--models", nargs="+", choices=MODELS, default=list(MODELS))
    parser.add_argument("--only", default="", help="part of the names of the specs to time")
    parser.add_argument("--warm", default="", help=argparse.SUPPRESS)
    args = parser.parse_args()
    torch.manual_seed(0)
    if args.warm:
        return warm(*map(int, args.warm.split("/")))
    warm_in_parallel()
    gbps, rows = copy_gbps(), []
    free_memory()
    print(f"{torch.cuda.get_device_name()}, torch {torch.__version__}, copy {gbps:.0f} GB/s", flush=True)
    for model in args.models:
        rows += [next(time_torch(model, gbps=gbps))]
        free_memory()
        for spec in SPECS:
            if args.only in name_of(spec):
                rows.append(time_spec(model, spec, gbps=gbps))
                free_memory()
    show(rows)
    write_rows(results_folder() / "matrix_step.csv", rows, **versions(gbps))


if __name__ == "__main__":
    main()
