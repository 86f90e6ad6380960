"""Time of one optimizer step on the CPU: the native backend beside torch's fused fp32 AdamW, on the same tensors.

    python experiments/benchmarks/cpu_step.py  # 1 minute of 2 CPU cores -> cpu_step.csv

10M parameters in 150 tensors, 2 threads. Every round
steps each optimizer once, in turn, so that whatever else the machine does meets all alike; medians and minima over
rounds go to cpu_step.csv in $OUT or experiments/results. `moved_gbps` counts the bytes that a step has to
move (weights and states both ways, gradients once), so it can be compared with the copy that is timed beside.

On a machine that has other work, look at the load that is printed, and at minima: torch's threads wait for each other
after every tensor, so a core that is taken away slows torch more, and ratios of medians flatter us. `cpu_ms` is what
all threads together were running; with --threads 1 it is the one number that other work hardly changes.
"""

import argparse
import os
import platform
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import median

import torch
from torch import Tensor

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT))

from baoc.optim import BlockwiseOptimizer
from experiments.benchmarks.shared import optimizer_state_bytes, results_folder, write_rows

SPECS = (
    "adamw", "adamw_bf16", "adamw_int8", "adamw_int4", "rmsprop_int8", "lion", "lion_int8",
    "signum_int8", "sign", "adamw_shared_in_int8", "adamw_shared_out_int8", "foam_l2_int8",
    "adamw_int8+split8", "lion_int8+split8", "adamw_int8+bf16_sr",
)  # fmt: skip
WARM_UP, EAGER_ROUNDS = 3, 3
TORCH = ("torch_fused", "torch_foreach")
EAGER = ("adamw", "adamw_int8")


@dataclass(frozen=True, slots=True, kw_only=True)
class Row:
    """One optimizer. Ratios are to torch_fused, of medians and minima; `state_bytes`: per parameter, all of it."""

    optimizer: str
    median_ms: float
    min_ms: float
    cpu_ms: float  # least
    ratio: float
    min_ratio: float
    cpu_ratio: float
    state_bytes: float
    moved_bytes: float
    moved_gbps: float


def shapes(numel: int, num_tensors: int) -> list[tuple[int, ...]]:
    """Layers of two norms and four matrices, of about `numel` parameters altogether."""
    matrices = num_tensors * 2 // 3
    width = int((numel / matrices) ** 0.5)
    return [(width, width)] * matrices + [(width,)] * (num_tensors - matrices)


def make_params(of: Sequence[tuple[int, ...]]) -> list[Tensor]:
    torch.manual_seed(0)
    params = [(torch.randn(shape) * 0.02).requires_grad_() for shape in of]
    for param in params:
        param.grad = torch.randn_like(param) * 1e-3
    return params


def build(name: str, of: Sequence[tuple[int, ...]]) -> tuple[torch.optim.Optimizer, list[Tensor]]:
    params = make_params(of)
    if name in TORCH:
        return torch.optim.AdamW(params, lr=1e-3, **{name.removeprefix("torch_"): True}), params
    eager = name.startswith("eager_")
    spec = name.removeprefix("eager_")
    matrices = [param for param in params if param.ndim == 2]
    vectors = [param for param in params if param.ndim != 2]
    groups = [{"params": matrices}, {"params": vectors}]
    specs: object = spec
    if spec.startswith(("foam", "adamw_shared")):  # these need matrices; vectors run what they would in a plan
        probe = BlockwiseOptimizer(groups, "adamw")
        rest = "adamw" + spec[spec.index("+") :] if "+" in spec else "adamw"
        specs = {block.name: spec if len(block.params[0].shape) == 2 else rest for block in probe.blocks}
    return BlockwiseOptimizer(groups, specs, lr=1e-3, backend="eager" if eager else "native"), params


def timed(step: Callable[[], object]) -> tuple[float, float]:
    """Milliseconds by the clock, and of all threads' running."""
    begin, begin_cpu = time.perf_counter(), time.process_time()
    step()
    return (time.perf_counter() - begin) * 1e3, (time.process_time() - begin_cpu) * 1e3


def copy_gbps(numel: int) -> float:
    """Bytes read and written per second by a copy of as many fp32 numbers, in 1e9."""
    source = torch.zeros(numel)
    target = torch.empty_like(source)
    return 2 * source.nbytes / min(timed(lambda: target.copy_(source)) for _ in range(10))[0] / 1e6


def measure(names: Sequence[str], of: Sequence[tuple[int, ...]], *, rounds: int) -> list[Row]:
    built = {name: build(name, of) for name in names}
    times: dict[str, list[tuple[float, float]]] = {name: [] for name in names}
    for index in range(rounds + WARM_UP):
        for name, (optimizer, _) in built.items():
            if name.startswith("eager") and index >= WARM_UP + EAGER_ROUNDS:
                continue  # they take as long as all others together
            elapsed = timed(optimizer.step)
            if index >= WARM_UP:
                times[name].append(elapsed)
    numel = sum(torch.Size(shape).numel() for shape in of)
    found = {name: _summary(all_times) for name, all_times in times.items()}
    fused = found["torch_fused"]
    rows = []
    for name, (optimizer, params) in built.items():
        state = optimizer_state_bytes(optimizer)
        moved = sum(2 * p.nbytes + p.grad.nbytes for p in params if p.grad is not None) + 2 * state
        rows.append(
            Row(
                optimizer=name,
                median_ms=round(found[name][0], 2),
                min_ms=round(found[name][1], 2),
                cpu_ms=round(found[name][2], 2),
                ratio=round(found[name][0] / fused[0], 2),
                min_ratio=round(found[name][1] / fused[1], 2),
                cpu_ratio=round(found[name][2] / fused[2], 2),
                state_bytes=round(state / numel, 3),
                moved_bytes=round(moved / numel, 2),
                moved_gbps=round(moved / found[name][0] / 1e6, 1),
            )
        )
    return rows


def _summary(times: Sequence[tuple[float, float]]) -> tuple[float, float, float]:
    """Median and least by the clock, least of all threads' running."""
    clock, running = [ms for ms, _ in times], [ms for _, ms in times]
    return median(clock), min(clock), min(running)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--numel", type=int, default=10_000_000)
    parser.add_argument("--tensors", type=int, default=150)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--rounds", type=int, default=21)
    parser.add_argument("--specs", nargs="+", default=list(SPECS))
    args = parser.parse_args()
    torch.set_num_threads(args.threads)
    of = shapes(args.numel, args.tensors)
    names = [*TORCH, *args.specs, *(f"eager_{spec}" for spec in EAGER if spec in args.specs)]
    rows = measure(names, of, rounds=args.rounds)
    gbps = copy_gbps(args.numel)
    print(f"{platform.processor() or platform.machine()}, {args.threads} threads, copy {gbps:.0f} GB/s")
    print(f"load average {os.getloadavg()[0]:.1f}, {len(os.sched_getaffinity(0))} cores")
    print("optimizer              median ms     min     cpu  ratio  of min  of cpu  state B  moved B  GB/s")
    for r in rows:
        print(
            f"{r.optimizer:24s} {r.median_ms:7.2f} {r.min_ms:7.2f} {r.cpu_ms:7.2f} {r.ratio:6.2f} {r.min_ratio:7.2f} "
            f"{r.cpu_ratio:7.2f} {r.state_bytes:8.3f} {r.moved_bytes:8.2f} {r.moved_gbps:5.1f}"
        )
    path = write_rows(
        results_folder() / "cpu_step.csv",
        rows,
        numel=sum(torch.Size(shape).numel() for shape in of),
        tensors=args.tensors,
        threads=args.threads,
        rounds=args.rounds,
        torch=torch.__version__,
        capability=torch.backends.cpu.get_cpu_capability(),
        copy_gbps=round(gbps, 1),
        load=round(os.getloadavg()[0], 1),
        cores=len(os.sched_getaffinity(0)),
    )
    print(f"{len(rows)} rows in {path}")


if __name__ == "__main__":
    main()
