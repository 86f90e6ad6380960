"""What the schedule of streamed blocks gives at Llama 1.3B, on a clock that is computed: no GPU is needed.

`python experiments/benchmarks/host_schedule.py` runs the optimizer's own rings over a model with 1/16 of the widths,
and lets every lane take the time that the real bytes would at the rates below. It is a floor: launches cost nothing,
and copies take nothing from kernels. It tells what of the link a schedule hides, and what is fetched more than once.
"""

import argparse
import sys
from collections.abc import Callable
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import torch
from torch import nn

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT))

from baoc.optim import BlockwiseOptimizer  # noqa: E402
from baoc.optim.offload.lanes import IN, MAIN, OUT, STEP, Lanes  # noqa: E402
from baoc.planning.transfer import NUM_BUFFERS, PIECE_BYTES  # noqa: E402
from tests.support.placing import rings  # noqa: E402

WIDTH = 16  # by which hidden sizes are divided, so that tensors have 1/256 of their elements
LAYERS, HIDDEN, FFN, VOCABULARY = 24, 2048 // WIDTH, 5461 // WIDTH, 32000 // WIDTH
FINAL = ("down", "up", "gate", "norm_out", "o", "v", "k", "q", "norm_in")  # in a layer's backward
KERNEL_S = 0.15e-3  # of a piece: 16M parameters at 0.9 ms per 100M


class Clock(Lanes):
    """Lanes whose work is done at once, and takes the time on the clock that its bytes do."""

    def __init__(self, *, rate: float):
        self.now = dict.fromkeys((MAIN, IN, STEP, OUT), 0.0)
        self.bytes_in, self._rate = 0, rate

    def run(self, lane: str, work: Callable[[], object]) -> None:
        work()
        if lane == STEP:
            self.now[STEP] += KERNEL_S
            return
        nbytes = sum(host.nbytes for host, _ in work.__self__._runs) * WIDTH**2  # pyright: ignore
        self.now[lane] += nbytes / self._rate
        self.bytes_in += nbytes * (lane == IN)

    def mark(self, lane: str) -> float:
        return self.now[lane]

    def wait(self, lane: str, mark: Any) -> None:
        self.now[lane] = max(self.now[lane], mark or 0.0)


def shapes() -> dict[str, tuple[int, ...]]:
    kinds = {**dict.fromkeys("qkvo", (HIDDEN, HIDDEN)), **dict.fromkeys(("gate", "up", "down"), (FFN, HIDDEN))}
    kinds |= dict.fromkeys(("norm_in", "norm_out"), (HIDDEN // WIDTH,))
    layers = {f"{layer}.{kind}": shape for layer in range(LAYERS) for kind, shape in kinds.items()}
    return {"embedding": (VOCABULARY, HIDDEN), **layers, "norm": (HIDDEN // WIDTH,), "head": (VOCABULARY, HIDDEN)}


def simulate(args: argparse.Namespace, *, ahead: bool, learns: bool, accumulate: int) -> tuple[float, float]:
    """Milliseconds and bytes that come in, of the last of five steps."""
    clock = Clock(rate=args.rate * 1e9)
    params = {name: nn.Parameter(torch.zeros(shape, dtype=torch.bfloat16)) for name, shape in shapes().items()}
    final = ["head", "norm", *(f"{i}.{kind}" for i in reversed(range(LAYERS)) for kind in FINAL), "embedding"]
    numel = sum(param.numel() for param in params.values())
    with rings(piece_bytes=PIECE_BYTES // WIDTH**2, num_buffers=NUM_BUFFERS, lanes=clock):
        optimizer = BlockwiseOptimizer(params.items(), "adamw_int8+split8@streamed")
        if not learns:
            optimizer.registry.learn_travel = lambda finals: None
        begin, before = 0.0, 0
        for _ in range(5):
            begin, before = clock.now[MAIN], clock.bytes_in
            clock.now[MAIN] += (args.forward * accumulate + args.backward * (accumulate - 1)) / 1e3
            optimizer.zero_grad()
            with optimizer.last_backward() if ahead else nullcontext():
                for name in final:
                    clock.now[MAIN] += args.backward / 1e3 * params[name].numel() / numel
                    params[name].sum().backward()
            optimizer.step()
    return (clock.now[MAIN] - begin) * 1e3, clock.bytes_in - before


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--forward", type=float, default=41, help="ms of a micro-batch")
    parser.add_argument("--backward", type=float, default=82, help="ms of a micro-batch")
    parser.add_argument("--rate", type=float, default=43.5, help="GB/s each way while both are at work")
    args = parser.parse_args()
    print(f"{'schedule':<44} {'accumulate':>10} {'ms':>8} {'GB in':>6}")
    for name, ahead, learns in (
        ("in step() alone", False, False),
        ("in backward, in the order of the model", True, False),
        ("in backward, in the order of the backward", True, True),
    ):
        for accumulate in (1, 8):
            ms, nbytes = simulate(args, ahead=ahead, learns=learns, accumulate=accumulate)
            print(f"{name:<44} {accumulate:>10} {ms:>8.1f} {nbytes / 1e9:>6.2f}")


if __name__ == "__main__":
    main()
