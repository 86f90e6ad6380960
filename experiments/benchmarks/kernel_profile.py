"""Launch times of the matrix rules at Llama 1.3B by how their launches are cut, beside what they are compared with.

    python experiments/benchmarks/kernel_profile.py --warm  # time not recorded, compiles and times nothing
    python experiments/benchmarks/kernel_profile.py  # 2 minutes of an H200 -> kernel_profile.csv

`--warm` compiles in parallel, so it may run beside others. Medians of 7 between CUDA events, kernels alone. A cut is
elements per program, warps, elements that a thread loads at once, registers; after a colon stand the elements by warp
of Adafactor's sums, after another the lines of a program of theirs. Then each spec's best cut by kernel and by shape,
the slowest spec first. `floor_ms` moves gradients once, weights and states both ways at the speed of a device copy,
`twice_ms` also what has to be read before the step.
"""

import argparse
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from statistics import median

import torch

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT))

from baoc.kernels import Engine, LaunchConfig
from baoc.kernels.triton import means_plan
from baoc.kernels.triton.kinds import codec_bytes
from baoc.kernels.triton.matrix_kinds import whole_lines
from baoc.optim.backends import Options
from baoc.optim.backends.fused import kernel_lanes
from experiments.benchmarks.matrix_step import SPECS, least_bytes, make_engine, name_of
from experiments.benchmarks.optimizer_step import MODELS, copy_gbps, events_ms, versions
from experiments.benchmarks.shared import append_row, free_memory, results_folder

STEPS, WORKERS = 7, 15
# An empty one is the spec's own.
TRIED: dict[str, tuple[str, ...]] = {
    "adafactor_momentum_int8": ("", ":512"),
    "adafactor+split8": ("",), "adafactor_momentum": ("",), "adafactor": ("",),
    "foam_l2_int8+split8": ("",), "foam_l2_int8": ("",),
    "adamw_shared_out_int8+split8": ("",), "adamw_shared_out_int8": ("",), "adamw_shared_out": ("",),
    "adamw_int4+split8": ("",), "adamw_int4": ("",), "adamw_shared_in_int8+split8": ("",), "foam_l1": ("",),
    "foam_l2": ("",), "foam_l3_int8": ("",), "adamw_shared_in_int8": ("",),
    "adamw_shared_in": ("",), "adamw_int8_root": ("",), "adamw_int8_root+split8": ("",),
}  # fmt: skip


def engine_of(spec: str, cut: str, shapes: list[tuple[int, ...]]) -> tuple[Engine, bool]:
    sizes, per_warp, lines = [*cut.split(":"), "", ""][:3]
    means_plan.PER_WARP, means_plan.LARGE_LINES = int(per_warp or 512), int(lines or 512)
    means_plan.PER_WARP_CODED = int(per_warp or 256)
    given = None
    if sizes:
        chunk, warps, vector, registers, repeat = map(int, [*sizes.split("/"), 1][:5])
        given = LaunchConfig(chunk=chunk, warps=warps, vector=vector, registers=registers, repeat=repeat)
    engine = make_engine(next(row for row in SPECS if name_of(row) == spec), shapes, config=given)
    options = (Options(lr=1e-3, betas=(0.9, 0.95), eps=1e-8, weight_decay=0.1),)
    engine.stage(options, thresholds=kernel_lanes(1), phase=1)
    return engine, any(table.matches[0] is not None for table in engine.tables)


def kernels_of(engine: Engine, matched: bool) -> str:
    """Milliseconds of each kernel of a step, the largest first."""
    was, engine.graphs.on = engine.graphs.on, False  # a graph would be one event
    engine.run(matched=matched)
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as profile:
        engine.run(matched=matched)
        torch.cuda.synchronize()
    engine.graphs.on = was
    times: dict[str, float] = {}
    for event in profile.events() or ():
        times[event.name] = times.get(event.name, 0.0) + event.time_range.elapsed_us() / 1e3
    largest = sorted(times.items(), key=lambda item: -item[1])[:5]
    return ", ".join(f"{name[:24]} {ms:.3f}" for name, ms in largest if ms > 0.02)


def by_shape(spec: str, cut: str, *, gbps: float) -> str:
    """Share of the floor, on matrices of each shape alone."""
    shares = []
    for shape in dict.fromkeys(shape for shape in MODELS["llama_1b"] if len(shape) == 2 and shape[0] != 32000):
        engine, matched = engine_of(spec, cut, [shape] * 40)
        times = events_ms(lambda e=engine, m=matched: e.run(matched=m), steps=5)
        shares.append(f"{shape[0]}x{shape[1]} {least_bytes(engine) / gbps / 1e6 / median(times):.2f}")
        del engine
        free_memory()
    return ", ".join(shares)


def read_twice(engine: Engine) -> int:
    """Bytes of gradients and m that are read before the step as well, for what it divides by is a mean of them."""
    total = 0
    for table in engine.tables:
        kind, adafactor = table.kind, table.kind.rule.startswith("adafactor")
        for param, shape in zip(table.params, table.shapes, strict=True):
            shared = kind.rule.startswith("adamw_shared") and not whole_lines(kind.rule, shape)
            if adafactor or shared:
                total += param.numel() * param.element_size()
            if adafactor and kind.traits.has_m:
                total += sum(codec_bytes(kind.m, shape.numel, name="m").values())
    return total


def compile_(spec: str, cut: str) -> None:
    command = [sys.executable, __file__, "--one", spec, cut]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode:
        print(f"FAILED {spec} {cut}: {done.stderr.strip()[-300:]}", flush=True)


def one(spec: str, cut: str) -> None:
    shapes = (
        list(dict.fromkeys(shape for shape in MODELS["llama_1b"] if shape[0] != 32000)) * 16
    )  # as many as are large
    engine, matched = engine_of(spec, cut, shapes)
    engine.run(matched=matched)
    torch.cuda.synchronize()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--specs", nargs="+", choices=TRIED, default=list(TRIED))
    parser.add_argument("--warm", action="store_true")
    parser.add_argument("--limit-s", type=float, default=600.0, help="begin no timing after so many seconds")
    parser.add_argument("--one", nargs=2, default=(), help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.one:
        return one(*args.one)
    tried, best = [(spec, cut) for spec in args.specs for cut in TRIED[spec]], {}
    if args.warm:
        with ThreadPoolExecutor(WORKERS) as pool:
            list(pool.map(lambda job: compile_(*job), tried))
        return
    begin, gbps = time.monotonic(), copy_gbps()
    path = results_folder() / "kernel_profile.csv"
    path.unlink(missing_ok=True)
    for spec, cut in tried:
        if time.monotonic() - begin > args.limit_s:
            print(f"no time for {spec} {cut}", flush=True)
            continue
        try:
            engine, matched = engine_of(spec, cut, MODELS["llama_1b"])
            times = events_ms(lambda e=engine, m=matched: e.run(matched=m), steps=STEPS)
        except Exception as error:
            print(f"FAILED {spec} {cut}: {type(error).__name__}: {str(error)[:300]}", flush=True)
            continue
        floor = least_bytes(engine) / gbps / 1e6
        twice = floor + read_twice(engine) / gbps / 1e6
        numbers = {"launch_ms": median(times), "min_ms": min(times), "floor_ms": floor, "twice_ms": twice}
        rounded = {name: f"{number:.3f}" for name, number in numbers.items()}
        append_row(path, {"spec": spec, "cut": cut or "own", **rounded}, **versions(gbps))
        share = floor / median(times)
        best[spec] = max(best.get(spec, (0.0, "")), (share, cut))
        print(f"{spec:29s} {cut or 'own':14s} {median(times):7.3f} ms, floor {floor:6.3f}, {share:.2f}", flush=True)
        del engine
        free_memory()
    show_parts(best, gbps=gbps, until=begin + args.limit_s)


def show_parts(best: dict[str, tuple[float, str]], *, gbps: float, until: float) -> None:
    """Each spec's best cut, by kernel and by shape, the slowest first."""
    for spec, (share, cut) in sorted(best.items(), key=lambda item: item[1]):
        if time.monotonic() < until:
            engine, matched = engine_of(spec, cut, MODELS["llama_1b"])
            kernels = kernels_of(engine, matched)
            del engine
            free_memory()
            print(f"{spec} {cut} {share:.2f}: {by_shape(spec, cut, gbps=gbps)}; {kernels}", flush=True)


if __name__ == "__main__":
    main()
