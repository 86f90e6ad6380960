"""Where the time of a training step goes while states stream: engines by the millisecond, on one GPU.

`python experiments/benchmarks/host_trace.py` trains Llama 1.3B as `host_placement.py` does, all on the device and
streamed in backward, and prints what the model's stream, the steps' and both ways of the link did in each slice of a
step, counted from the beginning of backward. Rows go to host_trace.csv in $OUT or experiments/results.
"""

import argparse
import json
import logging
import sys
import tempfile
import time
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import torch
from torch.profiler import ProfilerActivity, profile

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT))

from baoc.optim import BlockwiseOptimizer  # noqa: E402
from baoc.optim.backward import KeepGradients  # noqa: E402
from experiments.benchmarks import host_placement as bench  # noqa: E402

BEGIN = "nll_loss_backward"  # in the name of the first kernel of a backward
Span = tuple[float, float]
Row = dict[str, Any]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--slice", type=float, default=10, help="ms")
    parser.add_argument("--micro-batch", type=int, default=2)
    args = parser.parse_args()
    logging.getLogger("baoc").setLevel(logging.ERROR)
    model, rows = bench.llama(), []
    tokens = torch.randint(bench.VOCABULARY, (args.micro_batch, bench.SEQUENCE), device=bench.DEVICE)
    for plan in bench.PLANS[:2]:
        bench.clean()
        optimizer = BlockwiseOptimizer(model, plan.specs[0], lr=1e-5)
        rows += traced(model, optimizer, tokens, plan=plan, slice_ms=args.slice)
        optimizer.zero_grad()
        del optimizer
    bench.write(bench.OUT / "host_trace.csv", rows)


def traced(
    model: torch.nn.Module, optimizer: BlockwiseOptimizer, tokens: torch.Tensor, *, plan: bench.Plan, slice_ms: float
) -> list[Row]:
    bench._between_steps(model, optimizer, tokens, plan=plan, accumulate=1, steps=3)
    spent = HookTime()
    began = time.perf_counter()
    bench._between_steps(model, optimizer, tokens, plan=plan, accumulate=1, steps=4)
    steps = 7  # its own and what it leaves out
    print(
        f"\n{plan.name}: {(time.perf_counter() - began) / steps * 1e3:.1f} ms a step, of which the host spends "
        f"{spent.stop() / steps * 1e3:.1f} in hooks of backward",
        flush=True,
    )
    with profile(activities=[ProfilerActivity.CUDA]) as profiler:
        bench._between_steps(model, optimizer, tokens, plan=plan, accumulate=1, steps=2)
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "trace.json"
        profiler.export_chrome_trace(str(path))
        events = json.loads(path.read_text())["traceEvents"]
    return sliced(events, name=plan.name, slice_ms=slice_ms)


class HookTime:
    """Seconds that Python is in the hooks that step blocks in backward."""

    def __init__(self) -> None:
        self._ready, self._seconds = KeepGradients.ready, 0.0
        clock = self

        def ready(self: KeepGradients, param: torch.Tensor) -> None:
            began = time.perf_counter()
            clock._ready(self, param)
            clock._seconds += time.perf_counter() - began

        KeepGradients.ready = ready

    def stop(self) -> float:
        KeepGradients.ready = self._ready
        return self._seconds


def sliced(events: Iterable[dict[str, Any]], *, name: str, slice_ms: float) -> list[Row]:
    """One row for each slice of the last step that is there whole: percent of it that an engine was busy."""
    work = [e for e in events if e.get("cat") in ("kernel", "gpu_memcpy", "gpu_memset") and e.get("ph") == "X"]
    begins = sorted(e["ts"] for e in work if BEGIN in e["name"])
    begins = [t for i, t in enumerate(begins) if not i or t - begins[i - 1] > 20e3]
    begin, end = begins[-2], begins[-1]
    per_stream: dict[int, float] = {}
    for e in work:
        per_stream[e["args"]["stream"]] = per_stream.get(e["args"]["stream"], 0.0) + e["dur"] * (e["cat"] == "kernel")
    main = max(per_stream, key=lambda stream: per_stream[stream])
    lanes = {
        "model": [e for e in work if e["cat"] == "kernel" and e["args"]["stream"] == main],
        "step": [e for e in work if e["cat"] == "kernel" and e["args"]["stream"] != main],
        "in": [e for e in work if "HtoD" in e["name"]],
        "out": [e for e in work if "DtoH" in e["name"]],
    }
    for lane, found in lanes.items():
        inside = [e for e in found if begin <= e["ts"] < end]
        busy, last = sum(e["dur"] for e in inside) / 1e3, max((e["ts"] + e["dur"] for e in inside), default=begin)
        size = sum(e["args"].get("bytes", 0) for e in inside)
        rate = f", {size / 1e9:.2f} GB, {size / max(busy, 1e-9) / 1e6:.1f} GB/s while at it" if size > 1e6 else ""
        print(f"  {lane:6} {len(inside):5} pieces, busy {busy:7.1f} ms, over {(last - begin) / 1e3:.1f} ms{rate}")
    rows: list[Row] = []
    step = slice_ms * 1e3
    for index in range(int((end - begin) / step) + 1):
        low, high = begin + index * step, min(begin + (index + 1) * step, end)
        row: Row = {"plan": name, "from_ms": round(index * slice_ms, 1)}
        for lane, found in lanes.items():
            row[f"{lane}_percent"] = round(100 * busy_within(found, low=low, high=high) / max(high - low, 1))
        for lane in ("in", "out"):
            row[f"{lane}_gbps"] = round(bytes_within(lanes[lane], low=low, high=high) / max(high - low, 1) / 1e3, 1)
        rows.append(row)
        print("  ", *row.values(), flush=True)
    return rows


def busy_within(events: Iterable[dict[str, Any]], *, low: float, high: float) -> float:
    """Microseconds in which any of the events goes on."""
    spans = sorted((max(e["ts"], low), min(e["ts"] + e["dur"], high)) for e in events)
    total, reached = 0.0, low
    for first, last in spans:
        if last > max(first, reached):
            total += last - max(first, reached)
            reached = last
    return total


def bytes_within(events: Iterable[dict[str, Any]], *, low: float, high: float) -> float:
    found = 0.0
    for e in events:
        share = min(e["ts"] + e["dur"], high) - max(e["ts"], low)
        found += e["args"].get("bytes", 0) * max(share, 0.0) / max(e["dur"], 1e-3)
    return found


if __name__ == "__main__":
    main()
