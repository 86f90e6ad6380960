"""What watching gradients costs, beside the limits that it is held to: shares of time, seconds and bytes.

    python experiments/benchmarks/profiling_cost.py --device cpu

A decoder of attention and MLP blocks trains on random tokens in a plain loop with BaocOptimizer(budget="state_25") and
reallocation=interval. All that the profiler does (sampling, statistics) is timed by the clock and by
the process's, apart for the warm-up and for the steps after the first decision, and set against the time of all steps.
Above 10M parameters the limits are 5 % of the warm-up, 1 % of later time and .2 bytes per parameter; below, 16 MiB and
3 s of the thread that trains. On a GPU only the host's time is told, as the device is not waited for. A row per case in
OUT/profiling_cost.csv.
"""

import argparse
import csv
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT))

import torch  # noqa: E402
from torch import Tensor, nn  # noqa: E402

from baoc import BaocOptimizer  # noqa: E402
from baoc.config.environment import commit  # noqa: E402
from baoc.planning.planner import PlannerSettings  # noqa: E402
from baoc.profiling import GradientProfiler  # noqa: E402
from baoc.profiling.schedule import LARGE_PARAMS, LATER_SHARE, MAX_S, MAX_SHARE  # noqa: E402
from baoc.training.reallocation import ReallocationSettings  # noqa: E402
from baoc.training.session import SessionSettings  # noqa: E402

VOCABULARY, LENGTH = 256, 64
SIZES = {"small": (64, 4, 32), "large": (384, 6, 4)}  # width, depth, batch: below and above 10M parameters
PARTS = ("observe", "profile")  # everything of the profiler that training calls


class Decoder(nn.Module):
    def __init__(self, *, width: int, depth: int):
        super().__init__()
        self.embedding = nn.Embedding(VOCABULARY, width)
        layer = nn.TransformerEncoderLayer(width, 4, 4 * width, dropout=0.0, batch_first=True, norm_first=True)
        self.layers = nn.TransformerEncoder(layer, depth, enable_nested_tensor=False)
        self.head = nn.Linear(width, VOCABULARY)

    def forward(self, tokens: Tensor) -> Tensor:
        mask = nn.Transformer.generate_square_subsequent_mask(tokens.shape[1], device=tokens.device)
        return self.head(self.layers(self.embedding(tokens), mask=mask, is_causal=True))


class Stopwatch:
    """Seconds by two clocks inside the methods it is put around: the wall's, and the processor's of this process."""

    def __init__(self) -> None:
        self.wall_s = self.processor_s = 0.0

    def around(self, owner: Any, name: str) -> None:
        method: Callable[..., Any] = getattr(owner, name)

        def timed(*args: Any, **kwargs: Any) -> Any:
            wall, processor = time.perf_counter(), time.process_time()
            try:
                return method(*args, **kwargs)
            finally:
                self.wall_s += time.perf_counter() - wall
                self.processor_s += time.process_time() - processor

        setattr(owner, name, timed)


def measured(*, width: int, depth: int, batch: int, steps: tuple[int, int], device: str) -> list[dict]:
    """A row for the warm-up and one for the steps after the first decision."""
    torch.manual_seed(0)
    model = Decoder(width=width, depth=depth).to(device)
    reallocation = ReallocationSettings(mode="interval", warmup_steps=steps[0], interval=max(steps[1] // 2, 2))
    settings = SessionSettings(planner=PlannerSettings(risk="statistics"), reallocation=reallocation)
    optimizer = BaocOptimizer(model, budget="state_25", settings=settings)
    profiler, num_params = optimizer.reallocator.profiler, sum(p.numel() for p in model.parameters())
    assert isinstance(profiler, GradientProfiler)
    watch = Stopwatch()
    for name in PARTS:
        watch.around(profiler, name)
    rows, nbytes = [], profiler.nbytes
    large = num_params >= LARGE_PARAMS
    for phase, count, share in (("warm-up", steps[0], MAX_SHARE), ("later", steps[1], LATER_SHARE)):
        before = watch.wall_s, watch.processor_s, profiler.num_samples
        wall, processor = time.perf_counter(), time.process_time()
        for _ in range(count):
            tokens = torch.randint(VOCABULARY, (batch, LENGTH + 1), device=device)
            loss = nn.functional.cross_entropy(model(tokens[:, :-1]).flatten(0, 1), tokens[:, 1:].flatten())
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
        if device == "cuda":
            torch.cuda.synchronize()
        wall, processor = time.perf_counter() - wall, time.process_time() - processor
        spent = watch.wall_s - before[0], watch.processor_s - before[1]
        rows.append(
            {
                "parameters": num_params,
                "device": device,
                "phase": phase,
                "steps": count,
                "samples": profiler.num_samples - before[2],
                "step_wall_ms": 1e3 * wall / count,
                "profiling_wall_s": spent[0],
                "profiling_processor_s": spent[1],
                "share_wall": spent[0] / wall,
                "share_processor": spent[1] / processor,
                "limit": f"{share:.0%} of time" if large else f"{MAX_S:g} s in all",
                "bytes": nbytes,
                "limit_bytes": int(0.2 * num_params) if large else 16 * 2**20,
            }
        )
    return rows


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--device", default="cpu", choices=["cpu", "cuda"])
    parser.add_argument("--steps", type=int, nargs=2, default=(60, 120), help="before and after the first decision")
    parser.add_argument("--size", nargs="+", default=list(SIZES), choices=list(SIZES))
    parser.add_argument("--out", type=Path, default=ROOT / "experiments" / "results")
    given = parser.parse_args()
    torch.set_num_threads(1)
    rows: list[dict] = []
    for width, depth, batch in (SIZES[size] for size in given.size):
        rows += measured(width=width, depth=depth, batch=batch, steps=tuple(given.steps), device=given.device)
        print(rows[-2], rows[-1], sep="\n", flush=True)
    about = {"commit": commit(), "torch": torch.__version__}
    given.out.mkdir(parents=True, exist_ok=True)
    with (given.out / "profiling_cost.csv").open("w", newline="") as file:
        writer = csv.DictWriter(file, [*rows[0], *about], lineterminator="\n")
        writer.writeheader()
        writer.writerows(row | about for row in rows)


if __name__ == "__main__":
    main()
