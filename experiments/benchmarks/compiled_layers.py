"""What micro-batches of an experiment cost, layers as they are and compiled: seconds, the host's part, bytes.

`python experiments/benchmarks/compiled_layers.py OUT [--only vit_l16_8gb ...] [--seconds 240]` on an NVIDIA GPU. Each
experiment's network runs outside of any cap, by the code that decisions measure with, in a process of its own that
starts with an empty cache of compiled kernels; with `--warm` a second process follows that finds the first one's.
OUT/layers.csv has a row per (kind, weights, micro-batch, recomputed layers), written as it comes. `kind`: eager, any
(compiled once for all micro-batches, as decisions compare), one (for each, as runs are trained), with --timed also
timed (kernels chosen by timing them). `first_s`: of the first micro-batch, which compiles. `ms`: of a later one.
`host_ms`: until the host has queued it, the device being idle before. `loop_ms`: in Lightning's loop, for some.
`bytes`: forward and backward as probed, states apart. OUT/host_*.txt: the operators on which the host spends most,
for a micro-batch of the size that comes first.
"""

import argparse
import csv
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT))

CASES: dict[str, tuple[tuple[str, ...], tuple[int, ...]]] = {  # overrides, micro-batches
    "vit_l16_8gb": (("experiments=vit_l16_8gb",), (32, 16, 64, 128, 8, 4)),
    "dit_xl2_16gb": (("experiments=dit_xl2_16gb",), (32, 64, 16, 128, 8)),
    "llama_350m_4gb": (("experiments=llama_350m_8gb", "budget=4gb"), (4, 2, 8, 1, 16)),
}
LOOPED = 2  # micro-batches, the first ones of a case, that are also timed in the training loop


def ways(sizes: tuple[int, ...], *, layers: int, timed: bool) -> Iterator[tuple[str, str, int, int]]:
    """(kind, weights, micro-batch, recomputed layers), those that tell most first."""
    most, first = max(sizes), sizes[0]
    for kind in ("eager", "one"):
        yield from ((kind, "native", size, number) for size, number in ((first, 0), (most, layers), (first, layers)))
    yield from (("any", "native", size, 0) for size in sizes[:3])
    yield from (("any", "native", size, layers) for size in (most, first))
    yield from (("eager", "native", size, 0) for size in sizes[1:3])
    yield from (("eager", "bf16", size, number) for size, number in ((first, 0), (most, layers)))
    yield from (("any", "bf16", size, number) for size, number in ((first, 0), (most, layers)))
    for kind in ("eager", "any"):
        yield from ((kind, "native", size, 0) for size in sizes[3:])
    if timed:
        yield from (("timed", "native", size, number) for size, number in ((first, 0), (most, layers)))


class Absent:
    """In the place of torch.cuda, for a look at this script on a CPU."""

    def synchronize(self) -> None: ...

    def reset_peak_memory_stats(self) -> None: ...

    def empty_cache(self) -> None: ...

    def max_memory_allocated(self) -> int:
        return 0

    def get_device_name(self) -> str:
        return "cpu"


def run_case(name: str, *, out: Path, seconds: float, timed: bool, turn: str, overrides: list[str]) -> None:
    import torch

    from baoc.config.compose import compose
    from baoc.config.from_hydra import from_hydra
    from baoc.config.resolve import resolve
    from baoc.models import switches
    from baoc.models.switches import disable_checkpointing, enable_checkpointing, recomputable_layers, set_compiled
    from baoc.profiling.bf16_params import cast_to_bf16
    from baoc.training import run as training
    from baoc.training.measure.microbatches import Trials

    end = time.monotonic() + seconds
    device = "cuda" if torch.cuda.is_available() else "cpu"
    cuda = torch.cuda if device == "cuda" else Absent()
    resolved = resolve(from_hydra(compose([*CASES[name][0], *overrides])), device=device)
    with tempfile.TemporaryDirectory() as folder:
        task, data = training.build(resolved, run_dir=Path(folder), device=device)
    where = torch.device("cuda", 0) if device == "cuda" else torch.device("cpu")
    task.to(where)
    batch, val = next(iter(data.make_train_loader(limit=None))), next(iter(data.val_dataloader()), None)
    trials = Trials(task, batch=batch, val_batch=val, device=where, precision="bf16-mixed")
    layers = len(recomputable_layers(task.model))
    narrow = {key: param for key, param in task.named_parameters() if param.ndim > 1}
    total, (_, sizes) = resolved.config.batch_size, CASES[name]
    columns = ["case", "turn", "kind", "weights", "micro_batch", "recomputed", "num_layers", "first_s", "ms", "host_ms"]
    columns += ["samples_per_s", "loop_ms", "bytes", "peak_allocated", "why", "torch", "device"]
    print(" | ".join(columns[:-2]), flush=True)
    compile_was = torch.compile
    for kind, weights, size, recomputed in ways(sizes, layers=layers, timed=timed and turn == "cold"):
        if time.monotonic() > end:
            break
        row = {"case": name, "turn": turn, "kind": kind, "weights": weights, "micro_batch": size, "why": ""}
        row |= {"recomputed": recomputed, "num_layers": layers, "torch": torch.__version__}
        row["device"] = cuda.get_device_name()
        disable_checkpointing(task.model)
        if recomputed:
            enable_checkpointing(task.model, name=name, count=recomputed)
        set_compiled(task.model, kind != "eager", any_batch=kind == "any")
        if kind == "timed" and torch.compile is compile_was:
            torch._dynamo.reset()
            switches.compiled_layers.clear()
            torch.compile = lambda f, **_: compile_was(f, dynamic=False)  # pyright: ignore[reportAttributeAccessIssue]
        try:
            with cast_to_bf16(narrow if weights == "bf16" else {}, module=task):
                row |= measured(trials, batch, size=size, cuda=cuda)
                trial = trials.run(size, accumulation=max(2, total // size), timed=False)
                row["bytes"] = trial.footprint.forward_backward_bytes
                if size in sizes[:LOOPED] or size == max(sizes):
                    step_s = trials.rehearsed(size, per_step=total // size, clip=(1.0, "norm"), max_s=0.5)
                    row["loop_ms"] = 1e3 * step_s / (total // size)
        except Exception as error:
            row["why"] = f"{type(error).__name__}: {str(error).splitlines()[0][:150]}"
        append(out / "layers.csv", row, columns=columns)
        if (size, weights) == (sizes[0], "native") and not row["why"]:
            path = out / f"host_{name}_{turn}_{kind}_{recomputed}.txt"
            leave_host_profile(trials, batch, size=size, path=path)
        shown = (row.get(key, "-") for key in columns[:-2])
        print(" | ".join(f"{v:.4g}" if isinstance(v, float) else str(v) for v in shown), flush=True)
        cuda.empty_cache()


def measured(trials: Any, batch: Any, *, size: int, cuda: Any) -> dict[str, Any]:
    """Seconds of the micro-batch, and the most bytes allocated."""
    from baoc.data.batches import resized
    from baoc.training.measure.probe import silent

    moved = trials._moved(resized(batch, size))

    def once() -> float:
        began = time.perf_counter()
        with silent(trials.module):
            trials._loss(moved).backward()
        return time.perf_counter() - began

    began = time.perf_counter()
    once()
    cuda.synchronize()
    first_s = time.perf_counter() - began
    once()
    cuda.reset_peak_memory_stats()
    hosts = []
    for _ in range(5):
        cuda.synchronize()
        hosts.append(once())
    cuda.synchronize()
    began, count = time.perf_counter(), 0
    while count < 4 or time.perf_counter() - began < 0.3:
        once()
        count += 1
        if count % 4 == 0:
            cuda.synchronize()
    cuda.synchronize()
    ms = 1e3 * (time.perf_counter() - began) / count
    trials.module.zero_grad(set_to_none=True)
    found = {"first_s": first_s, "ms": ms, "host_ms": 1e3 * sorted(hosts)[2], "samples_per_s": 1e3 * size / ms}
    return found | {"peak_allocated": cuda.max_memory_allocated()}


def leave_host_profile(trials: Any, batch: Any, *, size: int, path: Path) -> None:
    from torch.profiler import ProfilerActivity, profile

    from baoc.data.batches import resized
    from baoc.training.measure.probe import silent

    moved = trials._moved(resized(batch, size))
    with silent(trials.module):
        for _ in range(2):  # what is done once is no part of it
            trials._loss(moved).backward()
    with silent(trials.module), profile(activities=[ProfilerActivity.CPU]) as seen:
        trials._loss(moved).backward()
    path.write_text(seen.key_averages().table(sort_by="self_cpu_time_total", row_limit=40, max_name_column_width=60))


def append(path: Path, row: dict[str, Any], *, columns: list[str]) -> None:
    new = not path.is_file()
    with path.open("a", newline="") as file:
        writer = csv.DictWriter(file, columns, restval="", lineterminator="\n")
        if new:
            writer.writeheader()
        writer.writerow(row)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("out", type=Path)
    parser.add_argument("--only", nargs="*", choices=list(CASES), default=list(CASES))
    parser.add_argument("--seconds", type=float, default=240.0, help="of all cases, shared alike")
    parser.add_argument("--warm", action="store_true")
    parser.add_argument("--timed", action="store_true")
    parser.add_argument("--override", nargs="*", default=[], help="more of the experiment's, such as model.size=mini")
    parser.add_argument("--turn", help="used by the processes that this one starts")
    asked = parser.parse_args()
    asked.out.mkdir(parents=True, exist_ok=True)
    if asked.turn:
        (name,) = asked.only
        run_case(
            name, out=asked.out, seconds=asked.seconds, timed=asked.timed, turn=asked.turn, overrides=asked.override
        )
        return
    turns = ("cold", "warm") if asked.warm else ("cold",)
    for name in asked.only:
        with tempfile.TemporaryDirectory() as cache:
            for turn in turns:
                share = asked.seconds / len(asked.only) * (1 if not asked.warm else 0.8 if turn == "cold" else 0.2)
                command = [sys.executable, __file__, str(asked.out), "--only", name, "--turn", turn]
                command += ["--seconds", str(share), *(["--timed"] if asked.timed else [])]
                command += ["--override", *asked.override] if asked.override else []
                subprocess.run(command, check=False, env={**os.environ, "TORCHINDUCTOR_CACHE_DIR": cache})


if __name__ == "__main__":
    main()
