"""What several benchmarks share: timed calls, freed memory, bytes of optimizer states, and tables of rows."""

import csv
import gc
import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from time import perf_counter
from typing import Any

from baoc.tracking.files import write_csv

RESULTS = Path(__file__).resolve().parents[1] / "results"


def results_folder() -> Path:
    """$OUT, else experiments/results."""
    return Path(os.environ.get("OUT") or RESULTS)


def write_rows(path: Path, rows: Sequence[Any], **common: object) -> Path:
    """Writes all rows, dataclasses or mappings, each with what they have in `common`; returns `path`."""
    path.parent.mkdir(parents=True, exist_ok=True)
    write_csv(path, [as_mapping(row) | common for row in rows])
    return path


def read_rows(path: Path) -> list[dict[str, str]]:
    with path.open(encoding="utf-8", newline="") as file:
        return list(csv.DictReader(file))


def append_row(path: Path, row: Any, **common: object) -> None:
    """Adds a row to the table in `path`, which begins with it where there is none."""
    cells = as_mapping(row) | common
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("a", newline="") as file:
        writer = csv.DictWriter(file, list(cells), lineterminator="\n")
        if not file.tell():
            writer.writeheader()
        writer.writerow(cells)


def as_mapping(row: Any) -> dict[str, Any]:
    return dict(row) if isinstance(row, Mapping) else asdict(row)


def seconds(run: Callable[[], object]) -> float:
    """Seconds of `run`, with all work of the GPU that it launches."""
    import torch

    synchronize = torch.cuda.synchronize if torch.cuda.is_initialized() else lambda: None
    synchronize()
    begin = perf_counter()
    run()
    synchronize()
    return perf_counter() - begin


def free_memory() -> None:
    """Collects garbage and gives torch's unused blocks of device memory back."""
    import torch

    gc.collect()
    torch.cuda.empty_cache()  # does nothing before CUDA is used


def optimizer_state_bytes(optimizer: Any) -> int:
    """Bytes of an optimizer's states on this rank, of BAOC's or of any other."""
    if hasattr(optimizer, "state_bytes"):
        return optimizer.state_bytes()
    values = [value for state in optimizer.state.values() for value in state.values()]
    return sum(getattr(value, "_local_tensor", value).nbytes for value in values)


def peak_reserved_bytes(device: Any) -> int:
    """The most that torch's allocator has reserved since its peak was reset, and the context; 0 of a CPU."""
    import torch

    from baoc.profiling.memory import current_context_bytes

    return torch.cuda.max_memory_reserved(device) + current_context_bytes(device) if device.type == "cuda" else 0
