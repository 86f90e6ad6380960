"""What a run does on a GPU while it changes: exact resume after kill -9, and a budget lowered from outside.

    python experiments/benchmarks/online_gpu.py exact OUT --model vit llama dit
    python experiments/benchmarks/online_gpu.py lowered OUT

`exact`: each model is trained whole, and killed at a random step and resumed, with deterministic algorithms and
reallocations on the way; logged values and exported weights are compared bit for bit. `lowered`: a Llama 130M is asked
for memory by a file in its folder and gets it back later; what the card holds beyond what it held before is read from
the driver every few milliseconds, so nothing of the process escapes (the card must be idle else). Each writes
OUT/<name>.json and ends with a table.
"""

import argparse
import json
import os
import random
import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT))

from baoc.profiling.device import _nvml_free  # noqa: E402

CLOCKS = ("time_s", "time/step_ms", "throughput/samples_per_s", "memory/rss_gib", "memory/peak_gib", "budget/slack_gib")
SIZES = {"vit": "tiny", "llama": "nano", "dit": "tiny"}
STEPS = 120
EXACT = (  # the once-decision comes at step 20, the budget grows at 70: both move blocks
    "budget=state_10 reallocation=once reallocation.warmup_steps=20 budget.schedule=[{step:70,budget:state_25}] "
    f"trainer.deterministic=true trainer.max_steps={STEPS} trainer.log_every_n_steps=1 trainer.val_check_interval=60 "
    "trainer.limit_val_batches=2 checkpoint.every_n_steps=7 checkpoint.keep=3 trainer.enable_progress_bar=false"
)
LOWERED = (
    "model=llama model.size=130m model.vocab_size=32000 model.checkpointing=false dataset.sequence_length=512 "
    "device=cuda budget=6gb micro_batch=8 batch_size=8 reallocation=interval trainer.max_steps=240 "
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


def lowered(out: Path, *, ask: str, at: int, back: int) -> dict[str, Any]:
    run_dir = out / "lowered"
    free_before, began = _nvml_free(0), time.monotonic()
    assert free_before is not None, "the driver does not tell what is free"
    process = start(run_dir, overrides=LOWERED, log="run")
    trace: list[tuple[float, int, int]] = []  # seconds, bytes held, step
    moments = {"asked": 0.0, "answered": 0.0, "given_back": 0.0}
    answer, step = run_dir / "budget.json", -1
    while process.poll() is None:
        now = time.monotonic() - began
        if len(trace) % 10 == 0:  # the log is read less often than the card
            found = lines(run_dir)
            step = found[-1]["step"] if found else -1
            if step >= at and not moments["asked"]:
                (run_dir / "budget").write_text(ask)
                moments["asked"] = now
            elif moments["asked"] and not moments["answered"]:
                told = json.loads(answer.read_text())
                moments["answered"] = now if told["budget"]["name"] == ask or told["refused"] else 0.0
            elif step >= back and not moments["given_back"]:
                (run_dir / "budget").unlink()
                moments["given_back"] = now
        trace.append((now, free_before - (_nvml_free(0) or free_before), step))
        time.sleep(0.003)
    events = [json.loads(line) for line in (run_dir / "reallocations.jsonl").read_text().splitlines()]
    (out / "lowered_trace.csv").write_text("s,bytes,step\n" + "".join(f"{s:.4f},{b},{k}\n" for s, b, k in trace))
    m = moments

    def most(since: float, until: float) -> int:
        return max((held for s, held, _ in trace if since <= s < until), default=0)

    return {
        "asked": ask,
        "exit_code": process.returncode,
        **{f"{name}_s": round(value, 3) for name, value in m.items()},
        "peak_before_bytes": most(0, m["asked"]),
        "peak_while_moving_bytes": most(m["asked"], m["answered"]),
        "peak_lowered_bytes": most(m["answered"], m["given_back"]),
        "peak_after_bytes": most(m["given_back"], 1e9),
        "budget_events": [
            {k: e[k] for k in ("step", "why", "state_bytes_before", "state_bytes_after")} | {"moves": len(e["moves"])}
            for e in events
            if e["trigger"] == "budget"
        ],
        "answer": json.loads(answer.read_text()),
        "result": json.loads((run_dir / "result.json").read_text()) if (run_dir / "result.json").is_file() else None,
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("part", choices=["exact", "lowered"])
    parser.add_argument("out", type=Path)
    parser.add_argument("--model", nargs="+", default=["vit", "llama", "dit"], choices=list(SIZES))
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--device", default="cuda", help="of `exact`")
    parser.add_argument("--ask", default="5300mb")
    given = parser.parse_args()
    out = given.out.resolve()
    out.mkdir(parents=True, exist_ok=True)
    if given.part == "exact":
        found: Any = exact(out, models=given.model, seed=given.seed, device=given.device)
        for row in found:
            print(row)
    else:
        found = lowered(out, ask=given.ask, at=60, back=150)
        print({k: v for k, v in found.items() if k != "result"})
    (out / f"{given.part}.json").write_text(json.dumps(found, indent=1))


if __name__ == "__main__":
    main()
