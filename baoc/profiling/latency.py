"""Seconds of an optimizer step per spec, as a line over tensors and elements, from steps that it is given to time.

Only a step_time budget asks for all specs; timings are kept per machine, so that a second plan costs nothing.
"""

import hashlib
import json
import os
import platform
import tempfile
from collections.abc import Callable, Iterable, Mapping
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from time import perf_counter
from typing import Any

import torch

from baoc import __version__
from baoc.profiling.memory import clear_cache
from baoc.types import LatencyTable

MakeStep = Callable[[int, int], Callable[[], None]]

SMALL = 2**12  # elements of a tensor whose step is all launching
LARGE = {"cpu": 2**18, "cuda": 2**23}  # and of one whose step is all arithmetic and memory
MANY = 9  # small tensors, to tell what each costs
MAX_S = 5.0
MAX_REPEATS = 15
_SLEEP_CYCLES = 4_000_000  # some milliseconds in which the host runs ahead of the device
_SOURCES = ("kernels", "rules", "codecs", "optim")  # what a step is made of
_SCHEMA = 2


@dataclass(frozen=True, slots=True, kw_only=True)
class Line:
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
    """The line of every one of `steps`, from medians of three steps: a small tensor, many of them, a large one.

    `steps` maps a spec to a callable that, given the elements of a tensor and a number of tensors, sets these up and
    returns their step. All of it takes about `max_s` at most (every step runs twice at least), set-up included. With
    `cache_dir`, specs that were timed before on this device, by these versions and thread count, are read back; a file
    that cannot be read is measured again, and one that cannot be written is done without.
    """
    device = torch.device(device)
    key = machine(device)
    known = read_lines(cache_dir, key=key)
    missing = [spec for spec in steps if spec not in known]
    share = max_s / max(1, len(missing) * 3)
    whole: dict[str, Line] = {}  # timed on tensors large enough to be of use to other runs
    for spec in missing:
        line, large = _line(steps[spec], device=device, share=share, clock=clock)
        known[spec] = line
        if large >= LARGE.get(device.type, LARGE["cpu"]):
            whole[spec] = line
    if whole:
        _write(cache_dir, key=key, lines=read_lines(cache_dir, key=key) | whole)
    return LatencyTable(
        device=key["device"],
        step_s=median(known[spec].step_s for spec in steps) if steps else 0.0,
        fixed_s={spec: known[spec].tensor_s for spec in steps},
        per_element_s={spec: known[spec].element_s for spec in steps},
    )


def fit_line(*, small_s: float, many_s: float, large_s: float, large: int) -> Line:
    """The line through three steps: of one tensor of SMALL elements, of MANY such, and of one of `large` elements.

    Nothing is negative: noise may make the larger one the faster one.
    """
    element_s = max(0.0, (large_s - small_s) / (large - SMALL))
    tensor_s = max(0.0, (many_s - small_s) / (MANY - 1) - element_s * SMALL)
    return Line(step_s=max(0.0, small_s - tensor_s - element_s * SMALL), tensor_s=tensor_s, element_s=element_s)


def _line(make: MakeStep, *, device: torch.device, share: float, clock: Callable[[], float]) -> tuple[Line, int]:
    """The line of a spec, and how large its largest tensor was: less than LARGE where memory has no room for more."""

    def timed(numel: int, tensors: int) -> float:
        began = clock()
        step = make(numel, tensors)
        return _timed(step, device=device, limit=share - (clock() - began), clock=clock)

    small_s, many_s = timed(SMALL, 1), timed(SMALL, MANY)
    large = LARGE.get(device.type, LARGE["cpu"])
    while True:
        try:
            return fit_line(small_s=small_s, many_s=many_s, large_s=timed(large, 1), large=large), large
        except torch.OutOfMemoryError:
            if large <= 4 * SMALL:
                raise
        clear_cache(device)
        large //= 4


def _timed(step: Callable[[], object], *, device: torch.device, limit: float, clock: Callable[[], float]) -> float:
    """Median seconds of `step` after one run that is not counted, repeated while `limit` lasts.

    On CUDA those of the device alone, as it is busy with a backward pass while a step is launched; and after three
    runs, as the first ones compile, measure and are captured in a graph.
    """
    began = clock()
    for _ in range(3 if device.type == "cuda" else 1):
        step()
    wait(device)
    found: list[float] = []
    took = 0.0
    while not found or (len(found) < MAX_REPEATS and clock() - began + took < limit):
        start = clock()
        found.append(_device_seconds(step) if device.type == "cuda" else _host_seconds(step, clock))
        took = clock() - start
    return median(found)


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


def series_seconds(
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
    """Seconds of one `run` among many that follow each other, as in training, where nobody waits for the device.

    One run first that is not counted, unless `warm` is False; then `least` to `most` while `max_s` lasts, of which one
    is run to know how many, unless `once_s` tells it. On CUDA the mean of a series, else the median. Training looks at
    its losses once per step, so `group` runs, those of a step, are launched without waiting for the device.
    """
    began = clock()
    if warm:
        run()
    wait(device)
    found: list[float] = []
    if once_s is None:
        start = clock()
        run()
        wait(device)
        found = [once_s := clock() - start]
    count = max(least, min(most, int((max_s - (clock() - began)) / max(once_s, 1e-9))))
    if device.type != "cuda":
        return median([*found, *(_host_seconds(run, clock) for _ in range(count - len(found)))])
    group = min(group, count)
    start = clock()
    for _ in range(count // group):
        for _ in range(group):
            run()
        wait(device)
    return (clock() - start) / (count // group * group)


def wait(device: torch.device) -> None:
    """Until the device has done what it was given."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)


# -- cache ------------------------------------------------------------------------------------------------------------


def machine(device: torch.device) -> dict[str, str]:
    """All that a timing depends on beside the spec: device, threads, versions, and the source of what steps."""
    cuda = device.type == "cuda"
    return {
        "device": torch.cuda.get_device_name(device)
        if cuda
        else f"{device.type} {platform.processor() or platform.machine()}",
        "host": "" if cuda else f"{platform.node()} {os.cpu_count()} cores, {torch.get_num_threads()} threads",
        "torch": torch.__version__,
        "triton": _triton_version(),
        "baoc": __version__,
        "source": source_hash(Path(__file__).parents[1] / name for name in _SOURCES),
        "schema": str(_SCHEMA),
    }


def source_hash(folders: Iterable[Path]) -> str:
    """Of every source file below the folders, with their names."""
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
    digest = hashlib.sha256(json.dumps(key, sort_keys=True).encode()).hexdigest()[:16]
    return Path(cache_dir) / f"latency-{digest}.json"


def read_lines(cache_dir: Path | str | None, *, key: Mapping[str, str]) -> dict[str, Line]:
    """Spec -> line of an earlier run; nothing where there is none or it cannot be read."""
    if cache_dir is None:
        return {}
    try:
        data: Any = json.loads(_path(cache_dir, key).read_text(encoding="utf-8"))
        if data["key"] != dict(key):
            return {}
        return {str(spec): _read_line(line) for spec, line in data["lines"].items()}
    except (OSError, ValueError, KeyError, TypeError, IndexError, AttributeError):
        return {}


def _read_line(line: Any) -> Line:
    step_s, tensor_s, element_s = (float(value) for value in line)
    if not all(0 <= value < float("inf") for value in (step_s, tensor_s, element_s)):
        raise ValueError(f"no seconds: {line}")
    return Line(step_s=step_s, tensor_s=tensor_s, element_s=element_s)


def _write(cache_dir: Path | str | None, *, key: Mapping[str, str], lines: Mapping[str, Line]) -> None:
    """Replaces the file at once, so that two runs at a time leave a whole one; a cache is never worth a failure."""
    if cache_dir is None:
        return
    path = _path(cache_dir, key)
    rows = {spec: (line.step_s, line.tensor_s, line.element_s) for spec, line in sorted(lines.items())}
    with suppress(OSError):
        path.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.NamedTemporaryFile("w", encoding="utf-8", dir=path.parent, suffix=".tmp", delete=False) as draft:
            json.dump({"key": dict(key), "lines": rows}, draft, indent=1)
        os.replace(draft.name, path)
