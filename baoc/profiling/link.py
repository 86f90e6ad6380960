"""Measures copy rates between host and device, in each direction and both at once."""

from collections.abc import Callable
from contextlib import nullcontext
from statistics import median
from time import perf_counter

import torch
from torch import Tensor

from baoc.planning.transfer import PIECE_BYTES
from baoc.types import LinkRates
from baoc.units import MIB

SIZES = (MIB, 4 * MIB, PIECE_BYTES)  # bytes of a copy
MAX_S = 0.8
LEAST_REPEATS = 3


def measure_link(
    device: torch.device | str,
    *,
    sizes: tuple[int, ...] = SIZES,
    max_s: float = MAX_S,
    clock: Callable[[], float] = perf_counter,
) -> LinkRates:
    """Median rates of copies between pinned host memory and `device`, measured in about `max_s` seconds.

    For both directions at once, copies start together on two streams.
    """
    device = torch.device(device)
    pinned = device.type == "cuda"
    rates: dict[str, list[float]] = {"in": [], "out": [], "both": []}
    share = max_s / (3 * len(sizes))
    for size in sizes:
        here = [torch.empty(size, dtype=torch.uint8, pin_memory=pinned) for _ in range(2)]
        there = [torch.empty(size, dtype=torch.uint8, device=device) for _ in range(2)]
        streams = [torch.cuda.Stream(device) for _ in range(2)] if pinned else []
        directions = {"in": [(there[0], here[0])], "out": [(here[1], there[1])]}
        directions["both"] = [*directions["in"], *directions["out"]]
        for direction, copies in directions.items():
            copy = _copying(copies, streams=streams)
            rates[direction].append(size * len(copies) / _seconds(copy, device=device, max_s=share, clock=clock))
    return LinkRates(
        sizes=sizes,
        in_rates=tuple(rates["in"]),
        out_rates=tuple(rates["out"]),
        both_rates=tuple(rates["both"]),
        source="measured",
    )


def _copying(copies: list[tuple[Tensor, Tensor]], *, streams: list[torch.cuda.Stream]) -> Callable[[], None]:
    """A callable that starts all copies (to, from), each on its own stream on CUDA."""

    def run() -> None:
        for index, (to, source) in enumerate(copies):
            with torch.cuda.stream(streams[index]) if streams else nullcontext():
                to.copy_(source, non_blocking=True)

    return run


def _seconds(
    run: Callable[[], None], *, device: torch.device, max_s: float, clock: Callable[[], float], most: int = 50
) -> float:
    """Median seconds of `run` after one warm-up run."""

    def once() -> float:
        start = clock()
        run()
        if device.type == "cuda":
            torch.cuda.synchronize(device)
        return max(clock() - start, 1e-9)

    began = clock()
    once()
    found = [once() for _ in range(LEAST_REPEATS)]
    while len(found) < most and clock() - began + found[-1] < max_s:
        found.append(once())
    return median(found)
