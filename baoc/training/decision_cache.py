"""The cache of decisions: the same run on the same card does not measure its options again.

An entry is a file named by the hash of everything that the decision rests on: network, batch, card, budget, versions,
settings. Entries that are damaged, of another key, or in a folder that another user can write to are ignored.
"""

import hashlib
import json
import math
import os
import platform
import sys
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from baoc.cache import CACHE_VARIABLE, cache_folder, json_sha256, read_private, write_private
from baoc.config.environment import package_versions
from baoc.config.options import hash_own_code
from baoc.config.schema import RunConfig
from baoc.parallel import ranks
from baoc.profiling.latency import source_hash, timing_key
from baoc.types import Budget, Footprint, LatencyTable, Option, read_plain, to_plain

MAX_ENTRIES = 256  # the newest ones are kept
# Settings that no decision rests on. The length of a run only matters for `Entry.run_s`.
_RUN = ("name", "seed", "resume", "logger", "checkpoint", "faults")
_TRAINER = (
    *("max_steps", "max_epochs", "max_time", "min_steps", "min_epochs", "log_every_n_steps", "enable_progress_bar"),
    *("enable_model_summary", "val_check_interval", "check_val_every_n_epoch", "limit_val_batches"),
)
# Prefixes of environment variables that change what torch, its libraries or BAOC do; _FOLDERS do not.
_STEERING = ("BAOC_", "TORCH", "PYTORCH_", "TRITON_", "CUDA_", "CUBLAS", "CUDNN", "NVIDIA_", "OMP_", "MKL_")
_FOLDERS = (CACHE_VARIABLE, "CUDA_VISIBLE_DEVICES", "NVIDIA_VISIBLE_DEVICES", "CUDA_CACHE_PATH", "TRITON_CACHE_DIR")
_DRIVER = Path("/proc/driver/nvidia/version")


@dataclass(frozen=True, slots=True, kw_only=True)
class Entry:
    """A decision: the chosen option, all options, its footprint, and the latency table to plan the run with.

    `run_s`: seconds of the longest run for which it is good enough; infinite if no unmeasured option could be better.
    `in_16_bits`: it had room with bf16 weights only.
    """

    chosen: Option
    options: tuple[Option, ...]
    footprint: Footprint
    latency: LatencyTable
    run_s: float
    in_16_bits: bool = False


def key_of(
    config: RunConfig, *, network: nn.Module, batches: Sequence[Any], budget: Budget, device: torch.device
) -> dict[str, Any]:
    """Everything that a decision rests on, as plain values. `batches`: of training and validation; their shapes
    count."""
    settings = to_plain(config)
    settings = {key: value for key, value in settings.items() if key not in _RUN}
    settings["trainer"] = {key: value for key, value in settings["trainer"].items() if key not in _TRAINER}
    tensors = [*network.named_parameters(), *network.named_buffers()]
    return {
        "config": settings | {"budget": to_plain(replace(budget, name=""))},
        "code": hash_own_code(config) | _code_of_layers(network),
        "batches": [_shapes(batch) for batch in batches],
        "ranks": ranks().size,  # several ranks keep buckets of gradients
        "network": json_sha256(
            [type(network).__module__, type(network).__qualname__, repr(network)],
            [[name, *_shape(tensor), tensor.requires_grad] for name, tensor in tensors],
        ),
        "machine": timing_key(device) | _card(device) | {"source": source_hash([Path(__file__).parents[1]])},
        "versions": {**package_versions(), "python": platform.python_version()},
        "torch": [
            torch.get_float32_matmul_precision(),
            torch.are_deterministic_algorithms_enabled(),
            torch.backends.cudnn.benchmark,
            torch.backends.cuda.matmul.allow_tf32,
        ],
        "environment": {
            name: value
            for name, value in sorted(os.environ.items())
            if name.startswith(_STEERING) and name not in _FOLDERS
        },
    }


def _code_of_layers(network: nn.Module) -> dict[str, str]:
    """SHA-256 of the files that define the network's layers, by module name.

    Without those of torch and BAOC, which the key has otherwise, and without the files that these import.
    """
    names = sorted({type(layer).__module__ for layer in network.modules()})
    files = {name: getattr(sys.modules.get(name), "__file__", None) for name in names}
    others = {name: Path(file) for name, file in files.items() if file and name.split(".")[0] not in ("torch", "baoc")}
    return {name: hashlib.sha256(file.read_bytes()).hexdigest() for name, file in others.items() if file.is_file()}


def _card(device: torch.device) -> dict[str, str]:
    host = f"{platform.machine()} {os.cpu_count()} cores"
    if device.type != "cuda":
        return {"processor": host}
    card = torch.cuda.get_device_properties(device)
    driver = _DRIVER.read_text(encoding="utf-8") if _DRIVER.is_file() else ""
    return {"processor": host, "card": f"{card.name}, {card.total_memory} bytes", "driver": json_sha256(driver)}


def _shape(tensor: Tensor) -> list[Any]:
    return [list(tensor.shape), str(tensor.dtype)]


def _shapes(batch: Any) -> Any:
    if isinstance(batch, Tensor):
        return _shape(batch)
    if isinstance(batch, Mapping):
        return {str(key): _shapes(value) for key, value in batch.items()}
    return [_shapes(value) for value in batch] if isinstance(batch, list | tuple) else type(batch).__name__


def path_of(key: Mapping[str, Any]) -> Path:
    return cache_folder() / f"decision-{json_sha256(key)[:32]}.json"


def load_decision(key: Mapping[str, Any]) -> Entry | None:
    """The decision for this key; None if there is no intact one."""
    try:
        stored: Any = json.loads(read_private(path_of(key)) or "")
        body = stored["body"]
        if stored["digest"] != json_sha256(body) or body["key"] != json.loads(json.dumps(key)):
            return None
        entry = read_plain(Entry, body)
        return replace(entry, run_s=math.inf) if math.isnan(entry.run_s) else entry
    except (ValueError, KeyError, TypeError):
        return None


def store_decision(key: Mapping[str, Any], entry: Entry) -> None:
    """Stores a decision for later runs, and deletes the oldest entries."""
    body = json.loads(json.dumps({"key": key, **to_plain(entry)}))
    write_private(path_of(key), json.dumps({"digest": json_sha256(body), "body": body}))
    with suppress(OSError):
        entries = sorted(cache_folder().glob("decision-*.json"), key=lambda path: path.stat().st_mtime)
        for old in entries[:-MAX_ENTRIES]:
            old.unlink(missing_ok=True)
