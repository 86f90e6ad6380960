"""What a step of BlockwiseOptimizer costs the host: Python's time for 200 tensors of 8 specs, no gradients computed.

    python experiments/benchmarks/host_cost.py  # time not recorded, H200 -> host_cost.csv
    python experiments/benchmarks/host_cost.py --stub  # 9 seconds of a CPU core -> printed
    python experiments/benchmarks/host_cost.py --beside FOLDER  # 20 seconds of an H200 -> host_cost.csv

Tensors are small, so that the device is never what is waited for. `--stub` runs anywhere: uploads go to the CPU and
nothing is launched, which leaves out what the replay costs (5 us).

`--beside FOLDER`, a checkout, times the first case of this checkout and of that one by turns of TURN_STEPS steps, in
two processes that live as long: on a shared host two runs, one after the other, differ by more than two versions do.
Both run on the same two processors, as one process kept 50 us a step and another 88 where the host had put them.
"""

import argparse
import os
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from statistics import median

import torch
from torch import nn

ROOT = Path(os.environ.get("BAOC_TREE") or Path(__file__).resolve().parents[2])  # of the checkout that is timed
sys.path.insert(0, str(ROOT))

from baoc.kernels import Engine
from baoc.optim import BlockwiseOptimizer
from baoc.optim.backends import fused

NUM_TENSORS = 200
SPECS = (
    "adamw", "adamw_bf16", "adamw_int8", "adamw_int8_root", "rmsprop_int8", "lion_int8", "signum_int8", "sign",
)  # fmt: skip
STEPS = 300
TURNS, TURN_STEPS = 60, 100


def build(device: str, *, num_specs: int) -> tuple[list[nn.Parameter], BlockwiseOptimizer]:
    """Two parameter groups, with and without decay, as models have them."""
    params = [nn.Parameter(torch.zeros((32, 32) if i % 2 else (32,), device=device)) for i in range(NUM_TENSORS)]
    names = [f"p{i}" for i in range(NUM_TENSORS)]
    groups = [
        {"params": [(names[i], params[i]) for i in range(odd, NUM_TENSORS, 2)], "weight_decay": 0.1 * odd}
        for odd in (0, 1)
    ]
    specs = {name: SPECS[i * num_specs // NUM_TENSORS] for i, name in enumerate(names)}
    return params, BlockwiseOptimizer(groups, specs, lr=1e-3, backend="fused")


def give(params: list[nn.Parameter]) -> None:
    for param in params:
        param.grad = torch.ones_like(param)


def step_us(
    optimizer: BlockwiseOptimizer, before: Callable[[int], object], *, wait: Callable[[], object], steps: int = STEPS
) -> float:
    """Median microseconds of `step`, with the device idle before it and a schedule that moves the learning rate."""
    times = []
    for index in range(steps + 20):
        before(index)
        for group in optimizer.param_groups:
            group["lr"] = 1e-3 / (1 + index)
        wait()
        begin = time.perf_counter()
        optimizer.step()
        times.append(time.perf_counter() - begin)
    return median(times[20:]) * 1e6


def replay_us(optimizer: BlockwiseOptimizer) -> float:
    """Median microseconds of the driver's part: replaying a step's graph."""
    engine = optimizer.registry.backends[0].engine  # pyright: ignore[reportAttributeAccessIssue]
    graph = next(iter(engine.graphs._graphs.values()))
    times = []
    for _ in range(STEPS):
        torch.cuda.synchronize()
        begin = time.perf_counter()
        graph.replay()
        times.append(time.perf_counter() - begin)
    engine._upload.sending = True  # the device has counted uploads of which the host knows nothing
    return median(times) * 1e6


def rows(device: str) -> list[dict[str, object]]:
    wait = torch.cuda.synchronize if device == "cuda" else int
    found = []

    def note(what: str, specs: int, value: float) -> None:
        found.append({"case": what, "specs": specs, "tensors": NUM_TENSORS, "host_us": f"{value:.1f}"})
        print(f"{value:8.1f} us  {specs} spec(s)  {what}", flush=True)  # at once: what is cut short leaves the others

    for num_specs in (1, 8):
        params, optimizer = build(device, num_specs=num_specs)
        give(params)
        note("gradients stay where they are", num_specs, step_us(optimizer, lambda _: None, wait=wait))
        if device == "cuda":
            note("of that, replaying its graph", num_specs, replay_us(optimizer))
        sets = [[torch.ones_like(param) for param in params] for _ in range(2)]
        kept: list[list[torch.Tensor | None]] = []

        def alternate(index: int, params: list[nn.Parameter] = params, sets: list[list[torch.Tensor]] = sets) -> None:
            for param, grad in zip(params, sets[index % 2], strict=True):
                param.grad = grad

        def renew(index: int, params: list[nn.Parameter] = params, kept: list = kept) -> None:
            kept.append([param.grad for param in params])  # so that nothing comes back to its place
            give(params)

        note("every gradient moves, to and fro", num_specs, step_us(optimizer, alternate, wait=wait))
        note("every gradient moves, to places never seen", num_specs, step_us(optimizer, renew, wait=wait))
        give(params)
        note("masked before", num_specs, step_us(optimizer, lambda _, o=optimizer: o.mask_nonfinite(), wait=wait))
        for backend in optimizer.registry.backends:
            backend.graphs = False  # pyright: ignore[reportAttributeAccessIssue]
            backend._engine = None  # pyright: ignore[reportAttributeAccessIssue]
        if device == "cuda":
            note("launched plainly, without a graph", num_specs, step_us(optimizer, lambda _: None, wait=wait))
    if device == "cuda":
        params = [nn.Parameter(torch.zeros(32, 32, device=device)) for _ in range(NUM_TENSORS)]
        give(params)
        torch_fused = torch.optim.AdamW(params, fused=True)
        note("torch.optim.AdamW(fused=True)", 1, step_us(torch_fused, lambda _: None, wait=wait))  # pyright: ignore
    empty = torch.optim.SGD([nn.Parameter(torch.zeros(1))])
    note("an optimizer with nothing to do (torch's own share)", 0, step_us(empty, lambda _: None, wait=int))  # pyright: ignore
    return found


def serve() -> None:
    """Reads a number of specs a line, and prints what a step of so many takes."""
    built = {}
    for num_specs in (1, 8):
        params, built[num_specs] = build("cuda", num_specs=num_specs)
        give(params)
    for line in sys.stdin:
        optimizer = built[int(line)]
        print(step_us(optimizer, lambda _: None, wait=torch.cuda.synchronize, steps=TURN_STEPS), flush=True)


def beside(tree: str) -> list[dict[str, object]]:
    trees = {"this": str(ROOT), "other": tree}
    os.sched_setaffinity(0, sorted(os.sched_getaffinity(0))[-2:])
    running = {
        name: subprocess.Popen(
            [sys.executable, __file__, "--serve"], env={**os.environ, "BAOC_TREE": folder}, text=True,
            stdin=subprocess.PIPE, stdout=subprocess.PIPE,
        )
        for name, folder in trees.items()
    }  # fmt: skip
    found: list[dict[str, object]] = []
    for num_specs in (1, 8):
        times: dict[str, list[float]] = {name: [] for name in trees}
        for turn in range(-2, TURNS):  # the first two are not counted
            for name in list(trees) if turn % 2 else list(trees)[::-1]:
                given, told = running[name].stdin, running[name].stdout
                assert given is not None and told is not None
                print(num_specs, file=given, flush=True)
                host_us = float(told.readline())
                if turn >= 0:
                    times[name].append(host_us)
                    found.append({"tree": name, "specs": num_specs, "turn": turn, "host_us": f"{host_us:.1f}"})
        more = sorted(a - b for a, b in zip(times["this"], times["other"], strict=True))
        # The interval of a median by ranks: 60 differences, of which the 23rd and the 38th bound it at 95 %.
        low, high = more[TURNS // 2 - 8], more[TURNS // 2 + 7]
        print(
            f"{num_specs} spec(s): this {median(times['this']):.1f} us, other {median(times['other']):.1f} us; "
            f"by turns {median(more):+.1f} us [{low:+.1f}, {high:+.1f}], n {TURNS}",
            flush=True,
        )
    for process in running.values():
        process.kill()
    return found


def stub() -> None:
    """Lets the fused backend take CPU tensors and launch nothing."""
    fused.available = lambda device: True
    Engine.run = lambda self, **_: None  # pyright: ignore[reportAttributeAccessIssue]
    Engine.mark = lambda self, **_: None  # pyright: ignore[reportAttributeAccessIssue]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--stub", action="store_true")
    parser.add_argument("--beside", metavar="FOLDER", help="another checkout")
    parser.add_argument("--serve", action="store_true", help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.serve:
        return serve()
    if args.stub:
        stub()
    device = "cpu" if args.stub else "cuda"
    found = beside(args.beside) if args.beside else rows(device)
    where = "stub" if args.stub else torch.cuda.get_device_name()
    if not args.stub:
        from experiments.benchmarks.shared import results_folder, write_rows  # another checkout may not have it

        write_rows(results_folder() / "host_cost.csv", found, device=where, torch=torch.__version__)
    print(f"{where}, torch {torch.__version__}, Python {sys.version.split()[0]}; median of {STEPS} steps")


if __name__ == "__main__":
    main()
