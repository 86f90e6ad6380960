"""What gradient release costs and saves: whole training steps with it and without, by turns in one process.

    python experiments/benchmarks/release_step.py OUT  # 2 minutes of an H200 -> release_step.csv, release_parts.csv

A decoder of Llama 130M's widths in bf16 autocast, each parameter a block (with Muon embedding and head are AdamW's).
Kept, released and `norm`, which clips by the previous step's norm where gradients are released, are built side by side
and run `--steps` steps one behind the other, as training does, in each of five repetitions. A row of release_step.csv
is one repetition: milliseconds of a step between CUDA events, and those that all threads of the host took. Its peak is
what torch allocated in a step beyond what lay there between steps, `beyond_mib` what the driver took meanwhile beyond
torch, CUDA graphs of kept steps among it. Rows of release_parts.csv say what the host does of a released step, in
microseconds by part.

First `same_bits` steps a small decoder kept and released on equal gradients, some of them not finite or not there, and
compares weights and states bit for bit: a difference ends the run with exit code 1, after the times.
"""

import argparse
import csv
import sys
import time
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from pathlib import Path
from statistics import mean
from typing import Any
from unittest.mock import patch

import torch
from torch import Tensor, nn

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT))

from baoc.core.statistics import mean_interval
from baoc.kernels import Engine
from baoc.optim import BlockwiseOptimizer, GradientRelease
from baoc.optim.backends.fused import FusedBackend
from baoc.optim.backward import DropGradients
from baoc.optim.nonfinite import NonFiniteFilter
from experiments.benchmarks.shared import free_memory

VOCABULARY, REPETITIONS, WARM = 32000, 5, 8
SPECS = ("adamw", "adamw_int8", "adamw_int8+split8", "muon")
RELEASES = {"kept": False, "released": True, "norm": GradientRelease(clip_norm=1.0)}
PARTS = (
    (DropGradients, "ready"), (DropGradients, "step_with"), (FusedBackend, "__call__"), (Engine, "stage"),
    (Engine, "run"), (NonFiniteFilter, "check"),
)  # fmt: skip


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


def specs_of(net: Decoder, spec: str) -> Any:
    if spec != "muon":
        return spec
    inner = {name for name, param in net.layers.named_parameters(prefix="layers") if param.ndim == 2}
    return {name: spec if name in inner else "adamw" for name, _ in net.named_parameters()}


def same_bits(spec: str) -> list[str]:
    """What differs between a kept and a released optimizer after eight steps on equal gradients: names of tensors."""
    nets, optimizers, tensors = [], [], []
    for release in (False, True):
        torch.manual_seed(0)
        nets.append(Decoder(width=128, layers=4, device="cuda"))
        settings: Any = {"lr": 1e-3, "weight_decay": 0.1, "release": release}
        optimizers.append(BlockwiseOptimizer(nets[-1], specs_of(nets[-1], spec), **settings))
    for step in range(8):
        for net, optimizer in zip(nets, optimizers, strict=True):
            torch.manual_seed(step)
            optimizer.zero_grad()
            grads = {name: 1e-2 * torch.randn_like(param) for name, param in net.named_parameters()}
            if step == 5:
                grads["layers.1.linear1.weight"][3, 4] = float("inf")
            if step == 6:  # in another order, and without some
                grads = {name: grads[name] for name in reversed(grads) if "layers.2.norm" not in name}
            params = dict(net.named_parameters())
            torch.stack([(params[name] * grad).sum().float() for name, grad in grads.items()]).sum().backward()
            optimizer.step()
    for net, optimizer in zip(nets, optimizers, strict=True):
        states = {f"{n} {k}": v for n, p in net.named_parameters() for k, v in optimizer.state[p].items()}
        tensors.append({**dict(net.named_parameters()), **states})
    return [name for name, tensor in tensors[0].items() if not torch.equal(tensor, tensors[1][name])]


class Case:
    """A network in training, and what its repetitions took."""

    def __init__(self, spec: str, how: str, *, width: int, layers: int, tokens: Tensor):
        torch.manual_seed(0)
        self.how, self.tokens = how, tokens
        self.net = Decoder(width=width, layers=layers, device="cuda")
        specs = specs_of(self.net, spec)
        self.optimizer = BlockwiseOptimizer(self.net, specs, lr=1e-4, weight_decay=0.1, release=RELEASES[how])
        before = self._beyond()
        for _ in range(WARM):
            self.step()
        torch.cuda.synchronize()
        self.beyond_mib = (self._beyond() - before) / 2**20
        self.step_ms: list[float] = []

    @staticmethod
    def _beyond() -> int:
        """Bytes of the device that are in use and not torch's."""
        free, total = torch.cuda.mem_get_info()
        return total - free - torch.cuda.memory_reserved()

    def step(self) -> None:
        self.optimizer.zero_grad()
        with torch.autocast("cuda", torch.bfloat16):
            loss = self.net(self.tokens)
        loss.backward()
        self.optimizer.step()

    def repetition(self, steps: int) -> dict[str, object]:
        self.step()
        torch.cuda.synchronize()
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        torch.cuda.reset_peak_memory_stats()
        before, host = torch.cuda.memory_allocated(), time.process_time()
        begin.record()
        for _ in range(steps):
            self.step()
        end.record()
        host = time.process_time() - host
        end.synchronize()
        self.step_ms.append(begin.elapsed_time(end) / steps)
        peak = torch.cuda.max_memory_allocated() - before
        return {
            "step_ms": f"{self.step_ms[-1]:.2f}", "cpu_ms": f"{host * 1e3 / steps:.2f}", "n": steps,
            "peak_mib": f"{peak / 2**20:.1f}", "beyond_mib": f"{self.beyond_mib:.1f}",
        }  # fmt: skip


@contextmanager
def timed() -> Iterator[Mapping[str, list[float]]]:
    """Inside, calls of PARTS leave their seconds, each with those of the parts that it calls."""
    seconds: dict[str, list[float]] = defaultdict(list)

    def noting(name: str, call: Callable[..., Any]) -> Callable[..., Any]:
        def noted(*args: Any, **given: Any) -> Any:
            begin = time.perf_counter()
            try:
                return call(*args, **given)
            finally:
                seconds[name].append(time.perf_counter() - begin)

        return noted

    with ExitStack() as stack:
        for owner, name in PARTS:
            call = noting(f"{owner.__name__}.{name}", getattr(owner, name))
            stack.enter_context(patch.object(owner, name, call))
        yield seconds


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--width", type=int, default=768)
    parser.add_argument("--layers", type=int, default=12)
    parser.add_argument("--specs", nargs="+", default=SPECS)
    parser.add_argument("--how", nargs="+", default=list(RELEASES), choices=RELEASES)
    parser.add_argument("--batch", type=int, default=8, help="sequences of 1,024 tokens")
    parser.add_argument("--steps", type=int, default=15)
    args = parser.parse_args()
    args.folder.mkdir(parents=True, exist_ok=True)
    device = {"device": torch.cuda.get_device_name(), "torch": torch.__version__}
    tokens = torch.randint(VOCABULARY, (args.batch, 1024), device="cuda")
    table = []
    differing = {spec: names for spec in args.specs if (names := same_bits(spec))}
    with (args.folder / "release_step.csv").open("w") as steps, (args.folder / "release_parts.csv").open("w") as parts:
        rows: csv.DictWriter | None = None
        by_part = csv.DictWriter(parts, ["spec", "gradients", "part", "calls", "host_us", "n"])
        by_part.writeheader()
        for spec in args.specs:
            cases = [Case(spec, how, width=args.width, layers=args.layers, tokens=tokens) for how in args.how]
            for repetition in range(REPETITIONS):
                for case in cases if repetition % 2 == 0 else reversed(cases):
                    about = {"spec": spec, "gradients": case.how, "batch": args.batch, "repetition": repetition}
                    row = {**about, **case.repetition(args.steps), **device}
                    rows = rows or csv.DictWriter(steps, list(row))
                    if not steps.tell():
                        rows.writeheader()
                    rows.writerow(row)
                    steps.flush()
                    print(*list(row.values())[:-2], flush=True)
            for case in cases:
                ratios = [own / kept for own, kept in zip(case.step_ms, cases[0].step_ms, strict=True)]
                groups = len(set(case.optimizer.registry.step_groups.values()))
                ratio = mean_interval(ratios, level=0.95)
                table.append((spec, case.how, mean(case.step_ms), ratio.mean, ratio.low, ratio.high, groups))
                with timed() as seconds:
                    for _ in range(args.steps):
                        case.step()
                for part, taken in seconds.items():
                    us, calls = sum(taken) * 1e6 / args.steps, len(taken) / args.steps
                    by_part.writerow(dict(zip(
                        by_part.fieldnames, (spec, case.how, part, f"{calls:.1f}", f"{us:.0f}", args.steps), strict=True
                    )))  # fmt: skip
                    print(f"{spec} {case.how}: {part} {calls:.1f} calls, {us:.0f} us of a step", flush=True)
                parts.flush()
            del case, cases
            free_memory()
    print(f"\n{'spec':18} {'gradients':9} {'step ms':>8}  ratio to the first, 95 % of n {REPETITIONS}   groups")
    for spec, how, ms, ratio, low, high, groups in table:
        print(f"{spec:18} {how:9} {ms:8.2f}  {ratio:.3f} [{low:.3f}, {high:.3f}]   {groups}")
    for spec in args.specs:
        print(f"{spec}: kept and released differ in {', '.join(differing[spec])}" if spec in differing else
              f"{spec}: kept and released are the same bit for bit")  # fmt: skip
    sys.exit(bool(differing))


if __name__ == "__main__":
    main()
