"""Random memory budgets: is the peak that was predicted ever passed, does the least one work, and one byte less not?

    python experiments/benchmarks/peak_campaign.py --tries 200  # 35 minutes of a CPU core -> peak_campaign_cpu.csv
    python experiments/benchmarks/peak_campaign.py --device cuda --side 16 --seconds 500
    # 9 minutes of an H200 -> peak_campaign_cuda.csv

A try draws a
task, a batch, a way of reallocating, a risk, release or accumulation, averages, recomputed activations, and whether the
run is stopped and resumed in the middle; then a budget between the least feasible one of that run and the largest that
binds, every third try the least itself. On a CPU the monitor follows every step, validation, decision, migration,
checkpoint, resume, sample and export (BAOC_TRACK_EVERY_STEP), and lets a run go on that passes its budget, so that the
row has the whole excess and the stretch that held most.

`--device cuda --side 16` takes a GPU, and draws sizes and doors as well: run.py with a micro-batch or with a decision,
BaocStrategy, and BaocOptimizer in a plain loop with and without a probe. The least budget is what the refusal of a
smaller one names; where a try is given just that, another process asks for one byte less, and must be refused by the
same number. As the allocator is capped, a run that needs more than its budget ends, which is a fault. Processes that
share the card tell their own bytes by the driver; where it does not tell them apart, one runs at a time.

The table gets a row per try as soon as it is over, and a second call goes on with the tries that have none. The exit
code is the number of faults.
"""

import argparse
import csv
import fcntl
import json
import os
import random
import sys
import tarfile
import tempfile
import time
import traceback
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, fields
from functools import partial
from pathlib import Path
from typing import Any

os.environ.setdefault("OMP_NUM_THREADS", "1")  # a process that forks must not have threads of torch's
ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT))

import lightning as L
import torch
from torch.nn.functional import cross_entropy

from baoc import BaocOptimizer, BaocStrategy
from baoc.callbacks.memory import MemoryMonitor
from baoc.config.compose import compose
from baoc.config.environment import commit
from baoc.config.from_hydra import from_hydra
from baoc.errors import InfeasibleBudgetError
from baoc.profiling import memory
from baoc.training import run as training
from baoc.training import trainer as assembly
from baoc.units import MIB
from experiments.benchmarks.own_networks import gpt
from experiments.benchmarks.shared import append_row, results_folder

PLAIN = ("logger=jsonl", "trainer.enable_progress_bar=false")
MODELS = ("vit", "vit", "llama", "dit", "unet")
SIZES = {
    "vit": ("tiny", "mini", "small", "base"), "llama": ("nano", "60m", "130m"), "dit": ("tiny", "s2"),
    "unet": ("tiny", "cifar"),
}  # fmt: skip
DOORS = ("run",) * 5 + ("strategy", "loop", "loop without a probe")
TOLERANCE = 0.97  # of the prediction, that a measured peak is not to stay below


@dataclass(frozen=True, slots=True, kw_only=True)
class Try:
    """`outcome`: met, breached, refused, or what went wrong. `stretches`: what each held, of both parts of a run.

    `one_less`: what became of a byte below the least, where that was asked. `context`: how its bytes were told.
    """

    number: int
    door: str
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
    one_less: str
    context: str
    seconds: float


def drawn(draw: random.Random) -> tuple[list[str], int, int | None]:
    """Overrides, steps, and the step at which the run is stopped and resumed, if it is."""
    model = draw.choice(MODELS)
    batch = draw.choice((4, 8, 16, 32) if model == "vit" else (2, 4, 8))
    warmup, mode = draw.choice((4, 6, 8)), draw.choice(("once", "once", "once", "off"))
    steps = draw.choice((12, 16, 20))
    given = [f"model={model}", f"batch_size={batch}", f"reallocation={mode}", f"seed={draw.randrange(100)}"]
    if mode != "off":
        given.append(f"reallocation.warmup_steps={warmup}")
        given.append(f"risk={draw.choice(('statistics', 'statistics', 'prior'))}")
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


def drawn_for_gpu(draw: random.Random) -> tuple[str, list[str], int, int | None]:
    """The same behind its door; of own loops the words are the sizes of their network."""
    door, steps = draw.choice(DOORS), draw.choice((8, 12))
    if door != "run":
        given = {
            "width": draw.choice((64, 160, 384)),
            "depth": draw.choice((2, 4, 8)),
            "length": draw.choice((32, 256)),
        }
        return door, [f"{key}={n}" for key, n in given.items()] + [f"batch={draw.choice((4, 16, 64))}"], steps, None
    model = draw.choice(MODELS)
    size, batch = draw.choice(SIZES[model]), draw.choice((4, 8, 16, 32, 64))
    mode, way = draw.choice(("off", "once")), draw.choice(("decided", "decided", "plain", "release"))
    given = [f"model={model}", f"model.size={size}", f"batch_size={batch}", f"seed={draw.randrange(100)}"]
    given += [f"reallocation={mode}", "trainer.limit_val_batches=1", f"trainer.val_check_interval={steps - 2}"]
    if size in ("small", "base", "mini"):
        given += ["dataset=synthetic_images", "dataset.num_samples=256", "dataset.num_classes=10"]
        given += ["dataset.image_size=32"] if size == "mini" else []
    if mode != "off":
        given.append("reallocation.warmup_steps=4")
    if way != "decided":
        given += [
            f"micro_batch={batch if way == 'release' else draw.choice((batch, batch // 2))}",
            f"model.checkpointing={draw.choice(('true', 'false'))}",
        ]
        given += [f"optim.release_gradients={'true' if way == 'release' else 'false'}"]
    if model in ("dit", "unet"):
        given += ["task.sample_steps=2", "task.num_samples=8"]
    if draw.random() < 0.3:
        given.append("trainer.precision=32-true")
    if draw.random() < 0.2:
        given.append("catalogue.specs=['*']")
    return door, given, steps, steps // 2 if draw.random() < 0.2 else None


def start(work: Callable[[], dict[str, Any] | None], *, folder: Path, device: str) -> str:
    """Runs it in a process of its own; "" or what its error said. What it returns is result.json."""
    folder.mkdir(parents=True, exist_ok=True)
    pid = os.fork()
    if not pid:
        code = 1
        try:
            log = os.open(folder / "said.txt", os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
            os.dup2(log, 1)
            os.dup2(log, 2)
            os.chdir(folder)
            if device == "cuda":
                begin_context(folder)
            if (told := work()) is not None:
                (folder / "result.json").write_text(json.dumps(told))
            code = 0
        except BaseException as error:  # told to the parent, whatever it is
            (folder / "error.txt").write_text(f"{type(error).__name__}: {error}\n{traceback.format_exc()}")
            if isinstance(error, InfeasibleBudgetError):
                (folder / "least").write_text(str(error.least_feasible_bytes))
        finally:
            os._exit(code)
    status = os.waitpid(pid, 0)[1]
    if status == 0:
        return ""
    told = folder / "error.txt"
    return told.read_text().splitlines()[0] if told.is_file() else f"ended with status {status}"


def begin_context(folder: Path) -> None:
    """One process at a time, so that each is told from the others by when it came."""
    with (Path(tempfile.gettempdir()) / "peak_campaign.lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        memory.current_context_bytes("cuda:0")
        own = memory.nvml_own(0)
    (folder / "context").write_text("by driver" if own is not None else "by free memory")


def run(overrides: Sequence[str], *, budget: int, run_dir: Path, device: str) -> str:
    """Through run.py's own door."""
    words = [*PLAIN, f"device={device}", *overrides, f"budget={budget}b"]

    def work() -> None:
        if device == "cpu":
            assembly.MemoryMonitor = partial(assembly.MemoryMonitor, enforce=False)  # pyright: ignore
        else:
            assembly.MemoryMonitor = Stretches  # pyright: ignore
        training.run(from_hydra(compose(words)), run_dir=run_dir, command="peak_campaign")

    return start(work, folder=run_dir, device=device)


class Stretches(MemoryMonitor):
    """On a GPU, where the allocator knows of no stretches: the peak so far at the end of each, in peaks.csv."""

    @contextmanager
    def track(self, label: str) -> Iterator[None]:
        with super().track(label):
            yield
        self.note(label)

    def note(self, label: str) -> None:
        held = (
            torch.cuda.max_memory_reserved(),
            torch.cuda.max_memory_allocated(),
            memory.current_context_bytes("cuda:0"),
        )
        with Path("peaks.csv").open("a") as file:
            print(label, self._trainer.global_step if self._trainer else "", *held, file=file, sep=",")

    def setup(self, *given: Any, **named: Any) -> None:
        super().setup(*given, **named)
        self.note("setup")

    def on_train_batch_end(self, *given: Any, **named: Any) -> None:
        self.note("training")
        super().on_train_batch_end(*given, **named)

    def on_validation_batch_end(self, *given: Any, **named: Any) -> None:
        self.note("validation")
        super().on_validation_batch_end(*given, **named)


def own_loop(door: str, words: Sequence[str], *, budget: int, steps: int, device: str) -> dict[str, Any]:
    """A small GPT in a loop of one's own, or in Lightning's with BaocStrategy."""
    size = {key: int(n) for key, n in (word.split("=") for word in words)}
    torch.manual_seed(0)
    tokens = torch.randint(256, (4 * size["batch"], size["length"] + 1))
    model = gpt(256, size["length"], width=size["width"], depth=size["depth"])

    def loss(batch: torch.Tensor) -> torch.Tensor:
        return cross_entropy(model(batch[:, :-1]).flatten(0, 1), batch[:, 1:].flatten())

    if door == "strategy":
        module = Module(model, loss)
        strategy = BaocStrategy(budget=f"{budget}b")
        quiet = {
            "logger": False, "enable_checkpointing": False, "enable_progress_bar": False,
            "enable_model_summary": False,
        }  # fmt: skip
        accelerator = "gpu" if device == "cuda" else "cpu"
        trainer = L.Trainer(strategy=strategy, max_steps=steps, accelerator=accelerator, devices=1, **quiet)
        trainer.fit(module, torch.utils.data.DataLoader(tokens, batch_size=size["batch"]))  # pyright: ignore
        narrator, plan = strategy.narrators[0], strategy.narrators[0].plan
    else:
        model.to(device)
        batches = tokens.split(size["batch"])

        def probe() -> None:
            loss(batches[0].to(device)).backward()

        optimizer = BaocOptimizer(model, budget=f"{budget}b", probe=probe if door == "loop" else None)
        for step in range(steps):
            optimizer.zero_grad()
            loss(batches[step % len(batches)].to(device)).backward()
            optimizer.step()
        narrator, plan = optimizer.narrator, optimizer.plan
    held = narrator.peak_bytes
    return {
        "peak_by_stretch": {"training": held} if held else {},
        "peak_bytes_predicted": plan.peak_bytes,
        "least_feasible_bytes": plan.least_feasible_bytes,
        "most_useful_bytes": plan.most_useful_bytes,
    }


class Module(L.LightningModule):
    def __init__(self, model: torch.nn.Module, loss: Callable[[torch.Tensor], torch.Tensor]):
        super().__init__()
        self.model, self.loss = model, loss

    def training_step(self, batch: torch.Tensor, batch_idx: int) -> torch.Tensor:
        return self.loss(batch)

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.AdamW(self.parameters(), lr=1e-3)


def read(path: Path) -> dict[str, Any]:
    return json.loads(path.read_text()) if path.is_file() else {}


SMALL = 950 * MIB  # above a context, below what most tries need


def one_try(number: int, *, seed: int, folder: Path, device: str) -> Try:
    began, draw = time.monotonic(), random.Random(seed * 100_003 + number)
    if device == "cpu":
        door, (overrides, steps, stop) = "run", drawn(draw)
    else:
        door, overrides, steps, stop = drawn_for_gpu(draw)

    def asked(budget: int, *, name: str, steps: int, more: Sequence[str] = ()) -> str:
        if door == "run":
            words = [*overrides, f"trainer.max_steps={steps}", *more]
            return run(words, budget=budget, run_dir=folder / name, device=device)
        own = partial(own_loop, door, overrides, budget=budget, steps=steps, device=device)
        return start(own, folder=folder / name, device=device)

    look = {"name": "plan", "steps": steps, "more": ["mode=plan"]}
    said = asked(100 * 2**30 if device == "cpu" else SMALL, **look)
    bounds = read(folder / "plan" / ("allocation.json" if door == "run" else "result.json"))
    least, most = bounds.get("least_feasible_bytes", 0), bounds.get("most_useful_bytes", 0)
    if (folder / "plan" / "least").is_file():
        said, least = "", int((folder / "plan" / "least").read_text())
        most = least + max(64 * MIB, least - SMALL)
    budget = least if number % 3 == 0 else draw.randint(least, max(least, most))
    ends = [steps] if stop is None or not 0 < stop < steps else [stop, steps]
    peaks: dict[str, int] = {}
    result: dict[str, Any] = {}
    for part, end in enumerate(ends):
        if said:
            break
        resume = [f"resume={folder / 'part_0'}"] if part else []
        said = asked(budget, name=f"part_{part}", steps=end, more=resume)
        result = read(folder / f"part_{part}" / "result.json")
        held = result.get("peak_by_stretch") or {"all": result.get("peak_bytes", 0)}  # CUDA's is of all together
        for name, most_held in held.items():
            peaks[name] = max(peaks.get(name, 0), most_held)
        if said.startswith("BudgetBreachedError") and result:
            said = ""  # told below, by the bytes of all parts
    highest = max(peaks, key=peaks.__getitem__, default="")
    predicted, measured = result.get("peak_bytes_predicted", 0), peaks.get(highest, 0)
    outcome = "refused" if said.startswith("InfeasibleBudgetError") and budget != least else said
    if not outcome:
        outcome = "met" if 0 < measured <= min(budget, predicted) else "breached"
    one_less = ""
    if budget == least and outcome == "met" and device == "cuda":
        one_less = asked(least - 1, name="one_less", steps=steps)
        if one_less.startswith("InfeasibleBudgetError"):
            again = int((folder / "one_less" / "least").read_text())
            one_less = "refused" if again == least else f"refused, {again} named"
        one_less = one_less or "trained"
    contexts = {path.read_text() for path in folder.glob("*/context")}
    return Try(
        number=number,
        door=door,
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
        one_less=one_less,
        context=" and ".join(sorted(contexts)),
        seconds=round(time.monotonic() - began, 1),
    )


def tells_apart(folder: Path) -> bool:
    """Whether two processes on the card are told apart by the driver."""
    pid = os.fork()
    if not pid:  # holds a context while the other one asks
        begin_context(folder)
        (folder / "there").touch()
        time.sleep(10)
        os._exit(0)
    while not (folder / "there").is_file() and not os.waitpid(pid, os.WNOHANG)[0]:
        time.sleep(0.1)
    start(lambda: None, folder=folder / "other", device="cuda")
    os.kill(pid, 9)
    os.waitpid(pid, 0)
    return (folder / "other" / "context").read_text() == "by driver"


def work_on(numbers: int, *, given: argparse.Namespace, path: Path, until: float) -> None:
    """Tries whose numbers come from the pipe, until it is empty or the time is over."""
    while (part := os.read(numbers, 4)) and time.monotonic() < until:
        number = int.from_bytes(part, "big")
        with tempfile.TemporaryDirectory() as folder:
            one = one_try(number, seed=given.seed, folder=Path(folder) / "day", device=given.device)
            if one.outcome not in ("met", "refused") or one.one_less not in ("", "refused"):
                keep(Path(folder) / "day", into=path.with_name(f"fault_{number}.tgz"))
        append_row(path, one, commit=commit(), seed=given.seed)  # one write, behind those of others
        share = one.measured_bytes / max(1, one.predicted_bytes)
        less = f", one byte less {one.one_less}" if one.one_less else ""
        print(f"{number}: {one.door}, {one.outcome}{less}, {share:.4f} of predicted, {one.overrides}", flush=True)


def keep(folder: Path, *, into: Path) -> None:
    """What tells why, but for checkpoints."""
    with tarfile.open(into, "w:gz") as file:
        for path in folder.rglob("*"):
            if path.is_file() and path.stat().st_size < 10**6:
                file.add(path, path.relative_to(folder))


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--tries", type=int, default=200)
    parser.add_argument("--first", type=int, default=0, help="number of the first try")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--seconds", type=float, default=float("inf"), help="begins no try after so many")
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cpu")
    parser.add_argument("--side", type=int, default=1, help="tries side by side")
    parser.add_argument("--out", type=Path, help="folder of peak_campaign_DEVICE.csv, and of what tells of faults")
    parser.add_argument("--only", type=int, nargs="*", help="these tries alone")
    given = parser.parse_args()
    until = time.monotonic() + given.seconds
    os.environ[assembly.TRACK_EVERY_STEP] = "1"
    out = given.out or results_folder()
    out.mkdir(parents=True, exist_ok=True)
    path = out / f"peak_campaign_{given.device}.csv"
    if not path.is_file():
        path.write_text(",".join([*(field.name for field in fields(Try)), "commit", "seed"]) + "\n")
    known = {(row["number"], row["seed"]) for row in csv.DictReader(path.open())}
    side = given.side
    if given.device == "cuda" and side > 1:
        with tempfile.TemporaryDirectory() as folder:
            if not tells_apart(Path(folder)):
                print("the driver does not tell processes apart: one try at a time", flush=True)
                side = 1
    reading, writing = os.pipe()
    wanted = given.only or range(given.first, given.first + given.tries)
    numbers = [number for number in wanted if (str(number), str(given.seed)) not in known]
    os.write(writing, b"".join(number.to_bytes(4, "big") for number in numbers))  # 64 KiB, 16,000 tries
    os.close(writing)
    workers = []
    for _ in range(side):
        workers.append(os.fork())
        if not workers[-1]:
            work_on(reading, given=given, path=path, until=until)
            os._exit(0)
    for worker in workers:
        os.waitpid(worker, 0)
    rows = [row for row in csv.DictReader(path.open()) if (row["number"], row["seed"]) not in known]
    faults = [r for r in rows if r["outcome"] not in ("met", "refused") or r["one_less"] not in ("", "refused")]
    shares = [int(r["measured_bytes"]) / int(r["predicted_bytes"]) for r in rows if r["outcome"] == "met"]
    for row in faults:
        print(f"FAULT {row['number']}: {row['door']}, {row['outcome']}, {row['one_less']}; {row['overrides']}")
    for door in sorted({row["door"] for row in rows}):
        ends = [row["outcome"] for row in rows if row["door"] == door]
        print(f"{door}: {len(ends)} tries, {ends.count('met')} met, {ends.count('refused')} refused")
    below = sum(share < TOLERANCE for share in shares)
    less = [row["one_less"] for row in rows if row["one_less"]]
    print(
        f"{len(rows)} tries, {len(faults)} faults; {below} of {len(shares)} peaks below {TOLERANCE} of the prediction, "
        f"the highest {max(shares, default=0):.4f}; one byte less: {less.count('refused')} of {len(less)} refused"
    )
    return min(len(faults), 100)


if __name__ == "__main__":
    sys.exit(main())
