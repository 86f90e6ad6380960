"""What a run does on a GPU while it changes: exact resume, a budget lowered from outside, reallocation, and its jumps.

    python experiments/benchmarks/online_gpu.py exact OUT --model vit llama dit  # time not recorded, H200 -> exact.json
    python experiments/benchmarks/online_gpu.py lowered OUT  # the same -> lowered.json
    python experiments/benchmarks/online_gpu.py quality OUT --workers 6 --seconds 130
    # 3 minutes of an H200 -> quality.csv

`exact`: each model is trained whole, and killed at a random step and resumed, with deterministic algorithms and blocks
that move on the way; logged values and exported weights are compared bit for bit. `lowered`: a Llama 130M is asked for
memory by a file in its folder and gets it back later; what the driver says that the process holds is read every few
milliseconds. Where the driver does not tell processes apart, it is what torch's allocator holds and CONTEXT_BYTES, as
others may use the card meanwhile; "by_driver" of the result tells which. `quality`: reallocation off and once,
and fp32 AdamW, on a network of each task, as many as fit into the time, and how the training loss goes on
across the first move. Each writes OUT/<name>.json and ends with a table; `quality` has a
row per run in OUT/quality.csv as well, and with `--seconds 0` runs nothing and tells what OUT holds.
"""

import argparse
import json
import math
import os
import random
import runpy
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from statistics import mean, stdev
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT))

from experiments.benchmarks.shared import write_rows

CLOCKS = ("time_s", "time/step_ms", "throughput/samples_per_s", "memory/rss_gib", "memory/peak_gib", "budget/slack_gib")
SIZES = {"vit": "tiny", "llama": "nano", "dit": "tiny"}
STEPS = 120
CONTEXT_BYTES = 700 * 2**20  # of a process that uses one H100, by its driver
EXACT = (  # the once-decision comes at step 20, the budget grows at 70: both move blocks
    "budget=state_10 reallocation=once reallocation.warmup_steps=20 budget.schedule=[{step:70,budget:state_25}] "
    f"trainer.deterministic=true trainer.max_steps={STEPS} trainer.log_every_n_steps=1 trainer.val_check_interval=60 "
    "trainer.limit_val_batches=2 checkpoint.every_n_steps=7 checkpoint.keep=3 trainer.enable_progress_bar=false"
)
LOWERED = (
    "model=llama model.size=130m model.vocab_size=32000 model.checkpointing=false dataset.sequence_length=512 "
    "device=cuda budget=7gb micro_batch=8 batch_size=8 reallocation=once trainer.max_steps=240 "
    "trainer.log_every_n_steps=5 trainer.val_check_interval=100000 trainer.limit_val_batches=4 "
    "trainer.enable_progress_bar=false checkpoint.export=false"
)


def start(run_dir: Path, *, overrides: str, log: str) -> subprocess.Popen[bytes]:
    run_dir.parent.mkdir(parents=True, exist_ok=True)
    environment = {**os.environ, "CUBLAS_WORKSPACE_CONFIG": ":4096:8", "OMP_NUM_THREADS": "1"}
    command = [sys.executable, "run.py", *overrides.split(), f"hydra.run.dir={run_dir}"]
    file = (run_dir.parent / f"{run_dir.name}.{log}.log").open("wb")
    return subprocess.Popen(command, cwd=ROOT, env=environment, stdout=file, stderr=subprocess.STDOUT)


def lines(run_dir: Path) -> list[dict[str, Any]]:
    path = run_dir / "metrics.jsonl"
    text = path.read_text() if path.is_file() else ""
    return [json.loads(line) for line in text[: text.rfind("\n") + 1].splitlines()]


def timeless(run_dir: Path) -> list[dict[str, Any]]:
    return [{k: v for k, v in line.items() if k not in CLOCKS} for line in lines(run_dir)]


def wait_for(run_dir: Path, process: subprocess.Popen[bytes], *, step: int) -> bool:
    """Until `step` is logged; False where the process ended before."""
    while process.poll() is None:
        found = lines(run_dir)
        if found and found[-1]["step"] >= step:
            return True
        time.sleep(0.01)
    return False


# -- exact resume -----------------------------------------------------------------------------------------------------


def exact(out: Path, *, models: Sequence[str], seed: int, device: str) -> list[dict[str, Any]]:
    text = {m: f"model={m} model.size={SIZES[m]} device={device} {EXACT}" for m in models}
    draw = random.Random(seed)
    given = [(model, draw.randrange(25, STEPS - 15)) for model in models]
    with ThreadPoolExecutor(2 * len(given)) as pool:
        whole = [pool.submit(trained, out / model / "whole", overrides=text[model]) for model, _ in given]
        cut = [pool.submit(killed, out / model / "cut", overrides=text[model], step=step) for model, step in given]
        return [
            compared(out / model, step=step, ended=w.result(), told=c.result())
            for (model, step), w, c in zip(given, whole, cut, strict=True)
        ]


def trained(run_dir: Path, *, overrides: str) -> int:
    return start(run_dir, overrides=overrides, log="run").wait()


def killed(run_dir: Path, *, overrides: str, step: int) -> tuple[int, int]:
    """Kills a run after `step` and lets it go on in its folder; the last step before the kill, and the exit code."""
    process = start(run_dir, overrides=overrides, log="killed")
    assert wait_for(run_dir, process, step=step), f"{run_dir} ended before its kill"
    process.send_signal(signal.SIGKILL)
    process.wait()
    at = lines(run_dir)[-1]["step"]
    return at, start(run_dir, overrides=f"{overrides} resume={run_dir}", log="resumed").wait()


def compared(folder: Path, *, step: int, ended: int, told: tuple[int, int]) -> dict[str, Any]:
    logs = [
        [{k: v for k, v in line.items() if k not in CLOCKS} for line in lines(folder / r)] for r in ("whole", "cut")
    ]
    weights = [list((folder / r / "model").glob("*.safetensors")) for r in ("whole", "cut")]
    events = folder / "whole" / "reallocations.jsonl"
    moves = [json.loads(line) for line in events.read_text().splitlines()] if events.is_file() else []
    return {
        "model": folder.name,
        "killed_after_step": told[0],
        "exit_codes": [ended, told[1]],
        "steps": len(logs[0]),
        "steps_that_differ": sum(a != b for a, b in zip(*logs, strict=False)) + abs(len(logs[0]) - len(logs[1])),
        "reallocations": [move["step"] for move in moves if move["accepted"]],
        "weights_equal": all(len(w) == 1 for w in weights) and weights[0][0].read_bytes() == weights[1][0].read_bytes(),
        "killed_when_asked": told[0] >= step,
    }


# -- a budget lowered from outside ------------------------------------------------------------------------------------


def child(run_dir: Path) -> None:
    """run.py with a thread that writes down what torch's allocator holds."""
    import torch

    from baoc.profiling import memory

    total = torch.cuda.mem_get_info(0)[1]
    memory.free_at_start[0] = total  # others on the card are not this process's context
    torch.cuda.mem_get_info = lambda *_: (total - CONTEXT_BYTES - torch.cuda.memory_reserved(0), total)

    def read() -> None:
        with (run_dir.parent / "trace.csv").open("w") as file:
            while True:
                file.write(f"{time.time():.4f},{torch.cuda.memory_reserved(0)},{memory.nvml_own(0) or 0}\n")
                file.flush()
                time.sleep(0.002)

    threading.Thread(target=read, daemon=True).start()
    trace_moves(run_dir.parent / "moves.jsonl")
    sys.argv = ["run.py", *LOWERED.split(), f"hydra.run.dir={run_dir}"]
    runpy.run_path("run.py", run_name="__main__")


def trace_moves(path: Path) -> None:
    """Writes a line per migration: what the allocator held before, at the most, and after, and the largest new block.

    The states of the block that moves are there twice, so the peak may pass the larger of both ends by one block, and
    by what converts its largest tensor.
    """
    import torch

    from baoc.optim import BlockwiseOptimizer

    migrate = BlockwiseOptimizer.migrate

    def traced(self: BlockwiseOptimizer, specs: Any, **given: Any) -> Any:
        held, since = torch.cuda.memory_allocated(0), time.perf_counter()
        torch.cuda.reset_peak_memory_stats(0)
        moves = migrate(self, specs, **given)
        torch.cuda.synchronize()
        if not moves:
            return moves
        blocks, states = [self.registry.live[move.block].block for move in moves], self.block_state_bytes()
        line = {
            "moves": len(moves),
            "seconds": time.perf_counter() - since,
            "before_bytes": held,
            "peak_bytes": torch.cuda.max_memory_allocated(0),
            "after_bytes": torch.cuda.memory_allocated(0),
            "largest_block_state_bytes": max((states[block.name] for block in blocks), default=0),
            "largest_tensor_bytes": max((4 * param.numel for block in blocks for param in block.params), default=0),
        }
        with path.open("a") as file:
            file.write(json.dumps(line) + "\n")
        return moves

    BlockwiseOptimizer.migrate = traced


def least(run_dir: Path) -> str:
    """A budget 3 % above the least feasible one of a run, in whole MiB."""
    found = json.loads((run_dir / "allocation.json").read_text())["least_feasible_bytes"]
    return f"{math.ceil(1.03 * found / 2**20)}mb"


def lowered(out: Path, *, ask: str, at: int, back: int) -> dict[str, Any]:
    run_dir = out / "lowered"
    log = (out / "lowered.log").open("wb")
    process = subprocess.Popen([sys.executable, __file__, "child", str(run_dir)], cwd=ROOT, stdout=log, stderr=log)
    moments = dict.fromkeys(("asked", "answered", "given_back", "ended"), float("inf"))
    if wait_for(run_dir, process, step=at):
        ask = least(run_dir) if ask == "least" else ask
        moments["asked"] = time.time()
        (run_dir / "budget").write_text(ask)
    answer = run_dir / "budget.json"
    while process.poll() is None and moments["answered"] == float("inf"):
        told = json.loads(answer.read_text())
        if told["budget"]["name"] == ask or told["refused"]:
            moments["answered"] = time.time()
    if wait_for(run_dir, process, step=back):
        (run_dir / "budget").unlink()
        moments["given_back"] = time.time()
    process.wait()
    moments["ended"] = time.time()
    trace = [[float(x) for x in line.split(",")] for line in (out / "trace.csv").read_text().splitlines()[:-1]]

    by_driver = all(own > 0 for _, _, own in trace)

    def most(since: float, until: float) -> int:
        held = ((own if by_driver else reserved + CONTEXT_BYTES) for s, reserved, own in trace if since <= s < until)
        return int(max(held, default=0))

    events = [json.loads(line) for line in (run_dir / "reallocations.jsonl").read_text().splitlines()]
    result, moves = run_dir / "result.json", out / "moves.jsonl"
    return {
        "asked": ask,
        "exit_code": process.returncode,
        "readings": len(trace),
        "by_driver": by_driver,
        "seconds_until_in_force": round(moments["answered"] - moments["asked"], 3),
        "peak_before_bytes": most(0, moments["asked"]),
        "peak_while_moving_bytes": most(moments["asked"], moments["answered"]),
        "peak_lowered_bytes": most(moments["answered"] + 0.05, moments["given_back"]),
        "peak_after_bytes": most(moments["given_back"], moments["ended"]),
        "budget_events": [
            {k: e[k] for k in ("step", "why", "state_bytes_before", "state_bytes_after")} | {"moves": len(e["moves"])}
            for e in events
            if e["trigger"] == "budget"
        ],
        "moves": [json.loads(line) for line in moves.read_text().splitlines()] if moves.is_file() else [],
        "answer": json.loads(answer.read_text()),
        "result": json.loads(result.read_text()) if result.is_file() else None,
    }


# -- reallocation on and off ------------------------------------------------------------------------------------------

LATE = "trainer.val_check_interval=100000"
TASKS = {
    "llama": f"model=llama model.size=60m dataset.sequence_length=512 batch_size=16 trainer.max_steps=300 {LATE}",
    "vit": f"model=vit model.size=mini batch_size=256 trainer.max_steps=300 {LATE}",
    "dit": f"model=dit model.size=s2 batch_size=256 trainer.max_steps=400 {LATE}",
    # the default of a CPU, half way and at its end
    "nano": (
        "model=llama model.size=nano trainer.precision=32-true trainer.max_steps=600 trainer.val_check_interval=300"
    ),
}
KINDS = {
    **{mode: f"budget=state_10 reallocation={mode}" for mode in ("off", "once")},
    "adamw": "budget=unlimited reallocation=off allocator=uniform_adamw",
}
COMMON = "device=cuda trainer.log_every_n_steps=1 checkpoint.export=false trainer.enable_progress_bar=false"
ORDER = [("off", "once"), ("adamw",)]


def quality(
    out: Path, *, models: Sequence[str], kinds: Sequence[str], seeds: int, workers: int, seconds: float
) -> list[dict[str, Any]]:
    until = time.monotonic() + seconds
    jobs = [
        (m, kind, seed) for some in ORDER for m in models for seed in range(seeds) for kind in some if kind in kinds
    ]

    def one(job: tuple[str, str, int]) -> None:
        model, kind, seed = job
        left = until - time.monotonic()
        if left < 20:
            return
        overrides = f"{TASKS[model]} seed={seed} {KINDS[kind]} {COMMON}"
        process = start(out / model / kind / str(seed), overrides=overrides, log="run")
        try:
            process.wait(timeout=left)
        except subprocess.TimeoutExpired:
            process.kill()

    with ThreadPoolExecutor(workers) as pool:
        list(pool.map(one, jobs))
    return tabulated(out, models=models)


def result_row(run_dir: Path, *, model: str, kind: str) -> dict[str, Any]:
    """A finished run as a line of quality.csv; blocks moved and the jump are of the first move."""
    result = json.loads((run_dir / "result.json").read_text())
    env = json.loads((run_dir / "env.json").read_text())
    events = run_dir / "reallocations.jsonl"
    told = [json.loads(line) for line in events.read_text().splitlines()] if events.is_file() else []
    decisions = [event for event in told if "accepted" in event]
    return {
        "model": model,
        "kind": kind,
        "seed": result["seed"],
        "quality": result["quality"]["name"],
        "value": result["quality"]["value"],
        "half_way": half_way(run_dir, name=result["quality"]["name"]),
        "steps": result["num_steps"],
        "state_fraction": result["state_bytes"] / result["state_bytes_adamw"],
        "peak_bytes": result["peak_bytes"],
        "peak_bytes_predicted": result["peak_bytes_predicted"],
        "step_ms": result["step_ms"],
        "decisions": len(decisions),
        "reallocations": result["num_reallocations"],
        "blocks_moved": next((len(event["moves"]) for event in decisions if event["accepted"]), 0),
        "jump_at_40": jump(run_dir),
        "device": "; ".join(env["device"].get("cuda") or [env["device"]["asked"]]),
        "python": env["python"],
        "torch": env["versions"]["torch"],
        "triton": env["versions"].get("triton", ""),
        "commit": result["commit"],
    }


def half_way(run_dir: Path, *, name: str) -> float | str:
    """The quality that was found first, where it was looked at more than once."""
    found = [line[name] for line in lines(run_dir) if name in line]
    return found[0] if len(found) > 1 else ""


def tabulated(out: Path, *, models: Sequence[str]) -> list[dict[str, Any]]:
    """Writes quality.csv, a row per run, seeds in order; returns a summary per model and kind."""
    rows = [
        result_row(path.parent, model=model, kind=kind)
        for model in models
        for kind in KINDS
        for path in sorted((out / model / kind).glob("*/result.json"), key=lambda path: int(path.parent.name))
    ]
    write_rows(out / "quality.csv", rows)
    return [
        summary([row for row in rows if (row["model"], row["kind"]) == key], reference=rows)
        for key in dict.fromkeys((row["model"], row["kind"]) for row in rows)
    ]


def summary(rows: Sequence[dict[str, Any]], *, reference: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """Mean and spread of runs of one model and kind, and of their paired differences to reallocation=off."""
    model, kind = rows[0]["model"], rows[0]["kind"]
    off = {row["seed"]: row for row in reference if (row["model"], row["kind"]) == (model, "off")}
    paired = [row["value"] - off[row["seed"]]["value"] for row in rows if row["seed"] in off]
    values = [row["value"] for row in rows]
    return {
        "model": model,
        "kind": kind,
        "n": len(rows),
        "quality": rows[0]["quality"],
        "mean": round(mean(values), 4),
        "sd": round(stdev(values), 4) if len(values) > 1 else None,
        "less_off": [round(value, 4) for value in paired],
        "less_off_mean": round(mean(paired), 4) if paired else None,
        "less_off_sd": round(stdev(paired), 4) if len(paired) > 1 else None,
        "state_fraction": round(mean(row["state_fraction"] for row in rows), 4),
        "peak_bytes": max(row["peak_bytes"] for row in rows),
        "step_ms": [round(row["step_ms"], 1) for row in rows],
        "reallocations": [row["reallocations"] for row in rows],
        "jump_at_40": [round(row["jump_at_40"], 4) for row in rows],
    }


def jump(run_dir: Path, *, step: int = 40, width: int = 5) -> float:
    """Mean training loss of the `width` steps after `step` less that of the `width` steps before it."""
    loss = {line["step"]: line["train/loss"] for line in lines(run_dir) if "train/loss" in line}
    after, before = (mean(loss[i] for i in range(first, first + width)) for first in (step, step - width))
    return after - before


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("part", choices=["exact", "lowered", "quality", "child"])
    parser.add_argument("out", type=Path)
    parser.add_argument("--model", nargs="+", default=["vit", "llama", "dit"], choices=list(TASKS))
    parser.add_argument("--kinds", nargs="+", default=list(KINDS), choices=list(KINDS), help="of `quality`")
    parser.add_argument("--seeds", type=int, default=3, help="of `quality`")
    parser.add_argument("--seed", type=int, default=0, help="of the moments of `exact`")
    parser.add_argument("--device", default="cuda", help="of `exact`")
    parser.add_argument("--ask", default="least", help="of `lowered`: a budget, or 3 %% above the least feasible")
    parser.add_argument("--workers", type=int, default=6)
    parser.add_argument("--seconds", type=float, default=130)
    given = parser.parse_args()
    out = given.out.resolve()
    if given.part == "child":
        return child(out)
    out.mkdir(parents=True, exist_ok=True)
    if given.part == "exact":
        found: Any = exact(out, models=given.model, seed=given.seed, device=given.device)
    elif given.part == "quality":
        found = quality(
            out, models=given.model, kinds=given.kinds, seeds=given.seeds, workers=given.workers, seconds=given.seconds
        )
    else:
        found = lowered(out, ask=given.ask, at=60, back=150)
    for row in found if isinstance(found, list) else [{k: v for k, v in found.items() if k != "result"}]:
        print(row)
    (out / f"{given.part}.json").write_text(json.dumps(found, indent=1))
    return None


if __name__ == "__main__":
    main()
