"""Time of BlockwiseOptimizer.step as it runs: every spec alone, a plan of 8 specs, torch's fused AdamW beside them.

    python experiments/benchmarks/engine_step.py  # time not recorded, H200 -> engine_step.csv

First engine_check.py holds the fused backend, graph replays included, against the eager one. Then whole steps are timed
between CUDA events with gradients in place, medians of 15, all in one process; `host_us` is Python's part with an idle
device. The table is printed last. Peers are timed by `optimizer_step.py --peers`.

`floor_ms` is what a device copy would need for the bytes that a step has to move: gradients once, weights and states
twice. `ms` begins with an idle device, so the host's part is in it; `device_ms` begins when the host is ahead, as in
training. `mixed` gives every 25th block of 8 one of 8 specs; its `over_best` is its time per byte moved over that of
the best single spec of the same model (at most 1.3 is what it should be), `device_over_best` that of `device_ms`.
"""

import argparse
import subprocess
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from math import prod
from pathlib import Path
from statistics import median

import torch
from torch import nn

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT))

from baoc.core.catalogue import SPECS
from baoc.optim import BlockwiseOptimizer
from baoc.optim.rules import RULES
from baoc.types import ParamInfo, Role
from experiments.benchmarks.optimizer_step import MODELS, copy_gbps, events_ms, host_us, versions
from experiments.benchmarks.shared import free_memory, results_folder, write_rows

DEVICE = "cuda"
TIMED = (
    "adamw", "adamw_bf16", "adamw_int8", "rmsprop_int8", "lion_int8", "signum_int8", "sign",
    "adamw_int8+split8", "adamw_int8+bf16_sr", "lion_int8+split8", "sign+bf16_sr",
    "adamw_shared_in_int8", "adamw_shared_out_int8", "adafactor", "adafactor_momentum_int8", "foam_l2_int8",
    "foam_l3_int8", "column_norm",
)  # fmt: skip
MIXED = (
    "adamw", "adamw_bf16", "adamw_int8", "rmsprop_int8", "lion_int8", "signum_int8", "sign",
)  # fmt: skip


@dataclass(frozen=True, slots=True, kw_only=True)
class Row:
    """One timing of a whole step. `backends`: how many blocks each steps."""

    model: str
    optimizer: str
    state_bytes_per_element: float
    moved_bytes_per_element: float
    ms: float
    min_ms: float
    host_us: float
    floor_ms: float
    device_ms: float
    backends: str
    over_best: float = 0.0
    device_over_best: float = 0.0

    @property
    def efficiency(self) -> float:
        return self.floor_ms / self.ms


def make_params(shapes: Sequence[tuple[int, ...]]) -> list[nn.Parameter]:
    return [nn.Parameter(torch.randn(shape, device=DEVICE) * 0.02) for shape in shapes]


def give(params: Sequence[nn.Parameter]) -> None:
    """Gradients of the parameters' own type."""
    for param in params:
        param.grad = (torch.randn(param.shape, device=DEVICE) * 1e-3).to(param.dtype)


def specs_for(spec: str, shapes: Sequence[tuple[int, ...]]) -> dict[str, str]:
    """The spec for every block that it applies to; AdamW in the same storage and weights for what is no matrix."""
    _, plus, weights = spec.partition("+")
    needs_matrix = RULES[SPECS[spec].rule].info.needs_matrix
    storage = SPECS[spec].storage
    other = ("adamw" if storage == "fp32" else f"adamw_{storage}") + plus + weights
    infos = [ParamInfo(name=f"p{i}", shape=s, dtype="float32", role=Role.MLP) for i, s in enumerate(shapes)]
    return {info.name: other if needs_matrix and info.matrix_shape is None else spec for info in infos}


def mixed(shapes: Sequence[tuple[int, ...]]) -> dict[str, str]:
    return {f"p{i}": MIXED[i % len(MIXED)] for i in range(len(shapes))}


def time_baoc(model: str, name: str, specs: dict[str, str], *, gbps: float) -> Row:
    shapes = MODELS[model]
    params = make_params(shapes)
    numel = sum(map(prod, shapes))
    groups = [{"params": [(f"p{i}", param) for i, param in enumerate(params)]}]
    optimizer = BlockwiseOptimizer(groups, specs, lr=1e-3, weight_decay=0.1)
    give(params)
    for _ in range(3):
        optimizer.step()
    state = optimizer.state_bytes() / numel
    moved = sum(3 * param.element_size() * param.numel() for param in params) / numel + 2 * state
    times = events_ms(optimizer.step)
    chosen = [choice.backend for choice in optimizer.registry.choices.values()]
    return Row(
        model=model,
        optimizer=name,
        state_bytes_per_element=round(state, 3),
        moved_bytes_per_element=round(moved, 3),
        ms=median(times),
        min_ms=min(times),
        host_us=host_us(optimizer.step),
        floor_ms=moved * numel / gbps / 1e6,
        device_ms=median(events_ms(optimizer.step, busy=True)),
        backends=" ".join(f"{name}:{chosen.count(name)}" for name in sorted(set(chosen))),
    )


def time_torch(model: str, *, gbps: float) -> Row:
    shapes = MODELS[model]
    params = make_params(shapes)
    give(params)
    optimizer = torch.optim.AdamW(params, lr=1e-3, fused=True)
    numel = sum(map(prod, shapes))
    times = events_ms(optimizer.step)
    return Row(
        model=model, optimizer="torch_fused", state_bytes_per_element=8, moved_bytes_per_element=28, ms=median(times),
        min_ms=min(times), host_us=host_us(optimizer.step), floor_ms=28 * numel / gbps / 1e6,
        device_ms=median(events_ms(optimizer.step, busy=True)), backends="",
    )  # fmt: skip


def attempt(timing: Callable[[], Row], *, what: str) -> list[Row]:
    """One row, or none and the reason: a spec that fails must not cost the others their times."""
    try:
        return [timing()]
    except Exception as error:
        print(f"FAILED {what}: {type(error).__name__}: {str(error)[:400]}", flush=True)
        return []
    finally:
        free_memory()


def time_model(model: str, *, gbps: float, names: Sequence[str]) -> list[Row]:
    shapes = MODELS[model]
    rows = attempt(lambda: time_torch(model, gbps=gbps), what="torch")
    for name in names:
        rows += attempt(lambda n=name: time_baoc(model, n, specs_for(n, shapes), gbps=gbps), what=f"{model} {name}")
    singles = [row for row in rows if row.optimizer in MIXED]
    plan = attempt(lambda: time_baoc(model, "mixed", mixed(shapes), gbps=gbps), what=f"{model} mixed")
    if singles:
        plan = [
            replace(
                row, over_best=_over_best(row, singles, "ms"), device_over_best=_over_best(row, singles, "device_ms")
            )
            for row in plan
        ]
    return rows + plan


def _over_best(row: Row, singles: Sequence[Row], key: str) -> float:
    def per_byte(row: Row) -> float:
        return getattr(row, key) / row.moved_bytes_per_element

    return round(per_byte(row) / min(map(per_byte, singles)), 3)


def show(rows: Sequence[Row]) -> None:
    print(
        "model       optimizer                state  moved      ms     min device  floor  eff host_us  best  backends"
    )
    for r in rows:
        best = f"{r.over_best:5.2f} device {r.device_over_best:5.2f}" if r.over_best else "     "
        print(
            f"{r.model:11s} {r.optimizer:23s} {r.state_bytes_per_element:6.2f} {r.moved_bytes_per_element:6.2f} "
            f"{r.ms:7.3f} {r.min_ms:7.3f} {r.device_ms:6.3f} {r.floor_ms:6.3f} {r.efficiency:4.2f} {r.host_us:7.0f} "
            f"{best}  {r.backends}",
            flush=True,
        )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--models", nargs="+", choices=MODELS, default=list(MODELS))
    parser.add_argument("--specs", nargs="+", default=list(TIMED))
    parser.add_argument("--no-check", action="store_true")
    args = parser.parse_args()
    torch.manual_seed(0)
    checked = 0
    if not args.no_check:
        checked = subprocess.run([sys.executable, str(Path(__file__).with_name("engine_check.py"))]).returncode
    gbps = copy_gbps()
    free_memory()
    rows: list[Row] = []
    for model in args.models:
        rows += time_model(model, gbps=gbps, names=args.specs)
    path = write_rows(results_folder() / "engine_step.csv", rows, **versions(gbps))
    print(
        f"{torch.cuda.get_device_name()}, torch {torch.__version__}, copy {gbps:.0f} GB/s; {len(rows)} rows in {path}"
    )
    if checked:
        print("engine_check.py FAILED: see above")
    show(rows)
    sys.exit(checked or len(rows) < len(args.models) * (len(args.specs) + 2))


if __name__ == "__main__":
    main()
