"""What torch.compile of a network's layers would give: seconds and bytes of ViT micro-batches, eager and compiled.

`python experiments/benchmarks/compiled_layers.py OUT.csv [--size large] [--micro-batch 32]`; on a GPU if there is one.
Weights of 16 bits but for vectors, activations of bf16 that are all kept: what `vit_l16_8gb` runs where nothing is
recomputed. Layers are compiled one by one, so that all share the code of one. Not part of a decision yet.
"""

import argparse
import csv
import sys
import time
from pathlib import Path

import torch
from torch import nn

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT))

from baoc.models import build_model  # noqa: E402
from baoc.models.prepare import Preparation, prepare  # noqa: E402
from baoc.types import ImageDataSpec  # noqa: E402

SPEC = ImageDataSpec(dataset="random", image_size=224, channels=3, num_classes=1000, num_train=1, num_val=1)


def timed(model: nn.Module, images: torch.Tensor, *, repeats: int) -> dict[str, float]:
    """Mean seconds of a forward and backward, seconds of the first one, and the most bytes held."""
    device = images.device.type

    def once() -> None:
        with torch.autocast(device, dtype=torch.bfloat16):
            loss = model(images).float().square().mean()
        loss.backward()
        wait()

    def wait() -> None:
        if device == "cuda":
            torch.cuda.synchronize()

    model.zero_grad()
    began = time.perf_counter()
    once()
    first_s = time.perf_counter() - began
    once()
    if device == "cuda":
        torch.cuda.reset_peak_memory_stats()
    began = time.perf_counter()
    for _ in range(repeats):
        once()
    seconds = (time.perf_counter() - began) / repeats
    peak = torch.cuda.max_memory_allocated() if device == "cuda" else 0
    return {"first_s": first_s, "ms": 1e3 * seconds, "samples_per_s": len(images) / seconds, "peak_bytes": peak}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("out", type=Path)
    parser.add_argument("--size", default="large")
    parser.add_argument("--micro-batch", type=int, default=32)
    parser.add_argument("--repeats", type=int, default=8)
    parser.add_argument("--backend", default="inductor")
    asked = parser.parse_args()
    device = "cuda" if torch.cuda.is_available() else "cpu"
    with torch.device(device):
        model = build_model("vit", spec=SPEC, size=asked.size)
    prepare(model, Preparation(activations="bf16"), name="vit")
    for param in model.parameters():
        param.data = param.data.to(torch.bfloat16 if param.ndim > 1 else torch.float32)
    images = torch.randn(asked.micro_batch, 3, model.image_size, model.image_size, device=device)  # pyright: ignore[reportArgumentType, reportCallIssue]
    rows = []
    for kind in ("eager", "compiled"):
        if kind == "compiled":
            for unit in model.checkpoint_units:  # pyright: ignore[reportGeneralTypeIssues]
                unit.compile(backend=asked.backend, dynamic=False)
        name = torch.cuda.get_device_name() if device == "cuda" else device
        rows.append({"kind": kind, "micro_batch": asked.micro_batch, "device": name, "torch": torch.__version__})
        rows[-1] |= timed(model, images, repeats=asked.repeats)
        print(rows[-1], flush=True)
        with asked.out.open("w", newline="") as file:
            writer = csv.DictWriter(file, list(rows[0]), lineterminator="\n")
            writer.writeheader()
            writer.writerows(rows)


if __name__ == "__main__":
    main()
