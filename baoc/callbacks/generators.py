"""What an exact resume needs beyond Lightning's checkpoint: random generators, and logs truncated to the checkpoint."""

import logging
import random
from collections.abc import Mapping
from typing import Any

import lightning as L
import numpy as np
import torch
from torch import Tensor

from baoc.callbacks.vote import ranks_of
from baoc.data.loader import seed_from_numbers
from baoc.parallel import SINGLE_PROCESS, Ranks
from baoc.tracking.jsonl import JsonlLogger

log = logging.getLogger(__name__)


class RngState(L.Callback):
    """Stores the states of Python's, NumPy's and torch's (CPU, and the run's CUDA device) generators in checkpoints.

    They are restored when the first training batch starts, not when the checkpoint is loaded, because Lightning loads
    it before data loaders and sanity checks, which draw numbers too. Place this callback first, so that draws of other
    callbacks at the start of a batch come after. `metrics.jsonl` is truncated to the step of the checkpoint, so that
    steps of a killed attempt are not logged twice. Resuming on another type of device logs a warning.

    A checkpoint holds the generators of each rank. A rank without a state is seeded from rank 0's state and its number.
    """

    def __init__(self) -> None:
        self._pending: dict[str, Any] | None = None
        self._device = torch.device("cpu")
        self._ranks: Ranks = SINGLE_PROCESS

    def setup(self, trainer: L.Trainer, pl_module: L.LightningModule, stage: str) -> None:
        self._device, self._ranks = trainer.strategy.root_device, ranks_of(trainer)

    def on_train_start(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        then = "cuda" if "cuda" in (self._pending or {}) else "cpu"
        if self._pending is not None and then != self._device.type:
            log.warning(
                "the checkpoint was written on %s, this run is on %s: weights and states are taken over; what is drawn "
                "on the device from here on, such as dropout, is not what it would have been there",
                then,
                self._device.type,
            )
        for logger in trainer.loggers:
            if isinstance(logger, JsonlLogger):
                logger.resume_from(step=trainer.global_step)

    def on_train_batch_start(
        self, trainer: L.Trainer, pl_module: L.LightningModule, batch: Any, batch_idx: int
    ) -> None:
        if self._pending is not None:
            restore_rng(self._pending, rank=self._ranks.rank)
            self._pending = None

    def state_dict(self) -> dict[str, Any]:
        # A resumed run that saves before its first training batch passes on the state that it has not used yet.
        if self._pending is not None:
            return self._pending
        first, *others = self._ranks.all_gather(capture_rng(self._device))
        return {**first, "others": others} if others else first

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        self._pending = state_dict


def capture_rng(device: torch.device | None = None) -> dict[str, Any]:
    """States of the global generators as tensors and plain numbers; of CUDA only `device`, to initialise no other."""
    version, words, gauss = random.getstate()
    kind, keys, position, has_gauss, cached = np.random.get_state(legacy=True)
    assert kind == "MT19937", f"NumPy's global generator is a {kind}, which cannot be saved"
    state = {
        "python": {"version": version, "words": torch.tensor(words, dtype=torch.int64), "gauss": gauss},
        "numpy": {
            "keys": torch.from_numpy(np.asarray(keys).astype(np.int64)),
            "position": int(position),
            "has_gauss": int(has_gauss),
            "cached": float(cached),
        },
        "torch": torch.get_rng_state(),
    }
    if device is not None and device.type == "cuda":
        state["cuda"] = torch.cuda.get_rng_state(device)
        state["cuda_device"] = device.index or 0
    return state


def check_rng(state: Mapping[str, Any]) -> None:
    """Raises what generators raise for an invalid state, without changing those of the process."""
    _set(state, python=random.Random(), numpy=np.random.RandomState(), torch_=torch.Generator())
    if "cuda" in state:
        _bytes(state["cuda"])
        int(state["cuda_device"])


def _set(state: Mapping[str, Any], *, python: Any, numpy: Any, torch_: torch.Generator) -> None:
    plain, arrays = state["python"], state["numpy"]
    python.setstate((plain["version"], tuple(plain["words"].tolist()), plain["gauss"]))
    keys = arrays["keys"].numpy().astype(np.uint32)
    numpy.set_state(("MT19937", keys, arrays["position"], arrays["has_gauss"], arrays["cached"]))
    torch_.set_state(_bytes(state["torch"]))


def restore_rng(state: Mapping[str, Any], *, rank: int = 0) -> None:
    """Restores what `capture_rng` returned on this rank, without a CUDA state if that device is missing. A rank without
    a state is seeded from its number and rank 0's state."""
    others = state.get("others", [])
    if rank > len(others):
        seed = seed_from_numbers(rank, *_bytes(state["torch"])[:16].tolist())
        random.seed(seed)
        np.random.seed(seed)
        torch.manual_seed(seed)  # CUDA's too
        return
    state = others[rank - 1] if rank else state
    _set(state, python=random, numpy=np.random, torch_=torch.default_generator)
    if "cuda" in state and state["cuda_device"] < torch.cuda.device_count():
        torch.cuda.set_rng_state(_bytes(state["cuda"]), state["cuda_device"])


def _bytes(state: Tensor) -> Tensor:
    """uint8 on the CPU, as generators need it, from wherever the checkpoint was loaded to."""
    return state.to(device="cpu", dtype=torch.uint8)
