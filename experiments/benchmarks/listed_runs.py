"""Runs of a list, over seeds, side by side: quality, and its paired difference to the first label of the group.

    python -m experiments.benchmarks.listed_runs LIST.tsv FOLDER OUT.csv --seeds 0 1 2 --workers 2 --seconds 240

A line of LIST.tsv is GROUP, LABEL and overrides, divided by tabs. Seeds come first, so that time that runs out costs
seeds and not labels; killed, the same command goes on. OUT.csv is written at the end, from what was finished.
"""

import argparse
import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from statistics import mean, stdev
from typing import Any

from baoc.frontier.runs import find_runs
from baoc.tracking.files import write_csv
from experiments.benchmarks.fronts import device_of, paired, run_until, study_of

Line = tuple[str, str, tuple[str, ...]]


def read_list(file: Path) -> list[Line]:
    """(group, label, overrides) of each line that is neither empty nor a comment."""
    lines = [line for line in file.read_text(encoding="utf-8").splitlines() if line.strip() and line[0] != "#"]
    return [(group, label, tuple(words.split())) for group, label, words in (line.split("\t") for line in lines)]


def lists_of(lines: Sequence[Line], *, seeds: Sequence[int]) -> list[list[str]]:
    """The overrides of each run; that of number k is of line k modulo the number of lines."""
    return [[*words, f"seed={seed}"] for seed in seeds for *_, words in lines]


def rows_of(found: Mapping[tuple[int, int], float], *, lines: Sequence[Line]) -> list[dict[str, Any]]:
    """`found`: quality by (line, seed). A row per line that has a run."""
    first: dict[str, int] = {}
    rows = []
    for at, (group, label, _) in enumerate(lines):
        own = {seed: value for (line, seed), value in found.items() if line == at}
        base = first.setdefault(group, at)
        theirs = {seed: value for (line, seed), value in found.items() if line == base}
        if not own:
            continue
        against = paired(own, theirs)
        rows.append(
            {
                "group": group,
                "label": label,
                "n": len(own),
                "quality": mean(own.values()),
                "quality_sd": stdev(own.values()) if len(own) > 1 else None,
                "rival": lines[base][1],
                "pairs": against["n"],
                **{key: against[key] for key in ("difference", "difference_sd", "t")},
                "better_pairs": sum(own[seed] < theirs[seed] for seed in own if seed in theirs),
                "values": " ".join(f"{seed}:{own[seed]:.4f}" for seed in sorted(own)),
            }
        )
    return rows


def collect(folder: Path, *, lines: Sequence[Line]) -> list[dict[str, Any]]:
    found: dict[tuple[int, int], float] = {}
    commits, devices = dict[str, None](), dict[str, None]()
    for run in find_runs(folder):
        if run.result is None or run.result["quality"]["value"] is None:
            continue
        found[int(run.path.name) % len(lines), run.result["seed"]] = run.result["quality"]["value"]
        commits[str(run.result["commit"])[:7]] = None
        devices[device_of(run)] = None
    about = {"device": " ".join(devices), "commit": " ".join(commits)}
    return [row | about for row in rows_of(found, lines=lines)]


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("list", type=Path)
    parser.add_argument("folder", type=Path, help="of the runs")
    parser.add_argument("out", type=Path)
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2])
    parser.add_argument("--workers", type=int, default=os.cpu_count() or 1)
    parser.add_argument("--device", default="cpu", choices=("cpu", "cuda"))
    parser.add_argument("--seconds", type=int, default=0, help="0: as long as it takes")
    parser.add_argument("--collect", action="store_true", help="start nothing")
    given = parser.parse_args()
    lines = read_list(given.list)
    if not given.collect:
        config = study_of(lists_of(lines, seeds=given.seeds), workers=given.workers, device=given.device)
        run_until(config, folder=given.folder, seconds=given.seconds)
    rows = collect(given.folder, lines=lines)
    if rows:
        write_csv(given.out, rows)
    for row in rows:
        numbers = [
            f"{row[key]:.4f}" if row[key] is not None else "" for key in ("quality", "difference", "difference_sd")
        ]
        print(row["group"], row["label"], f"n {row['n']}", *numbers, row["better_pairs"], row["values"], flush=True)


if __name__ == "__main__":
    main()
