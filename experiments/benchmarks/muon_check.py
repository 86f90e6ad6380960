"""The fused Muon step against the eager one on the GPU, and how long each takes.

`python experiments/benchmarks/muon_check.py` on a machine with an NVIDIA GPU takes about a minute. Both multiply in
bf16 there; updates of one step from the same weights and states are compared by the tolerance of the tests. Hidden
matrices run Muon, other tensors AdamW. Rows go to muon_step.csv in $OUT or experiments/results: medians of 7 steps
between CUDA events, the memory that a step takes beside what lives before it, and how long the host is busy.
"""

import argparse
import csv
import os
import sys
from pathlib import Path
from statistics import median

import torch
from torch import nn

ROOT = Path(__file__).resolve().parents[2]
sys.path[:0] = [str(ROOT), str(Path(__file__).parent)]

from matrix_step import OUTER_SIDES  # noqa: E402
from optimizer_step import MODELS, clean, events_ms, host_us  # noqa: E402

from baoc.optim import BlockwiseOptimizer  # noqa: E402
from tests.support.tolerances import MUON_BF16  # noqa: E402

SHAPES = [(768, 768)] * 3 + [(2048, 768), (768, 2048), (515, 1365), (1365, 515), (300, 9000), (40, 8, 3, 3), (768,)]
SPECS = ("muon", "muon_int8", "muon_bf16+split8", "muon+split16")
STEPS = 7


def is_hidden(shape: tuple[int, ...]) -> bool:
    return len(shape) > 1 and not set(shape) & set(OUTER_SIDES)


def build(shapes: list[tuple[int, ...]], spec: str, *, backend: str) -> tuple[list[nn.Parameter], BlockwiseOptimizer]:
    torch.manual_seed(0)
    params = [nn.Parameter(torch.randn(shape, device="cuda") * 0.02) for shape in shapes]
    plus, weights = spec.partition("+")[1:]
    specs = {
        f"p{i}": spec if is_hidden(shape) or shape == (40, 8, 3, 3) else f"adamw{plus}{weights}"
        for i, shape in enumerate(shapes)
    }
    groups = [{"params": [(f"p{i}", param) for i, param in enumerate(params)]}]
    return params, BlockwiseOptimizer(groups, specs, lr=1e-2, weight_decay=0.0, backend=backend)


def check(spec: str) -> float:
    """Largest normalised squared error of a matrix's update, in four steps."""
    params, fused = build(SHAPES, spec, backend="fused")
    twins, eager = build(SHAPES, spec, backend="eager")
    worst = 0.0
    for step in range(4):
        for param, twin in zip(params, twins, strict=True):
            grad = torch.randn(param.shape, device="cuda").to(param.dtype) * 1e-3
            if step == 2:
                grad.view(-1)[::97] = float("nan")
            param.grad, twin.grad = grad, grad.clone()
        before = fused.export_weights()
        fused.step()
        eager.step()
        after, theirs = fused.export_weights(), eager.export_weights()
        for index, shape in enumerate(SHAPES):
            if len(shape) > 1:
                name = f"p{index}"
                mine, other = after[name] - before[name], theirs[name] - before[name]
                worst = max(worst, float((mine - other).square().sum() / other.square().sum()))
        fused.load_weights(theirs)
        eager.load_weights(theirs)
    assert {choice.backend for choice in fused.roster.choices.values()} == {"fused"}
    assert worst <= 2 * MUON_BF16.nmse, f"{spec}: NMSE {worst:.1e}"
    assert fused.num_nonfinite == eager.num_nonfinite > 0
    return worst


def time_step(model: str, spec: str, *, backend: str) -> dict[str, object]:
    params, optimizer = build(MODELS[model], spec, backend=backend)
    for param in params:
        param.grad = (torch.randn(param.shape, device="cuda") * 1e-3).to(param.dtype)
    for _ in range(2):
        optimizer.step()
    torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    times = events_ms(optimizer.step, steps=STEPS)
    taken = torch.cuda.max_memory_allocated() - before
    flops = 0.0
    for shape in filter(is_hidden, MODELS[model]):
        short, long = sorted((shape[0], shape[1:] and torch.Size(shape[1:]).numel()))
        flops += 5 * (4 * short * short * long + 2 * short**3)
    ms = median(times)
    return {
        "model": model, "spec": spec, "backend": backend, "ms": f"{ms:.3f}", "min_ms": f"{min(times):.3f}",
        "host_us": f"{host_us(optimizer.step):.0f}", "temporary_mib": f"{taken / 2**20:.0f}",
        "tflops": f"{flops / ms / 1e9:.0f}",
    }  # fmt: skip


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--only", choices=("check", "time"), help="the other is left out")
    only = parser.parse_args().only
    if only != "time":
        for spec in SPECS:
            print(f"equal {spec}: NMSE at most {check(spec):.1e} of {2 * MUON_BF16.nmse:.1e}", flush=True)
    if only != "check":
        time_all()


def time_all() -> None:
    rows = []
    for model in ("vit_b", "llama_130m", "llama_1b"):
        for spec, backend in (("muon", "fused"), ("muon_int8+split8", "fused"), ("muon", "eager")):
            rows.append(time_step(model, spec, backend=backend))
            print(" ".join(f"{key} {value}" for key, value in rows[-1].items()), flush=True)
            clean()
    folder = Path(os.environ.get("OUT") or ROOT / "experiments" / "results")
    folder.mkdir(parents=True, exist_ok=True)
    common = {"device": torch.cuda.get_device_name(), "torch": torch.__version__}
    with (folder / "muon_step.csv").open("w", newline="") as file:
        writer = csv.DictWriter(file, [*rows[0], *common])
        writer.writeheader()
        writer.writerows(row | common for row in rows)


if __name__ == "__main__":
    main()
