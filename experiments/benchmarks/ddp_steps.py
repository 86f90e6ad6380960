"""Two GPUs: steps, peaks and weights of BaocDDPStrategy beside Lightning's DDP with torch's fused AdamW.

`torchrun --nproc-per-node 2 experiments/benchmarks/ddp_steps.py` on a machine with NVIDIA GPUs; rows go to
ddp_steps.csv in $OUT or experiments/results as they come. A network's runs are in one process. `step_ms` is the median
over windows of 5 steps of the slowest rank; `peak_bytes` the largest of ranks, context included; `equal` whether all
ranks end with the same weights, bit for bit. `resumed` goes on from a checkpoint of half the steps, and `equal` is then
to the run that was not interrupted.
"""

import csv
import logging
import os
import sys
import tempfile
import warnings
from dataclasses import asdict, dataclass
from pathlib import Path
from statistics import median
from time import perf_counter
from typing import Any

import lightning as L
import torch
from lightning.fabric.plugins.environments.lightning import LightningEnvironment
from lightning.pytorch.strategies import DDPStrategy

ROOT = Path(__file__).resolve().parents[2]
sys.path[:0] = [str(ROOT)]

from baoc import BaocDDPStrategy  # noqa: E402
from baoc.data import build_data  # noqa: E402
from baoc.models import build_model  # noqa: E402
from baoc.parallel import ranks  # noqa: E402
from baoc.profiling import context_bytes, context_now  # noqa: E402
from baoc.tasks import OptimizerSettings, build_task  # noqa: E402
from baoc.training.callbacks import RngState  # noqa: E402
from baoc.training.lightning import checksum  # noqa: E402
from baoc.training.reallocation import ReallocationSettings  # noqa: E402
from baoc.training.session import SessionSettings  # noqa: E402

SIZE = int(os.environ.get("WORLD_SIZE", "1"))  # of which Lightning clears the environment
WARM, WINDOW, WINDOWS = 8, 5, 6
NETWORKS: dict[str, tuple[str, str, str, str, dict[str, Any], int]] = {
    "vit-l": ("vision", "vit", "large", "synthetic_images", {"num_samples": 2048}, 32),
    "llama-350m": ("language", "llama", "350m", "pysource", {"sequence_length": 1024}, 8),
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Row:
    network: str
    ranks: int
    optimizer: str
    budget: str
    step_ms: float
    ratio: float  # of step_ms to DDP with fused AdamW
    peak_bytes: int
    peak_bytes_predicted: int | None
    state_bytes: int
    moves: int
    equal: bool


class Clock(L.Callback):
    def __init__(self) -> None:
        self.ms: list[float] = []
        self._at = 0.0

    def on_train_batch_end(self, trainer: L.Trainer, *_: Any) -> None:
        if trainer.global_step >= WARM and (trainer.global_step - WARM) % WINDOW == 0:
            torch.cuda.synchronize()
            now = perf_counter()
            if trainer.global_step > WARM:
                self.ms.append(1e3 * (now - self._at) / WINDOW)
            self._at = now


def trained(
    network: str,
    strategy: Any,
    *,
    steps: int = WARM + WINDOW * WINDOWS,
    save: Path | None = None,
    load: Path | None = None,
) -> tuple[float, int, float]:
    """(ms of a step, peak bytes of the rank that holds most, checksum of the weights)."""
    task_name, family, size, dataset, options, batch = NETWORKS[network]
    data = build_data(dataset, task=task_name, batch_size=batch, **options)
    model = build_model(family, spec=data.spec, size=size, seed=0)
    given = {"lr": 1e-4, "betas": (0.9, 0.95), "eps": 1e-8, "weight_decay": 0.1, "warmup_fraction": 0.1}
    settings = OptimizerSettings(**given, schedule="constant", final_lr_fraction=1.0)
    task = build_task(task_name, model=model, spec=data.spec, seed=0, optimizer=settings)
    clock = Clock()
    trainer = L.Trainer(
        strategy=strategy,
        accelerator="cuda",
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
    torch.cuda.reset_peak_memory_stats()
    trainer.fit(task, datamodule=data, ckpt_path=load)
    device = torch.device("cuda", torch.cuda.current_device())
    peak = torch.cuda.max_memory_reserved() + context_now(device)
    if save is not None:
        trainer.save_checkpoint(save)
    found = checksum(param.to(device) for param in task.parameters())
    group = ranks()
    high, low = group.most(found, -found)
    ms = max(group.gathered(median(clock.ms) if clock.ms else 0.0))
    sums = found if high == -low else -1.0
    return ms, int(group.most(peak)[0]), sums


def fresh() -> None:
    import gc

    gc.collect()
    torch.cuda.empty_cache()
    torch.cuda.set_per_process_memory_fraction(1.0)


def baoc(budget: str, *, mode: str = "off") -> BaocDDPStrategy:
    reallocation = ReallocationSettings(mode=mode, warmup_steps=8, interval=10)
    return BaocDDPStrategy(budget, settings=SessionSettings(reallocation=reallocation))


def main() -> None:
    warnings.filterwarnings("ignore")
    logging.getLogger("lightning.pytorch").setLevel(logging.ERROR)
    torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
    context_bytes(torch.device("cuda", torch.cuda.current_device()))
    out = Path(os.environ.get("OUT", ROOT / "experiments" / "results")) / "ddp_steps.csv"
    rows: list[Row] = []

    def keep(
        network: str, optimizer: str, budget: str, found: Any, strategy: Any, *, reference: float, equal: bool
    ) -> None:
        known = getattr(strategy, "reallocator", None)
        ms, peak, _ = found
        rows.append(
            Row(
                network=network, ranks=ranks().size, optimizer=optimizer, budget=budget, step_ms=round(ms, 3),
                ratio=round(ms / reference, 4), peak_bytes=peak, equal=equal,
                peak_bytes_predicted=known.plan.peak_bytes if known is not None else None,
                state_bytes=known.optimizer.state_bytes() if known is not None else 0,
                moves=known.num_accepted if known is not None else 0,
            )
        )  # fmt: skip
        if ranks().rank == 0:
            print(rows[-1], flush=True)
            with out.open("w", newline="") as file:
                writer = csv.DictWriter(file, list(asdict(rows[0])))
                writer.writeheader()
                writer.writerows(asdict(row) for row in rows)

    for network in NETWORKS:
        plain = DDPStrategy(gradient_as_bucket_view=True)
        found = trained(network, plain)
        reference, full = found[0], found[1]
        keep(network, "torch AdamW", "", found, plain, reference=reference, equal=found[2] >= 0)
        del plain
        for budget, mode in (("unlimited", "off"), (f"{int(full * 0.8)}", "interval")):
            fresh()
            strategy = baoc(budget, mode=mode)
            found = trained(network, strategy)
            keep(network, f"baoc, {mode}", budget, found, strategy, reference=reference, equal=found[2] >= 0)
            del strategy
        with tempfile.TemporaryDirectory() as folder:
            path = ranks().first(Path(folder) / "half.ckpt")
            fresh()
            whole = trained(network, baoc("state_25"), steps=12)
            fresh()
            trained(network, baoc("state_25"), steps=6, save=path)
            fresh()
            strategy = baoc("state_25")
            again = trained(network, strategy, steps=12, load=path)
            ranks().most(0)
        keep(
            network,
            "baoc, resumed",
            "state_25",
            (0.0, *again[1:]),
            strategy,
            reference=reference,
            equal=again[2] == whole[2] >= 0,
        )
        del strategy
        fresh()
    torch.distributed.destroy_process_group()


if __name__ == "__main__":
    main()
