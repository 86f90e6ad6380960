"""Times `lagrangian` at 1,000 and 10,000 blocks of 24 specs under two limits, with the gap that it certifies.

Block sizes are log-normal, so that single blocks weigh; each row of the CSV is one seed and one tightness of the
limits. Run from the repository's root: `python -m experiments.benchmarks.allocator_scale OUT.csv`.
"""

import csv
import platform
import sys
from statistics import median
from time import perf_counter

import numpy as np

from baoc.planning.allocators import ALLOCATORS
from baoc.types import Candidate, Cost, Limits, Risk

NUM_SPECS = 24
BYTES = (0, 0.03, 0.25, 0.5, 1, 1.06, 2, 2.1, 3, 4, 4.1, 5, 6, 8)  # per element
TIGHT = ((0.05, 0.2), (0.1, 0.3), (0.3, 0.5))  # share of the range of bytes, of seconds
SEEDS = range(10)
REPEATS = 3


def instance(num_blocks: int, *, seed: int, tight: tuple[float, float]) -> tuple[dict[str, list[Candidate]], Limits]:
    """Random blocks: risk falls with bytes at a rate of the block's own, with noise; seconds are drawn freely."""
    rng = np.random.default_rng(seed)
    size = rng.lognormal(11, 2, num_blocks)[:, None]
    per_element = rng.choice(BYTES, (num_blocks, NUM_SPECS)) + rng.random((num_blocks, NUM_SPECS)) * 0.01
    num_bytes = np.round(size * per_element)
    weight = rng.lognormal(0, 1.5, num_blocks)[:, None]
    decay = np.exp(-per_element * rng.uniform(0.2, 1, (num_blocks, 1)))
    risk = weight * decay * rng.uniform(0.6, 1.4, (num_blocks, NUM_SPECS))
    step_s = size * 1e-11 * rng.uniform(0.5, 3, (num_blocks, NUM_SPECS))
    candidates = {
        f"b{block}": [
            Candidate(
                block=f"b{block}",
                spec=f"s{spec}",
                cost=Cost(state_bytes=int(num_bytes[block, spec]), step_s=float(step_s[block, spec])),
                risk=Risk(total=float(risk[block, spec])),
            )
            for spec in range(NUM_SPECS)
        ]
        for block in range(num_blocks)
    }

    def between(values: np.ndarray, share: float) -> float:
        least, most = values.min(axis=1).sum(), values.max(axis=1).sum()
        return float(least + share * (most - least))

    return candidates, Limits(state_bytes=int(between(num_bytes, tight[0])), step_s=between(step_s, tight[1] * 0.5))


def main(path: str) -> None:
    rows = []
    for num_blocks in (1_000, 10_000):
        for tight in TIGHT:
            for seed in SEEDS:
                candidates, limits = instance(num_blocks, seed=seed, tight=tight)
                seconds = []
                for _ in range(REPEATS):
                    began = perf_counter()
                    allocation = ALLOCATORS["lagrangian"](candidates, limits=limits)
                    seconds.append(perf_counter() - began)
                rows.append(
                    [num_blocks, *tight, seed, f"{median(seconds) * 1e3:.1f}", f"{100 * (allocation.gap or 0):.4f}"]
                )
    with open(path, "w", newline="", encoding="utf-8") as file:
        writer = csv.writer(file)
        writer.writerow(["blocks", "byte_share", "step_share", "seed", "median_ms", "gap_percent"])
        writer.writerows(rows)
    print(f"{platform.machine()}, numpy {np.__version__}, one process")
    for num_blocks in (1_000, 10_000):
        mine = [row for row in rows if row[0] == num_blocks]
        times, gaps = sorted(float(row[4]) for row in mine), sorted(float(row[5]) for row in mine)
        print(
            f"{num_blocks} blocks, n={len(mine)}: median {median(times):.0f} ms, worst {times[-1]:.0f} ms; "
            f"gap median {median(gaps):.4f} %, worst {gaps[-1]:.4f} %"
        )


if __name__ == "__main__":
    main(sys.argv[1])
