"""Seconds of an optimizer step per spec, as a line over the number of elements, from steps that it is given to time.

Only a step_time budget asks for it; timings are kept per machine, so that a second plan costs nothing.
"""

import hashlib
import json
import os
import platform
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from statistics import median
from time import perf_counter
from typing import Any

import torch

from baoc import __version__
from baoc.types import LatencyTable, to_plain

MakeStep = Callable[[int], Callable[[], None]]

SIZES = (2**14, 2**20)  # elements: one where launching dominates, one where arithmetic and memory do
MAX_S = 5.0
MAX_REPEATS = 15
_SCHEMA = 1


def measure_latency(
    steps: Mapping[str, MakeStep],
    *,
    device: torch.device | str = "cpu",
    sizes: tuple[int, int] = SIZES,
    max_s: float = MAX_S,
    base_step: Callable[[], None] | None = None,
    reference_step: Callable[[], None] | None = None,
    cache_dir: Path | str | None = None,
    clock: Callable[[], float] = perf_counter,
) -> LatencyTable:
    """`fixed_s + per_element_s * numel` per spec, both at least 0, from medians at two sizes.

    `steps` maps a spec to a callable that, given a number of elements, sets up a block of that size and returns its
    step. `base_step` runs forward and backward, `reference_step` a whole step with torch's fused AdamW; both are timed
    where given. All of it takes about `max_s` at most (every step runs twice at least), set-up included. With
    `cache_dir`, specs that were timed before on this device, by these versions and thread count, are read back.
    """
    device = torch.device(device)
    key = _machine(device, sizes=sizes)
    known = _read(cache_dir, key=key)
    missing = [spec for spec in steps if spec not in known]
    wholes = [step for step in (base_step, reference_step) if step is not None]
    share = max_s / max(1, len(missing) * len(sizes) + len(wholes))
    for spec in missing:
        known[spec] = _line(steps[spec], sizes=sizes, device=device, share=share, clock=clock)
    if missing:
        _write(cache_dir, key=key, lines=known)
    return LatencyTable(
        device=key["device"],
        fixed_s={spec: known[spec][0] for spec in steps},
        per_element_s={spec: known[spec][1] for spec in steps},
        base_step_s=_timed(base_step, device=device, limit=share, clock=clock) if base_step is not None else 0.0,
        reference_step_s=(
            _timed(reference_step, device=device, limit=share, clock=clock) if reference_step is not None else 0.0
        ),
    )


def fit_line(sizes: Sequence[int], seconds: Sequence[float]) -> tuple[float, float]:
    """(fixed, per element) through two points, neither negative: noise may make the larger block the faster one."""
    (small, large), (low, high) = sizes, seconds
    slope = max(0.0, (high - low) / (large - small))
    return max(0.0, low - slope * small), slope


def _line(
    make: MakeStep, *, sizes: tuple[int, int], device: torch.device, share: float, clock: Callable[[], float]
) -> tuple[float, float]:
    seconds: list[float] = []
    for numel in sizes:
        began = clock()
        step = make(numel)
        seconds.append(_timed(step, device=device, limit=share - (clock() - began), clock=clock))
    return fit_line(sizes, seconds)


def _timed(step: Callable[[], None], *, device: torch.device, limit: float, clock: Callable[[], float]) -> float:
    """Median seconds of `step` after one run that is not counted, repeated while `limit` lasts."""
    began = clock()
    step()
    _wait(device)
    found: list[float] = []
    while not found or (len(found) < MAX_REPEATS and clock() - began + found[-1] < limit):
        start = clock()
        step()
        _wait(device)
        found.append(clock() - start)
    return median(found)


def _wait(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)


# -- cache ------------------------------------------------------------------------------------------------------------


def _machine(device: torch.device, *, sizes: tuple[int, int]) -> dict[str, str]:
    """All that a timing depends on beside the spec."""
    cuda = device.type == "cuda"
    return {
        "device": torch.cuda.get_device_name(device)
        if cuda
        else f"{device.type} {platform.processor() or platform.machine()}",
        "host": "" if cuda else f"{platform.node()} {os.cpu_count()} cores, {torch.get_num_threads()} threads",
        "torch": torch.__version__,
        "baoc": __version__,
        "sizes": ",".join(map(str, sizes)),
        "schema": str(_SCHEMA),
    }


def _path(cache_dir: Path | str, key: Mapping[str, str]) -> Path:
    digest = hashlib.sha256(json.dumps(key, sort_keys=True).encode()).hexdigest()[:16]
    return Path(cache_dir) / f"latency-{digest}.json"


def _read(cache_dir: Path | str | None, *, key: Mapping[str, str]) -> dict[str, tuple[float, float]]:
    """Spec -> (fixed, per element) of an earlier run; nothing where there is none or it cannot be read."""
    if cache_dir is None:
        return {}
    try:
        data: Any = json.loads(_path(cache_dir, key).read_text(encoding="utf-8"))
        if data["key"] != dict(key):
            return {}
        return {str(spec): (float(line[0]), float(line[1])) for spec, line in data["lines"].items()}
    except (OSError, ValueError, KeyError, TypeError, IndexError):
        return {}


def _write(cache_dir: Path | str | None, *, key: Mapping[str, str], lines: Mapping[str, tuple[float, float]]) -> None:
    """Replaces the file at once, so that two runs at a time leave a whole one."""
    if cache_dir is None:
        return
    path = _path(cache_dir, key)
    path.parent.mkdir(parents=True, exist_ok=True)
    draft = path.with_suffix(f".{os.getpid()}.tmp")
    draft.write_text(json.dumps({"key": dict(key), "lines": to_plain(dict(lines))}, indent=1), encoding="utf-8")
    draft.replace(path)
