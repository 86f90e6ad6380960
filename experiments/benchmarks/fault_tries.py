"""What a machine does to a run, again and again: damaged files, full disks, clocks that jump, a second owner.

    python experiments/benchmarks/fault_tries.py damage --tries 100
    # half a minute and seconds a try, CPU -> fault_tries_damage.csv
    python experiments/benchmarks/fault_tries.py disk --tries 100  # the same, as root -> fault_tries_disk.csv
    python experiments/benchmarks/fault_tries.py clock --tries 100  # the same -> fault_tries_clock.csv
    python experiments/benchmarks/fault_tries.py owners --tries 100  # the same -> fault_tries_owners.csv

`damage`: a file of a finished run's folder, of a study's or of the cache is torn, flipped, emptied or replaced; then a
checkpoint is looked for, the metrics and the study are read, and a frontier is made. An error that is not one of ours
is a fault, and so is a checkpoint that was taken although its own file was damaged. `disk` (as root, on Linux): run
folder, cache or study lie on a file system that is full after a random number of bytes; the command must end as docs
say, with one sentence, and once there is room go on from what was written to the metrics of the undisturbed run.
`clock`: the wall clock jumps by up to ten years, both ways, at random moments; nothing may change but the times told.
`owners`: a second process takes the same folder while the first is at work; it must be refused and change nothing.

The table gets a row per try; the exit code is the number of faults.
"""

import argparse
import io
import json
import os
import random
import shutil
import signal
import subprocess
import sys
import tempfile
import time
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager, redirect_stderr, redirect_stdout, suppress
from pathlib import Path
from typing import Any

os.environ.setdefault("OMP_NUM_THREADS", "1")  # a process that forks must not have threads of torch's
ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT))

from baoc.cli.failures import failure_of, report
from baoc.cli.main import main as command
from baoc.config.compose import compose
from baoc.config.environment import commit
from baoc.config.from_hydra import from_hydra
from baoc.errors import BaocError
from baoc.frontier.build import write_frontier
from baoc.sweep.study import run_study
from baoc.sweep.study_config import StudyConfig, read_study
from baoc.tracking.checkpoints import load_checked
from baoc.tracking.metrics import read_metrics
from baoc.training.resume import find_checkpoint, saved_decision
from experiments.benchmarks.kill_tries import CLOCKS
from experiments.benchmarks.shared import append_row, results_folder

KIB = 1024
STEPS = 6
RUN = (
    "model=vit", "device=cpu", "budget=state_25", "batch_size=16", "model.dropout=0.1", f"trainer.max_steps={STEPS}",
    "trainer.limit_val_batches=1", "trainer.val_check_interval=3", "trainer.log_every_n_steps=1", "checkpoint.keep=3",
    "trainer.enable_progress_bar=false", "trainer.num_sanity_val_steps=0", "checkpoint.every_n_steps=1",
    "checkpoint.export=false", "reallocation=once", "reallocation.warmup_steps=2",
    "budget.schedule=[{step:4,budget:state_10}]",
)  # fmt: skip
STUB = """
import json, sys
words = dict(word.split("=", 1) for word in sys.argv[1:])
result = {"quality": {"value": float(words["x"])}, "state_bytes": 1, "peak_bytes": 1, "samples_per_s": 1.0}
json.dump(result, open(words["hydra.run.dir"] + "/result.json", "w"))
"""
REPLACEMENTS = (b"", b"{}", b"[]", b"null", b"3", b'"text"', b"\xff\xfe\x00", b"a,b\n1\n")
Row = dict[str, object]


def study(**changes: object) -> StudyConfig:
    given = {"name": "s", "objectives": {"quality": "minimize"}, "space": {"x": {"low": 0.0, "high": 1.0}}}
    return read_study({**given, "sampler": "random", "n_trials": 6, "workers": 2, "early_stop": None, **changes})


def forked(work: Callable[[], int | None], *, said: Path, wait: bool = True) -> int:
    """Exit code of `work` in a process of its own, or its pid; what it says is in `said`."""
    pid = os.fork()
    if not pid:
        code = 1
        try:
            file = os.open(said, os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
            os.dup2(file, 1)
            os.dup2(file, 2)
            code = work() or 0
        except (Exception, SystemExit, KeyboardInterrupt) as error:
            failure = failure_of(error)
            report(failure)
            code = failure.exit_code
        finally:
            sys.stdout.flush()
            sys.stderr.flush()
            os._exit(code)
    return os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) if wait else pid


def started(folder: Path, *words: str) -> Callable[[], int]:
    return lambda: command([*RUN, f"hydra.run.dir={folder}", *words])


def sentence(said: Path) -> str:
    """The error line that a command told; a fault where there is a traceback, or none."""
    lines = said.read_text(errors="replace").splitlines()
    if any(line.startswith("Traceback") for line in lines):
        return "FAULT: a traceback: " + lines[-1]
    return next((line for line in lines if line.startswith("baoc:")), "")


def faults_of(code: int, *, said: Path) -> list[str]:
    """Of a command that should have ended well."""
    told = sentence(said)
    return [f"ended with {code}: {told}"] if code or told.startswith("FAULT") else []


def metrics(folder: Path) -> list[dict[str, Any]]:
    return [{k: v for k, v in line.items() if k not in CLOCKS} for line in read_metrics(folder)]


# -- damage -----------------------------------------------------------------------------------------------------------


def damage(path: Path, *, draw: random.Random) -> str:
    """Damages a file and says how."""
    content = path.read_bytes()
    kind = draw.choice(("torn", "flipped", "replaced"))
    if kind == "torn":
        place = draw.randrange(len(content) or 1)
        path.write_bytes(content[:place])
        return f"torn after {place} of {len(content)} bytes"
    if kind == "flipped" and content:
        place = draw.randrange(len(content))
        changed = bytearray(content)
        changed[place] ^= 1 << draw.randrange(8)
        path.write_bytes(changed)
        return f"a bit of byte {place} of {len(content)} flipped"
    new = draw.choice(REPLACEMENTS)
    path.write_bytes(new)
    return f"replaced by {new!r}"


def damaged(number: int, *, draw: random.Random, folder: Path, whole: Path) -> Row:
    day = folder / "day"
    shutil.copytree(whole, day)
    run_dir, cache = day / "job", day / "cache"
    file = draw.choice(sorted(path for path in day.rglob("*") if path.is_file() and path.name != "said"))
    how = damage(file, draw=draw)
    asked = from_hydra(compose([*RUN, "resume=auto"]))
    os.environ["BAOC_CACHE"] = str(cache)
    given = study(n_trials=8)
    readers: dict[str, Callable[[], object]] = {
        "resume": lambda: find_checkpoint(asked, run_dir=run_dir),
        "decision": lambda: saved_decision(asked, checkpoint=run_dir / "checkpoints" / "last.ckpt"),
        "metrics": lambda: read_metrics(run_dir),
        "frontier": lambda: write_frontier(run_dir, show=False),
        "study": lambda: run_study(given, folder=day / "study", code=STUB),
    }
    outcomes, faults = [], []
    for name, read in readers.items():
        if (file.is_relative_to(day / "study")) != (name == "study"):
            continue
        try:
            with redirect_stdout(io.StringIO()), redirect_stderr(io.StringIO()):
                found = read()
            outcomes.append(f"{name} done")
            if name == "resume" and found == file:
                faults.append("a damaged checkpoint was taken")
        except BaocError as error:
            outcomes.append(f"{name} {type(error).__name__}")
        except Exception as error:
            outcomes.append(f"{name} {type(error).__name__}")
            where = traceback.extract_tb(error.__traceback__)[-1]
            faults.append(f"{name}: {type(error).__name__}: {error} at {where.name}")
    if file.is_relative_to(cache):  # a run reads it
        code = forked(started(day / "again", "trainer.max_steps=2"), said=day / "said")
        outcomes.append(f"run {code}")
        faults += faults_of(code, said=day / "said")
    row: Row = {"what": f"{file.relative_to(day)} {how}", "outcome": "; ".join(outcomes), "faults": "; ".join(faults)}
    shutil.rmtree(day)
    return row


# -- disks ------------------------------------------------------------------------------------------------------------


@contextmanager
def small_disk(at: Path, *, size: int) -> Iterator[Callable[[], object]]:
    """A file system of `size` bytes, none at the least; what it yields makes room."""
    at.mkdir(exist_ok=True)
    page = 4 * KIB
    subprocess.run(["mount", "-t", "tmpfs", "-o", f"size={size or page}", "tmpfs", str(at)], check=True)
    try:
        if not size:  # which tmpfs takes for no limit
            (at / "taken").write_bytes(bytes(page))
        yield lambda: subprocess.run(["mount", "-o", "remount,size=512m", str(at)], check=True)
    finally:
        subprocess.run(["umount", str(at)], check=True)


def full(number: int, *, draw: random.Random, folder: Path, whole: Path) -> Row:
    what = draw.choice(("run", "run", "study", "cache"))
    used = sum(path.stat().st_size for path in (whole / {"run": "job"}.get(what, what)).rglob("*") if path.is_file())
    size = max(8, draw.randrange(int(1.1 * used)) // (4 * KIB)) * 4 * KIB
    size = 0 if what == "cache" else size  # it holds a few hundred bytes
    faults: list[str] = []
    disk, said = folder / "disk", folder / "said"
    with small_disk(disk, size=size) as more:
        os.environ["BAOC_CACHE"] = str(disk / "cache" if what == "cache" else folder / "cache")
        run_dir = folder / "job" if what == "cache" else disk / "job"
        begin = started(run_dir)
        if what == "study":
            begin = lambda: run_study(study(), folder=disk / "study", code=STUB) and None  # noqa: E731
        code = forked(begin, said=said)
        told = sentence(said)
        if code not in ((0,) if what == "cache" else (0, 2)) or told.startswith("FAULT") or (code and not told):
            faults.append(f"exit code {code}: {told}")
        files = sorted((run_dir / "checkpoints").glob("*.ckpt"))
        intact = []
        for file in files:
            try:
                load_checked(file)
                intact.append(file)
            except BaocError as error:
                faults.append(f"{file.name} is not whole: {error}")
        more()
        if what == "study":
            again = forked(lambda: check_study(disk / "study"), said=said)
            faults += [f"not whole after room was made: {again}: {sentence(said)}"] if again else []
        elif code:
            resume = [f"resume={run_dir}"] if intact else []
            if not intact:  # nothing to go on from, and a run is never overwritten
                shutil.rmtree(run_dir)
            again = forked(started(run_dir, *resume), said=said)
            if again and not (run_dir / "result.json").is_file():
                faults.append(f"does not go on: {again}: {sentence(said)}")
        if what != "study" and not faults and metrics(run_dir) != metrics(whole / "job"):
            faults.append("not the metrics of the run that was never disturbed")
        left = [path.name for path in disk.rglob("*") if path.name.endswith((".tmp", ".part"))]
        faults += [f"left behind: {', '.join(left)}"] if left else []
    for path in (folder / "job", folder / "cache"):
        shutil.rmtree(path, ignore_errors=True)
    return {"what": f"{what} on {size // KIB} KiB", "outcome": f"{code}: {told}", "faults": "; ".join(faults)}


def check_study(folder: Path) -> int:
    trials = run_study(study(), folder=folder, code=STUB).trials
    return 0 if [trial.state.name for trial in trials] == ["COMPLETE"] * 6 else 9


# -- clocks -----------------------------------------------------------------------------------------------------------


def jumping(draw: random.Random) -> Callable[[], float]:
    real, shift = time.time, [0.0]

    def now() -> float:
        if draw.random() < 0.05:
            shift[0] = draw.choice((1, -1)) * 10 ** draw.uniform(-2, 8.5)
        return real() + shift[0]

    return now


def clocked(number: int, *, draw: random.Random, folder: Path, whole: Path) -> Row:
    """time.time jumps; files take the true time, as if another machine's server kept them."""
    what, said = draw.choice(("run", "study", "resumed")), folder / "said"
    libraries_only = lambda _, names: [name for name in names if not name.endswith(".so")]  # noqa: E731
    shutil.copytree(whole / "cache", folder / "cache", ignore=libraries_only)
    os.environ["BAOC_CACHE"] = str(folder / "cache")
    faults: list[str] = []

    def work(*words: str) -> Callable[[], int | None]:
        def jumps() -> int | None:
            time.time = jumping(draw)
            if what == "study":
                return check_study(folder / "study")
            return started(folder / "job", *words)()

        return jumps

    attempts: list[tuple[str, ...]] = [()]
    if what == "resumed":
        attempts = [(f"trainer.max_steps={draw.randrange(1, STEPS)}",), (f"resume={folder / 'job'}",)]
    code = 0
    for words in attempts:
        if not faults:
            code = forked(work(*words), said=said)
            faults += faults_of(code, said=said)
    if not faults and what != "study":
        ours, theirs = metrics(folder / "job"), metrics(whole / "job")
        steps = [line["step"] for line in ours]
        if steps != list(range(STEPS)):
            faults.append(f"metrics of steps {steps}")
        elif what == "run" and ours != theirs:
            faults.append("not the metrics of the run that was never disturbed")
        told = json.loads((folder / "job" / "result.json").read_text())
        known = {key: told[key] for key in ("train_s", "samples_per_s") if told.get(key) is not None}
        faults += [f"{key} is {value}" for key, value in known.items() if not 0 < value < 1e6]
    for path in ("job", "study", "cache"):
        shutil.rmtree(folder / path, ignore_errors=True)
    return {"what": what, "outcome": str(code), "faults": "; ".join(faults)}


# -- owners -----------------------------------------------------------------------------------------------------------


def owned(number: int, *, draw: random.Random, folder: Path, whole: Path) -> Row:
    os.environ["BAOC_CACHE"] = str(whole / "cache")
    run_dir, moment = folder / "job", draw.randrange(STEPS)
    first = forked(started(run_dir), said=folder / "said", wait=False)
    ended = False
    while not ended:
        with suppress(OSError):
            if (run_dir / "run.lock").read_text():  # empty: made, and not yet held
                break
        ended = os.waitpid(first, os.WNOHANG)[0] != 0
        time.sleep(0.02)
    while moment and not ended:
        with suppress(OSError):
            if len((run_dir / "metrics.jsonl").read_text().splitlines()) >= moment:
                break
        ended = os.waitpid(first, os.WNOHANG)[0] != 0
        time.sleep(0.02)
    faults: list[str] = []
    words = draw.choice(((), (f"resume={run_dir}",), ("seed=1",), ("mode=plan",)))
    os.kill(first, signal.SIGSTOP)  # at work, however long the second one takes
    code = forked(started(run_dir, *words), said=folder / "other")
    told = sentence(folder / "other")
    os.kill(first, signal.SIGCONT)
    if not ended and (code != 2 or "process" not in told):
        faults.append(f"the second one ended with {code}: {told}")
    if not ended:
        faults += faults_of(os.waitstatus_to_exitcode(os.waitpid(first, 0)[1]), said=folder / "said")
    if not ended and not faults and metrics(run_dir) != metrics(whole / "job"):
        faults.append("not the metrics of the run that was never disturbed")
    shutil.rmtree(run_dir, ignore_errors=True)
    what = f"{' '.join(words) or 'the same command'} after {moment} steps"
    return {"what": what, "outcome": f"{code}: {told}"[:300], "faults": "; ".join(faults)}


KINDS = {"damage": damaged, "disk": full, "clock": clocked, "owners": owned}


def undisturbed(whole: Path) -> None:
    """A run, a study and a cache to damage and to compare with."""
    os.environ["BAOC_CACHE"] = str(whole / "cache")
    assert forked(started(whole / "job"), said=whole / "said") == 0, (whole / "said").read_text()
    assert forked(lambda: check_study(whole / "study"), said=whole / "said") == 0, (whole / "said").read_text()


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("kind", choices=KINDS)
    parser.add_argument("--tries", type=int, default=100)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--seconds", type=float, default=float("inf"), help="begins no try after so many")
    parser.add_argument("--out", type=Path, default=results_folder())
    given = parser.parse_args()
    faults, done, until = 0, 0, time.monotonic() + given.seconds
    file = given.out / f"fault_tries_{given.kind}.csv"
    file.unlink(missing_ok=True)
    with tempfile.TemporaryDirectory() as temporary:
        folder, whole = Path(temporary), Path(temporary) / "whole"
        whole.mkdir()
        undisturbed(whole)
        for number in range(given.tries):
            if time.monotonic() > until:
                break
            draw = random.Random(f"{given.kind} {given.seed} {number}")
            row = KINDS[given.kind](number, draw=draw, folder=folder, whole=whole)
            append_row(file, {"number": number, **row}, seed=given.seed, commit=commit())
            done, faults = done + 1, faults + bool(row["faults"])
            if row["faults"]:
                print(f"{number}: {row['what']}: {row['faults']}", flush=True)
    print(f"{given.kind}: {done} tries, {faults} with faults; {file}")
    return min(faults, 100)


if __name__ == "__main__":
    sys.exit(main())
