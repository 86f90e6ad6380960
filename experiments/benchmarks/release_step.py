"""What gradient release costs and saves: whole training steps with it and without, in one process.

`python experiments/benchmarks/release_step.py` on a machine with an NVIDIA GPU, under a minute. A decoder of Llama
130M's widths in bf16 autocast, each parameter a block; medians and quartiles of 15 steps between CUDA events, the
processor's time in as many more, and the peak of what torch allocated. `norm` clips by the previous step's norm where
gradients are released. Rows go to release_step.csv in $OUT or experiments/results, and with `--stacks` what a hundred
more steps of a case spend their seconds in to release_SPEC_HOW_BATCH.stacks.txt beside it.
"""

import argparse
import csv
import os
import sys
import time
from collections.abc import Callable
from pathlib import Path
from statistics import median, quantiles

import torch
from torch import Tensor, nn

ROOT = Path(__file__).resolve().parents[2]
sys.path[:0] = [str(ROOT), str(Path(__file__).parent)]

from optimizer_step import clean, events_ms  # noqa: E402
from stacks import sampled  # noqa: E402

from baoc.optim import BlockwiseOptimizer, GradientRelease  # noqa: E402

STEPS, VOCABULARY = 15, 32000
CASES = [
    (spec, how) for spec in ("adamw", "adamw_int8", "adamw_int8+split8") for how in ("kept", "released", "norm")
]  # fmt: skip


class Decoder(nn.Module):
    def __init__(self, *, width: int, layers: int, device: str):
        super().__init__()
        self.embed = nn.Embedding(VOCABULARY, width, device=device)
        self.layers = nn.ModuleList(
            nn.TransformerEncoderLayer(width, width // 64, 4 * width, 0.0, batch_first=True, device=device)
            for _ in range(layers)
        )
        self.head = nn.Linear(width, VOCABULARY, bias=False, device=device)

    def forward(self, tokens: Tensor) -> Tensor:
        mask = nn.Transformer.generate_square_subsequent_mask(tokens.shape[1], device=tokens.device)
        hidden = self.embed(tokens)
        for layer in self.layers:
            hidden = layer(hidden, src_mask=mask, is_causal=True)
        logits = self.head(hidden[:, :-1])
        return nn.functional.cross_entropy(logits.flatten(0, 1).float(), tokens[:, 1:].flatten())


def trained(spec: str, how: str, *, net: Decoder, tokens: Tensor) -> tuple[BlockwiseOptimizer, Callable[[], None]]:
    """The optimizer and one step of training with it."""
    release = {"kept": False, "released": True, "norm": GradientRelease(clip_norm=1.0)}[how]
    optimizer = BlockwiseOptimizer(net, spec, lr=1e-4, weight_decay=0.1, release=release)

    def step() -> None:
        optimizer.zero_grad()
        with torch.autocast(tokens.device.type, torch.bfloat16):
            loss = net(tokens)
        loss.backward()
        optimizer.step()

    return optimizer, step


def time_case(
    spec: str, how: str, *, width: int, layers: int, batch: int, stacks: Path | None = None
) -> dict[str, object]:
    torch.manual_seed(0)
    net = Decoder(width=width, layers=layers, device="cuda")
    tokens = torch.randint(VOCABULARY, (batch, 1024), device="cuda")
    optimizer, step = trained(spec, how, net=net, tokens=tokens)
    for _ in range(4):
        step()
    torch.cuda.reset_peak_memory_stats()
    low, middle, high = quantiles(events_ms(step, steps=STEPS), n=4)
    cpu_ms = median(processor_ms(step))
    peak = torch.cuda.max_memory_allocated() / 2**30
    if stacks is not None:
        with sampled(stacks):
            for _ in range(100):
                step()
            torch.cuda.synchronize()
    chosen = {choice.backend for choice in optimizer.registry.choices.values()}
    return {
        "spec": spec, "gradients": how, "parameters": sum(p.numel() for p in net.parameters()), "batch": batch,
        "step_ms": f"{middle:.2f}", "q1_ms": f"{low:.2f}", "q3_ms": f"{high:.2f}", "cpu_ms": f"{cpu_ms:.2f}",
        "n": STEPS, "peak_gib": f"{peak:.3f}", "backends": " ".join(sorted(chosen)),
    }  # fmt: skip


def processor_ms(step: Callable[[], None]) -> list[float]:
    """Of all threads, in what a step asks of the host, which does not wait for the device in it."""
    times = []
    for _ in range(STEPS):
        torch.cuda.synchronize()
        begin = time.process_time()
        step()
        times.append((time.process_time() - begin) * 1e3)
    return times


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--width", type=int, default=768)
    parser.add_argument("--layers", type=int, default=12)
    parser.add_argument("--specs", nargs="+", default=sorted({spec for spec, _ in CASES}))
    parser.add_argument("--batch", type=int, nargs="+", default=[1, 8], help="sequences of 1,024 tokens")
    parser.add_argument("--stacks", action="store_true", help="leave what the seconds of more steps were spent in")
    args = parser.parse_args()
    folder = Path(os.environ.get("OUT") or ROOT / "experiments" / "results")
    folder.mkdir(parents=True, exist_ok=True)
    common = {"device": torch.cuda.get_device_name(), "torch": torch.__version__}
    writer = None
    with (folder / "release_step.csv").open("w", newline="") as file:
        for batch in args.batch:
            for spec, how in [case for case in CASES if case[0] in args.specs]:
                stacks = folder / f"release_{spec}_{how}_{batch}.stacks.txt" if args.stacks else None
                sizes = {"width": args.width, "layers": args.layers, "batch": batch}
                row = {**time_case(spec, how, stacks=stacks, **sizes), **common}
                if writer is None:
                    writer = csv.DictWriter(file, list(row))
                    writer.writeheader()
                writer.writerow(row)
                file.flush()
                print(*list(row.values())[:10], flush=True)
                clean()


if __name__ == "__main__":
    main()
