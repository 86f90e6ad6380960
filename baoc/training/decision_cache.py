"""The cache of decisions: the same run on the same card does not measure its options again, nor what a refusal named.

An entry is a file named by the hash of everything that the decision rests on: network, batch, card, budget, versions,
settings. A refusal's `Least` rests on the same, but for the budget's bytes. Entries that are damaged, of another key or
in a folder that another user can write to are ignored.
"""

import hashlib
import inspect
import json
import math
import os
import platform
import sys
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, TypeVar

import torch
from torch import nn

from baoc.cache import CACHE_VARIABLE, cache_folder, json_sha256, read_private, write_private
from baoc.config.environment import package_versions
from baoc.config.options import hash_own_code
from baoc.config.schema import RunConfig
from baoc.parallel import ranks
from baoc.profiling.caller_probe import shapes_of
from baoc.profiling.footprint import PAGES_BYTES
from baoc.profiling.latency import source_hash, timing_key
from baoc.types import Budget, Footprint, LatencyTable, Option, ParamInfo, read_plain, to_plain

MAX_ENTRIES = 256  # the newest ones are kept
# Settings that no decision rests on. The length of a run only matters for `Entry.run_s`.
_RUN = ("name", "mode", "seed", "resume", "logger", "checkpoint", "faults")
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


@dataclass(frozen=True, slots=True, kw_only=True)
class Least:
    """The least memory budget that a refusal named: later runs of this step are refused below it, and fit from it on,
    although another process measures the same step a few of the allocator's pages larger or smaller.

    `footprint` was measured within the named budget, with `recomputed` layers. `entry`: the decision within it, with
    the options that were refused; None where none were searched. Nothing is kept of a loop whose module is not known,
    of one after something was compiled in its process, and of fully_shard. Of several ranks the first keeps and reads
    it.
    """

    num_bytes: int
    footprint: Footprint
    recomputed: int
    entry: Entry | None = None

    def is_of(self, measured: Footprint) -> bool:
        """True if a footprint of this process is of the same step, a page of each size more or less: no key holds all
        that a step does, such as a helper's code. Processes that measured the same step were 17.5 MB apart at most."""
        now, then = (
            replace(footprint, profile_bytes=0, profile_temporary_bytes=0).peak_bytes(state_bytes=0)
            for footprint in (measured, self.footprint)
        )
        return abs(now - then) <= PAGES_BYTES // 2


_Stored = TypeVar("_Stored", Entry, Least)


def least_key(decision_key: Mapping[str, Any]) -> dict[str, Any]:
    """What `Least` rests on, where `decision_key` is what the decision rests on."""
    config = decision_key["config"]
    return {**decision_key, "config": config | {"budget": config["budget"] | {"memory_bytes": None}}, "least": True}


def least_key_of_step(
    inputs: Any,
    *,
    network: nn.Module,
    infos: Sequence[ParamInfo],
    settings: object,
    budget: Budget,
    device: torch.device,
) -> dict[str, Any]:
    """What `Least` rests on, of a step that runs on `inputs` and whose micro-batch is not searched."""
    return {
        "config": [repr(settings), to_plain(replace(budget, name="", memory_bytes=None))],
        "code": _code_of_layers(network),
        "batches": inputs,
        "network": [_hash_of(network), json_sha256(repr(infos), [layer.training for layer in network.modules()])],
        "autocast": [torch.is_autocast_enabled(device.type), str(torch.get_autocast_dtype(device.type))],
        "least": True,
        **_surroundings(device),
    }


def key_of(
    config: RunConfig, *, network: nn.Module, batches: Sequence[Any], budget: Budget, device: torch.device
) -> dict[str, Any]:
    """Everything that a decision rests on, as plain values: of the `batches` their shapes."""
    settings = to_plain(config)
    settings = {key: value for key, value in settings.items() if key not in _RUN}
    settings["trainer"] = {key: value for key, value in settings["trainer"].items() if key not in _TRAINER}
    return {
        "config": settings | {"budget": to_plain(replace(budget, name=""))},
        "code": hash_own_code(config) | _code_of_layers(network),
        "batches": [shapes_of(batch) for batch in batches],
        "network": _hash_of(network),
        **_surroundings(device),
    }


def _hash_of(network: nn.Module) -> str:
    tensors = [*network.named_parameters(), *network.named_buffers()]
    return json_sha256(
        [type(network).__module__, type(network).__qualname__, repr(network)],
        [[name, *shapes_of(tensor), tensor.requires_grad] for name, tensor in tensors],
    )


def _surroundings(device: torch.device) -> dict[str, Any]:
    return {
        "ranks": ranks().size,  # several ranks keep buckets of gradients
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
    """SHA-256 of the files that define the network's layers, by module name, but for torch's and BAOC's, which the key
    has otherwise. Of a script that is run, which may say the budget too, it is the text of each class."""
    kinds = {type(layer) for layer in network.modules()}
    names = sorted({kind.__module__ for kind in kinds} - {"__main__"})
    files = {name: getattr(sys.modules.get(name), "__file__", None) for name in names}
    others = {name: Path(file) for name, file in files.items() if file and name.split(".")[0] not in ("torch", "baoc")}
    code = {name: hashlib.sha256(file.read_bytes()).hexdigest() for name, file in others.items() if file.is_file()}
    for kind in kinds:
        with suppress(OSError, TypeError, SyntaxError):  # typed at a prompt, or edited since
            code |= {kind.__qualname__: json_sha256(inspect.getsource(kind))} if kind.__module__ == "__main__" else {}
    return code


def _card(device: torch.device) -> dict[str, str]:
    host = f"{platform.machine()} {os.cpu_count()} cores"
    if device.type != "cuda":
        return {"processor": host}
    card = torch.cuda.get_device_properties(device)
    driver = _DRIVER.read_text(encoding="utf-8") if _DRIVER.is_file() else ""
    return {"processor": host, "card": f"{card.name}, {card.total_memory} bytes", "driver": json_sha256(driver)}


def path_of(key: Mapping[str, Any]) -> Path:
    return cache_folder() / f"decision-{json_sha256(key)[:32]}.json"


def load_decision(key: Mapping[str, Any]) -> Entry | None:
    """The decision for this key; None if there is no intact one."""
    entry = _load(Entry, key)
    return replace(entry, run_s=math.inf) if entry is not None and math.isnan(entry.run_s) else entry


def load_least(key: Mapping[str, Any]) -> Least | None:
    """What a refusal named for this key; None if there is nothing intact."""
    return _load(Least, key)


def _load(kind: type[_Stored], key: Mapping[str, Any]) -> _Stored | None:
    try:
        stored: Any = json.loads(read_private(path_of(key)) or "")
        body = stored["body"]
        if stored["digest"] != json_sha256(body) or body["key"] != json.loads(json.dumps(key)):
            return None
        return read_plain(kind, body)
    except (ValueError, KeyError, TypeError):
        return None


def store_decision(key: Mapping[str, Any], entry: Entry | Least) -> None:
    """Stores a decision, or what a refusal named, for later runs, and deletes the oldest entries."""
    body = json.loads(json.dumps({"key": key, **to_plain(entry)}))
    write_private(path_of(key), json.dumps({"digest": json_sha256(body), "body": body}))
    with suppress(OSError):
        entries = sorted(cache_folder().glob("decision-*.json"), key=lambda path: path.stat().st_mtime)
        for old in entries[:-MAX_ENTRIES]:
            old.unlink(missing_ok=True)
