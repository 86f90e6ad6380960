"""Is a recipe better than tuned AdamW? Six recipes, two beta2, five rates, three seeds, three tasks, paired by seed.

    python -m experiments.benchmarks.recipe_study OUT [--seconds 540] [--done ROWS.csv] [--fashion FILE.npz]
    python -m experiments.benchmarks.recipe_study OUT --phase long --rows ROWS.csv [--done LONG_ROWS.csv]

A recipe is a spec per role; recipe_lists.py holds what was fixed before the first run. Rows go to OUT/rows.csv as they
come, in an order that is balanced wherever it is cut; `--done` copies rows of a call before and leaves their runs out.
The long phase trains AdamW and the two best recipes for ten times the steps at the rates that `longer` names, on other
seeds. experiments/analysis/recipe_study.py makes the table again.

For one NVIDIA GPU: forward, backward and clipping are one CUDA graph per task and slot, the optimizer steps after its
replay, and each of some processes has `--slots` runs under way on streams of their own. Fastest was one process of six
without MPS (CUDA_DEVICE_MAX_CONNECTIONS=32, `--procs 1 --slots 6 --mps off`). First it is checked that graphs and plain
launches give the same losses (else that task runs plainly), and OUT/steps.csv gets step times of an otherwise idle
device. A run's own seconds were shared with others: they are no measure of speed. For several GPUs start one of these
on each, `--part 0 2` and `--part 1 2` say, each with CUDA_VISIBLE_DEVICES (a UUID) and CUDA_MPS_PIPE_DIRECTORY of its
own.
"""

import argparse
import csv
import gc
import multiprocessing as mp
import os
import shutil
import subprocess
import sys
import time
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import asdict, fields
from pathlib import Path
from queue import Empty
from typing import Any

import torch

from baoc.tracking.files import write_csv
from experiments.analysis.recipe_study import longer, read_rows, summarise, table
from experiments.benchmarks.recipe_lists import (
    BASE_LR,
    BETA2,
    CHECKED,
    FACTORS,
    LONGER,
    RECIPES,
    SEEDS,
    TIMED,
    TOLERANCE,
)
from experiments.benchmarks.recipe_runs import Bench, Job, Options, Rig, Row, Slot, schedule, wait
from experiments.benchmarks.recipe_tasks import TASKS

MOST_FAILED = 3  # runs of a process, one after the other


def short_jobs(options: Options, *, seeds: Sequence[int], steps: int | None) -> list[Job]:
    return [
        Job("short", task, recipe, beta2, factor, seed, steps or TASKS[task].steps)
        for seed in seeds
        for factor in FACTORS
        for beta2 in BETA2
        for recipe in options.recipes
        for task in options.tasks
    ]


def long_jobs(options: Options, rows: Sequence[Any], *, seeds: Sequence[int], steps: int | None) -> list[Job]:
    settings = sorted(longer(rows), key=lambda setting: FACTORS.index(setting[3]))
    jobs = [
        Job("long", task, recipe, beta2, factor, seed, steps or LONGER * TASKS[task].steps)
        for seed in seeds
        for task, recipe, beta2, factor in settings
        if task in options.tasks
    ]
    # After the first seed the slowest task comes last, so that where it is cut the others have that seed as a whole.
    return sorted(jobs, key=lambda job: (job.seed, job.seed != seeds[0] and job.task == "language"))


# -- many at once -----------------------------------------------------------------------------------------------------


def prepare_process() -> None:
    torch.set_num_threads(1)
    torch.set_float32_matmul_precision("high")
    if not torch.cuda.is_available():
        torch.set_flush_denormal(True)


def work(jobs: Sequence[Job], options: Options, taken: Any, go: Any, graphed: Any, results: Any) -> None:
    """Takes jobs by number until there are none or no time is left for one."""
    prepare_process()
    import transformers.models.llama.modeling_llama
    import transformers.models.vit.modeling_vit  # noqa: F401  (seconds, while the check runs)

    bench = Bench(options)
    if not go.wait(max(0.0, options.end - time.time())):
        return
    on = {task: bool(graphed[place]) for place, task in enumerate(TASKS)}
    steps = {task: max((job.steps for job in jobs if job.task == task), default=1) for task in TASKS}
    slots = [Slot(bench, graphed=on, steps=steps) for _ in range(options.slots)]
    lasted: dict[str, float] = {}
    more, in_a_row = True, 0
    gc.freeze()
    while time.time() < options.end:
        moved = False
        for slot in slots:
            if slot.job is None and more:
                job = _take(jobs, taken)
                more = job is not None and time.time() + lasted.get(job.task, 0.0) < options.end
                if job is not None and more:
                    slot.start(job)
            if slot.job is None or not slot.ready:
                continue
            moved = True
            try:
                row = slot.advance()
            except Exception as error:  # of one run; where one after the other fails, it is the process
                results.put(slot.fail(error))
                in_a_row += 1
                if in_a_row == MOST_FAILED or "CUDA error" in str(error):
                    return
                continue
            if row is not None:
                lasted[row.task], in_a_row = row.train_s, 0
                results.put(row)
        if not more and all(slot.job is None for slot in slots):
            return
        if not moved:
            time.sleep(5e-5)


def _take(jobs: Sequence[Job], taken: Any) -> Job | None:
    with taken.get_lock():
        taken.value += 1
        return jobs[taken.value - 1] if taken.value <= len(jobs) else None


# -- the check before -------------------------------------------------------------------------------------------------


def check(options: Options, wanted: bool, graphed: Any, results: Any) -> None:
    """Whether graphs do what plain launches do, task by task, and step times; compiles what all processes launch."""
    prepare_process()
    bench = Bench(options)
    for name in options.tasks:
        place, steps = list(TASKS).index(name), CHECKED + 1
        try:
            rigs = [Rig(bench.task(name), steps=steps, graphed=on) for on in ((False, True) if wanted else (False,))]
        except Exception as error:
            rigs = [Rig(bench.task(name), steps=steps, graphed=False)]
            print(f"{name}: no graph, so steps are launched plainly: {type(error).__name__}: {error}", flush=True)
        same = len(rigs) > 1
        for recipe in options.recipes:
            begun = time.time()
            job = Job("check", name, recipe, BETA2[0], 1.0, 1, CHECKED)
            curves = [losses(bench, rig, job) for rig in rigs]
            apart = max(abs(a - b) / abs(a) for a, b in zip(curves[0], curves[-1], strict=True))
            same = same and apart <= TOLERANCE
            told = step_times(bench, rigs[-1], job) | {"apart": round(apart, 6)}
            results.put(told)
            print(
                f"{name} {recipe}: loss {curves[0][0]:.4f} to {curves[0][-1]:.4f} in {CHECKED} steps, graph and plain "
                f"{apart:.2%} apart; gradients {told['gradients_ms']:.2f} ms, a step {told['step_ms']:.2f} ms; checked "
                f"in {time.time() - begun:.1f} s",
                flush=True,
            )
        if wanted and not same:
            print(
                f"{name}: graphs and plain launches differ by more than {TOLERANCE:.0%}: launched plainly", flush=True
            )
        graphed[place] = int(wanted and same)
    results.put(None)


def losses(bench: Bench, rig: Rig, job: Job) -> list[float]:
    rig.begin(bench.weights(job.task, job.seed), bench.plan(job))
    optimizer = bench.optimizer(rig, job)
    curve = []
    for step in range(job.steps):
        for group in optimizer.param_groups:
            group["lr"] = BASE_LR * schedule(step, job.steps)
        rig.step()
        assert rig.last_loss is not None
        curve.append(rig.last_loss.clone())
        optimizer.step()
    return torch.stack(curve).tolist()


def step_times(bench: Bench, rig: Rig, job: Job) -> dict[str, Any]:
    """Milliseconds of gradients alone and of whole steps by the clock; each step sees the first step's data."""
    optimizer = bench.optimizer(rig, job)
    for _ in range(5):
        rig.at.zero_()
        rig.step()
        optimizer.step()
    spent = {}
    for name, stepping in (("gradients_ms", False), ("step_ms", True)):
        wait(rig.device)
        begun = time.perf_counter()
        for _ in range(TIMED if rig.device.type == "cuda" else 2):
            rig.at.zero_()
            rig.step()
            if stepping:
                optimizer.step()
        wait(rig.device)
        spent[name] = round(1e3 * (time.perf_counter() - begun) / (TIMED if rig.device.type == "cuda" else 2), 4)
    planner, specs = bench.specs(rig, job.recipe)
    used = {spec: sum(one == spec for one in specs.values()) for spec in sorted(set(specs.values()))}
    return {
        "task": job.task, "recipe": job.recipe, "graphed": rig.graph is not None, **spent,
        "optimizer_ms": round(spent["step_ms"] - spent["gradients_ms"], 4),
        "params": sum(param.numel() for param in rig.params), "state_bytes": optimizer.state_bytes(),
        "state_fraction": round(optimizer.state_bytes() / planner.state_bytes_adamw, 5),
        "specs": " ".join(f"{spec}:{count}" for spec, count in used.items()),
    }  # fmt: skip


# -- the whole --------------------------------------------------------------------------------------------------------


def start_mps() -> bool:
    """NVIDIA's service that lets processes share the device at the same time, if it is there and works."""
    control = shutil.which("nvidia-cuda-mps-control")
    if control is None or subprocess.run([control, "-d"], capture_output=True).returncode:
        return False
    try:
        tried = subprocess.run(
            [sys.executable, "-c", "import torch; torch.zeros(1, device='cuda').item()"],
            capture_output=True,
            timeout=60,
        )
        works = tried.returncode == 0
    except subprocess.TimeoutExpired:
        works = False
    if not works:
        stop_mps()
    return works


def stop_mps() -> None:
    with suppress(subprocess.SubprocessError, OSError):
        subprocess.run(["nvidia-cuda-mps-control"], input=b"quit\n", capture_output=True, timeout=20)


def collect(writer: "Writer", processes: Sequence[Any], results: Any, *, num_jobs: int, end: float) -> None:
    """Writes rows until all are there, the time is over, or nobody is left to bring one."""
    begun, last = time.time(), 0.0
    while writer.num_new < num_jobs:
        alive = any(process.is_alive() for process in processes)
        try:
            writer.add(results.get(timeout=1))
        except Empty:
            if not alive or time.time() > end + 5:
                break
        if time.time() - last > 20:
            last = time.time()
            rate = 60 * writer.num_new / (last - begun + 1e-9)
            print(f"{last - begun:5.0f} s: {writer.num_new} of {num_jobs} runs, {rate:.0f} a minute", flush=True)


class Writer:
    def __init__(self, path: Path, done: Sequence[dict[str, str]]):
        names = [field.name for field in fields(Row)]
        self._file = path.open("w", newline="")
        self._writer = csv.DictWriter(self._file, names)
        self._writer.writeheader()
        self._writer.writerows(done)
        self._file.flush()
        self.num_new = 0
        self.num_failed = 0

    def add(self, row: Row) -> None:
        self._writer.writerow(asdict(row))
        self._file.flush()
        self.num_new += 1
        self.num_failed += row.status == "error"
        if row.status == "error" and self.num_failed <= 5:
            print(f"FAILED {' '.join(row.key)}: {row.note}", flush=True)


def gather_check(checker: Any, results: Any, *, end: float) -> list[dict[str, Any]]:
    """Its step times. A task that it does not come to is launched plainly."""
    told: list[dict[str, Any]] = []
    while time.time() < end:
        alive = checker.is_alive()
        try:
            row = results.get(timeout=1)
        except Empty:
            if alive:
                continue
            break
        if row is None:
            return told
        told.append(row)
    print("the check did not come to its end: tasks that it had not passed are launched plainly", flush=True)
    checker.terminate()
    return told


def run_checked(options: Options, jobs: Sequence[Job], given: Any, writer: Writer) -> None:
    spawn = mp.get_context("spawn")
    taken, go, graphed, results = spawn.Value("i", 0), spawn.Event(), spawn.Array("i", len(TASKS)), spawn.Queue()
    cuda = options.device.startswith("cuda")
    rest = (options, taken, go, graphed, results)
    workers = [spawn.Process(target=work, args=(jobs, *rest), daemon=True) for _ in range(given.procs)]
    for worker in workers:
        worker.start()
    try:
        wanted = given.graphs == "on" and cuda
        if given.check == "on":
            checker = spawn.Process(target=check, args=(options, wanted, graphed, results), daemon=True)
            checker.start()
            told = gather_check(checker, results, end=min(options.end, time.time() + given.check_seconds))
            if told:
                write_csv(given.out / "steps.csv", told)
        else:
            graphed[:] = [int(wanted)] * len(TASKS)
        go.set()
        collect(writer, workers, results, num_jobs=len(jobs), end=options.end)
    finally:
        for worker in workers:
            worker.terminate()


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("out", type=Path)
    parser.add_argument("--phase", choices=["short", "long"], default="short")
    parser.add_argument("--rows", type=Path, help="rows of the short phase, by which the long one is chosen")
    parser.add_argument("--done", type=Path, help="rows of a call before, which are kept and not run again")
    parser.add_argument("--seconds", type=float, default=540, help="what has not ended then is dropped")
    parser.add_argument("--fashion", type=Path, help="fashion_mnist.npz, or the folder of its IDX files")
    parser.add_argument("--tasks", nargs="+", choices=list(TASKS), default=list(TASKS))
    parser.add_argument("--recipes", nargs="+", choices=list(RECIPES), default=list(RECIPES))
    parser.add_argument("--seeds", nargs="+", type=int)
    parser.add_argument("--steps", type=int, help="instead of each task's own: to try the script")
    parser.add_argument("--limit", type=int, help="of runs")
    parser.add_argument(
        "--part", type=int, nargs=2, default=(0, 1), metavar=("I", "N"), help="every Nth run, from I on"
    )
    parser.add_argument("--tiny", action="store_true", help="tiny networks: to try the script")
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--procs", type=int, help="processes; 12 on a GPU with MPS, else 2")
    parser.add_argument("--slots", type=int, default=1, help="runs under way in each")
    parser.add_argument("--graphs", choices=["on", "off"], default="on")
    parser.add_argument("--check", choices=["on", "off"], default="on")
    parser.add_argument("--check-seconds", type=float, default=200)
    parser.add_argument("--mps", choices=["auto", "off"], default="auto")
    given = parser.parse_args()
    if given.phase == "long" and given.rows is None:
        parser.error("--phase long needs --rows ROWS.csv of the short phase, which its rates are chosen by")
    return given


def main() -> None:
    begun, given = time.time(), arguments()
    given.out.mkdir(parents=True, exist_ok=True)
    cuda = given.device.startswith("cuda")
    os.environ.setdefault("CUDA_DEVICE_MAX_CONNECTIONS", str(given.slots + 1))  # MPS has few for all processes together
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    mps = cuda and given.mps == "auto" and start_mps()
    given.procs = given.procs or ((12 if mps else 2) if cuda else 1)
    options = Options(
        device=given.device,
        tasks=tuple(given.tasks),
        recipes=tuple(given.recipes),
        fashion=given.fashion,
        tiny=given.tiny,
        slots=given.slots,
        end=begun + given.seconds,
    )
    seeds = given.seeds or SEEDS[given.phase]
    chosen = {"seeds": seeds, "steps": given.steps}
    jobs = (
        short_jobs(options, **chosen) if given.phase == "short" else long_jobs(options, read_rows(given.rows), **chosen)
    )
    done = [row for row in read_rows(given.done) if row["status"] != "error"] if given.done else []
    kept = {tuple(row[name] for name in Job._fields) for row in done}
    part, num_parts = given.part
    jobs = [job for job in jobs if job.key not in kept][part::num_parts][: given.limit]
    print(
        f"{len(jobs)} runs to do, {len(done)} done before; {given.procs} processes x {options.slots} slots, "
        f"MPS {'on' if mps else 'off'}, torch {torch.__version__}, {given.device}",
        flush=True,
    )
    writer = Writer(given.out / "rows.csv", done)
    try:
        run_checked(options, jobs, given, writer)
    finally:
        if mps:
            stop_mps()
    told = summarise(read_rows(given.out / "rows.csv"))
    if told:
        write_csv(given.out / "summary.csv", told)
    minutes = (time.time() - begun) / 60
    print(f"{writer.num_new} of {len(jobs)} runs, {writer.num_failed} failed, {minutes:.1f} minutes\n{table(told)}")


if __name__ == "__main__":
    main()
