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
MAX_S = 0.8  # for all sizes and directions
MIN_REPEATS, MAX_REPEATS = 3, 50


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
    max_s_per_timing = max_s / (3 * len(sizes))
    for size in sizes:
        on_host = [torch.empty(size, dtype=torch.uint8, pin_memory=pinned) for _ in range(2)]
        on_device = [torch.empty(size, dtype=torch.uint8, device=device) for _ in range(2)]
        streams = [torch.cuda.Stream(device) for _ in range(2)] if pinned else []
        directions = {"in": [(on_device[0], on_host[0])], "out": [(on_host[1], on_device[1])]}
        directions["both"] = [*directions["in"], *directions["out"]]
        for direction, copies in directions.items():
            copy = _copy_all(copies, streams=streams)
            seconds = _median_seconds(copy, device=device, max_s=max_s_per_timing, clock=clock)
            rates[direction].append(size * len(copies) / seconds)
    return LinkRates(
        sizes=sizes,
        in_rates=tuple(rates["in"]),
        out_rates=tuple(rates["out"]),
        both_rates=tuple(rates["both"]),
        source="measured",
    )


def _copy_all(copies: list[tuple[Tensor, Tensor]], *, streams: list[torch.cuda.Stream]) -> Callable[[], None]:
    """A callable that starts all copies (target, source), each on its own stream on CUDA."""

    def run() -> None:
        for index, (target, source) in enumerate(copies):
            with torch.cuda.stream(streams[index]) if streams else nullcontext():
                target.copy_(source, non_blocking=True)

    return run


def _median_seconds(
    run: Callable[[], None], *, device: torch.device, max_s: float, clock: Callable[[], float]
) -> float:
    """Median seconds of `run`, after one warm-up run: MIN_REPEATS to MAX_REPEATS runs in about `max_s` seconds."""

    def once() -> float:
        start = clock()
        run()
        if device.type == "cuda":
            torch.cuda.synchronize(device)
        return max(clock() - start, 1e-9)

    began = clock()
    once()
    seconds = [once() for _ in range(MIN_REPEATS)]
    while len(seconds) < MAX_REPEATS and clock() - began + seconds[-1] < max_s:
        seconds.append(once())
    return median(seconds)
