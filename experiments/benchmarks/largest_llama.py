"""The deepest Llama whose training step fits a device budget, by where and how its optimizer states are kept.

`python experiments/benchmarks/largest_llama.py` needs no GPU: peaks are those of mode=plan for a card that is not here
(shapes counted, bf16-mixed, micro-batch 1, recomputed activations, released gradients), and the least that any
allocation takes. Layers are those of the 1.3B network (width 2,048), or with --width 4096 of the 7B one. A depth is
tried before it is told of.
Rows go to largest_llama.csv in $OUT or experiments/results. With `--train LAYERS` one method (--methods) trains 3 steps
of so many layers within one of --budgets on the GPU that is here, by `python run.py`, and its peak is told; with
`--gpus 2` under fully_shard, bf16 weights and gradients that are kept.
"""

import argparse
import csv
import io
import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from contextlib import redirect_stdout
from dataclasses import dataclass, field
from pathlib import Path

import torch

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT))

from baoc.config.compose import compose  # noqa: E402
from baoc.config.from_hydra import from_hydra  # noqa: E402
from baoc.config.resolve import resolve  # noqa: E402
from baoc.errors import InfeasibleBudgetError  # noqa: E402
from baoc.planning.cards import CARDS  # noqa: E402
from baoc.training.measure.absent_card import plan_for  # noqa: E402
from baoc.training.run import build, quieten  # noqa: E402
from baoc.training.trainer import session_settings  # noqa: E402
from baoc.units import GIB  # noqa: E402

SHAPES = {256: (688, 8), 2048: (5461, 32), 4096: (11008, 32)}  # width -> hidden, heads; the first to try commands
METHODS = {
    "fp32 AdamW on the device": ("allocator=uniform_adamw", "catalogue.specs=[adamw]"),
    "packed AdamW on the device": ("catalogue.specs=[adamw_int8+split8]", "catalogue.keep_fp32_roles=[]"),
    "packed AdamW, streamed as it must": (
        "catalogue.specs=[adamw_int8+split8,adamw_int8+split8@streamed]",
        "catalogue.keep_fp32_roles=[]",
    ),
    "as the product chooses": (),
    "any spec on the device": ("catalogue.specs=['*','*+split8']", "catalogue.keep_fp32_roles=[]"),
    "any spec anywhere": (
        "catalogue.specs=['*','*+split8','*@streamed','*+split8@streamed']",
        "catalogue.keep_fp32_roles=[]",
    ),
}
FIXED = (
    "model=llama",
    "model.source=hf",
    "model.vocab_size=32000",
    "model.checkpointing=true",
    "dataset.sequence_length=1024",
    "batch_size=1",
    "micro_batch=1",
    "trainer.precision=bf16-mixed",
    "optim.release_gradients=true",  # for all methods alike: whole gradients would take as much as the weights
)
SHARDED = (  # of several GPUs, in the place of the last two of FIXED
    "trainer.strategy=fsdp",
    "trainer.precision=bf16-true",
)
# A checkpoint of tens of gigabytes takes longer than the steps, and so do random numbers: those that the model's own
# replace, and its own, of which a million are drawn and repeated. The peak that is measured is that of training: what
# is looked at before a plan is told by itself.
RUN = """
import atexit, runpy, sys, time
began = time.monotonic()
import torch
from baoc.training import trainer as assembly
from baoc.callbacks.checkpoint import SafeCheckpoint
SafeCheckpoint._save_last = SafeCheckpoint._save_best = lambda *_, **__: None
torch.nn.Linear.reset_parameters = lambda self: None
draw, some = torch.Tensor.normal_, torch.empty(2**20 + 7).normal_()
def normal_(self, mean=0.0, std=1.0, *, generator=None):
    if mean or self.numel() <= len(some) or self.device.type != "cpu" or not self.is_contiguous():
        return draw(self, mean, std, generator=generator)
    for part in self.detach().view(-1).split(len(some)):
        torch.mul(some[: len(part)], std, out=part)
    return self
torch.Tensor.normal_ = normal_
watch = assembly.watch_memory
def held():
    return {name: getattr(torch.cuda, f"max_memory_{name}")() for name in ("reserved", "allocated")}
def watch_memory(memory, *, strategy, predicted_bytes, **rest):
    if strategy.root_device.type == "cuda":
        print(f"before the plan: {held()}, the plan: {predicted_bytes}; {time.monotonic() - began:.0f} s", flush=True)
        atexit.register(lambda: print(f"held at the end: {held()}", flush=True))
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats()
    watch(memory, strategy=strategy, predicted_bytes=predicted_bytes, **rest)
assembly.watch_memory = watch_memory
sys.argv = sys.argv[1:]
runpy.run_path(sys.argv[0], run_name="__main__")
"""
PLANNED = (
    "mode=plan",
    "device=h100",
    "budget=1gb",  # below every one of them, so that each tells the least that it takes
)


@dataclass(kw_only=True)
class Peaks:
    """Least peaks by depth of one method, each planned once."""

    width: int
    overrides: tuple[str, ...]
    found: dict[int, int] = field(default_factory=dict)
    sizes: dict[int, int] = field(default_factory=dict)

    def at(self, depth: int) -> int:
        if depth not in self.found:
            with tempfile.TemporaryDirectory() as folder, redirect_stdout(io.StringIO()):
                self.found[depth] = self._planned(depth, Path(folder))
        return self.found[depth]

    def _planned(self, depth: int, folder: Path) -> int:
        path = folder / "config.json"
        path.write_text(json.dumps(architecture(self.width, depth)))
        config = from_hydra(compose([*FIXED, *PLANNED, f"model.name_or_path={path}", *self.overrides]))
        resolved, card = resolve(config, device="cuda"), CARDS["h100"]
        with torch.device("meta"):
            task, data = build(resolved, run_dir=folder, device=card.name)
        self.sizes[depth] = sum(param.numel() for param in task.parameters())
        try:
            plan_for(
                card, resolved.config, task=task, data=data, settings=session_settings(resolved.config), run_dir=folder
            )
        except InfeasibleBudgetError as error:
            return error.least_feasible_bytes
        raise AssertionError("a step fits 1 GiB, so that the least peak is not told: lower the budget")


def architecture(width: int, depth: int) -> dict[str, object]:
    hidden, heads = SHAPES[width]
    return {
        "model_type": "llama",
        "architectures": ["LlamaForCausalLM"],
        "hidden_size": width,
        "intermediate_size": hidden,
        "num_attention_heads": heads,
        "num_key_value_heads": heads,
        "num_hidden_layers": depth,
        "vocab_size": 32000,
        "max_position_embeddings": 2048,
        "tie_word_embeddings": False,
    }


def deepest(peak: Callable[[int], int], *, limit: int, first: tuple[int, int] = (2, 6)) -> int:
    """The most layers whose peak is within `limit`, 0 where one layer is not: by lines through what was planned."""
    if peak(1) > limit:
        return 0
    low, high = first
    slope = (peak(high) - peak(low)) / (high - low)
    fits, over, turn = 1, 0, 0  # the deepest that was found to fit, and the shallowest that was not
    while over != fits + 1:
        guess = fits + max(1, int((limit - peak(fits)) / slope))
        if over:  # halves in between, for peaks that are far from any line
            guess, turn = min(guess, over - 1) if turn % 2 == 0 else (fits + over) // 2, turn + 1
        if peak(guess) <= limit:
            fits = guess
        else:
            over = guess
            slope = (peak(over) - peak(fits)) / (over - fits)
    return fits


def train(
    method: str, *, width: int, layers: int, budget: int, folder: Path, gpus: int, steps: int, device: str
) -> None:
    """Some steps by the command, without a checkpoint, whatever becomes of them; prints what it measured."""
    config = folder / "config.json"
    config.write_text(json.dumps(architecture(width, layers)))
    run_dir, launcher, fixed = folder / "run", [], FIXED
    if gpus > 1:
        launcher = [sys.executable, "-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={gpus}"]
        launcher.append("--no-python")
        fixed = (*FIXED[:-2], *SHARDED, f"batch_size={2 * gpus}")
    once = (
        f"trainer.max_steps={steps}",
        "trainer.log_every_n_steps=1",
        "trainer.limit_val_batches=1",
        "checkpoint.export=false",
    )
    arguments = [*fixed, *METHODS[method], *once, f"budget={budget}gb", f"hydra.run.dir={run_dir}"]
    began = time.perf_counter()
    command = [
        *launcher,
        sys.executable,
        "-c",
        RUN,
        str(ROOT / "run.py"),
        *arguments,
        f"model.name_or_path={config}",
        f"device={device}",
    ]
    code = subprocess.run(command, cwd=ROOT).returncode
    print(f"{method}, {layers} layers, {budget} GiB: exit code {code} after {time.perf_counter() - began:.0f} s")
    for name in ("result.json", "metrics.jsonl"):
        for path in sorted(folder.rglob(name)):
            print(f"{name}: {path.read_text()[-1500:]}")
    for path in sorted(folder.rglob("footprint.json")):
        found = {key: value for key, value in json.loads(path.read_text()).items() if isinstance(value, int)}
        print(f"{path.name}: {found}")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--width", type=int, choices=SHAPES, default=2048)
    parser.add_argument("--budgets", nargs="+", type=int, default=[8, 16, 24], help="GiB of device memory")
    parser.add_argument("--methods", nargs="+", choices=METHODS, default=list(METHODS))
    parser.add_argument("--train", type=int, metavar="LAYERS", help="train this many, instead of looking for them")
    parser.add_argument("--gpus", type=int, default=1, help="of what is trained")
    parser.add_argument("--steps", type=int, default=3, help="of what is trained")
    parser.add_argument("--device", default="cuda", choices=("cuda", "cpu"), help="of what is trained")
    parser.add_argument("--folder", type=Path, help="of what is trained; else one that goes")
    args = parser.parse_args()
    if args.train:
        with tempfile.TemporaryDirectory() as folder:
            budget, method, where = args.budgets[0], args.methods[0], args.folder or Path(folder)
            where.mkdir(parents=True, exist_ok=True)
            given = {"width": args.width, "layers": args.train, "gpus": args.gpus, "steps": args.steps}
            return train(method, budget=budget, folder=where, device=args.device, **given)
    quieten()
    rows: list[dict[str, object]] = []
    for method in args.methods:
        peaks, began = Peaks(width=args.width, overrides=METHODS[method]), time.perf_counter()
        for budget in args.budgets:
            depth = deepest(peaks.at, limit=budget * GIB)
            rows.append(
                {
                    "method": method,
                    "budget_gib": budget,
                    "width": args.width,
                    "layers": depth,
                    "parameters": peaks.sizes.get(depth, 0),
                    "peak_bytes": peaks.found[depth] if depth else "",
                }
            )
            size = peaks.sizes.get(depth, 0) / 1e9
            print(f"{method:32} {budget:3} GiB: {depth:4} layers, {size:6.2f}B parameters", flush=True)
            write(rows)
        print(f"  ({len(peaks.found)} plans, {time.perf_counter() - began:.0f} s)", flush=True)


def write(rows: list[dict[str, object]]) -> None:
    folder = Path(os.environ.get("OUT") or ROOT / "experiments" / "results")
    folder.mkdir(parents=True, exist_ok=True)
    with (folder / "largest_llama.csv").open("w", newline="", encoding="utf-8") as file:
        writer = csv.DictWriter(file, list(rows[0]), lineterminator="\n")
        writer.writeheader()
        writer.writerows(rows)


if __name__ == "__main__":
    main()
