"""Random memory budgets with every step and stretch tracked: is the peak that was predicted ever passed?

`python experiments/benchmarks/peak_campaign.py --tries 200` takes about ten seconds a try on one core. A try draws a
task, a batch, a way of reallocating, a risk, release or accumulation, averages, recomputed activations, and whether the
run is stopped and resumed in the middle; then a budget between the least feasible one of that run and the largest that
binds, every third try the least itself. On a CPU the monitor follows every step, validation, decision, migration,
checkpoint, resume, sample and export (BAOC_TRACK_EVERY_STEP), and lets a run go on that passes its budget, so that the
row has the whole excess and the stretch that held most. peak_campaign_cpu.csv in $OUT or experiments/results gets a row
per try as soon as it is over, and a second call goes on behind the last row. The exit code is the number of faults.
"""

import argparse
import csv
import json
import os
import random
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass, fields
from functools import partial
from pathlib import Path
from typing import Any

os.environ.setdefault("OMP_NUM_THREADS", "1")  # a process that forks must not have threads of torch's
ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT))

from baoc.config.compose import compose  # noqa: E402
from baoc.config.environment import commit  # noqa: E402
from baoc.config.from_hydra import from_hydra  # noqa: E402
from baoc.errors import BudgetBreachedError, InfeasibleBudgetError  # noqa: E402
from baoc.training import run as training  # noqa: E402
from baoc.training import trainer as assembly  # noqa: E402

PLAIN = ("logger=jsonl", "trainer.enable_progress_bar=false", "device=cpu")
MODELS = ("vit", "vit", "llama", "dit", "unet")
TOLERANCE = 0.97  # of the prediction, that a measured peak is not to stay below


@dataclass(frozen=True, slots=True, kw_only=True)
class Try:
    """`outcome`: met, breached, refused, or what went wrong. `stretches`: what each held, of both parts of a run."""

    number: int
    overrides: str
    resumed_at: int | None
    budget_bytes: int
    least_bytes: int
    most_bytes: int
    predicted_bytes: int
    measured_bytes: int
    highest: str
    stretches: str
    outcome: str
    seconds: float

    @property
    def faulty(self) -> bool:
        return self.outcome not in ("met", "refused")


def drawn(draw: random.Random) -> tuple[list[str], int, int | None]:
    """Overrides, steps, and the step at which the run is stopped and resumed, if it is."""
    model = draw.choice(MODELS)
    batch = draw.choice((4, 8, 16, 32) if model == "vit" else (2, 4, 8))
    warmup, mode = draw.choice((4, 6, 8)), draw.choice(("once", "once", "interval", "drift", "off"))
    steps = draw.choice((12, 16, 20))
    given = [f"model={model}", f"batch_size={batch}", f"reallocation={mode}", f"seed={draw.randrange(100)}"]
    if mode != "off":
        given.append(f"reallocation.warmup_steps={warmup}")
        given.append(f"risk={draw.choice(('statistics', 'statistics', 'prior'))}")
    if mode in ("interval", "drift"):
        given += [f"reallocation.interval={draw.choice((4, 6))}", "reallocation.drift_threshold=0.01"]
    way = draw.choice(("plain", "plain", "accumulate", "release"))
    if way == "accumulate":
        given.append(f"micro_batch={batch // 2}")
    if way == "release":
        given.append("optim.release_gradients=true")
    if draw.random() < 0.3:
        given.append("model.checkpointing=true")
    if draw.random() < 0.4:
        given.append(f"task.ema_decay={draw.choice((0.0, 0.99))}")
    if draw.random() < 0.3:
        given.append("trainer.precision=bf16-mixed")
        if draw.random() < 0.5:
            given.append("catalogue.specs=['*']")
    if draw.random() < 0.5:
        given.append("checkpoint.every_n_steps=5")
    if model in ("dit", "unet"):
        given += ["task.sample_steps=2", f"task.num_samples={draw.choice((8, 40))}"]
    given += ["trainer.limit_val_batches=1", f"trainer.val_check_interval={draw.choice((7, 100))}"]
    return given, steps, draw.choice((None, steps // 3, warmup - 1, steps - 3))


def start(overrides: Sequence[str], *, run_dir: Path) -> str:
    """Runs it in a process of its own; "" or what its error said."""
    run_dir.mkdir(parents=True, exist_ok=True)
    pid = os.fork()
    if not pid:
        code = 1
        try:
            log = os.open(run_dir / "said.txt", os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
            os.dup2(log, 1)
            os.dup2(log, 2)
            assembly.MemoryMonitor = partial(assembly.MemoryMonitor, enforce=False)  # pyright: ignore
            training.run(from_hydra(compose([*PLAIN, *overrides])), run_dir=run_dir, command="peak_campaign")
            code = 0
        except (BudgetBreachedError, InfeasibleBudgetError) as error:
            (run_dir / "error.txt").write_text(f"{type(error).__name__}: {error}")
        except BaseException as error:  # told to the parent, whatever it is
            (run_dir / "error.txt").write_text(f"{type(error).__name__}: {error}")
        finally:
            os._exit(code)
    status = os.waitpid(pid, 0)[1]
    if status == 0:
        return ""
    told = run_dir / "error.txt"
    return told.read_text().splitlines()[0] if told.is_file() else f"ended with status {status}"


def read(path: Path) -> dict[str, Any]:
    return json.loads(path.read_text()) if path.is_file() else {}


def one_try(number: int, *, seed: int, folder: Path) -> Try:
    began, draw = time.monotonic(), random.Random(seed * 100_003 + number)
    overrides, steps, stop = drawn(draw)
    said = start([*overrides, f"trainer.max_steps={steps}", "budget=100gb", "mode=plan"], run_dir=folder / "plan")
    bounds = read(folder / "plan" / "allocation.json")
    least, most = bounds.get("least_feasible_bytes", 0), bounds.get("most_useful_bytes", 0)
    budget = least if number % 3 == 0 else draw.randint(least, max(least, most))
    ends = [steps] if stop is None or not 0 < stop < steps else [stop, steps]
    peaks: dict[str, int] = {}
    result: dict[str, Any] = {}
    for part, end in enumerate(ends):
        if said:
            break
        resume = [f"resume={folder / 'part_0'}"] if part else []
        said = start(
            [*overrides, f"trainer.max_steps={end}", f"budget={budget}b", *resume], run_dir=folder / f"part_{part}"
        )
        result = read(folder / f"part_{part}" / "result.json")
        for name, held in result.get("peak_by_stretch", {}).items():
            peaks[name] = max(peaks.get(name, 0), held)
        if said.startswith("BudgetBreachedError"):
            said = ""  # told below, by the bytes of all parts
    highest = max(peaks, key=peaks.__getitem__, default="")
    predicted, measured = result.get("peak_bytes_predicted", 0), peaks.get(highest, 0)
    outcome = "refused" if said.startswith("InfeasibleBudgetError") else said
    if not outcome:
        outcome = "met" if measured <= budget and measured <= predicted else "breached"
    return Try(
        number=number,
        overrides=" ".join([*overrides, f"trainer.max_steps={steps}"]),
        resumed_at=ends[0] if len(ends) > 1 else None,
        budget_bytes=budget,
        least_bytes=least,
        most_bytes=most,
        predicted_bytes=predicted,
        measured_bytes=measured,
        highest=highest,
        stretches=json.dumps(peaks),
        outcome=outcome,
        seconds=round(time.monotonic() - began, 1),
    )


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--tries", type=int, default=200)
    parser.add_argument("--first", type=int, default=0, help="number of the first try")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--seconds", type=float, default=float("inf"), help="begins no try after so many")
    parser.add_argument("--out", type=Path, help="folder of peak_campaign_cpu.csv")
    given = parser.parse_args()
    os.environ[assembly.TRACK_EVERY_STEP] = "1"
    out = given.out or Path(os.environ.get("OUT", ROOT / "experiments" / "results"))
    out.mkdir(parents=True, exist_ok=True)
    path = out / "peak_campaign_cpu.csv"
    known = list(csv.DictReader(path.open())) if path.is_file() else []
    about, began = {"commit": commit(), "seed": given.seed}, time.monotonic()
    names = [*(field.name for field in fields(Try)), *about]
    done, faults, closest = 0, 0, []
    with path.open("a", newline="") as file:
        writer = csv.DictWriter(file, names, lineterminator="\n")
        if not known:
            writer.writeheader()
        for number in range(given.first, given.first + given.tries):
            if any(row["number"] == str(number) and row["seed"] == str(given.seed) for row in known):
                continue
            if time.monotonic() - began > given.seconds:
                break
            with tempfile.TemporaryDirectory() as folder:
                one = one_try(number, seed=given.seed, folder=Path(folder) / "day")
            writer.writerow(asdict(one) | about)
            file.flush()
            done, faults = done + 1, faults + one.faulty
            share = one.measured_bytes / max(1, one.predicted_bytes)
            closest += [share] if one.outcome == "met" else []
            print(f"{number}: {one.outcome}, {share:.4f} of predicted, {one.highest}; {one.overrides}", flush=True)
    below = sum(share < TOLERANCE for share in closest)
    print(f"{done} tries, {faults} faults; {below} peaks below {TOLERANCE} of the prediction")
    return faults


if __name__ == "__main__":
    sys.exit(main())
