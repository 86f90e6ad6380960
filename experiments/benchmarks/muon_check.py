"""The fused Muon step against the eager one on the GPU, how long each takes, and how its products may be made.

    python experiments/benchmarks/muon_check.py  # 90 seconds of an H200 -> muon_products.csv, muon_step.csv

`--only check`, `products` or `time` leaves the others out. Updates of one step from the same weights and states are
compared by the tolerance of the tests. Hidden matrices run Muon, other tensors AdamW. `muon_products.csv` has a stack's
products by way and tiles; `muon_step.csv` medians of 15 steps between CUDA events, the memory that a step takes beside
what lives before it, and how long the host is busy.

The floor of a step: `bytes_ms` is what must move at least (gradient, m and weights once each way, the matrices in and
out of the products) over the speed of a copy; `flops_ms` is `operations` over the rate of torch's largest product,
which a symmetric one reaches at best. Both are measured here. Neither can hide behind the other within one matrix.
"""

import argparse
import sys
from collections.abc import Callable, Iterator
from math import prod
from pathlib import Path
from statistics import median

import torch
from torch import Tensor, nn

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT))

from baoc.kernels import polar
from baoc.kernels.polar import A, B, C
from baoc.kernels.triton import orthogonal
from baoc.kernels.triton.orthogonal import Tiles
from baoc.optim import BlockwiseOptimizer
from experiments.benchmarks.matrix_step import OUTER_SIDES, operations
from experiments.benchmarks.optimizer_step import MODELS, copy_gbps, events_ms, host_us, time_torch, versions
from experiments.benchmarks.shared import append_row, free_memory, results_folder, write_rows
from tests.support.tolerances import MUON_BF16

SHAPES: list[tuple[int, ...]] = [(768, 768)] * 3 + [
    (2048, 768),
    (768, 2048),
    (515, 1365),
    (1365, 515),
    (300, 9000),
    (40, 8, 3, 3),
    (768,),
]
SPECS = ("muon", "muon_int8", "muon_bf16+split8")
# num, lines, length: ViT-B's matrices and Llama 1.3B's, as a step has them in a batch
STACKS = ((24, 768, 768), (12, 768, 3072), (12, 3072, 768), (6, 2048, 2048), (3, 5504, 2048))
TILES = (
    Tiles(), Tiles(stages=4), Tiles(warps=8), Tiles(warps=8, stages=4), Tiles(k=32, stages=4), Tiles(k=128, stages=2),
    Tiles(m=64, n=64, stages=4), Tiles(m=256, n=256, warps=16, stages=2),
)  # fmt: skip
WIDE_TILES = (Tiles(n=256, warps=8), Tiles(m=256, warps=8))  # of products that are not symmetric
Row = dict[str, object]


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
    assert {choice.backend for choice in fused.registry.choices.values()} == {"fused"}
    assert worst <= 2 * MUON_BF16.nmse, f"{spec}: NMSE {worst:.1e}"
    assert fused.num_nonfinite == eager.num_nonfinite > 0
    return worst


def stack_of(num: int, lines: int, length: int) -> Tensor:
    stack = torch.randn(num, lines, length, device="cuda")
    return (stack / torch.linalg.matrix_norm(stack, keepdim=True)).half()


def torch_plain(x: Tensor) -> Tensor:
    """Five steps on X by cuBLAS in bf16, as the fused step had them before."""
    x, wide = x.bfloat16(), x.shape[1] <= x.shape[2]
    for _ in range(polar.STEPS):
        gram = torch.bmm(x, x.mT) if wide else torch.bmm(x.mT, x)
        poly = torch.baddbmm(gram, gram, gram, beta=B, alpha=C)
        x = torch.baddbmm(x, *((poly, x) if wide else (x, poly)), beta=A)
    return x


def torch_stretches(x: Tensor) -> Tensor:
    """What `orthogonal.orthogonalize` does, by cuBLAS, which makes the whole of symmetric products."""
    wide = x.shape[1] <= x.shape[2]
    for steps in polar.STRETCHES:
        gram = torch.bmm(x, x.mT) if wide else torch.bmm(x.mT, x)
        one = torch.eye(gram.shape[1], dtype=x.dtype, device=x.device).mul(A).expand_as(gram)
        q = p = torch.baddbmm(torch.add(one, gram, alpha=B), gram, gram, alpha=C)
        for _ in range(steps - 1):
            gram = torch.bmm(p, torch.bmm(p, gram))
            p = torch.baddbmm(torch.add(one, gram, alpha=B), gram, gram, alpha=C)
            q = torch.bmm(p, q)
        x = torch.bmm(q, x) if wide else torch.bmm(x, q)
    return x


def ours(num: int, lines: int, length: int) -> Callable[[Tensor], Tensor]:
    room = torch.zeros(polar.workspace_bytes(num, lines, length), dtype=torch.uint8, device="cuda")

    def run(x: Tensor) -> Tensor:
        room[: 2 * x.numel()].view(torch.float16).copy_(x.flatten())
        return orthogonal.orthogonalize(room, num=num, lines=lines, length=length)

    return run


def products_of(num: int, lines: int, length: int) -> Iterator[Row]:
    """A stack's polar factors by each way, with their error against fp64, and single products by each tiling."""
    x = stack_of(num, lines, length)
    exact = reference(x[:1])
    halves = num * operations(lines, length)
    ways = {"torch plain bf16": torch_plain, "torch stretches fp16": torch_stretches, "ours": ours(num, lines, length)}
    for name, way in ways.items():
        ms = median(events_ms(lambda way=way: way(x), steps=7))
        error = float((way(x)[:1].double() - exact).square().sum() / exact.square().sum())
        yield {"stack": f"{num}x{lines}x{length}", "way": name, "ms": f"{ms:.4f}", "tflops": f"{halves / ms / 1e9:.0f}",
               "nmse": f"{error:.1e}"}  # fmt: skip
    wide, short = lines <= length, min(lines, length)
    across, square, out = (x if wide else x.mT), stack_of(num, short, short), torch.empty_like(x)
    gram = torch.empty_like(square)
    for what, flops, plain, tilings, run in (
        ("x x^T", short * short * max(lines, length), lambda: torch.bmm(across, across.mT, out=gram), TILES,
         lambda tiles: orthogonal.product(across, across, gram, symmetric=True, tiles=tiles)),
        ("a + b g + c g^2", short**3, lambda: torch.baddbmm(square, square, square, beta=B, alpha=C, out=gram), TILES,
         lambda tiles: orthogonal.product(square, square, gram, c=square, scales=(C, B, A), symmetric=True,
                                          tiles=tiles)),
        ("q x", 2 * short * short * max(lines, length),
         lambda: torch.bmm(*((square, x) if wide else (x, square)), out=out), (*TILES, *WIDE_TILES),
         lambda tiles: orthogonal.product(*((square, x.mT) if wide else (x, square)), out, symmetric=False,
                                          tiles=tiles)),
    ):  # fmt: skip
        timed: list[tuple[str, Callable[[], object]]] = [("torch", plain)]
        timed += [(text_of(tiles), lambda tiles=tiles, run=run: run(tiles)) for tiles in tilings]
        for name, call in timed:
            try:
                ms = median(events_ms(call, steps=7, busy=True))
            except Exception as error:  # a tiling that the processor has no room for
                print(f"{what} {name}: {type(error).__name__}", flush=True)
                continue
            yield {"stack": f"{num}x{lines}x{length}", "way": f"{what}: {name}", "ms": f"{ms:.4f}",
                   "tflops": f"{num * flops / ms / 1e9:.0f}", "nmse": ""}  # fmt: skip


def text_of(tiles: Tiles) -> str:
    return f"{tiles.m}x{tiles.n}x{tiles.k}/{tiles.warps}/{tiles.stages}"


def reference(x: Tensor) -> Tensor:
    x, wide = x.double(), x.shape[1] <= x.shape[2]
    for _ in range(polar.STEPS):
        gram = x @ x.mT if wide else x.mT @ x
        poly = B * gram + C * (gram @ gram)
        x = A * x + (poly @ x if wide else x @ poly)
    return x


def time_step(model: str, spec: str, *, backend: str, gbps: float, rate: float) -> Row:
    params, optimizer = build(MODELS[model], spec, backend=backend)
    for param in params:
        param.grad = (torch.randn(param.shape, device="cuda") * 1e-3).to(param.dtype)
    for _ in range(2):
        optimizer.step()
    torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    times = events_ms(optimizer.step, steps=15 if backend == "fused" else 3)
    taken = torch.cuda.max_memory_allocated() - before
    flops, nbytes = 0.0, 0.0
    for shape, param in zip(MODELS[model], params, strict=True):
        state = sum(t.numel() * t.element_size() for t in optimizer.state[param].values() if t.ndim)
        nbytes += 3 * param.numel() * param.element_size() + 2 * state
        if is_hidden(shape):
            flops += operations(shape[0], prod(shape[1:]))
            nbytes += 4 * param.numel()  # fp16 into the products and out of them
    if backend == "fused" and model == "vit_b" and spec == "muon":
        profiled(optimizer)
    ms = median(times)
    return {
        "model": model, "spec": spec, "backend": backend, "ms": f"{ms:.3f}", "min_ms": f"{min(times):.3f}",
        "host_us": f"{host_us(optimizer.step):.0f}", "temporary_mib": f"{taken / 2**20:.0f}",
        "bytes_ms": f"{nbytes / gbps / 1e6:.3f}", "flops_ms": f"{flops / rate / 1e9:.3f}", "steps": len(times),
    }  # fmt: skip


def profiled(optimizer: BlockwiseOptimizer) -> None:
    """Prints where a step's time goes, by kernel."""
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as profile:
        for _ in range(3):
            optimizer.step()
        torch.cuda.synchronize()
    for row in sorted(profile.key_averages(), key=lambda row: -row.self_device_time_total)[:8]:
        print(f"  {row.self_device_time_total / 3:7.0f} us a step, {row.count / 3:4.0f} x {row.key[:60]}", flush=True)


def matmul_tflops() -> float:
    """The rate of torch's product of two matrices of 8192 in fp16."""
    a, b = (torch.randn(8192, 8192, device="cuda", dtype=torch.float16) for _ in range(2))
    return 2 * 8192**3 / median(events_ms(lambda: a @ b, steps=7)) / 1e9


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--only", choices=("check", "products", "time"), help="the others are left out")
    only = parser.parse_args().only
    if only in (None, "products"):
        products = results_folder() / "muon_products.csv"
        products.unlink(missing_ok=True)
        about = {"device": torch.cuda.get_device_name(), "torch": torch.__version__}
        for stack in STACKS:
            for row in products_of(*stack):
                print(" ".join(f"{key} {value}" for key, value in row.items()), flush=True)
                append_row(products, row, **about)
            free_memory()
    if only in (None, "check"):
        for spec in SPECS:
            print(f"equal {spec}: NMSE at most {check(spec):.1e} of {2 * MUON_BF16.nmse:.1e}", flush=True)
    if only in (None, "time"):
        time_all()


def time_all() -> None:
    rows: list[Row] = []
    gbps, rate = copy_gbps(), matmul_tflops()
    free_memory()
    print(f"{torch.cuda.get_device_name()}, copy {gbps:.0f} GB/s, product of 8192 {rate:.0f} TFLOP/s", flush=True)
    for model in ("vit_b", "llama_130m", "llama_1b"):
        adamw = next(time_torch(model, gbps=gbps))
        rows.append(
            {"model": model, "spec": "torch_fused", "backend": "torch", "ms": f"{adamw.ms:.3f}",
             "min_ms": f"{adamw.min_ms:.3f}", "host_us": f"{adamw.host_us:.0f}", "temporary_mib": "0",
             "bytes_ms": f"{adamw.floor_ms:.3f}", "flops_ms": "0", "steps": 15}
        )  # fmt: skip
        free_memory()
        for spec, backend in (("muon", "fused"), ("muon_int8+split8", "fused"), ("muon", "eager")):
            if backend == "fused" or model == "vit_b":
                rows.append(time_step(model, spec, backend=backend, gbps=gbps, rate=rate))
                free_memory()
            about = versions(gbps) | {"product_tflops": f"{rate:.0f}"}
            write_rows(results_folder() / "muon_step.csv", rows, **about)
    for row in rows:
        print(" ".join(f"{key} {value}" for key, value in row.items()), flush=True)


if __name__ == "__main__":
    main()
