"""Times optimizer steps and fits seconds per spec as a linear function of the numbers of tensors and elements.

Timings are cached per machine, so that a second plan costs nothing.
"""

import hashlib
import json
import os
import platform
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from time import perf_counter
from typing import Any

import torch

from baoc.cache import json_sha256, read_private, write_private
from baoc.profiling.memory import clear_cache
from baoc.types import LatencyTable

MakeStep = Callable[[int, int], Callable[[], None]]  # (elements of a tensor, number of tensors) -> their step

SMALL_NUMEL = 2**12  # of a tensor whose step is dominated by launch overhead
LARGE_NUMEL = {"cpu": 2**18, "cuda": 2**23}  # of a tensor whose step is dominated by memory and arithmetic
NUM_SMALL = 9  # small tensors stepped together, for the seconds per tensor
MAX_S = 5.0  # for all specs
MAX_REPEATS = 15  # of one timing
_SLEEP_CYCLES = 4_000_000  # some milliseconds, in which the host launches the step ahead of the device
_SOURCES = ("kernels", "optim")  # folders whose code a step runs
_SCHEMA = 2  # of the cache file


@dataclass(frozen=True, slots=True, kw_only=True)
class StepCost:
    """Seconds of a step: `step_s` once, `tensor_s` for each tensor, `element_s` for each element; none is negative."""

    step_s: float
    tensor_s: float
    element_s: float


def measure_latency(
    steps: Mapping[str, MakeStep],
    *,
    device: torch.device | str = "cpu",
    max_s: float = MAX_S,
    cache_dir: Path | str | None = None,
    clock: Callable[[], float] = perf_counter,
) -> LatencyTable:
    """Times each spec on one small tensor, on NUM_SMALL of them and on a large one, and fits a `StepCost`.

    Args:
        steps: spec -> callable (elements of a tensor, number of tensors) that sets these up and returns their step.
        max_s: about the most seconds for all specs, set-up included; each step runs at least twice.
        cache_dir: where timings are read from and written to. They are valid for this device, these versions and this
            thread count. A file that cannot be read or written is ignored.
    """
    device = torch.device(device)
    key = timing_key(device)
    costs = read_timings(cache_dir, key=key)
    missing = [spec for spec in steps if spec not in costs]
    max_s_per_timing = max_s / max(1, len(missing) * 3)
    cacheable: dict[str, StepCost] = {}  # timed on tensors of full size
    for spec in missing:
        costs[spec], large = _time_spec(steps[spec], device=device, max_s=max_s_per_timing, clock=clock)
        if large >= LARGE_NUMEL.get(device.type, LARGE_NUMEL["cpu"]):
            cacheable[spec] = costs[spec]
    if cacheable:
        _write(cache_dir, key=key, costs=read_timings(cache_dir, key=key) | cacheable)
    return LatencyTable(
        device=key["device"],
        step_s=median(costs[spec].step_s for spec in steps) if steps else 0.0,
        fixed_s={spec: costs[spec].tensor_s for spec in steps},
        per_element_s={spec: costs[spec].element_s for spec in steps},
    )


def fit_step_cost(*, small_s: float, many_s: float, large_s: float, large: int) -> StepCost:
    """The StepCost of three timings: one tensor of SMALL_NUMEL elements, NUM_SMALL of them, one of `large` elements.

    Terms are at least 0, as noise may make the larger step the faster one.
    """
    element_s = max(0.0, (large_s - small_s) / (large - SMALL_NUMEL))
    tensor_s = max(0.0, (many_s - small_s) / (NUM_SMALL - 1) - element_s * SMALL_NUMEL)
    return StepCost(
        step_s=max(0.0, small_s - tensor_s - element_s * SMALL_NUMEL), tensor_s=tensor_s, element_s=element_s
    )


def _time_spec(
    make: MakeStep, *, device: torch.device, max_s: float, clock: Callable[[], float]
) -> tuple[StepCost, int]:
    """(cost of a spec, elements of the large tensor). There are fewer than LARGE_NUMEL if memory does not suffice."""

    def timed(numel: int, tensors: int) -> float:
        began = clock()
        step = make(numel, tensors)
        return _median_seconds(step, device=device, max_s=max_s - (clock() - began), clock=clock)

    small_s, many_s = timed(SMALL_NUMEL, 1), timed(SMALL_NUMEL, NUM_SMALL)
    large = LARGE_NUMEL.get(device.type, LARGE_NUMEL["cpu"])
    while True:
        try:
            return fit_step_cost(small_s=small_s, many_s=many_s, large_s=timed(large, 1), large=large), large
        except torch.OutOfMemoryError:
            if large <= 4 * SMALL_NUMEL:
                raise
        clear_cache(device)
        large //= 4


def _median_seconds(
    step: Callable[[], object], *, device: torch.device, max_s: float, clock: Callable[[], float]
) -> float:
    """Median seconds of `step`, repeated for about `max_s` seconds, after one warm-up run.

    On CUDA only the device's time counts, as in training it is busy with backward while the step is launched. There are
    three warm-up runs, in which kernels are compiled, tuned and captured in a graph.
    """
    began = clock()
    for _ in range(3 if device.type == "cuda" else 1):
        step()
    synchronize(device)
    seconds: list[float] = []
    took = 0.0
    while not seconds or (len(seconds) < MAX_REPEATS and clock() - began + took < max_s):
        start = clock()
        seconds.append(_device_seconds(step) if device.type == "cuda" else _host_seconds(step, clock))
        took = clock() - start
    return median(seconds)


def _host_seconds(step: Callable[[], object], clock: Callable[[], float]) -> float:
    start = clock()
    step()
    return clock() - start


def _device_seconds(step: Callable[[], object]) -> float:
    begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    torch.cuda._sleep(_SLEEP_CYCLES)
    begin.record()
    step()
    end.record()
    end.synchronize()
    return begin.elapsed_time(end) / 1e3


def seconds_per_run(
    run: Callable[[], object],
    *,
    device: torch.device,
    max_s: float,
    least: int = 2,
    most: int = 12,
    warm: bool = True,
    once_s: float | None = None,
    group: int = 1,
    clock: Callable[[], float] = perf_counter,
) -> float:
    """Seconds of one `run` in a series of runs, as in training: the host does not wait for the device after each.

    This is the mean of the series on CUDA, and the median elsewhere.

    Args:
        max_s: about the most seconds of the series, in which there are `least` to `most` runs.
        warm: whether the first run is a warm-up, which does not count.
        once_s: seconds of one run; None times one run to choose the length of the series.
        group: runs between two waits for the device: the micro-batches of a step, whose losses are read once.
    """
    began = clock()
    if warm:
        run()
    synchronize(device)
    first: list[float] = []
    if once_s is None:
        start = clock()
        run()
        synchronize(device)
        first = [once_s := clock() - start]
    count = max(least, min(most, int((max_s - (clock() - began)) / max(once_s, 1e-9))))
    if device.type != "cuda":
        return median([*first, *(_host_seconds(run, clock) for _ in range(count - len(first)))])
    group = min(group, count)
    start = clock()
    for _ in range(count // group):
        for _ in range(group):
            run()
        synchronize(device)
    return (clock() - start) / (count // group * group)


def synchronize(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)


# -- cache ------------------------------------------------------------------------------------------------------------


def timing_key(device: torch.device) -> dict[str, str]:
    """What timings depend on, beside the spec: device, threads, versions, and the source code of the step."""
    cuda = device.type == "cuda"
    return {
        "device": torch.cuda.get_device_name(device)
        if cuda
        else f"{device.type} {platform.processor() or platform.machine()}",
        "host": "" if cuda else f"{platform.node()} {os.cpu_count()} cores, {torch.get_num_threads()} threads",
        "torch": torch.__version__,
        "triton": _triton_version(),
        "source": source_hash(Path(__file__).parents[1] / name for name in _SOURCES),
        "schema": str(_SCHEMA),
    }


def source_hash(folders: Iterable[Path]) -> str:
    """Hash of the names and contents of all source files below the folders."""
    digest = hashlib.sha256()
    for folder in folders:
        for path in sorted(path for path in folder.rglob("*") if path.suffix in (".py", ".cpp", ".h")):
            digest.update(path.relative_to(folder).as_posix().encode())
            digest.update(path.read_bytes())
    return digest.hexdigest()[:16]


def _triton_version() -> str:
    from importlib.metadata import PackageNotFoundError, version

    try:
        return version("triton")
    except PackageNotFoundError:
        return ""


def _path(cache_dir: Path | str, key: Mapping[str, str]) -> Path:
    return Path(cache_dir) / f"latency-{json_sha256(key)[:16]}.json"


def read_timings(cache_dir: Path | str | None, *, key: Mapping[str, str]) -> dict[str, StepCost]:
    """Spec -> cost from the cache; empty unless there is a readable file that belongs to the user."""
    if cache_dir is None:
        return {}
    try:
        data: Any = json.loads(read_private(_path(cache_dir, key)) or "")
        if data["key"] != dict(key):
            return {}
        return {str(spec): _read_cost(cost) for spec, cost in data["lines"].items()}
    except (OSError, ValueError, KeyError, TypeError, IndexError, AttributeError):
        return {}


def _read_cost(cost: Any) -> StepCost:
    step_s, tensor_s, element_s = (float(value) for value in cost)
    if not all(0 <= value < float("inf") for value in (step_s, tensor_s, element_s)):
        raise ValueError(f"not seconds: {cost}")
    return StepCost(step_s=step_s, tensor_s=tensor_s, element_s=element_s)


def _write(cache_dir: Path | str | None, *, key: Mapping[str, str], costs: Mapping[str, StepCost]) -> None:
    if cache_dir is None:
        return
    lines = {spec: (cost.step_s, cost.tensor_s, cost.element_s) for spec, cost in sorted(costs.items())}
    write_private(_path(cache_dir, key), json.dumps({"key": dict(key), "lines": lines}, indent=1))
