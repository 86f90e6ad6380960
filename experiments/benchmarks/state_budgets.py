"""Quality at equal state bytes: BAOC's allocations against uniform specs and random feasible ones, on paired seeds.

    python experiments/benchmarks/state_budgets.py --seeds 5 --out experiments/results/state_budgets_vision

Each row is one configuration run on the same seeds; the table gives the mean and standard deviation of the validation
loss, and the mean paired difference to the reference row. Two processes of one thread each, as two threads give
little at this size. Configurations whose folder holds all results are not run again.
"""

import argparse
import csv
import json
import math
import os
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from statistics import mean, stdev

ROOT = Path(__file__).resolve().parents[2]
OWN = "budget=unlimited reallocation=off"  # a uniform spec at whatever bytes it needs

VISION = {
    "adamw_unlimited": f"{OWN} allocator=uniform_adamw",
    "baoc_prior_25": "budget=state_25 risk=prior",
    "baoc_statistics_25": "budget=state_25 risk=statistics",
    "baoc_shadow_25": "budget=state_25 risk=shadow",
    "random_25": "budget=state_25 allocator=random",
    "baoc_prior_10": "budget=state_10 risk=prior",
    "baoc_statistics_10": "budget=state_10 risk=statistics",
    "baoc_shadow_10": "budget=state_10 risk=shadow",
    "random_10": "budget=state_10 allocator=random",
    "uniform_adamw8bit": f"{OWN} allocator=uniform_adamw8bit",
    "uniform_lion8bit_matched": f"{OWN} allocator=uniform_lion8bit_matched",
    "uniform_foam_lr1e-2": f"{OWN} allocator=uniform_foam optim.lr=1e-2",
    "uniform_foam_matched": f"{OWN} allocator=uniform_foam_matched",
    "uniform_foam8bit_matched": f"{OWN} allocator=uniform_foam8bit_matched",
    "uniform_sign_lr3e-4": f"{OWN} allocator=uniform_sign optim.lr=3e-4",
    "uniform_sign_matched": f"{OWN} allocator=uniform_sign_matched",
}
REFERENCE = "baoc_prior_25"


def run(label: str, *, overrides: str, seeds: int, out: Path) -> None:
    folder = out / label
    if len(list(folder.glob("*/result.json"))) == seeds:
        return
    command = [sys.executable, "run.py", "-m", *overrides.split(), f"seed={','.join(map(str, range(seeds)))}"]
    command += [f"hydra.sweep.dir={folder}", "trainer.enable_progress_bar=false"]
    one_thread = {**os.environ, "OMP_NUM_THREADS": "1", "MKL_NUM_THREADS": "1"}
    done = subprocess.run(command, cwd=ROOT, env=one_thread, capture_output=True, text=True)
    print(f"{label}: exit {done.returncode}", flush=True)
    if done.returncode:
        print(done.stderr[-1500:], flush=True)


def collect(label: str, *, out: Path) -> dict[int, dict]:
    """Seed -> result of one configuration."""
    results = [json.loads(path.read_text()) for path in (out / label).glob("*/result.json")]
    return {result["seed"]: result for result in results}


def row(label: str, *, found: dict[int, dict], reference: dict[int, dict]) -> dict[str, object]:
    loss = [r["quality"]["value"] for r in found.values()]
    paired = [found[s]["quality"]["value"] - reference[s]["quality"]["value"] for s in found if s in reference]
    accuracy = [r["metrics"]["val/acc"] for r in found.values() if "val/acc" in r["metrics"]]
    spread = stdev(paired) if len(paired) > 1 else math.nan
    return {
        "configuration": label,
        "n": len(loss),
        "state_fraction": mean(r["state_bytes"] / r["state_bytes_adamw"] for r in found.values()),
        "loss": mean(loss),
        "loss_sd": stdev(loss) if len(loss) > 1 else math.nan,
        "difference": mean(paired) if paired else math.nan,
        "difference_sd": spread,
        "t": mean(paired) / (spread / len(paired) ** 0.5) if spread and not math.isnan(spread) else math.nan,
        "accuracy": mean(accuracy) if accuracy else math.nan,
        "step_ms": mean(r["step_ms"] for r in found.values()),
        "commit": next(iter(found.values()))["commit"],
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--task", choices=["vision"], default="vision")
    parser.add_argument("--seeds", type=int, default=5)
    parser.add_argument("--only", nargs="*", help="labels to run; all by default")
    parser.add_argument("--reference", default=REFERENCE)
    parser.add_argument("--out", type=Path, default=ROOT / "experiments/results/state_budgets_vision")
    args = parser.parse_args()
    chosen = {label: text for label, text in VISION.items() if not args.only or label in args.only}
    out = args.out.resolve()
    with ThreadPoolExecutor(2) as pool:
        list(pool.map(lambda item: run(item[0], overrides=item[1], seeds=args.seeds, out=out), chosen.items()))
    reference = collect(args.reference, out=out)
    rows = [row(label, found=f, reference=reference) for label in chosen if (f := collect(label, out=out))]
    with (out.parent / f"{out.name}.csv").open("w", newline="") as file:
        writer = csv.DictWriter(file, list(rows[0]))
        writer.writeheader()
        writer.writerows(rows)
    print(f"| configuration | n | state | val/loss (sd) | minus {args.reference} (sd, t) | val/acc |")
    print("|---|---|---|---|---|---|")
    for r in rows:
        print(
            f"| {r['configuration']} | {r['n']} | {r['state_fraction']:.1%} | {r['loss']:.4f} ({r['loss_sd']:.4f}) | "
            f"{r['difference']:+.4f} ({r['difference_sd']:.4f}, {r['t']:+.1f}) | {r['accuracy']:.1%} |"
        )


if __name__ == "__main__":
    main()
