"""Runs of a list, each a process of `python run.py`, over seeds and GPUs side by side: a raw row a run as it ends.

    python -m experiments.benchmarks.listed_runs LIST.tsv FOLDER ROWS.csv --seeds 0 1 2 --per-gpu 15 --minutes 9
    # 9 minutes (--minutes) and the longest run, H200 or CPU -> ROWS.csv

A line of LIST.tsv is GROUP, LABEL and overrides, divided by tabs; `{data}` stands for the folder of --data. Seeds come
first, so that time that runs out costs seeds and not labels; a line `# after all seeds` puts lines below it last. No
run is ended: past --minutes none starts. The same command goes on with the runs that have no row. Without a GPU,
--per-gpu runs share the cores.
"""

import argparse
import json
import os
import time
from collections.abc import Iterator, Mapping, Sequence
from csv import DictReader, DictWriter
from dataclasses import dataclass
from multiprocessing.connection import wait
from pathlib import Path
from statistics import mean, stdev
from typing import Any

from baoc.core.statistics import paired_difference
from baoc.frontier.runs import RunFolder, find_runs
from baoc.sweep.gpu_slots import find_gpus
from baoc.sweep.trial_process import COMMAND, RunOutcome, TrialProcess, preload
from baoc.tracking.files import read_json
from experiments.benchmarks.fronts import device_of

LAST = "# after all seeds"
# A checkpoint of tens of gigabytes takes longer than some runs.
UNKEPT = """
import sys
from baoc.callbacks.checkpoint import SafeCheckpoint
SafeCheckpoint._save_last = SafeCheckpoint._save_best = lambda *_, **__: None
from baoc.cli.main import main
sys.exit(main(sys.argv[1:], single=True))
"""
FIXED = ("checkpoint.export=false", "logger=jsonl", "trainer.enable_progress_bar=false")
COLUMNS = (
    "group", "label", "seed", "status", "quality", "value", "accuracy", "state_bytes", "state_fraction", "recipe", "lr",
    "num_steps", "peak_bytes", "step_ms", "train_s", "wall_s", "curve", "side_by_side", "overrides", "device", "python",
    "torch", "commit",
)  # fmt: skip
Row = Mapping[str, Any]


@dataclass(frozen=True, slots=True, kw_only=True)
class Line:
    group: str
    label: str
    words: tuple[str, ...]
    written: str = ""  # as in the list
    last: bool = False  # after all seeds of other lines


def read_list(file: Path, *, data: Path = Path("data"), also: Sequence[str] = ()) -> list[Line]:
    """`also`: overrides of every line."""
    lines: list[Line] = []
    last = False
    for text in file.read_text(encoding="utf-8").splitlines():
        last = last or text.strip() == LAST
        if text.strip() and text[0] != "#":
            group, label, written = text.split("\t")
            words = (*written.format(data=data).split(), *also)
            lines.append(Line(group=group, label=label, words=words, written=" ".join((written, *also)), last=last))
    return lines


def ordered(lines: Sequence[Line], *, seeds: Sequence[int]) -> list[tuple[Line, int]]:
    return [(line, seed) for last in (False, True) for seed in seeds for line in lines if line.last is last]


def read_rows(file: Path) -> list[Row]:
    if not file.is_file():
        return []
    with file.open(newline="") as stream:
        return list(DictReader(stream))


def run_all(
    jobs: Sequence[tuple[Line, int]],
    *,
    folder: Path,
    rows: Path,
    gpus: Sequence[str],
    per_gpu: int,
    minutes: float,
    code: str = COMMAND,
) -> None:
    """`gpus`: as CUDA_VISIBLE_DEVICES names them; one empty name is the CPU. `code`: the program of a run."""
    preload(word for line, _ in jobs for word in line.words)
    places = [gpu for _ in range(per_gpu) for gpu in gpus]
    done = {(row["group"], row["label"], int(row["seed"])) for row in read_rows(rows)}
    left = iter([(line, seed) for line, seed in jobs if (line.group, line.label, seed) not in done])
    began, running = time.monotonic(), list[Running]()
    while True:
        while places and time.monotonic() - began < 60 * minutes and (job := next(left, None)) is not None:
            running.append(Running(*job, gpu=places.pop(0), folder=folder, code=code))
        if not running:
            return
        wait([one.process.sentinel for one in running])
        for one in [one for one in running if one.process.process.exitcode is not None]:
            outcome = one.process.poll()
            assert outcome is not None
            append(rows, row_of(one, outcome=outcome, side_by_side=len(running)))
            running.remove(one)
            places.append(one.gpu)


class Running:
    """A run under way."""

    def __init__(self, line: Line, seed: int, *, gpu: str, folder: Path, code: str):
        self.line, self.seed, self.gpu = line, seed, gpu
        self.folder = folder / f"{line.group}_{line.label}_{seed}"
        self.began = time.monotonic()
        self.process = TrialProcess(
            [*line.words, f"seed={seed}", *FIXED],
            folder=self.folder,
            threads=1,
            code=code,
            variables={"CUDA_VISIBLE_DEVICES": gpu, "MKL_NUM_THREADS": "1"},
        )


def row_of(one: Running, *, outcome: RunOutcome, side_by_side: int) -> Row:
    line, result = one.line, outcome.result
    row: dict[str, Any] = {
        "group": line.group,
        "label": line.label,
        "seed": one.seed,
        "status": "finite"
        if result is not None and not outcome.diverged
        else " ".join((outcome.message or "no result").split())[:200],
        "wall_s": round(time.monotonic() - one.began, 2),
        "side_by_side": side_by_side,
        "overrides": line.written,
    }
    return row if result is None else row | told_of(next(iter(find_runs(one.folder))), result=result)


def told_of(run: RunFolder, *, result: Row) -> Row:
    env, plan = read_json(run.path / "env.json"), read_json(run.path / "allocation.json")
    curve = list(_curve(run.path / "metrics.jsonl", name=result["quality"]["name"]))
    return {
        "quality": result["quality"]["name"],
        "value": result["quality"]["value"],
        "accuracy": result["metrics"].get("val/acc", ""),
        "state_bytes": result["state_bytes"],
        "state_fraction": round(result["state_bytes"] / result["state_bytes_adamw"], 6),
        "recipe": (plan["basis"] or {}).get("recipe") or plan["allocator"],
        "lr": run.settings.get("optim.lr"),
        "num_steps": result["num_steps"],
        "peak_bytes": result["peak_bytes"],
        "step_ms": result["step_ms"],  # None of runs too short to tell
        "train_s": (result["step_ms"] or 0) * result["num_steps"] / 1e3,
        "curve": " ".join(f"{step}:{seconds:.1f}:{value:.5g}" for step, seconds, value in curve),
        "device": device_of(run),
        "python": env["python"],
        "torch": env["versions"]["torch"],
        "commit": str(result["commit"])[:7],
    }


def _curve(file: Path, *, name: str) -> Iterator[tuple[int, float, float]]:
    """(step, seconds since training began, value) of each validation."""
    if not file.is_file():  # a run too short to log
        return
    for text in file.read_text(encoding="utf-8").splitlines():
        told = json.loads(text)
        if name in told:
            yield told["step"], told["time_s"], told[name]


def append(file: Path, row: Row) -> None:
    new = not file.is_file()
    file.parent.mkdir(parents=True, exist_ok=True)
    with file.open("a", newline="") as stream:
        writer = DictWriter(stream, COLUMNS)
        if new:
            writer.writeheader()
        writer.writerow(row)


def table(rows: Sequence[Row]) -> list[str]:
    """A line per label: mean, and the paired difference to the first label of its group with its 95 % interval."""
    found: dict[str, dict[str, dict[int, float]]] = {}
    shares = {(row["group"], row["label"]): row["state_fraction"] for row in rows if row["status"] == "finite"}
    for row in rows:
        if row["status"] == "finite":
            values = found.setdefault(row["group"], {}).setdefault(row["label"], {})
            values[int(row["seed"])] = float(row["value"])
    lines = []
    for group, labels in found.items():
        first = next(iter(labels))
        for label, own in labels.items():
            spread = f"{stdev(own.values()):.4f}" if len(own) > 1 else "-"
            shared = own.keys() & labels[first].keys()
            told = str(paired_difference(own, labels[first], level=0.95)) if shared else "-"
            share = float(shares[group, label])
            lines.append(
                f"{group:10s} {label:14s} n {len(own)} {share:6.1%} {mean(own.values()):.4f} ({spread}) {told}"
            )
    return lines


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("list", type=Path)
    parser.add_argument("folder", type=Path, help="of the runs")
    parser.add_argument("rows", type=Path, help="CSV of raw rows")
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2])
    parser.add_argument("--per-gpu", type=int, default=1)
    parser.add_argument("--gpus", nargs="*", default=[gpu.name for gpu in find_gpus()], help="their numbers")
    parser.add_argument("--minutes", type=float, default=1e9, help="past which no run starts")
    parser.add_argument("--data", type=Path, default=Path("data"), help="folder that {data} stands for")
    parser.add_argument("--also", nargs="*", default=[], help="overrides of every run, such as trainer.max_steps=12")
    parser.add_argument("--without-checkpoints", action="store_true", help="those of large networks fill a disk")
    given = parser.parse_args()
    lines = read_list(given.list, data=given.data.absolute(), also=given.also)
    jobs = ordered(lines, seeds=given.seeds)
    began = time.monotonic()
    gpus, folder = given.gpus or [""], given.folder.absolute()
    print(
        f"{len(jobs)} runs on {f'GPUs {gpus}' if given.gpus else 'the CPU'}, {given.per_gpu} at once on each",
        flush=True,
    )
    code = UNKEPT if given.without_checkpoints else COMMAND
    run_all(jobs, folder=folder, rows=given.rows, gpus=gpus, per_gpu=given.per_gpu, minutes=given.minutes, code=code)
    rows = read_rows(given.rows)
    print(*table(rows), sep="\n")
    bad = [row for row in rows if row["status"] != "finite"]
    print(*(f"{row['group']} {row['label']} {row['seed']}: {row['status']}" for row in bad[:20]), sep="\n")
    took = f"{time.monotonic() - began:.0f} s, {os.cpu_count()} cores"
    print(f"{len(rows)} of {len(jobs)} runs, {len(bad)} without a value, {took}")


if __name__ == "__main__":
    main()
