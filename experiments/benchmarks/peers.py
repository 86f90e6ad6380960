"""Other people's optimizers for optimizer_step.py, as far as installed: bitsandbytes, torchao, FlashOptim, Gefen.

None is a dependency: who wants them beside ours installs them (pip install bitsandbytes torchao flashoptim gefen).
"""

from collections.abc import Callable, Iterator, Sequence
from importlib import import_module
from importlib.metadata import PackageNotFoundError, version
from typing import Any, NamedTuple

import torch
from torch import Tensor

FLOAT32, BFLOAT16 = torch.float32, torch.bfloat16


class Peer(NamedTuple):
    """An optimizer: its package, what it is called in the table, the type of its parameters, and how it is made."""

    package: str
    name: str
    dtype: torch.dtype
    make: Callable[[Any, Sequence[Tensor]], torch.optim.Optimizer]


PEERS = (
    Peer("bitsandbytes", "bnb_adamw8", FLOAT32, lambda bnb, ps: bnb.optim.AdamW8bit(ps, lr=1e-3)),
    Peer("bitsandbytes", "bnb_adamw8/bf16", BFLOAT16, lambda bnb, ps: bnb.optim.AdamW8bit(ps, lr=1e-3)),
    Peer(
        "flashoptim", "flash_adamw8/bf16+8", BFLOAT16,
        lambda flash, ps: flash.FlashAdamW(ps, lr=1e-3, quantize=True, master_weight_bits=24),
    ),
    Peer(
        "flashoptim", "flash_lion8/bf16+8", BFLOAT16,
        lambda flash, ps: flash.FlashLion(ps, lr=1e-4, quantize=True, master_weight_bits=24),
    ),
    Peer("gefen", "gefen", FLOAT32, lambda gefen, ps: gefen.Gefen(ps, lr=1e-3)),
    Peer("torchao.optim", "torchao_adamw8", FLOAT32, lambda ao, ps: ao.AdamW8bit(ps, lr=1e-3)),
    Peer("torchao.optim", "torchao_adamw4", FLOAT32, lambda ao, ps: ao.AdamW4bit(ps, lr=1e-3)),
)  # fmt: skip


def installed() -> Iterator[tuple[Peer, Any, str]]:
    """Peers that can be imported, their modules and versions; a line for each package that cannot be."""
    absent: dict[str, str] = {}
    for peer in PEERS:
        package = peer.package.partition(".")[0]
        if package in absent:
            continue
        try:
            module = import_module(peer.package)
            yield peer, module, f"{package} {_version(package)}"
        except Exception as error:  # a package built for another torch fails in its own way
            absent[package] = f"{type(error).__name__}: {str(error)[:120]}"
            print(f"peer absent: {package} ({absent[package]})", flush=True)


def _version(package: str) -> str:
    try:
        return version(package)
    except PackageNotFoundError:
        return "?"
