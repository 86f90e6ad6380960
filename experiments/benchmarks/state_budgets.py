"""Quality at equal state bytes: BAOC's allocations against uniform specs and random feasible ones, on paired seeds.

    python experiments/benchmarks/state_budgets.py --model vit --seeds 5
    # a minute a run, 2 at once on 2 CPU cores -> state_budgets_vit.csv

Each row is one configuration run on the same seeds; the table gives the mean and standard deviation of the quality
(val/loss, bits per byte, error at fixed noise: less is better), and the mean paired difference to the reference row.
Processes of one thread each, as two threads give little at these sizes. What has a result already is not run again.
"""

import argparse
import json
import math
import os
import subprocess
import sys
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from statistics import mean, stdev

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT))

from experiments.benchmarks.shared import write_rows

OWN = "budget=unlimited reallocation=off"  # a uniform spec at whatever bytes it needs

CONFIGURATIONS = {
    "uniform_adamw": f"{OWN} allocator=uniform_adamw", "baoc_prior_25": "budget=state_25 risk=prior",
    "baoc_statistics_25": "budget=state_25 risk=statistics", "random_25": "budget=state_25 allocator=random",
    "baoc_prior_10": "budget=state_10 risk=prior", "baoc_statistics_10": "budget=state_10 risk=statistics",
    "random_10": "budget=state_10 allocator=random", "reallocation_off_10": "budget=state_10 reallocation=off",
    "reallocation_once_10": "budget=state_10 reallocation=once",
    "uniform_adamw8bit": f"{OWN} allocator=uniform_adamw8bit",
    "uniform_adamw8bit_root": f"{OWN} allocator=uniform_adamw8bit_root",
    "uniform_adamw4bit": f"{OWN} allocator=uniform_adamw4bit", "uniform_rmsprop": f"{OWN} allocator=uniform_rmsprop",
    "uniform_lion8bit_matched": f"{OWN} allocator=uniform_lion8bit_matched",
    "uniform_foam_lr1e-2": f"{OWN} allocator=uniform_foam optim.lr=1e-2",
    "uniform_foam_matched": f"{OWN} allocator=uniform_foam_matched",
    "uniform_foam8bit_matched": f"{OWN} allocator=uniform_foam8bit_matched",
    "uniform_sign": f"{OWN} allocator=uniform_sign",
    "uniform_sign_lr3e-4": f"{OWN} allocator=uniform_sign optim.lr=3e-4",
    "uniform_sign_matched": f"{OWN} allocator=uniform_sign_matched",
}  # fmt: skip
REFERENCE = "baoc_prior_25"


def run(folder: Path, *, overrides: str) -> None:
    if (folder / "result.json").exists():
        return
    command = [sys.executable, "run.py", *overrides.split(), f"hydra.run.dir={folder}"]
    command += ["trainer.enable_progress_bar=false"]
    one_thread = {**os.environ, "OMP_NUM_THREADS": "1", "MKL_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": ""}
    done = subprocess.run(command, cwd=ROOT, env=one_thread, capture_output=True, text=True)
    print(f"{folder.parent.name} {folder.name}: exit {done.returncode}", flush=True)
    if done.returncode:
        print(done.stderr[-1500:], flush=True)


def collect(folder: Path) -> dict[int, dict]:
    """Seed -> result of one configuration."""
    results = [json.loads(path.read_text()) for path in folder.glob("*/result.json")]
    return {result["seed"]: result for result in results}


def row(label: str, *, found: dict[int, dict], reference: dict[int, dict]) -> dict[str, object]:
    loss = [r["quality"]["value"] for r in found.values()]
    paired = [found[s]["quality"]["value"] - reference[s]["quality"]["value"] for s in found if s in reference]
    accuracy = [r["metrics"]["val/acc"] for r in found.values() if "val/acc" in r["metrics"]]
    spread = stdev(paired) if len(paired) > 1 else math.nan
    return {
        "configuration": label,
        "n": len(loss),
        "reallocations": mean(r["num_reallocations"] for r in found.values()),
        "state_fraction": mean(r["state_bytes"] / r["state_bytes_adamw"] for r in found.values()),
        "loss": mean(loss),
        "loss_sd": stdev(loss) if len(loss) > 1 else math.nan,
        "quality": next(iter(found.values()))["quality"]["name"],
        "difference": mean(paired) if paired else math.nan,
        "difference_sd": spread,
        "t": mean(paired) / (spread / len(paired) ** 0.5) if spread and not math.isnan(spread) else math.nan,
        "accuracy": mean(accuracy) if accuracy else math.nan,
        "step_ms": mean(r["step_ms"] for r in found.values()),
        "train_s": mean(r["step_ms"] * r["num_steps"] / 1e3 for r in found.values()),
        "commit": next(iter(found.values()))["commit"],
    }


def table(model: str, *, labels: Sequence[str], reference: str, out: Path) -> None:
    """Write the model's CSV and print its table."""
    base = collect(out / model / reference)
    rows = [row(label, found=f, reference=base) for label in labels if (f := collect(out / model / label))]
    write_rows(out / f"state_budgets_{model}.csv", rows)
    print(f"| {model} | n | state | {rows[0]['quality']} (sd) | minus {reference} (sd, t) | val/acc | train s |")
    print("|---|---|---|---|---|---|---|")
    for r in rows:
        print(
            f"| {r['configuration']} | {r['n']} | {r['state_fraction']:.1%} | {r['loss']:.4f} ({r['loss_sd']:.4f}) | "
            f"{r['difference']:+.4f} ({r['difference_sd']:.4f}, {r['t']:+.1f}) | {r['accuracy']:.1%} | "
            f"{r['train_s']:.0f} |"
        )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--model", nargs="+", default=["vit"])
    parser.add_argument("--seeds", type=int, default=5)
    parser.add_argument("--workers", type=int, default=2)
    parser.add_argument("--only", nargs="*", help="labels to run; all by default")
    parser.add_argument("--reference", default=REFERENCE)
    parser.add_argument("--out", type=Path, default=ROOT / "experiments/results")
    args = parser.parse_args()
    labels = [label for label in CONFIGURATIONS if not args.only or label in args.only]
    out = args.out.resolve()
    jobs = [(model, label, seed) for model in args.model for label in labels for seed in range(args.seeds)]
    with ThreadPoolExecutor(args.workers) as pool:
        for model, label, seed in jobs:
            overrides = f"model={model} seed={seed} {CONFIGURATIONS[label]}"
            pool.submit(run, out / model / label / str(seed), overrides=overrides)
    for model in args.model:
        table(model, labels=labels, reference=args.reference, out=out)


if __name__ == "__main__":
    main()
