"""The environment of a run for `env.json` and `result.json`: versions, commit, device, threads, arguments.

Beside the arguments, contains nothing that identifies the machine or its user.
"""

import os
import platform
import subprocess
from collections.abc import Sequence
from contextlib import suppress
from functools import cache
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

from baoc.config import assets
from baoc.tracking.files import write_json

SCHEMA = 1
PACKAGES = ("torch", "lightning", "transformers", "numpy", "scipy", "hydra-core", "optuna", "wandb", "triton")
_VARIABLES = ("OMP_NUM_THREADS", "MKL_NUM_THREADS", "CUDA_VISIBLE_DEVICES", "CUBLAS_WORKSPACE_CONFIG")


def write_environment(path: Path, *, baoc: str, command: str, argv: Sequence[str], device: str) -> None:
    """Writes `env.json`. `baoc`: version of this package; `command` repeats the run; `device`: the configured one."""
    import torch

    content = {
        "schema": SCHEMA,
        "baoc": baoc,
        "commit": commit(),
        "python": platform.python_version(),
        "platform": f"{platform.system()} {platform.machine()}",
        "versions": package_versions(),
        "device": {
            "asked": device,
            "cuda": [torch.cuda.get_device_name(index) for index in range(torch.cuda.device_count())],
            "cpu_threads": torch.get_num_threads(),
            "cpu_count": os.cpu_count(),
        },
        "variables": {name: os.environ[name] for name in _VARIABLES if name in os.environ},
        "command": command,
        "argv": list(argv),  # of the command line; empty in a process of a launcher
    }
    write_json(path, content)


@cache
def commit() -> str:
    """The commit of the checkout, with `-dirty` if tracked files differ from it; `unknown` outside a checkout."""
    root = assets.root()
    if not (root / ".git").exists():
        return "unknown"
    head = _git("rev-parse", "HEAD", folder=root)
    if head is None:
        return "unknown"
    changed = _git("status", "--porcelain", "--untracked-files=no", folder=root)
    return f"{head}-dirty" if changed else head


@cache
def package_versions() -> dict[str, str]:
    """Installed versions of the packages that affect a run's numbers; absent ones are left out."""
    versions = {}
    for package in PACKAGES:
        with suppress(PackageNotFoundError):
            versions[package] = version(package)
    return versions


def _git(*command: str, folder: Path) -> str | None:
    try:
        process = subprocess.run(("git", *command), cwd=folder, capture_output=True, text=True, timeout=10, check=True)
    except (OSError, subprocess.SubprocessError):
        return None
    return process.stdout.strip()
