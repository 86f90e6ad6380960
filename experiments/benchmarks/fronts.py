"""Fronts of BAOC, of uniform specs and of random feasible allocations over the same budgets, for all three tasks.

    python -m experiments.benchmarks.fronts FOLDER OUT --seeds 0 1 2 --seconds 450
    # 8 minutes (--seconds; all runs take hours), CPU -> fronts_points.csv, fronts_equal.csv, fronts_area.csv

One study whose trials are all listed beforehand, seeds first, so that time that runs out costs seeds and not tasks
(--models dit,llama vit: vit's seeds come after all of the others'); killed, the same command goes on. With --collect
nothing is started: the runs below FOLDER are told, whoever made them. OUT gets fronts_points.csv (quality by
configuration, over seeds), fronts_equal.csv (paired differences at equal budgets) and fronts_area.csv (dominated area
by family, per seed and paired).
"""

import argparse
import io
import math
import os
import signal
import tarfile
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from statistics import mean, stdev
from typing import Any

from baoc.frontier.comparable_runs import allocator_family
from baoc.frontier.pareto import doublings, hypervolume, pareto
from baoc.frontier.runs import RunFolder, find_runs
from baoc.sweep.study import run_study
from baoc.sweep.study_config import StudyConfig, read_study
from baoc.tracking.files import read_json, write_csv
from experiments.analysis.calibrate import WEIGHT

# model -> (steps, what else): short enough for three tasks within minutes, validated at the end only; sizes are those
# that `auto` takes on a CPU, on a GPU as well
TASKS: dict[str, tuple[int, tuple[str, ...]]] = {
    "vit": (200, ("model.size=tiny",)),
    "dit": (200, ("model.size=tiny", "task.num_samples=0")),
    "llama": (100, ("model.size=nano",)),
}
BUDGETS = ("state_2", "state_5", "state_10", "state_25")
# BAOC with its default risk, with a dropped momentum weighted up and with role priors; random allocations
CHOSEN = (
    "allocator=exact risk=statistics", "allocator=exact risk=statistics risk.weights.drop_m=5",
    "allocator=random risk=statistics", "allocator=exact risk=prior",
)  # fmt: skip
UNIFORM = (
    "uniform_adamw", "uniform_adamw8bit", "uniform_lion8bit_matched", "uniform_foam8bit_matched",
    "uniform_column_norm_matched", "uniform_muon_matched", "uniform_adafactor_matched", "uniform_sign_matched",
    "uniform_sign",
)  # fmt: skip
KEPT = ("result.json", "error.json", "candidates.csv", "allocation.json", "config.yaml", "metrics.jsonl", "env.json")


def base(model: str, *, given: argparse.Namespace) -> list[str]:
    own, more = TASKS[model]
    told = dict(word.split("=") for word in given.steps)
    steps = told.get(model, own)
    return [f"model={model}", f"trainer.max_steps={steps}", f"trainer.val_check_interval={steps}", *more]


def runs_of(model: str, *, seed: int, given: argparse.Namespace) -> list[list[str]]:
    own = [*base(model, given=given), f"seed={seed}"]
    chosen = [words for words in CHOSEN if not any(part in words for part in given.without)]
    uniform = [name for name in UNIFORM if not any(part in name for part in given.without)]
    told = [[*own, f"budget={budget}", *words.split()] for budget in given.budgets for words in chosen]
    return told + [[*own, "budget=unlimited", "reallocation=off", f"allocator={name}"] for name in uniform]


def more_random(model: str, *, seeds: Iterable[int], given: argparse.Namespace) -> list[list[str]]:
    """Further random allocations at equal budgets: what a risk is calibrated on by `analysis.calibrate`."""
    words = [*base(model, given=given), "allocator=random", "risk=statistics"]
    return [[*words, f"seed={seed}", f"budget={budget}"] for seed in seeds for budget in given.budgets]


def study_of(lists: Sequence[Sequence[str]], *, workers: int, device: str = "cpu") -> StudyConfig:
    """On a GPU all of its trials share the card that CUDA_VISIBLE_DEVICES names: small networks leave it room."""
    given: dict[str, Any] = {
        "name": "fronts",
        "objectives": {"quality": "minimize", "state_bytes": "minimize"},
        "space": {"seed": {"choices": [0]}},  # not searched: all trials are listed
        "sampler": "random",
        "fixed": [f"device={device}", "checkpoint.export=false", "logger=jsonl"],
        "gpus": [],
        "baselines": [list(words) for words in lists],
        "n_trials": len(lists),
        "workers": workers,
    }
    return read_study(given)


def read_results(folder: Path) -> list[dict[str, Any]]:
    """Finished runs, flat."""
    rows = []
    for run in find_runs(folder):
        result = run.result
        if result is None or result["quality"]["value"] is None:
            continue
        family = allocator_family(result["allocator"])
        risk = _risk_of(run)
        if family == "BAOC" and risk != "statistics":
            family = f"BAOC, {risk}"
        rows.append(
            {
                "model": result["model"],
                "allocator": result["allocator"],
                "risk": risk if family.startswith("BAOC") else "",
                "budget": result["budget"]["name"],
                "seed": result["seed"],
                "family": family,
                "quality_name": result["quality"]["name"],
                "quality": result["quality"]["value"],
                "state_bytes": result["state_bytes"],
                "state_fraction": result["state_bytes"] / result["state_bytes_adamw"],
                "peak_bytes": result["peak_bytes"],
                "steps": result["num_steps"],
                "commit": result["commit"],
                "device": device_of(run),
            }
        )
    return rows


def _risk_of(run: RunFolder) -> str:
    """Its name, and the weights that are not 1."""
    weights = {key: value for key, value in run.settings.items() if key.startswith(WEIGHT) and float(value) != 1}
    told = [f"{key.removeprefix(WEIGHT)} {float(value):g}" for key, value in weights.items()]
    return " ".join([str(run.settings.get("risk.name", "")), *told])


def device_of(run: RunFolder) -> str:
    told = read_json(run.path / "env.json")["device"]
    cards = dict.fromkeys(map(str, told["cuda"])) if run.settings.get("device") != "cpu" else {}
    return (
        f"{', '.join(cards)}, several runs a card" if cards else f"{told['cpu_count']} x86-64 cores, one thread a run"
    )


def points(rows: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """A row per configuration, seeds joined; `dominated` by the mean quality and state of any other of its task."""
    keys = ("model", "family", "allocator", "risk", "budget", "quality_name", "steps")
    groups: dict[tuple[Any, ...], list[Mapping[str, Any]]] = {}
    for row in rows:
        groups.setdefault(tuple(row[key] for key in keys), []).append(row)
    told = []
    for group, members in groups.items():
        found = [member["quality"] for member in members]
        own = dict(zip(keys, group, strict=True)) | {"n": len(found), "quality": mean(found)}
        own |= {"quality_sd": stdev(found) if len(found) > 1 else None}
        own |= {key: max(member[key] for member in members) for key in ("state_fraction", "state_bytes", "peak_bytes")}
        told.append(own)
    for model in {row["model"] for row in told}:
        mine = [row for row in told if row["model"] == model]
        kept = pareto([(row["quality"], row["state_bytes"]) for row in mine])
        for row, best in zip(mine, kept, strict=True):
            row["dominated"] = not best
    return sorted(told, key=lambda row: (row["model"], row["family"], row["risk"], row["state_bytes"]))


def equal_budgets(rows: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """BAOC less its rivals at each budget, paired by seed: random's, and the best (by mean) uniform spec that fits."""
    told = []
    for model in dict.fromkeys(row["model"] for row in rows):
        mine = [row for row in rows if row["model"] == model]
        uniform: dict[str, dict[int, Mapping[str, Any]]] = {}
        for row in mine:
            if row["family"] == "uniform":
                uniform.setdefault(row["allocator"], {})[row["seed"]] = row
        for budget in dict.fromkeys(r["budget"] for r in mine if r["family"].startswith("BAOC")):
            own = [r for r in mine if r["budget"] == budget]
            limit = max(row["state_fraction"] for row in own if row["family"] != "uniform")
            chance = {row["seed"]: row["quality"] for row in own if row["allocator"] == "random"}
            fits = {n: r for n, r in uniform.items() if max(x["state_fraction"] for x in r.values()) <= limit * 1.001}
            best = min(fits, key=lambda n: mean(r["quality"] for r in fits[n].values()), default="")
            rivals = {"random": chance, best: {s: r["quality"] for s, r in fits.get(best, {}).items()}}
            for risk in dict.fromkeys(row["risk"] for row in own if row["risk"]):
                chosen = {row["seed"]: row["quality"] for row in own if row["risk"] == risk}
                told += [
                    {"model": model, "budget": budget, "risk": risk, "rival": r} | paired(chosen, t)
                    for r, t in rivals.items()
                ]
                rivals.setdefault(f"BAOC, {risk}", chosen)  # of the risks that come after it
    return [row for row in told if row["n"]]


def paired(own: Mapping[int, float], theirs: Mapping[int, float]) -> dict[str, Any]:
    both = sorted(set(own) & set(theirs))
    pairs = [own[seed] - theirs[seed] for seed in both]
    spread = stdev(pairs) if len(pairs) > 1 else None
    return {
        "n": len(pairs),
        "own": mean(own[seed] for seed in both) if both else None,
        "theirs": mean(theirs[seed] for seed in both) if both else None,
        "difference": mean(pairs) if pairs else None,
        "difference_sd": spread,
        "t": mean(pairs) / (spread / math.sqrt(len(pairs))) if spread else None,
    }


def areas(rows: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """Area that each family's runs of one seed dominate, in percent of what all of that seed do; the reference is the
    worst of all. State is taken as a share of AdamW's, and as its logarithm to base 2, not below 1/128."""
    told = []
    for model in dict.fromkeys(row["model"] for row in rows):
        for axis in ("share", "log2"):
            shares: dict[str, dict[int, float]] = {}
            mine = [row for row in rows if row["model"] == model]
            corner = (max(row["quality"] for row in mine), _axis(1.0, axis=axis))
            for seed in sorted({row["seed"] for row in mine}):
                own = [row for row in mine if row["seed"] == seed]
                if not {"BAOC", "uniform", "random feasible"} <= {row["family"] for row in own}:
                    continue
                whole = hypervolume([_cost(row, axis) for row in own], reference=corner)
                for family in sorted({row["family"] for row in own}):
                    part = [row for row in own if row["family"] == family]
                    value = 100 * hypervolume([_cost(row, axis) for row in part], reference=corner) / whole
                    shares.setdefault(family, {})[seed] = value
            for family, found in shares.items():
                for rival in ("uniform", "random feasible"):
                    told.append({"model": model, "state_axis": axis, "family": family, "rival": rival})
                    told[-1] |= paired(found, shares[rival])
    return [row for row in told if row["family"] != row["rival"]]


def _axis(fraction: float, *, axis: str) -> float:
    return fraction if axis == "share" else -doublings(fraction, up_to=1.0)


def _cost(row: Mapping[str, Any], axis: str) -> tuple[float, float]:
    return row["quality"], _axis(row["state_fraction"], axis=axis)


def write_all(folder: Path, *, out: Path, prefix: str = "fronts") -> None:
    rows = read_results(folder)
    commits = " ".join(dict.fromkeys(str(row["commit"])[:7] for row in rows))  # those of the runs
    devices = {row["model"]: row["device"] for row in rows}
    out.mkdir(parents=True, exist_ok=True)
    for name, told in (("points", points(rows)), ("equal", equal_budgets(rows)), ("area", areas(rows))):
        if told:
            told = [row | {"device": devices[row["model"]], "commit": commits} for row in told]
            write_csv(out / f"{prefix}_{name}.csv", told)
            print(f"{name}: {len(told)} rows", flush=True)


def pack(folder: Path, *, into: Path) -> None:
    """What a frontier, a page and a calibration need of every run, in one file (about 3 kB a run)."""
    with tarfile.open(into, "w:xz") as archive:
        for name in (*KEPT, "study.db", "study.json"):
            for file in sorted(folder.rglob(name)):
                text = _chosen_rows(file) if name == "candidates.csv" else file.read_bytes()
                entry = tarfile.TarInfo(str(file.relative_to(folder)))
                entry.size = len(text)
                archive.addfile(entry, io.BytesIO(text))


def _chosen_rows(candidates: Path) -> bytes:
    """Of a run's candidates those that it chose, and AdamW's, which their bytes are compared with."""
    allocation = candidates.parent / "allocation.json"
    chosen = read_json(allocation)["choices"] if allocation.is_file() else {}
    head, *lines = candidates.read_text(encoding="utf-8").splitlines(keepends=True)
    at = [head.strip().split(",").index(key) for key in ("block", "spec")]
    named = ((line, [line.split(",")[place] for place in at]) for line in lines)
    kept = [line for line, (block, spec) in named if spec in ("adamw", chosen.get(block))]
    return "".join([head, *kept]).encode()


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("folder", type=Path, help="of the runs")
    parser.add_argument("out", type=Path, help="of the CSVs")
    parser.add_argument("--models", nargs="+", default=[",".join(TASKS)], help=f"groups of {', '.join(TASKS)}")
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2])
    parser.add_argument("--more-random", type=int, default=0, help="further seeds of random ones, of the first model")
    parser.add_argument("--steps", nargs="*", default=[], metavar="MODEL=STEPS", help="other lengths than by task")
    parser.add_argument("--budgets", nargs="+", default=list(BUDGETS))
    parser.add_argument("--without", nargs="*", default=[], help="parts of configurations that are left out")
    parser.add_argument("--workers", type=int, default=os.cpu_count() or 1)
    parser.add_argument(
        "--device", default="cpu", choices=["cpu", "cuda"], help="cuda: one process per card, one FOLDER"
    )
    parser.add_argument("--seconds", type=int, default=0, help="0: as long as it takes")
    parser.add_argument("--collect", action="store_true", help="start nothing: the CSVs of runs that are there already")
    parser.add_argument("--prefix", default="fronts", help="of the CSVs' names")
    parser.add_argument("--pack", type=Path, help="FILE.tgz with the records of all runs")
    given = parser.parse_args()
    if not given.collect:
        run_all(given)
    write_all(given.folder, out=given.out, prefix=given.prefix)
    if given.pack:
        pack(given.folder, into=given.pack)


def run_all(given: argparse.Namespace) -> None:
    lists: list[list[str]] = []
    groups = [group.split(",") for group in given.models]
    for group in groups:
        for seed in given.seeds:
            lists += [words for model in group for words in runs_of(model, seed=seed, given=given)]
    lists += more_random(groups[0][0], seeds=range(100, 100 + given.more_random), given=given)
    run_until(study_of(lists, workers=given.workers, device=given.device), folder=given.folder, seconds=given.seconds)


def run_until(config: StudyConfig, *, folder: Path, seconds: int) -> None:
    """Ended with what it has after `seconds`; 0 is never."""
    try:
        signal.signal(signal.SIGALRM, _over)
        signal.alarm(seconds)
        run_study(config, folder=folder)
        signal.alarm(0)
    except KeyboardInterrupt as ended:
        print(f"ended before all runs: {ended}", flush=True)


def _over(*_: object) -> None:
    raise KeyboardInterrupt("time is over")


if __name__ == "__main__":
    main()
