"""Atomic checkpoints: the newest and the best, each written to a temporary file and renamed.

Lightning's own writer builds the file in memory, moves it from the system's temporary folder (a copy, where that is
another disk) and does not fsync; its ModelCheckpoint warns about folders that are not empty and keeps absolute paths.
"""

import logging
import math
import os
import shutil
from collections import OrderedDict
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager, nullcontext
from functools import reduce
from operator import getitem
from pathlib import Path
from time import monotonic, time
from typing import IO, Any, Literal, cast

import lightning as L
import torch
from lightning.pytorch.callbacks import Checkpoint
from lightning.pytorch.plugins.io import TorchCheckpointIO

from baoc.callbacks.generators import RngState, check_rng
from baoc.callbacks.trainer_state import (
    accumulating,
    fast_dev_run,
    is_final_batch,
    logs_now,
    validation_follows,
    values_to_log,
)
from baoc.callbacks.vote import StepVote, ranks_of
from baoc.errors import DISK_FULL_ERRNOS, CheckpointError, exception_chain
from baoc.parallel import SINGLE_PROCESS, Ranks
from baoc.tracking.checkpoints import (
    CHECKPOINT_FOLDER,
    CHECKPOINT_SCHEMA,
    CHECKPOINT_SUFFIX,
    CHECKSUM_KEY,
    LAST_CHECKPOINT,
    META_KEY,
    SCHEMA_KEY,
    WRITTEN_KEY,
    load_checked,
    newest_first,
)
from baoc.tracking.checksum import ChecksumFile
from baoc.tracking.files import FolderGuard, atomic_write
from baoc.tracking.jsonl import JsonlLogger

log = logging.getLogger(__name__)

_PLAIN = (torch.Tensor, torch.Size, torch.dtype, torch.device, int, float, complex, str, bytes, bool, type(None))


class AtomicCheckpointIO(TorchCheckpointIO):
    """Writes a checkpoint with its checksum to a temporary file of the same folder, fsyncs and renames it; verifies the
    checksum before loading. SafeCheckpoint installs it.

    Raises OutputError on a full disk, CheckpointError for files that are missing, truncated or damaged.
    """

    def save_checkpoint(self, checkpoint: dict[str, Any], path: Any, storage_options: Any | None = None) -> None:
        assert storage_options is None, "local files only"
        with atomic_write(path) as file:
            hashing_file = ChecksumFile(file)
            try:
                torch.save({**checkpoint, CHECKSUM_KEY: True}, cast(IO[bytes], hashing_file))
                hashing_file.append_checksum()
            except RuntimeError as error:
                for cause in exception_chain(error):
                    if isinstance(cause, OSError) and cause.errno in DISK_FULL_ERRNOS:  # torch names file positions
                        raise cause from None
                raise

    def load_checkpoint(self, path: Any, map_location: Any = None, weights_only: bool | None = None) -> dict[str, Any]:
        """Loads any checkpoint of Lightning: a user may resume from one of a Trainer without BAOC."""
        return load_checked(path, baoc_only=False, weights_only=weights_only is not False)


class SafeCheckpoint(Checkpoint):
    """Writes `checkpoints/last.ckpt`, keeps the newest `keep` checkpoints and the best one of a run.

    `last.ckpt` is written every `every_n_steps` optimizer steps, after `every_minutes` since the newest one (or the
    start of the run), and after the last step; with both None, only after the last step. Where validation follows a
    step, the checkpoint is written after it, so that a resumed run does not skip the validation. The last checkpoint is
    written before Lightning closes the epoch, so that a finished run can be extended. With `keep` above 1 older ones
    stay as `step_N.ckpt`. `best_N.ckpt` is written after validations that improve `monitor` (`mode` min or max).

    `meta` describes the run, for `resolve_resume(match=)`. `track(label)` wraps each write, to measure its memory. Once
    `is_ending()` returns True, the checkpoint of the step in progress is written as soon as that step ends. `vote` lets
    all ranks agree that `every_minutes` are over.

    Nothing is written on an exception, because an interrupt may come in the middle of a step. All ranks take part in a
    checkpoint; rank 0 writes it, and its clock and folder decide.
    """

    def __init__(
        self,
        run_dir: str | os.PathLike[str],
        *,
        every_n_steps: int | None = None,
        every_minutes: float | None = None,
        keep: int = 1,
        monitor: str | None = None,
        mode: Literal["min", "max"] = "min",
        meta: Mapping[str, Any] | None = None,
        track: Callable[[str], AbstractContextManager[Any]] | None = None,
        vote: StepVote | None = None,
    ):
        self.folder = Path(run_dir) / CHECKPOINT_FOLDER
        self.every_n_steps = every_n_steps
        self.every_minutes = every_minutes
        self.keep = keep
        self.monitor = monitor
        self.sign = 1.0 if mode == "min" else -1.0
        self.meta = dict(meta or {})
        self.track = track or (lambda label: nullcontext())
        self.is_ending: Callable[[], bool] = lambda: False  # Preemption sets it
        self.best: dict[str, float] = {}  # file name -> monitored value
        self._last_step, self._last_at = 0, monotonic()  # of the newest last.ckpt
        self._newest: tuple[int, Path] | None = None  # step and path of the newest file of any kind
        self._run_dir: FolderGuard | None = None
        self._warned = False
        self._timestamp = 0.0  # in the newest checkpoint, or in the one that the run resumed from
        self._ranks: Ranks = SINGLE_PROCESS
        self._vote = vote or StepVote()
        self._vote.local_values["checkpoint"] = lambda: float(
            self._ranks.rank == 0
            and self.every_minutes is not None
            and monotonic() - self._last_at >= 60 * self.every_minutes
        )

    @property
    def last_path(self) -> Path:
        return self.folder / LAST_CHECKPOINT

    @property
    def best_model_path(self) -> str:
        """Path of the best checkpoint, "" while there is none; Lightning's `ckpt_path="best"` reads it."""
        return next((str(self.folder / name) for name in self.best), "")

    def has_step(self, step: int) -> bool:
        """Whether last.ckpt is the checkpoint of `step`."""
        return step == self._last_step and self.last_path.is_file()

    # -- Lightning ------------------------------------------------------------------------------------------------

    def setup(self, trainer: L.Trainer, pl_module: L.LightningModule, stage: str) -> None:
        self._ranks = self._vote.ranks = ranks_of(trainer)
        if type(trainer.strategy.checkpoint_io) is TorchCheckpointIO:
            trainer.strategy.checkpoint_io = AtomicCheckpointIO()

    def on_train_start(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        self._last_step = trainer.global_step
        self._newest = None
        self._run_dir = FolderGuard(self.folder.parent)
        if self._ranks.rank == 0 and self.folder.is_dir() and not fast_dev_run(trainer):
            self._clean_up(resumed_from=trainer.ckpt_path)

    def on_train_batch_end(
        self, trainer: L.Trainer, pl_module: L.LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        if self._is_due(trainer) and (self.is_ending() or not validation_follows(trainer)):
            _log_before_checkpoint(trainer)
            self._save_last(trainer)

    def on_validation_end(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        if trainer.sanity_checking or trainer.state.fn != "fit" or fast_dev_run(trainer):
            return
        self._save_best(trainer)
        if self._is_due(trainer) and not accumulating(trainer):
            self._save_last(trainer)
        elif self.is_ending() and trainer.global_step == self._last_step:
            self._newest = None  # written before this validation: write again, so that a resumed run skips it
            self._write(trainer, self.last_path)

    def on_train_end(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        if trainer.global_step > self._last_step and not fast_dev_run(trainer):
            self._save_last(trainer)

    def on_save_checkpoint(self, trainer: L.Trainer, pl_module: L.LightningModule, checkpoint: dict[str, Any]) -> None:
        checkpoint[SCHEMA_KEY] = CHECKPOINT_SCHEMA
        self._timestamp = max(time(), self._timestamp + 1e-3)  # a resumed run's clock may be behind the first one's
        checkpoint[META_KEY] = {**self.meta, WRITTEN_KEY: self._timestamp}
        if not self._warned and (unsafe := unsafe_entries(checkpoint)):
            self._warned = True
            log.warning(
                "the checkpoint holds %s, which a safe load refuses: keep tensors and plain values only in "
                "hyperparameters and states, or the run cannot be resumed from it",
                ", ".join(unsafe[:3]),
            )

    def on_load_checkpoint(self, trainer: L.Trainer, pl_module: L.LightningModule, checkpoint: dict[str, Any]) -> None:
        self._timestamp = checkpoint.get(META_KEY, {}).get(WRITTEN_KEY, 0.0)

    def state_dict(self) -> dict[str, Any]:
        return {"best": dict(self.best)}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Takes over the best checkpoints of the resumed run that lie in this run's folder."""
        self.best = {name: value for name, value in state_dict["best"].items() if (self.folder / name).is_file()}

    # -- writing --------------------------------------------------------------------------------------------------

    def _clean_up(self, *, resumed_from: Any) -> None:
        """Cleans up after a killed attempt: deletes temporary files, and renames a last.ckpt that is not resumed from.

        It is named by its own step, so that `_save_last` does not give it another's; a damaged one becomes `*.damaged`.
        """
        for part in (*self.folder.glob(".*.tmp"), *self.folder.parent.glob(".*.tmp")):
            part.unlink(missing_ok=True)
        last = self.last_path
        if not last.is_file() or (resumed_from and os.path.realpath(resumed_from) == os.path.realpath(last)):
            return
        try:
            step = int(load_checked(last)["global_step"])
            last.replace(self.folder / f"step_{step:08d}{CHECKPOINT_SUFFIX}")
        except CheckpointError as error:
            log.warning("%s; it is kept as %s.damaged", error, last.name)
            last.replace(self.folder / f"{last.name}.damaged")

    def _is_due(self, trainer: L.Trainer) -> bool:
        step = trainer.global_step
        if fast_dev_run(trainer) or step == self._last_step:
            return False
        if self.is_ending() and not accumulating(trainer):
            return True
        if self._vote.outcome("checkpoint"):
            return not accumulating(trainer)
        return is_final_batch(trainer) or (self.every_n_steps is not None and step % self.every_n_steps == 0)

    def _save_last(self, trainer: L.Trainer) -> None:
        if self._ranks.rank == 0 and self.keep > 1 and self.last_path.is_file() and self._last_step:
            self.last_path.replace(self.folder / f"step_{self._last_step:08d}{CHECKPOINT_SUFFIX}")
            paths = list(self.folder.glob(f"step_*{CHECKPOINT_SUFFIX}"))
            if len(paths) >= self.keep:  # `newest_first` opens each file, as an abandoned attempt may have higher steps
                for path in newest_first(paths)[self.keep - 1 :]:
                    path.unlink(missing_ok=True)
        self._last_step, self._last_at = trainer.global_step, monotonic()
        self._vote.reset("checkpoint")
        self._write(trainer, self.last_path)

    def _save_best(self, trainer: L.Trainer) -> None:
        value = trainer.callback_metrics.get(self.monitor) if self.monitor else None
        if value is None or not torch.isfinite(value):
            return
        score, before = float(value), self.best
        if self._ranks.broadcast(any(self.sign * score >= self.sign * best for best in before.values())):
            return
        self.best = {f"best_{trainer.global_step:08d}{CHECKPOINT_SUFFIX}": score}
        (name,) = self.best
        self._write(trainer, self.folder / name)
        for other in before.keys() - self.best:
            (self.folder / other).unlink(missing_ok=True)

    def _write(self, trainer: L.Trainer, path: Path) -> None:
        """Writes a checkpoint to `path`, or links it to the one of this step that was written under another name."""
        if self._run_dir is not None:
            self._run_dir.check()
        newest, step = self._newest, trainer.global_step
        if newest is not None and self._ranks.broadcast(newest[0] == step and newest[1].is_file()):
            if self._ranks.rank == 0:
                _link(newest[1], path)
        else:
            with self.track("checkpoint"):
                trainer.save_checkpoint(path, weights_only=False)
        self._newest = (step, path)


def _log_before_checkpoint(trainer: L.Trainer) -> None:
    """Writes the batch's line of metrics.jsonl before its checkpoint. Lightning logs after all callbacks; a kill in
    between would lose the line, because a resumed run starts after this step."""
    if logs_now(trainer):
        values, step = values_to_log(trainer)
        for logger in trainer.loggers if values else ():
            if isinstance(logger, JsonlLogger):
                logger.log_metrics(values, step=step)


def _link(source: Path, path: Path) -> None:
    """Gives `path` the content of `source`: by a hard link, or a copy where the file system has none."""
    temporary = path.with_name(f".{path.name}.link.tmp")
    temporary.unlink(missing_ok=True)
    try:
        os.link(source, temporary)
        temporary.replace(path)
    except OSError:
        with atomic_write(path) as file, source.open("rb") as content:
            shutil.copyfileobj(content, file)


def unsafe_entries(value: Any, *, path: str = "") -> list[str]:
    """Lists what `torch.load(weights_only=True)` would refuse in a checkpoint: `path (type)` of each value."""
    if isinstance(value, _PLAIN):
        return []
    if type(value) in (dict, OrderedDict):
        return [entry for key, item in value.items() for entry in unsafe_entries(item, path=f"{path}/{key}")]
    if type(value) in (list, tuple, set):
        return [entry for index, item in enumerate(value) for entry in unsafe_entries(item, path=f"{path}/{index}")]
    return [f"{path[1:]} ({type(value).__name__})"]


# -- what a run goes on from -----------------------------------------------------------------------------------------


def check_contents(content: Mapping[str, Any]) -> None:
    """Raises CheckpointError, whose text follows a file's name, unless a run can go on from what a checkpoint holds:
    else Lightning starts afresh whatever is not there."""
    for key, is_right, wanted in _CONTENTS:
        if key not in content:
            raise CheckpointError(f"lacks {key!r}, so it is damaged or was not written by a run of ours")
        if not is_right(content[key]):
            raise CheckpointError(f"has a {key!r} that is not {wanted}: it is damaged")
    if not content["lr_schedulers"] and _progress(content["loops"], "scheduler_progress"):
        raise CheckpointError("has no steps of the schedule that its run had, which would start anew: it is damaged")
    done = _progress(content["loops"], "automatic_optimization.optim_progress", "optimizer", "step")
    if done != content["global_step"]:
        raise CheckpointError(f"is of step {content['global_step']}, and its loops of step {done}: it is damaged")
    for name, tensor in content["state_dict"].items():
        if not _is_finite(tensor):
            raise CheckpointError(f"has weights {name} that are NaN or infinite: the run had diverged")
    generators = content["callbacks"].get(RngState.__qualname__)
    if generators is None:
        raise CheckpointError("lacks the state of the random generators, without which a run does not go on exactly")
    try:
        check_rng(generators)
    except Exception as error:  # of three libraries' generators
        raise CheckpointError(f"has states of random generators that none takes ({error}): it is damaged") from error


def _is_finite(tensor: torch.Tensor) -> bool:
    """Whether no value is NaN or infinite: a network of the user's own may have buffers of any type and layout."""
    if tensor.layout is not torch.strided:
        tensor = tensor._values() if tensor.layout is torch.sparse_coo else tensor.values()
    tensor = torch.view_as_real(tensor) if tensor.is_complex() else tensor
    if tensor.is_meta or not tensor.is_floating_point() or not tensor.numel():
        return True  # restoring tells of what has no values
    tensor = tensor.float() if tensor.element_size() == 1 else tensor  # of 8 bits torch knows no extremes
    return math.isfinite(sum(map(float, tensor.aminmax())))


def _is_count(value: object) -> bool:
    return type(value) is int and 0 <= value < 2**63


def _progress(loops: Mapping[str, Any], part: str, *keys: str) -> int | None:
    """Completed steps of a part of the loop by Lightning's saved progress; None if that is missing."""
    try:
        return reduce(getitem, (*keys, "total", "completed"), loops["fit_loop"][f"epoch_loop.{part}"])
    except (KeyError, TypeError):
        return None


# Keys of a run's checkpoint: (key, check of its value, what the value has to be).
_CONTENTS: tuple[tuple[str, Callable[[Any], bool], str], ...] = (
    ("global_step", _is_count, "a count"),
    ("epoch", _is_count, "a count"),
    (
        "state_dict",
        lambda it: isinstance(it, Mapping) and bool(it) and all(isinstance(t, torch.Tensor) for t in it.values()),
        "tensors by name",
    ),
    (
        "optimizer_states",
        lambda it: isinstance(it, list) and len(it) == 1 and isinstance(it[0], Mapping) and "state" in it[0],
        "the states of one optimizer",
    ),
    (
        "lr_schedulers",
        lambda it: (
            isinstance(it, list)
            and all(isinstance(each, Mapping) and _is_count(each.get("last_epoch", 0)) for each in it)
        ),
        "the steps of schedules",
    ),
    ("loops", lambda it: isinstance(it, Mapping), "the progress of loops"),
    ("callbacks", lambda it: isinstance(it, Mapping), "states by callback"),
    (
        "hyper_parameters",
        lambda it: isinstance(it, Mapping) and isinstance(it.get("optimizer", {}), Mapping),
        "by name",
    ),
)
