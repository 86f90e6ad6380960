"""`kill -9` at random moments of a run, again and again: what is left must be whole, and must go on to the same end.

    python experiments/benchmarks/kill_tries.py --tries 100  # 15 minutes of a CPU core -> kill_tries.csv

A run of the digits, with a checkpoint every second step, reallocations and validations, is killed at a random moment
(setting up, in a step, in a migration, in the middle of writing) and resumed in its own folder until it ends; then the
next one begins. After each kill every checkpoint in the folder must be intact, `resume=` must find one as soon as one
was written, and metrics.jsonl must have every step up to the kill: the run tells its steps through a pipe. A run that
was killed often must end with the very metrics of the one never killed. The table gets a line per try as soon as it is
over; the exit code is the number of faults.
"""

import argparse
import os
import random
import signal
import sys
import tempfile
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

os.environ.setdefault("OMP_NUM_THREADS", "1")  # a process that forks must not have threads of torch's
ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT))

import lightning as L
from lightning.pytorch.callbacks import ProgressBar

from baoc.config.dynamics import DynamicsConfig, ScheduleEntry
from baoc.config.environment import commit
from baoc.config.schema import (
    CheckpointConfig,
    ModelConfig,
    ReallocationConfig,
    RunConfig,
    TrainerConfig,
)
from baoc.core.budgets import parse_budget
from baoc.errors import BaocError
from baoc.tracking.checkpoints import load_checked, resolve_resume
from baoc.tracking.metrics import read_metrics
from baoc.training import run as training
from baoc.training import trainer as assembly
from experiments.benchmarks.shared import append_row, results_folder

STEPS = 30
CLOCKS = ("time_s", "time/step_ms", "throughput/samples_per_s", "memory/rss_gib", "memory/peak_gib")


@dataclass(frozen=True, slots=True, kw_only=True)
class Try:
    """One process and what it left. `ended`: it was done before its kill came."""

    number: int
    seed: int
    after_s: float
    ended: bool
    steps_told: int  # steps begun, as told through the pipe; 0 if it was still setting up
    checkpoint_step: int  # of the newest intact one; 0 where none was written yet
    last_metric_step: int
    faults: str


class Tell(ProgressBar):
    """Writes the count of finished steps to a pipe whenever the next one begins, in the place of the run's bar."""

    def __init__(self, descriptor: int):
        super().__init__()
        self.descriptor = descriptor

    def disable(self) -> None: ...

    def on_train_batch_start(self, trainer: L.Trainer, *_: Any) -> None:
        os.write(self.descriptor, f"{trainer.global_step}\n".encode())


def config(*, resume: str | None) -> RunConfig:
    return RunConfig(
        name="kill",
        device="cpu",
        batch_size=32,
        resume=resume,
        budget=parse_budget("state_25"),
        model=ModelConfig(options={"dropout": 0.1}),
        reallocation=ReallocationConfig(mode="once", warmup_steps=6),
        dynamics=DynamicsConfig(
            schedule=(ScheduleEntry(budget="state_10", step=16), ScheduleEntry(budget="state_25", step=26))
        ),
        trainer=TrainerConfig(
            max_steps=STEPS,
            gradient_clip_val=1.0,
            num_sanity_val_steps=0,
            log_every_n_steps=1,
            val_check_interval=15,
            limit_val_batches=2,
            check_val_every_n_epoch=None,
            enable_model_summary=False,
        ),
        checkpoint=CheckpointConfig(every_n_steps=2, keep=3, export=False),
    )


def start(run_dir: Path) -> tuple[int, int]:
    """Forks a process that trains in `run_dir`, going on where the folder has a checkpoint: (pid, end of its pipe)."""
    reading, writing = os.pipe()
    pid = os.fork()
    if pid:
        os.close(writing)
        return pid, reading
    code = 1
    try:
        os.close(reading)
        quiet = os.open(os.devnull, os.O_WRONLY)
        os.dup2(quiet, 1)
        run_dir.mkdir(parents=True, exist_ok=True)
        resume = str(run_dir) if any(run_dir.rglob("*.ckpt")) else None
        assembly.RunProgress = lambda: Tell(writing)  # pyright: ignore
        training.run(config(resume=resume), run_dir=run_dir, command="kill_tries")
        code = 0
    finally:
        os._exit(code)


class Pipe:
    """What a run tells: the count of finished steps whenever the next one begins."""

    def __init__(self, descriptor: int):
        self.descriptor, self.text = descriptor, b""

    @property
    def step(self) -> int:
        whole = self.text[: self.text.rfind(b"\n") + 1].split()
        return int(whole[-1]) if whole else 0

    def wait_for(self, step: int) -> None:
        """Until `step` is told, or the run is over."""
        while self.step < step and (part := os.read(self.descriptor, 65536)):
            self.text += part

    def close(self) -> int:
        """The last step that was told, once the run is over."""
        self.wait_for(10**9)
        os.close(self.descriptor)
        return self.step


def kill(pid: int, pipe: Pipe, *, draw: random.Random, setup_s: float, step_s: float, done: int) -> float:
    """Kills a run that goes on from step `done`: one of five while it sets up, else in or after a random step.

    Moments are drawn by steps and not by the clock, as a busy machine would else kill all of them before they train.
    Returns the seconds after which it did.
    """
    began = time.monotonic()
    if draw.random() < 0.2:
        time.sleep(draw.uniform(0, setup_s))
    else:
        pipe.wait_for(done + draw.randint(1, STEPS // 3))
        time.sleep(draw.uniform(0, 3 * step_s))  # into the steps that follow: their update, a validation, a checkpoint
    os.kill(pid, signal.SIGKILL)
    return time.monotonic() - began


def faults_in(run_dir: Path, *, steps_told: int) -> tuple[list[str], int, int]:
    """What is wrong in a folder, the step of the newest intact checkpoint, and the last step in the metrics."""
    found, newest, last = [], 0, -1
    files = list((run_dir / "checkpoints").glob("*.ckpt"))
    for file in files:
        try:
            load_checked(file)
        except BaocError as error:
            found.append(f"checkpoint: {error}")
    if files:
        try:
            newest = int(load_checked(resolve_resume(run_dir, run_root=run_dir) or "")["global_step"])
        except BaocError as error:
            found.append(f"resume: {error}")
    try:
        steps = [line["step"] for line in read_metrics(run_dir)] if (run_dir / "metrics.jsonl").exists() else []
        last = steps[-1] if steps else -1
        if steps != list(range(len(steps))):
            found.append("metrics: steps are missing")
        if last < max(steps_told, newest) - 1:
            found.append(f"metrics: end at {last}, but {max(steps_told, newest)} steps were done")
    except BaocError as error:
        found.append(f"metrics: {error}")
    if steps_told > 2 and newest < steps_told - 3:
        found.append(f"checkpoint: the newest is of step {newest}, though {steps_told} steps were done")
    return found, newest, last


def plain(run_dir: Path) -> list[dict[str, Any]]:
    return [{k: v for k, v in line.items() if k not in CLOCKS} for line in read_metrics(run_dir)]


def tries(num: int, *, seed: int, folder: Path) -> Iterator[Try]:
    """Kills `num` processes, run after run, each run compared at its end with one that was never killed."""
    began = time.monotonic()
    pid, descriptor = start(folder / "whole")
    pipe = Pipe(descriptor)
    pipe.wait_for(1)
    setup_s, began = time.monotonic() - began, time.monotonic()
    pipe.close()
    assert os.waitpid(pid, 0)[1] == 0, "the run does not even end by itself"
    step_s, draw = (time.monotonic() - began) / STEPS, random.Random(seed)
    run, reached = 0, 0
    for number in range(num):
        run_dir = folder / f"run_{run}"
        pid, descriptor = start(run_dir)
        pipe = Pipe(descriptor)
        after_s = kill(pid, pipe, draw=draw, setup_s=setup_s, step_s=step_s, done=reached)
        status = os.waitpid(pid, 0)[1]
        steps_told = pipe.close()
        exited = os.WIFEXITED(status)
        ended = exited or (run_dir / "result.json").is_file()  # asked to go on, it would say that nothing is left
        found, newest, last = faults_in(run_dir, steps_told=steps_told)
        if ended:
            run += 1
            found += [f"exit code {os.WEXITSTATUS(status)}"] if exited and os.WEXITSTATUS(status) else []
            found += (
                ["not the metrics of the run that was never killed"]
                if plain(run_dir) != plain(folder / "whole")
                else []
            )
        reached = 0 if ended else newest
        yield Try(
            number=number,
            seed=seed,
            after_s=round(after_s, 3),
            ended=ended,
            steps_told=steps_told,
            checkpoint_step=newest,
            last_metric_step=last,
            faults="; ".join(found),
        )


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--tries", type=int, default=100)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--out", type=Path, help="folder of kill_tries.csv")
    given = parser.parse_args()
    out = (given.out or results_folder()) / "kill_tries.csv"
    out.unlink(missing_ok=True)
    done: list[Try] = []
    with tempfile.TemporaryDirectory() as folder:
        for one in tries(given.tries, seed=given.seed, folder=Path(folder) / "day"):
            print(one, flush=True)
            append_row(out, one, commit=commit(), moments="by steps")
            done.append(one)
    bad = [one for one in done if one.faults]
    killed = [one for one in done if not one.ended]
    print(f"{len(done)} tries, {len(killed)} killed in their middle, {len(bad)} with faults")
    return len(bad)


if __name__ == "__main__":
    sys.exit(main())
