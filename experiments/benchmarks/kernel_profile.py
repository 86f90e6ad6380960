"""Where the milliseconds of a step of the matrix rules go: each kernel's time at Llama 1.3B, for several cuts.

`python experiments/benchmarks/kernel_profile.py` on a machine with an NVIDIA GPU takes about a minute, most of it
compiling, in parallel. Times are torch's profiler's, means of 5 steps launched plainly. Rows go to kernel_profile.csv
in $OUT or experiments/results. `whole` is the sum of a step's kernels, `odd` that with the matrices alone that have a
side of 5,461, which is no multiple of anything.
"""

import argparse
import csv
import os
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import torch
from torch.profiler import ProfilerActivity, profile

sys.path[:0] = [str(Path(__file__).resolve().parents[2]), str(Path(__file__).parent)]

from matrix_step import SPECS, make_engine, name_of  # noqa: E402
from optimizer_step import MODELS, clean  # noqa: E402

from baoc.codecs.grouped import kernel_lanes  # noqa: E402
from baoc.kernels import Cut  # noqa: E402
from baoc.optim.backends.eager import Options  # noqa: E402

ROOT = Path(__file__).resolve().parents[2]
STEPS, WORKERS = 5, 15
# spec -> cuts to try beside its own: elements, warps, vector, registers
TRIED: dict[str, tuple[tuple[int, int, int, int], ...]] = {
    "adafactor_momentum_int8": ((512, 4, 4, 0), (256, 2, 4, 0)),
    "adafactor+split8": ((512, 2, 8, 0), (1024, 4, 8, 0)),
    "adamw_shared_out_int8+split8": ((512, 2, 8, 0), (1024, 4, 8, 0)),
    "adamw_shared_out_int8": ((512, 4, 4, 0), (256, 2, 4, 0)),
    "foam_l2_int8": ((512, 4, 4, 0), (256, 2, 4, 0), (1024, 8, 4, 0)),
    "foam_l2_int8+split8": ((512, 4, 4, 0), (256, 2, 4, 0), (512, 4, 8, 0)),
    "foam_l8_int8+split8": ((8192, 4, 4, 0), (8192, 8, 8, 0), (8192, 16, 4, 0)),
    "foam_l8": ((8192, 4, 4, 0), (8192, 16, 4, 0)),
    "foam_l2_out_int8+split8": ((512, 4, 1, 0), (256, 2, 1, 0), (512, 4, 4, 0)),
    "adamw_int4+split8": ((512, 2, 8, 0), (512, 4, 4, 0)),
    "adamw_int4": ((512, 2, 4, 0), (256, 2, 4, 0)),
}


def steps_of(spec: str, cut: Cut | None, shapes: list[tuple[int, ...]], *, num: int) -> None:
    engine = make_engine(next(s for s in SPECS if name_of(s) == spec), shapes, cut=cut)
    options = (Options(lr=1e-3, betas=(0.9, 0.95), eps=1e-8, weight_decay=0.1),)
    matched = any(table.matches[0] is not None for table in engine.tables)
    for phase in range(1, num + 1):
        engine.stage(options, thresholds=kernel_lanes(phase), phase=phase)
        engine.run(matched=matched, graphs=False)
    torch.cuda.synchronize()


def time_kernels(spec: str, cut: Cut | None, shapes: list[tuple[int, ...]]) -> dict[str, float]:
    """Milliseconds of each kernel in a step."""
    steps_of(spec, cut, shapes, num=1)
    with profile(activities=[ProfilerActivity.CUDA, ProfilerActivity.CPU]) as seen:
        steps_of(spec, cut, shapes, num=STEPS)
    found = {}
    for event in seen.key_averages():
        if event.key.endswith("_kernel") and event.self_device_time_total:
            found[event.key] = event.self_device_time_total / STEPS / 1e3
    return found


def warm(spec: str, cut: str) -> None:
    command = [sys.executable, __file__, "--warm", spec, cut]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode:
        print(f"FAILED to compile {spec} {cut}: {done.stderr[-400:]}", flush=True)


def parsed(cut: str) -> Cut | None:
    if not cut:
        return None
    chunk, warps, vector, registers = map(int, cut.split("/"))
    return Cut(chunk=chunk, warps=warps, vector=vector, registers=registers)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--specs", nargs="+", choices=TRIED, default=list(TRIED))
    parser.add_argument("--own", action="store_true", help="their own cuts alone")
    parser.add_argument("--warm", nargs=2, default=(), help=argparse.SUPPRESS)
    args = parser.parse_args()
    shapes = MODELS["llama_1b"]
    if args.warm:
        return steps_of(args.warm[0], parsed(args.warm[1]), list(dict.fromkeys(shapes[1:])), num=1)
    tried = [(s, "/".join(map(str, c)) if c else "") for s in args.specs for c in ((), *(() if args.own else TRIED[s]))]
    with ThreadPoolExecutor(WORKERS) as pool:
        list(pool.map(lambda job: warm(*job), tried))
    folder = Path(os.environ.get("OUT") or ROOT / "experiments" / "results")
    folder.mkdir(parents=True, exist_ok=True)
    common = {"device": torch.cuda.get_device_name(), "torch": torch.__version__}
    with (folder / "kernel_profile.csv").open("w", newline="") as file:
        writer = csv.DictWriter(file, ["spec", "cut", "part", "kernel", "ms", *common])
        writer.writeheader()
        for spec, cut in tried:
            for part, own in (("whole", shapes), ("odd", [s for s in shapes if 5461 in s])):
                try:
                    found = time_kernels(spec, parsed(cut), own)
                except Exception as error:
                    print(f"FAILED {spec} {cut}: {type(error).__name__}: {str(error)[:300]}", flush=True)
                    found = {}
                for kernel, ms in {**found, "all": sum(found.values())}.items():
                    row = {"spec": spec, "cut": cut or "own", "part": part, "kernel": kernel, "ms": f"{ms:.4f}"}
                    writer.writerow(row | common)
                file.flush()
                most = sorted(found.items(), key=lambda item: -item[1])[:4]
                told = ", ".join(f"{name.removesuffix('_kernel')} {ms:.2f}" for name, ms in most)
                print(f"{spec:30s} {cut or 'own':14s} {part:6s} {sum(found.values()):7.2f} ms: {told}", flush=True)
                clean()


if __name__ == "__main__":
    main()
