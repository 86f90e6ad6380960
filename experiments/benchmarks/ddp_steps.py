"""Two GPUs: steps, peaks and weights of BaocDDPStrategy beside Lightning's DDP with torch's fused AdamW.

    torchrun --standalone --nproc-per-node 2 experiments/benchmarks/ddp_steps.py OUT --seconds 140
    # under 3 minutes of 2 H200s -> ddp_steps.csv
    python experiments/benchmarks/ddp_steps.py OUT --kills 5
    # 8 minutes of 2 CPU cores with --device cpu -> ddp_kills.csv

Rows are written as they come. A network's runs are in one process. `step_ms` is the mean over windows of 5 steps of the
slowest rank, `median_ms` their median, `decision_ms` what rank 0 spent in the decision by gradients. `peak_bytes` is
what the allocator reserved and the context, `allocated_bytes` what of it tensors held at most, each of the rank that
held most; `equal` whether all ranks end with the same weights, bit for bit. `resumed` goes on from a checkpoint of half
the steps, and `equal` is then to the run that was not interrupted. `--device cpu --networks vit-mini` runs on gloo.

`--kills 5` kills all ranks of a run, or one of them (with `--one` always one), at random steps instead, at 2 and at 1
ranks in turn or at those of `--ranks`, and goes on by resume=auto: OUT/ddp_kills.csv, with `--strategy fsdp` that of
fully_shard and OUT/fsdp_kills.csv. `--seed` draws others.
"""

import argparse
import json
import logging
import os
import random
import signal
import subprocess
import sys
import tempfile
import warnings
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from statistics import mean, median
from time import perf_counter, sleep
from typing import Any

import lightning as L
import torch
from lightning.fabric.plugins.environments.lightning import LightningEnvironment
from lightning.pytorch.strategies import DDPStrategy

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT))

from baoc import BaocDDPStrategy
from baoc.callbacks.generators import RngState
from baoc.config.environment import commit
from baoc.config.schema import ReallocationConfig
from baoc.core.recipes import Recipe
from baoc.data import build_data
from baoc.models import build_model
from baoc.parallel import ranks
from baoc.profiling import context_bytes
from baoc.tasks import OptimizerSettings, build_task
from baoc.training.lightning import checksum
from baoc.training.session import SessionSettings
from experiments.benchmarks.shared import free_memory, peak_reserved_bytes, write_rows

SIZE = int(os.environ.get("WORLD_SIZE", "1"))  # of which Lightning clears the environment
WARM, WINDOW, WINDOWS = 8, 5, 6
NETWORKS: dict[str, tuple[str, str, str, str, dict[str, Any], int]] = {
    "vit-l": ("vision", "vit", "large", "synthetic_images", {"num_samples": 2048}, 32),
    "llama-350m": ("language", "llama", "350m", "pysource", {"sequence_length": 1024}, 8),
    "vit-mini": ("vision", "vit", "mini", "synthetic_images", {"num_samples": 2048, "image_size": 32}, 4),
}
KILLED_STEPS = 120


@dataclass(frozen=True, slots=True, kw_only=True)
class Row:
    network: str
    ranks: int
    optimizer: str
    budget: str
    step_ms: float
    median_ms: float
    ratio: float  # of step_ms to DDP with fused AdamW
    decisions: int
    decision_ms: float
    peak_bytes: int
    allocated_bytes: int
    peak_bytes_predicted: int | None
    excess: float | None  # of the peak over its prediction, as a share of it
    state_bytes: int
    moves: int
    equal: bool
    commit: str


class Clock(L.Callback):
    """Milliseconds of a step, by windows."""

    def __init__(self) -> None:
        self.ms: list[float] = []
        self._at = 0.0

    def on_train_batch_end(self, trainer: L.Trainer, *_: Any) -> None:
        if trainer.global_step >= WARM and (trainer.global_step - WARM) % WINDOW == 0:
            if torch.cuda.is_available():
                torch.cuda.synchronize()
            now = perf_counter()
            if trainer.global_step > WARM:
                self.ms.append(1e3 * (now - self._at) / WINDOW)
            self._at = now


@dataclass(slots=True, kw_only=True)
class Decisions:
    """Milliseconds of each decision here, and the largest peak that a plan has predicted."""

    ms: list[float]
    predicted: int = 0

    def watch(self, strategy: BaocDDPStrategy) -> None:
        strategy.plan_listeners.append(lambda _, plan: self._planned(plan, strategy))
        strategy.reallocation_listeners.append(lambda _, plan, __: self._note(plan))

    def _note(self, plan: Any) -> None:
        self.predicted = max(self.predicted, plan.peak_bytes)

    def _planned(self, plan: Any, strategy: BaocDDPStrategy) -> None:
        self._note(plan)
        if strategy.reallocator is not None:
            strategy.reallocator.memory_phase = self._timed

    @contextmanager
    def _timed(self, label: str) -> Iterator[None]:
        began = perf_counter()
        yield
        if label == "decision":
            self.ms.append(1e3 * (perf_counter() - began))


@dataclass(frozen=True, slots=True, kw_only=True)
class Found:
    """Of one training: milliseconds by window, peaks, and a sum over the weights, -1 where ranks differ."""

    ms: list[float]
    peak: int
    allocated: int
    weights: float


def trained(
    network: str,
    strategy: Any,
    *,
    device: str,
    steps: int = WARM + WINDOW * WINDOWS,
    save: Path | None = None,
    load: Path | None = None,
) -> Found:
    task_name, family, size, dataset, options, batch = NETWORKS[network]
    data = build_data(dataset, task=task_name, batch_size=batch, **options)
    model = build_model(family, spec=data.spec, size=size, seed=0)
    given = {"lr": 1e-4, "betas": (0.9, 0.95), "eps": 1e-8, "weight_decay": 0.1, "warmup_fraction": 0.1}
    settings = OptimizerSettings(**given, schedule="constant", final_lr_fraction=1.0)
    task = build_task(task_name, model=model, spec=data.spec, seed=0, optimizer=settings)
    clock = Clock()
    trainer = L.Trainer(
        strategy=strategy,
        accelerator=device,
        devices=SIZE,
        plugins=[LightningEnvironment()],
        precision="bf16-mixed",
        max_steps=steps,
        limit_val_batches=0,
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        callbacks=[RngState(), clock],
    )
    cuda = device == "cuda"
    if cuda:
        torch.cuda.reset_peak_memory_stats()
    trainer.fit(task, datamodule=data, ckpt_path=load)
    here = torch.device("cuda", torch.cuda.current_device()) if cuda else torch.device("cpu")
    peak = peak_reserved_bytes(here)
    allocated = torch.cuda.max_memory_allocated() if cuda else 0
    if save is not None:
        trainer.save_checkpoint(save)
    found = checksum(param.to(here) for param in task.parameters())
    high, low, peak, allocated = ranks().all_reduce_max(found, -found, peak, allocated)
    slowest = [max(windows) for windows in zip(*ranks().all_gather(clock.ms), strict=True)]
    return Found(ms=slowest, peak=int(peak), allocated=int(allocated), weights=found if high == -low else -1.0)


def uncapped(device: str) -> None:
    """Frees memory and lifts the cap of the run before."""
    free_memory()
    if device == "cuda":
        torch.cuda.set_per_process_memory_fraction(1.0)


def baoc(budget: str, *, mode: str = "off") -> BaocDDPStrategy:
    """`mode`: of reallocation, or adamw for fp32 AdamW everywhere, whose states are those of torch's."""
    if mode == "adamw":
        return BaocDDPStrategy(budget, recipe=Recipe(name="adamw", specs={"hidden": "adamw"}))
    reallocation = ReallocationConfig(mode=mode, warmup_steps=8)
    return BaocDDPStrategy(budget, settings=SessionSettings(reallocation=reallocation))


class Steps:
    """The rows of `networks`, written as they come."""

    def __init__(self, out: Path, *, device: str, until: float):
        self.rows: list[Row] = []
        self._path, self._device, self._until = out / "ddp_steps.csv", device, until

    @property
    def late(self) -> bool:
        """Whether the time is up, by rank 0's clock."""
        return ranks().broadcast_number(perf_counter() > self._until) > 0

    def run(self, network: str, *, resumed: bool) -> None:
        device = self._device
        plain = DDPStrategy(gradient_as_bucket_view=True)
        found = trained(network, plain, device=device)
        reference, limit = mean(found.ms), f"{int(found.peak * 0.8)}" if found.peak else "state_25"
        self._keep(network, "torch AdamW", "", found, reference=reference)
        del plain
        for budget, mode in (("unlimited", "adamw"), ("unlimited", "off"), (limit, "off"), (limit, "once")):
            if self.late:
                return
            uncapped(device)
            strategy, decisions = baoc(budget, mode=mode), Decisions(ms=[])
            decisions.watch(strategy)
            found = trained(network, strategy, device=device)
            self._keep(network, f"baoc, {mode}", budget, found, reference=reference, by=(strategy, decisions))
            del strategy
        if resumed and not self.late:
            self._resumed(network, reference=reference)
        uncapped(device)

    def _resumed(self, network: str, *, reference: float) -> None:
        device = self._device
        with tempfile.TemporaryDirectory() as folder:
            path = ranks().broadcast(Path(folder) / "half.ckpt")
            uncapped(device)
            whole = trained(network, baoc("state_25"), device=device, steps=12)
            uncapped(device)
            trained(network, baoc("state_25"), device=device, steps=6, save=path)
            uncapped(device)
            strategy, decisions = baoc("state_25"), Decisions(ms=[])
            decisions.watch(strategy)
            again = trained(network, strategy, device=device, steps=12, load=path)
            ranks().all_reduce_max(0)
        equal = again.weights == whole.weights >= 0
        given = {"reference": reference, "by": (strategy, decisions), "equal": equal}
        self._keep(network, "baoc, resumed", "state_25", again, **given)

    def _keep(
        self,
        network: str,
        optimizer: str,
        budget: str,
        found: Found,
        *,
        reference: float,
        by: tuple[BaocDDPStrategy, Decisions] | None = None,
        equal: bool | None = None,
    ) -> None:
        known = by[0].reallocator if by is not None else None
        predicted = by[1].predicted if by is not None else None
        ms = by[1].ms if by is not None else []
        step_ms = mean(found.ms) if found.ms else 0.0
        self.rows.append(
            Row(
                network=network, ranks=ranks().size, optimizer=optimizer, budget=budget,
                step_ms=round(step_ms, 3), median_ms=round(median(found.ms), 3) if found.ms else 0.0,
                ratio=round(step_ms / reference, 4), decisions=len(ms),
                decision_ms=round(mean(ms), 2) if ms else 0.0, peak_bytes=found.peak,
                allocated_bytes=found.allocated, peak_bytes_predicted=predicted,
                excess=round(found.peak / predicted - 1, 4) if predicted and found.peak else None,
                state_bytes=known.optimizer.state_bytes() if known is not None else 0,
                moves=known.num_accepted if known is not None else 0,
                equal=found.weights >= 0 if equal is None else equal, commit=commit(),
            )
        )  # fmt: skip
        if ranks().rank == 0:
            print(self.rows[-1], flush=True)
            write_rows(self._path, self.rows)


def table(rows: Sequence[Row]) -> str:
    lines = [f"{'network':12}{'optimizer':18}{'step ms':>9}{'ratio':>7}{'decision':>10}{'peak':>15}{'excess':>9} equal"]
    for row in rows:
        excess = "" if row.excess is None else f"{row.excess:+.2%}"
        lines.append(
            f"{row.network:12}{row.optimizer:18}{row.step_ms:9.1f}{row.ratio:7.3f}{row.decision_ms:10.1f}"
            f"{row.peak_bytes:15d}{excess:>9} {row.equal}"
        )
    return "\n".join(lines)


# -- kills ------------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True, kw_only=True)
class Kill:
    """One attempt of a run. `killed`: all, or one rank by its process; "" for one that was left to end. `left`:
    processes that were still there when rank 0 had ended and nobody wrote to its stderr any more."""

    number: int
    strategy: str  # of several ranks
    seed: int
    ranks: int
    killed: str
    at_step: int
    exit_code: int
    seconds: float
    steps_kept: int  # in metrics.jsonl
    left: int
    fault: str
    commit: str


def kills(
    num: int, *, out: Path, device: str, strategy: str, seed: int, counts: Sequence[int], one: bool, steps: int
) -> int:
    """Kills attempt after attempt, then lets the last one end after `steps`; the number of faults."""
    draw, rows = random.Random(seed), list[Kill]()
    size = "mini" if device == "cuda" else "tiny"
    words = [f"model.size={size}", f"device={device}", f"trainer.max_steps={steps}", "checkpoint.every_n_steps=5"]
    words += ["budget=state_25", "checkpoint.export=false", "trainer.limit_val_batches=1", "resume=auto"]
    words += ["trainer.log_every_n_steps=1", "dataset=synthetic_images", "trainer.val_check_interval=50"]
    with tempfile.TemporaryDirectory() as folder:
        run = Path(folder) / "day" / "run"
        for number in range(num + 1):
            count = counts[number % len(counts)]
            rank = draw.randrange(count) if count > 1 and (one or draw.random() < 0.5) else None
            what = "" if number == num else "all" if rank is None else f"rank {rank}"
            start, on = _steps(run), [f"trainer.strategy={strategy}"] if count > 1 else []
            process = subprocess.Popen(
                [sys.executable, str(ROOT / "run.py"), *words, *on, f"trainer.devices={count}", f"hydra.run.dir={run}"],
                stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True, start_new_session=True,
            )  # fmt: skip
            began, at = perf_counter(), start + draw.randint(6, 14)
            while what and process.poll() is None and _steps(run) < at and perf_counter() - began < 300:
                sleep(0.02)
            if what == "all" and process.poll() is None:
                os.killpg(process.pid, signal.SIGKILL)
            elif what and process.poll() is None:
                os.kill(_processes(process.pid)[rank], signal.SIGKILL)
            _, err = process.communicate(timeout=120)
            kept, code, left = _steps(run), process.returncode, _in_group(process.pid)
            expected = 0 if not what else -signal.SIGKILL if what in ("all", "rank 0") else 5
            faults = [] if code == expected else [f"exit code {code}: {err[-300:]}"]
            if left:
                faults.append(f"{left} processes are left")
            if kept < start or (what and kept < at):
                faults.append(f"{kept} steps kept, {start} before")
            seen = [json.loads(line)["step"] for line in (run / "metrics.jsonl").read_text().splitlines()]
            if not what and (sorted(set(seen)) != list(range(steps)) or not (run / "result.json").is_file()):
                faults.append("steps are missing in the whole run")
            rows.append(
                Kill(
                    number=number, strategy=strategy, seed=seed, ranks=count, killed=what, at_step=at if what else 0,
                    exit_code=code, seconds=round(perf_counter() - began, 1), steps_kept=kept, left=left,
                    fault="; ".join(faults), commit=commit(),
                )
            )  # fmt: skip
            print(rows[-1], flush=True)
            write_rows(out / f"{strategy}_kills.csv", rows)
    bad = sum(bool(row.fault) for row in rows)
    print(f"{strategy}: {num} kills and resumes at {' and '.join(map(str, counts))} ranks, {bad} with faults")
    return bad


def _steps(run: Path) -> int:
    path = run / "metrics.jsonl"
    return path.read_bytes().count(b"\n") if path.is_file() else 0


def _processes(pid: int) -> dict[int | None, int]:
    """Rank -> process of a run that `pid` has started and is rank 0 of."""
    found: dict[int | None, int] = {0: pid}
    for child in Path(f"/proc/{pid}/task/{pid}/children").read_text().split():
        words = Path(f"/proc/{child}/environ").read_bytes().split(b"\0")
        found |= {int(word[5:]): int(child) for word in words if word.startswith(b"RANK=")}
    return found


def _in_group(group: int) -> int:
    """How many processes of a group are there, of those that have not ended yet."""
    stats = [path.read_text().rpartition(")")[2].split() for path in Path("/proc").glob("[0-9]*/stat") if path.exists()]
    return sum(int(words[2]) == group and words[0] != "Z" for words in stats)


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("out", type=Path, help="folder of the rows")
    parser.add_argument("--networks", nargs="+", default=["vit-l", "llama-350m"], choices=NETWORKS)
    parser.add_argument("--device", default="cuda", choices=("cuda", "cpu"))
    parser.add_argument("--seconds", type=float, default=1e9, help="no row is begun later than this")
    parser.add_argument("--resumed", action="store_true", help="a row that goes on from half of its steps, too")
    parser.add_argument("--kills", type=int, default=0, help="kill and resume so often instead")
    parser.add_argument("--strategy", default="ddp", choices=("ddp", "fsdp"), help="of what is killed")
    parser.add_argument("--seed", type=int, default=0, help="of what is killed when")
    parser.add_argument("--ranks", nargs="+", type=int, default=[2, 1], help="of what is killed, in turn")
    parser.add_argument("--one", action="store_true", help="kill one rank, never all")
    given = parser.parse_args()
    given.out.mkdir(parents=True, exist_ok=True)
    if given.kills:
        words = {"out": given.out, "device": given.device, "strategy": given.strategy, "seed": given.seed}
        steps = max(KILLED_STEPS, 20 * given.kills)
        return kills(given.kills, **words, counts=given.ranks, one=given.one, steps=steps)
    warnings.filterwarnings("ignore")
    logging.getLogger("lightning.pytorch").setLevel(logging.ERROR)
    until = perf_counter() + given.seconds
    if given.device == "cuda":
        torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
        context_bytes(torch.device("cuda", torch.cuda.current_device()))
    steps = Steps(given.out, device=given.device, until=until)
    for network in given.networks:
        steps.run(network, resumed=given.resumed)
    if ranks().rank == 0:
        print(table(steps.rows))
    torch.distributed.destroy_process_group()
    return 0


if __name__ == "__main__":
    sys.exit(main())
