"""What a plan without a device counts, against the device's own probe: bytes of each network, moment by moment.

`python experiments/benchmarks/plan_check.py OUT.csv [--only NAME...] [--details FOLDER]`, on CUDA or a CPU. On a CPU
fake tensors flow in its own types and must agree to the byte; on CUDA columns tell where the rest comes from: bytes
tracked by operator, what the allocator handed out beyond them (workspaces), and what it reserved beyond that.
"""

import argparse
import csv
import json
import sys
import time
from dataclasses import asdict
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import torch
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT))

from baoc.config.compose import compose  # noqa: E402
from baoc.config.environment import commit  # noqa: E402
from baoc.config.from_hydra import from_hydra  # noqa: E402
from baoc.config.resolve import resolve  # noqa: E402
from baoc.data.batches import resized  # noqa: E402
from baoc.models.switches import disable_checkpointing, enable_checkpointing  # noqa: E402
from baoc.profiling.tracker import MemoryTracker  # noqa: E402
from baoc.training import run as training  # noqa: E402
from baoc.training.measure.absent_card import fake_, fake_batch  # noqa: E402
from baoc.training.measure.microbatches import Trials  # noqa: E402
from baoc.training.measure.probe import silent  # noqa: E402

TEXT = ("model=llama", "model.vocab_size=32000", "dataset.sequence_length=512", "batch_size=8")
ON_CUDA = {
    "llama_130m": ((*TEXT, "model.size=130m"), 8),
    "llama_350m": ((*TEXT, "model.size=350m"), 4),
    "vit_base": (("model=vit", "dataset=synthetic_images", "batch_size=32", "model.size=base"), 32),
    "vit_base_recomputed": (("model=vit", "dataset=synthetic_images", "batch_size=32", "model.size=base"), 32),
    "dit_b2": (("model=dit", "dataset=random_latents", "batch_size=32", "model.size=b2"), 32),
    "unet_cifar": (
        ("model=unet", "dataset=synthetic_images", "dataset.image_size=32", "batch_size=64", "model.size=cifar"),
        64,
    ),
}
ON_CPU = {
    "llama_nano": (("model=llama", "model.size=nano"), 8),
    "vit_tiny": (("model=vit", "model.size=tiny"), 32),
    "vit_tiny_recomputed": (("model=vit", "model.size=tiny"), 32),
    "dit_tiny": (("model=dit", "model.size=tiny"), 16),
    "unet_tiny": (("model=unet", "model.size=tiny"), 16),
}


class Workspaces(TorchDispatchMode):
    """The most that each operator allocated and freed within itself, on CUDA: bytes by name."""

    def __init__(self) -> None:
        super().__init__()
        self.found: dict[str, int] = {}

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_allocated()
        out = func(*args, **(kwargs or {}))
        within = torch.cuda.max_memory_allocated() - max(before, torch.cuda.memory_allocated())
        if within > self.found.get(func.name(), 0):
            self.found[func.name()] = within
        return out


def built(overrides: tuple[str, ...], *, device: str, meta: bool) -> tuple[Any, Any, Any]:
    config = resolve(from_hydra(compose([*overrides, "trainer.precision=auto"])), device=device)
    with TemporaryDirectory() as folder, torch.device("meta" if meta else "cpu"):
        task, data = training.build(config, run_dir=Path(folder), device=device)
    return config.config, task, data


def trials_of(config: Any, task: Any, data: Any, *, where: torch.device, fake: bool) -> tuple[Trials, Any]:
    batch = next(iter(data.make_train_loader(limit=None)))
    mode = FakeTensorMode(allow_non_fake_inputs=True)
    if fake:
        with mode:
            fake_(task)
            batch = fake_batch(batch)
    trials = Trials(
        task,
        batch=batch,
        val_batch=None,
        device=where,
        precision=str(config.trainer.precision),
        emulate_cuda=fake and torch.cuda.is_available(),
    )
    return trials, mode


def row_of(name: str, *, details: Path | None) -> dict[str, object]:
    overrides, size = (ON_CUDA if torch.cuda.is_available() else ON_CPU)[name]
    cuda = torch.cuda.is_available()
    began, here = time.time(), torch.device("cuda", 0) if cuda else torch.device("cpu")
    found: dict[str, Any] = {}
    config, task, data = built(overrides, device=here.type, meta=True)
    trials, mode = trials_of(config, task, data, where=torch.device("cpu"), fake=True)
    with mode:
        if name.endswith("recomputed"):
            enable_checkpointing(task.model, name=name)
        found["fake"] = trials.run(size, accumulation=1, timed=False).footprint
    config, task, data = built(overrides, device=here.type, meta=False)
    task.to(here)
    disable_checkpointing(task.model)
    if name.endswith("recomputed"):
        enable_checkpointing(task.model, name=name)
    trials, _ = trials_of(config, task, data, where=here, fake=False)
    found["probe"] = trials.run(size, accumulation=1, timed=False).footprint
    row: dict[str, object] = {"case": name, "micro_batch": size, "commit": commit(), "torch": torch.__version__}
    row["device"] = torch.cuda.get_device_name() if cuda else "cpu"
    for key in ("weights_bytes", "gradients_bytes", "resident_bytes", "forward_backward_bytes"):
        row |= {f"{key}_{which}": getattr(footprint, key) for which, footprint in found.items()}
    row["error"] = found["fake"].forward_backward_bytes / found["probe"].forward_backward_bytes - 1
    if cuda:
        row |= looked_into(trials, task, size=size, found=found)
    if details is not None:
        details.mkdir(parents=True, exist_ok=True)
        kept = {
            which: [asdict(m) | {"copies": len(m.copies)} for m in found[which].intervals]
            for which in ("fake", "probe")
        }
        (details / f"{name}.json").write_text(json.dumps(kept | {"workspaces": found.get("workspaces", {})}))
    return row | {"seconds": round(time.time() - began, 1)}


def looked_into(trials: Trials, task: Any, *, size: int, found: dict[str, Any]) -> dict[str, object]:
    """The same pass again: handed out and reserved by the allocator, tracked by operator, workspaces of operators."""
    batch = trials._moved(resized(trials._batch, size))

    def once() -> None:
        trials._loss(batch).backward()

    row: dict[str, object] = {}
    with silent(task):
        task.zero_grad(set_to_none=True)
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats()
        once()
        row["cold_allocated"], row["cold_reserved"] = (
            torch.cuda.max_memory_allocated(),
            torch.cuda.max_memory_reserved(),
        )
        task.zero_grad(set_to_none=True)
        with MemoryTracker(device="cuda").prime(task, batch) as tracker:
            once()
            row["cold_tracked"] = tracker.peak_bytes
        task.zero_grad(set_to_none=True)
        with Workspaces() as spaces:
            once()
        task.zero_grad(set_to_none=True)
    found["workspaces"] = dict(sorted(spaces.found.items(), key=lambda item: -item[1])[:12])
    row["workspace"] = max(spaces.found.values(), default=0)
    row["held_beyond_tensors"] = torch.cuda.memory_allocated() - sum(
        t.untyped_storage().nbytes() for t in (*task.parameters(), *task.buffers())
    )
    return row


def main() -> None:
    cases = ON_CUDA if torch.cuda.is_available() else ON_CPU
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("out", type=Path)
    parser.add_argument("--only", nargs="*", choices=list(cases), default=list(cases))
    parser.add_argument("--details", type=Path)
    asked = parser.parse_args()
    if torch.cuda.is_available():
        from baoc.profiling.memory import settle_allocator

        settle_allocator("cuda")
    rows: list[dict[str, object]] = []
    for name in asked.only:
        rows.append(row_of(name, details=asked.details))
        with asked.out.open("w", newline="") as file:
            writer = csv.DictWriter(file, list(dict.fromkeys(key for row in rows for key in row)), restval="")
            writer.writeheader()
            writer.writerows(rows)
        print(" ".join(f"{key}={value}" for key, value in rows[-1].items() if key not in ("commit", "torch")))


if __name__ == "__main__":
    main()
