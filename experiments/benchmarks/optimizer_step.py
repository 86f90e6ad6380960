"""Time of one optimizer step over all tensors of a model: fused kernels, torch's optimizers and the copy roofline.

    python experiments/benchmarks/optimizer_step.py --peers
    # 4 minutes of an H200, longer with peers -> optimizer_step.csv

First every kernel is held against its eager twin on the GPU (kernel_check.py, in parallel processes that also fill
Triton's cache); then steps are timed with CUDA events, medians of 15. Rules that are RMS-matched are timed with factors
and sums, as they run; all count non-finite elements. `--peers` times those of peers.py that are installed too, in the
same process, and names those that are not.
"""

import argparse
import subprocess
import sys
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from math import prod
from pathlib import Path
from statistics import median

import torch
from torch import Tensor

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT))

from baoc.core.catalogue import STORAGES
from baoc.kernels import FusedTable, Kind, LaunchConfig
from baoc.optim.backends.fused import kernel_lanes
from baoc.optim.codecs import CODEC_IMPLS
from experiments.benchmarks.kernel_check import CUTS, text_of
from experiments.benchmarks.peers import installed
from experiments.benchmarks.shared import free_memory, results_folder, write_rows
from tests.support.fused_step import engine_of, launch
from tests.support.kernel_cases import Options

STEPS = 15
DEVICE = "cuda"
FLOAT32, BFLOAT16 = torch.float32, torch.bfloat16
# name, rule, storage, weights, dtype of parameters and gradients
SPECS: list[tuple[str, str, str, str, torch.dtype]] = [
    ("adamw", "adamw", "fp32", "native", FLOAT32), ("adamw_bf16", "adamw", "bf16", "native", FLOAT32),
    ("adamw_int8", "adamw", "int8", "native", FLOAT32), ("rmsprop_int8", "rmsprop", "int8", "native", FLOAT32),
    ("lion_int8", "lion", "int8", "native", FLOAT32), ("signum_int8", "signum", "int8", "native", FLOAT32),
    ("sign", "sign", "fp32", "native", FLOAT32), ("adamw_int8/bf16", "adamw", "int8", "native", BFLOAT16),
    ("adamw_int8/bf16+8", "adamw", "int8", "split8", BFLOAT16),
    ("lion_int8/bf16+8", "lion", "int8", "split8", BFLOAT16),
]  # fmt: skip
SWEPT = ("adamw", "adamw_int8", "adamw_int8/bf16+8")  # as in kernel_check, which compiles them
Shapes = list[tuple[int, ...]]


@dataclass(frozen=True, slots=True, kw_only=True)
class Row:
    """One timing. `ms`: the whole step between CUDA events; `launch_ms`: kernels alone; `host_us`: Python's part."""

    model: str
    optimizer: str
    cut: str
    bytes_per_element: float
    ms: float
    min_ms: float
    launch_ms: float
    host_us: float
    floor_ms: float

    @property
    def efficiency(self) -> float:
        return self.floor_ms / self.ms


def vit_b() -> Shapes:
    """ViT-B/16 at 224, classifier included: 200 tensors."""
    d = 768
    layer: Shapes = [(d,), (d,), *[(d, d), (d,)] * 4, (d,), (d,), (4 * d, d), (4 * d,), (d, 4 * d), (d,)]
    return [(1, 1, d), (1, 197, d), (d, 3, 16, 16), (d,), *layer * 12, (d,), (d,), (1000, d), (1000,)]


def llama(d: int, layers: int, ffn: int, *, vocabulary: int = 32000) -> Shapes:
    layer: Shapes = [*[(d, d)] * 4, (ffn, d), (ffn, d), (d, ffn), (d,), (d,)]
    return [(vocabulary, d), *layer * layers, (d,), (vocabulary, d)]


MODELS: dict[str, Shapes] = {
    "vit_b": vit_b(),
    "llama_130m": llama(768, 12, 2048),
    "llama_1b": llama(2048, 24, 5461),
}


_BUSY_CYCLES = 4_000_000  # of a GPU's clock: longer than a host takes for a step


def events_ms(step: Callable[[], object], *, steps: int = STEPS, busy: bool = False) -> list[float]:
    """Milliseconds of each call between CUDA events, after three to warm up. `busy`: the device has work until the call
    has returned, as in training, so that what the host takes is no part of it; else it waits for the host."""
    for _ in range(3):
        step()
    times = []
    for _ in range(steps):
        start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        torch.cuda.synchronize()
        if busy:
            torch.cuda._sleep(_BUSY_CYCLES)  # pyright: ignore[reportPrivateUsage]
        start.record()
        step()
        end.record()
        end.synchronize()
        times.append(start.elapsed_time(end))
    return times


def host_us(step: Callable[[], object]) -> float:
    """Microseconds until the call returns, with the device idle before it."""
    times = []
    for _ in range(STEPS):
        torch.cuda.synchronize()
        begin = time.perf_counter()
        step()
        times.append(time.perf_counter() - begin)
    return median(times) * 1e6


def copy_gbps() -> float:
    """Bytes read and written per second by a device copy, in 1e9."""
    source = torch.empty(1 << 30, dtype=torch.uint8, device=DEVICE)
    target = torch.empty_like(source)
    return 2 * source.numel() / median(events_ms(lambda: target.copy_(source), steps=20)) / 1e6


def make_params(shapes: Shapes, dtype: torch.dtype) -> list[Tensor]:
    params = []
    for shape in shapes:
        param = (torch.randn(shape, device=DEVICE) * 0.02).to(dtype).requires_grad_()
        param.grad = (torch.randn(shape, device=DEVICE) * 1e-3).to(dtype)
        params.append(param)
    return params


def make_table(spec: Sequence, shapes: Shapes, *, config: LaunchConfig | None) -> FusedTable:
    _, rule, storage, weights, dtype = spec
    kind = Kind(rule=rule, m=STORAGES[storage].m, v=STORAGES[storage].v, weights=weights)
    params = make_params(shapes, dtype)
    states = []
    for param in params:
        state = {"correction": torch.zeros_like(param, dtype=torch.int8)} if weights == "split8" else {}
        for name, present, codec in (("m", kind.traits.has_m, kind.m), ("v", kind.traits.has_v, kind.v)):
            parts = CODEC_IMPLS[codec].allocate(param.shape, DEVICE) if present else {}
            state |= {f"{name}{part}": tensor for part, tensor in parts.items()}
        states.append(state)
    matches = [torch.ones(2, device=DEVICE) for _ in params] if rule != "adamw" else None
    return FusedTable(params, kind=kind, states=states, matches=matches, config=config)


def bytes_per_element(table: FusedTable) -> float:
    """Bytes that a step must move: gradients once, weights and states both ways."""
    state = sum(sum(table.kind.sizes(shape).values()) for shape in table.shapes)
    return 3 * table.params[0].element_size() + 2 * state / sum(shape.numel for shape in table.shapes)


def time_fused(model: str, spec: Sequence, *, gbps: float, config: LaunchConfig | None = None) -> Row:
    shapes = MODELS[model]
    table = make_table(spec, shapes, config=config)
    options, phase = (Options(lr=1e-3),), iter(range(1, 10_000))

    matched = spec[1] != "adamw"

    def step() -> None:
        now = next(phase)
        engine_of(table).stage(options, thresholds=kernel_lanes(now), phase=now)
        engine_of(table).send()
        launch(table, matched=matched, track=matched)

    times, width = events_ms(step), bytes_per_element(table)
    alone = events_ms(lambda: launch(table, matched=matched, track=matched))
    floor = width * sum(map(prod, shapes)) / gbps / 1e6
    return Row(
        model=model, optimizer=spec[0], cut=text_of(table.config), bytes_per_element=round(width, 3), ms=median(times),
        min_ms=min(times), launch_ms=median(alone), host_us=host_us(step), floor_ms=floor,
    )  # fmt: skip


def time_torch(model: str, *, gbps: float) -> Iterator[Row]:
    """torch.optim.AdamW: fused and foreach in fp32, fused in bf16."""
    shapes = MODELS[model]
    for name, dtype, how in (
        ("fused", FLOAT32, "fused"),
        ("foreach", FLOAT32, "foreach"),
        ("fused_bf16", BFLOAT16, "fused"),
    ):
        optimizer = torch.optim.AdamW(make_params(shapes, dtype), lr=1e-3, **{how: True})
        times, width = events_ms(optimizer.step), 7 * dtype.itemsize
        yield Row(
            model=model, optimizer=f"torch_{name}", cut="", bytes_per_element=width, ms=median(times),
            min_ms=min(times), launch_ms=median(times), host_us=host_us(optimizer.step),
            floor_ms=width * sum(map(prod, shapes)) / gbps / 1e6,
        )  # fmt: skip
        del optimizer
        free_memory()


def time_peers(model: str, *, gbps: float) -> Iterator[Row]:
    """Whole steps of other people's optimizers; their state is what they allocate in their first steps."""
    shapes = MODELS[model]
    numel = sum(map(prod, shapes))
    for peer, module, what in installed():
        try:
            params = make_params(shapes, peer.dtype)
            before = torch.cuda.memory_allocated()
            optimizer = peer.make(module, params)
            for _ in range(3):
                optimizer.step()
            free_memory()
            width = 3 * peer.dtype.itemsize + 2 * (torch.cuda.memory_allocated() - before) / numel
            times = events_ms(optimizer.step)
            yield Row(
                model=model, optimizer=peer.name, cut=what, bytes_per_element=round(width, 3), ms=median(times),
                min_ms=min(times), launch_ms=median(times), host_us=host_us(optimizer.step),
                floor_ms=width * numel / gbps / 1e6,
            )  # fmt: skip
        except Exception as error:  # theirs, and no reason to lose the others
            print(f"peer failed: {peer.name}: {type(error).__name__}: {str(error)[:200]}", flush=True)
        params = optimizer = None
        free_memory()


def show(rows: Iterable[Row]) -> None:
    print("model       optimizer          cut         B/el      ms     min  launch  floor  eff host_us")
    for r in rows:
        print(
            f"{r.model:11s} {r.optimizer:18s} {r.cut:10s} {r.bytes_per_element:5.1f} {r.ms:7.3f} {r.min_ms:7.3f} "
            f"{r.launch_ms:7.3f} {r.floor_ms:6.3f} {r.efficiency:4.2f} {r.host_us:6.0f}",
            flush=True,
        )


def versions(gbps: float) -> dict[str, str]:
    """What all rows of a table have: the device, torch and Triton, and the rate of a copy."""
    import triton

    about = {"device": torch.cuda.get_device_name(), "torch": torch.__version__, "triton": triton.__version__}
    return {**about, "copy_gbps": f"{gbps:.0f}"}


def best_cuts(model: str, *, gbps: float, rows: list[Row]) -> dict[str, LaunchConfig]:
    """Times every cut for the swept specs; the fastest of each."""
    best = {}
    for spec in SPECS:
        if spec[0] in SWEPT:
            timed = []
            for cut in CUTS:
                timed.append(time_fused(model, spec, gbps=gbps, config=cut))
                free_memory()
            rows += timed
            best[spec[0]] = CUTS[min(range(len(CUTS)), key=lambda index: timed[index].launch_ms)]
            ranked = sorted(timed, key=lambda row: row.launch_ms)
            print(f"{model} {spec[0]}:", *(f"{row.cut} {row.launch_ms:.3f}" for row in ranked), sep="  ", flush=True)
    return best


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--models", nargs="+", choices=MODELS, default=list(MODELS))
    parser.add_argument("--no-check", action="store_true")
    parser.add_argument("--peers", action="store_true", help="time other people's optimizers too")
    parser.add_argument("--no-sweep", action="store_true", help="time the default cut only")
    args = parser.parse_args()
    torch.manual_seed(0)
    if not args.no_check:
        subprocess.run([sys.executable, str(Path(__file__).with_name("kernel_check.py"))], check=True)
    gbps, rows, swept = copy_gbps(), [], []
    path = results_folder() / "optimizer_step.csv"
    free_memory()
    print(f"{torch.cuda.get_device_name()}, torch {torch.__version__}, copy {gbps:.0f} GB/s", flush=True)
    for model in args.models:
        rows += time_torch(model, gbps=gbps)
        best = {} if args.no_sweep else best_cuts(model, gbps=gbps, rows=swept)
        for spec in SPECS:
            rows.append(time_fused(model, spec, gbps=gbps, config=best.get(spec[0])))
            free_memory()
        write_rows(path, [*rows, *swept], **versions(gbps))  # what is measured stays where the next model is cut short
    if args.peers:  # last, for some take a hundred times as long
        for model in args.models:
            rows += time_peers(model, gbps=gbps)
            write_rows(path, [*rows, *swept], **versions(gbps))
    print(f"{len(rows) + len(swept)} rows in {path}")
    show(rows)


if __name__ == "__main__":
    main()
