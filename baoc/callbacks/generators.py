"""What an exact resume needs beyond Lightning's checkpoint: random number generators, and logs cut where it goes on."""

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
    """Keeps Python's, NumPy's and torch's (CPU, and CUDA of the run's device) generators in the checkpoint.

    They are put back when the first training batch starts, not when the checkpoint is loaded: Lightning restores
    before loaders and sanity checks, which draw numbers too. Place it first among the callbacks, so that whatever
    another callback draws at the start of a batch is drawn after. Loggers that can (`metrics.jsonl`) are told where the
    run goes on, so that steps of a lost attempt are not counted twice. Going on on another type of device is said.

    Of several ranks each has its own generators, which are all in the checkpoint. A rank that there was none of then
    draws its numbers from those of rank 0 and its own number.
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
        # Saved again before any training step, a resumed run must hand on what it has not used yet.
        if self._pending is not None:
            return self._pending
        first, *others = self._ranks.all_gather(capture_rng(self._device))
        return {**first, "others": others} if others else first

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        self._pending = state_dict


def capture_rng(device: torch.device | None = None) -> dict[str, Any]:
    """The global generators as tensors and plain numbers; CUDA's for `device` only, so no other is initialised."""
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
    """Raises what generators raise for a state that is none, without touching those of the process."""
    _set(state, python=random.Random(), numpy=np.random.RandomState(), torch_=torch.Generator())
    if "cuda" in state:
        _bytes(state["cuda"])
        int(state["cuda_device"])


def _set(state: Mapping[str, Any], *, python: Any, numpy: Any, torch_: torch.Generator) -> None:
    kept, arrays = state["python"], state["numpy"]
    python.setstate((kept["version"], tuple(kept["words"].tolist()), kept["gauss"]))
    keys = arrays["keys"].numpy().astype(np.uint32)
    numpy.set_state(("MT19937", keys, arrays["position"], arrays["has_gauss"], arrays["cached"]))
    torch_.set_state(_bytes(state["torch"]))


def restore_rng(state: Mapping[str, Any], *, rank: int = 0) -> None:
    """Puts back what `capture_rng` took on this rank; a CUDA state is left out where there is no such device. A rank of
    which there is no state gets a seed that follows from its number and rank 0's state."""
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
    """Generators want uint8 on the CPU, wherever the checkpoint was loaded to."""
    return state.to(device="cpu", dtype=torch.uint8)
