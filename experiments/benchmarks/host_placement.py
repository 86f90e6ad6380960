"""What host placement costs on one GPU: streamed steps alone, and whole training steps of Llama 1.3B.

    python experiments/benchmarks/host_placement.py
    # 4 minutes of an H200 -> host_placement_check.csv, _link.csv, _step.csv, _train.csv

Parts, of which any may be named:

check   weights and states of host-placed plans against the same plan on the device, bit for bit
link    bytes per second between pinned host memory and the device, each way alone and both at once, by block size
step    a streamed step with nothing to hide it, by block size, piece size and number of buffers
train   steps of Llama 1.3B, sequence 1024, bf16 weights: all on the device, streamed, half of it streamed

A part that fails is told of and the next one runs. `--seconds` ends the run in time.
"""

import argparse
import logging
import sys
import time
import traceback
from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import asdict, dataclass
from itertools import pairwise
from pathlib import Path
from statistics import median
from typing import Any

import torch
from torch import Tensor, nn

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT))

from baoc.kernels.host_memory import PageLock, allocate_host_memory
from baoc.optim import BlockwiseOptimizer
from baoc.units import MIB
from experiments.benchmarks.shared import free_memory, results_folder, write_rows
from tests.support.placing import rings

PACKED = "adamw_int8+split8"
WIDE = "adamw"  # fp32 m and v: 8 bytes per parameter travel, each way
DEVICE = torch.device("cuda")
SEQUENCE, VOCABULARY = 1024, 32_000
Row = dict[str, Any]
only: list[str] = []  # what the command line asks for; all where it says nothing
micro_batches: list[int] = []  # likewise
CHECKED = (PACKED, "lion_int8", "adamw", "foam_l2_int8", "adamw_shared_in_int8+bf16_sr", "muon")
SHAPES = [(257, 640), (1024, 512), (512, 4096), (64, 64), (2048, 1536)]  # of the tensors that are checked


def asked(name: str) -> bool:
    names = {plan.name for plan in PLANS}
    return not only or any(word == name if word in names else word in name for word in only)


def quartiles(times: list[float]) -> tuple[float, float, float]:
    ordered = sorted(times)
    return median(ordered), ordered[len(ordered) // 4], ordered[-1 - len(ordered) // 4]


def timed(step: Callable[[], object], *, warmup: int, steps: int) -> list[float]:
    """Milliseconds of steps one after another, until all that they started is over, copies to the host included."""
    for _ in range(warmup):
        step()
    times = []
    for _ in range(steps):
        torch.cuda.synchronize()
        begin = time.perf_counter()
        step()
        torch.cuda.synchronize()
        times.append((time.perf_counter() - begin) * 1e3)
    return times


# -- check ---------------------------------------------------------------------------------------------------------


def check() -> list[Row]:
    """Plans of one spec over tensors of several shapes, 6 steps, through every way in which blocks are stepped."""
    rows = []
    for spec in filter(asked, CHECKED):
        found = {way: _same(spec, way=way) for way in ("step", "clipped", "ahead", "released")}
        rows.append({"spec": f"{spec}@streamed", **found})
        print(*rows[-1].values(), flush=True)
    return rows


def _same(spec: str, *, way: str) -> str:
    """ "yes", or by how much weights differ."""
    torch.manual_seed(0)
    values = [torch.randn(shape) * 0.1 for shape in SHAPES]
    a, b = ({f"w{i}": nn.Parameter(v.to(DEVICE)) for i, v in enumerate(values)} for _ in range(2))
    with rings(piece_bytes=1 * MIB, num_buffers=2):
        one = BlockwiseOptimizer(a.items(), spec, lr=1e-2)
        two = BlockwiseOptimizer(b.items(), f"{spec}@streamed", lr=1e-2, release=way == "released")
        for step in range(6):
            grads = [torch.randn(shape) for shape in SHAPES]
            grads[0][3, 5] = float("nan") if step == 3 and way != "clipped" else 0.5
            for params, optimizer in ((a, one), (b, two)):
                _backward(params, grads, optimizer=optimizer, way=way if params is b else way.replace("ahead", "step"))
        saved = [optimizer.state_dict()["state"] for optimizer in (one, two)]
    worst, differ = 0.0, 0
    for name, param in a.items():
        worst = max(worst, float((param.detach().float().cpu() - b[name].detach().float().cpu()).abs().max()))
        differ += sum(not torch.equal(t.cpu(), saved[1][name][key].cpu()) for key, t in saved[0][name].items())
    return "yes" if not worst and not differ else f"weights {worst:.1e}, {differ} states"


def _backward(params: dict[str, nn.Parameter], grads: list[Tensor], *, optimizer: BlockwiseOptimizer, way: str) -> None:
    optimizer.zero_grad()
    loss = torch.stack([(p * g.to(p)).sum() for p, g in zip(params.values(), grads, strict=True)]).sum()
    with optimizer.last_backward() if way == "ahead" else nullcontext():
        loss.backward()
    if way == "clipped":
        optimizer.mask_nonfinite()
        torch.nn.utils.clip_grad_norm_(list(params.values()), 1.0)
    optimizer.step()


# -- link ----------------------------------------------------------------------------------------------------------


def link() -> list[Row]:
    """GB/s by size of the block that is copied; the sizes are those of 1M to 64M parameters at 3.125 bytes."""
    rows, total = [], 1024 * MIB
    host = allocate_host_memory(total, what="the measurement")
    lock = PageLock(host, device=DEVICE)
    there = torch.empty(total, dtype=torch.uint8, device=DEVICE)
    streams = torch.cuda.Stream(), torch.cuda.Stream()
    half = total // 2
    for millions in (0.25, 1, 4, 16, 64):
        size = int(millions * 1e6 * 3.125)
        starts = range(0, half - size + 1, size)

        def go(into: bool, out: bool, size: int = size, starts: range = starts) -> None:
            for start in starts:
                if into:
                    with torch.cuda.stream(streams[0]):
                        there[start : start + size].copy_(host[start : start + size], non_blocking=True)
                if out:
                    with torch.cuda.stream(streams[1]):
                        begin = half + start
                        host[begin : begin + size].copy_(there[begin : begin + size], non_blocking=True)

        row: Row = {"block_mparams": millions, "block_bytes": size, "locked": lock.locked}
        for name, ways in (("in", (True, False)), ("out", (False, True)), ("both", (True, True))):
            times = timed(lambda ways=ways: go(*ways), warmup=1, steps=7)
            row[f"{name}_gbps"] = round(sum(ways) * len(starts) * size / median(times) / 1e6, 1)
        rows.append(row)
        print(*row.values(), flush=True)
    return rows


# -- step ----------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True, kw_only=True)
class StepCase:
    """`block_m`: millions of elements per block; `count` blocks of them."""

    spec: str
    block_m: float
    count: int
    piece_mib: int = 48
    buffers: int = 3


STEP_CASES = [
    *[StepCase(spec=f"{PACKED}@streamed", block_m=m, count=int(384 / m)) for m in (1, 4, 16, 64)],
    *[StepCase(spec=f"{PACKED}@streamed", block_m=4, count=96, piece_mib=p) for p in (12, 24, 96)],
    *[StepCase(spec=f"{PACKED}@streamed", block_m=4, count=96, buffers=n) for n in (2, 4)],
    StepCase(spec=f"{PACKED}@streamed", block_m=4, count=96, piece_mib=12, buffers=6),
    StepCase(spec=f"{WIDE}@streamed", block_m=4, count=96),
    StepCase(spec=PACKED, block_m=4, count=96),
]


def step() -> list[Row]:
    rows = []
    for case in STEP_CASES:
        shape = (int(case.block_m * 1024), 1024)
        with rings(piece_bytes=case.piece_mib * MIB, num_buffers=case.buffers):
            values = [torch.randn(shape, device=DEVICE, dtype=torch.bfloat16) for _ in range(case.count)]
            params = {f"w{index}": nn.Parameter(value) for index, value in enumerate(values)}
            for param in params.values():
                param.grad = torch.full_like(param, 1e-3)
            optimizer = BlockwiseOptimizer(params.items(), case.spec, lr=1e-4)
            times = timed(optimizer.step, warmup=3, steps=9)
        torch.cuda.synchronize()
        begin = time.perf_counter()
        optimizer.step()
        host_ms = (time.perf_counter() - begin) * 1e3
        torch.cuda.synchronize()
        millions = case.count * shape[0] * shape[1] / 1e6
        middle, low, high = quartiles(times)
        travels = sum(optimizer.block_host_bytes().values()) if case.spec.endswith("streamed") else 0
        rows.append(
            {
                **asdict(case),
                "ms_per_100m": round(middle * 100 / millions, 2),
                "q1": round(low * 100 / millions, 2),
                "q3": round(high * 100 / millions, 2),
                "n": len(times),
                "both_ways_gbps": round(2 * travels / middle / 1e6, 1),
                "host_ms_per_100m": round(host_ms * 100 / millions, 2),
                "device_state_bytes": optimizer.state_bytes(),
                "locked": optimizer.registry.arena.locked,
            }
        )
        print(*rows[-1].values(), flush=True)
        del optimizer, params, param, values
        free_memory()
    return rows


# -- train ---------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True, kw_only=True)
class Plan:
    """`specs` by turns over the blocks. `ahead`: those on the host are stepped in the last backward already."""

    name: str
    specs: tuple[str, ...]
    ahead: bool
    micro_batch: int = 2
    accumulate: tuple[int, ...] = (1, 8)
    steps: tuple[int, ...] = (12, 5)


PLANS = [
    Plan(name="all on the device", specs=(PACKED,), ahead=False),
    Plan(name="streamed", specs=(f"{PACKED}@streamed",), ahead=True),
    Plan(name="streamed, in step() alone", specs=(f"{PACKED}@streamed",), ahead=False),
    Plan(name="half streamed", specs=(f"{PACKED}@streamed", PACKED), ahead=True, accumulate=(1,)),
    Plan(name="streamed in fp32", specs=(f"{WIDE}@streamed",), ahead=True, steps=(6, 3)),
    Plan(name="all on the device", specs=(PACKED,), ahead=False, micro_batch=1, accumulate=(1,)),
    Plan(name="streamed", specs=(f"{PACKED}@streamed",), ahead=True, micro_batch=1, accumulate=(1,)),
    Plan(name="half streamed", specs=(f"{PACKED}@streamed", PACKED), ahead=True, micro_batch=1, accumulate=(1,)),
]


def llama() -> nn.Module:
    from transformers import AutoModelForCausalLM

    from baoc.models.llama import llama_config

    sizes = {"width": 2048, "hidden": 5461, "depth": 24, "heads": 32}
    spec: Any = type("Text", (), {"sequence_length": SEQUENCE})
    with torch.device(DEVICE):
        return AutoModelForCausalLM.from_config(
            llama_config(sizes, vocab_size=VOCABULARY, spec=spec), dtype=torch.bfloat16
        )


def train() -> list[Row]:
    """Milliseconds from step to step, between events in the caller's stream: what runs beside it is in there."""
    model, rows = llama(), []
    for plan in PLANS:
        if not asked(plan.name) or (micro_batches and plan.micro_batch not in micro_batches):
            continue
        free_memory()
        torch.cuda.reset_peak_memory_stats()
        names = [name for name, param in model.named_parameters() if param.numel()]
        specs = {name: plan.specs[index % len(plan.specs)] for index, name in enumerate(names)}
        optimizer = BlockwiseOptimizer(model, specs, lr=1e-5)
        tokens = torch.randint(VOCABULARY, (plan.micro_batch, SEQUENCE), device=DEVICE)
        for accumulate, steps in zip(plan.accumulate, plan.steps, strict=False):
            times = _between_steps(model, optimizer, tokens, plan=plan, accumulate=accumulate, steps=steps)
            middle, low, high = quartiles(times)
            row = {"plan": plan.name, "micro_batch": plan.micro_batch, "accumulate": accumulate, "n": len(times)}
            row |= {"ms": round(middle, 1), "q1": round(low, 1), "q3": round(high, 1)}
            row |= {"peak_gib": round(torch.cuda.max_memory_allocated() / 2**30, 2)}
            row |= {"state_gib": round(optimizer.state_bytes() / 2**30, 3)}
            row |= {"host_gib": round(sum(optimizer.block_host_bytes().values()) / 2**30, 2)}
            base = next((r for r in rows if r["plan"] == PLANS[0].name and _alike(r, row)), row)
            rows.append({**row, "over_device": round(row["ms"] / base["ms"], 3)})
            print(*rows[-1].values(), flush=True)
            write_rows(results_folder() / "host_placement_train.csv", rows)
        optimizer.zero_grad()
        del optimizer
    return rows


def _alike(a: Row, b: Row) -> bool:
    return all(a[key] == b[key] for key in ("micro_batch", "accumulate"))


def _between_steps(
    model: nn.Module, optimizer: BlockwiseOptimizer, tokens: Tensor, *, plan: Plan, accumulate: int, steps: int
) -> list[float]:
    events = []
    for _ in range(steps + 3 if accumulate == 1 else steps + 2):
        for micro in range(accumulate):
            loss = model(input_ids=tokens, labels=tokens).loss / accumulate
            last = plan.ahead and micro == accumulate - 1
            with optimizer.last_backward() if last else nullcontext():
                loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        events.append(torch.cuda.Event(enable_timing=True))
        events[-1].record()
    torch.cuda.synchronize()
    return [before.elapsed_time(after) for before, after in pairwise(events)][-steps:]


PARTS: dict[str, Callable[[], list[Row]]] = {"check": check, "link": link, "step": step, "train": train}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("parts", nargs="*", default=list(PARTS), help=f"any of {', '.join(PARTS)}")
    parser.add_argument("--seconds", type=float, default=240, help="no part begins after this time")
    parser.add_argument(
        "--only", nargs="*", default=[], help="plans by name, or by a part that is no name; checked specs too"
    )
    parser.add_argument("--micro-batch", type=int, nargs="*", default=[], help="plans of such micro-batches alone")
    args = parser.parse_args()
    only.extend(args.only)
    micro_batches.extend(args.micro_batch)
    logging.getLogger("baoc").setLevel(logging.ERROR)  # gradients that are not finite are on purpose
    begin = time.monotonic()
    for part in args.parts:
        if time.monotonic() - begin > args.seconds:
            print(f"{part}: left out, {args.seconds:g} s are over")
            continue
        try:
            rows = PARTS[part]()
        except Exception:
            traceback.print_exc(limit=8)
            free_memory()
            continue
        write_rows(results_folder() / f"host_placement_{part}.csv", rows)
        print(f"\n{part} ({time.monotonic() - begin:.0f} s, {torch.cuda.get_device_name()}, torch {torch.__version__})")
        table(rows)


def table(rows: list[Row]) -> None:
    keys = list(dict.fromkeys(key for row in rows for key in row))
    lines = [keys, *[[str(row.get(key, "")) for key in keys] for row in rows]]
    widths = [max(len(line[i]) for line in lines) for i in range(len(keys))]
    for line in lines:
        print("  ".join(text.ljust(width) for text, width in zip(line, widths, strict=True)))


if __name__ == "__main__":
    main()
