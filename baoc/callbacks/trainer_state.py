"""State of a Trainer for which Lightning 2.6 has no public name: the only file to change for another Lightning."""

from typing import Any

import lightning as L
from lightning.fabric.utilities.apply_func import convert_tensors_to_scalars


def fast_dev_run(trainer: L.Trainer) -> bool:
    """True in a `fast_dev_run`, which must write no checkpoints."""
    return bool(getattr(trainer, "fast_dev_run", False))


def accumulating(trainer: L.Trainer) -> bool:
    """True if no optimizer step follows the batch that has just ended."""
    return trainer.fit_loop._should_accumulate()


def logs_now(trainer: L.Trainer) -> bool:
    """Whether Lightning will log this batch's values: at each `log_every_n_steps`-th optimizer step."""
    every = int(getattr(trainer, "log_every_n_steps", 0))
    if accumulating(trainer):
        return False
    return fast_dev_run(trainer) or (every > 0 and trainer.global_step % every == 0)


def values_to_log(trainer: L.Trainer) -> tuple[dict[str, Any], int]:
    """(values, step) that Lightning will pass to the loggers for the batch that has just ended."""
    values: dict[str, Any] = convert_tensors_to_scalars(trainer._logger_connector.metrics["log"])
    step = values.pop("step", None)
    if step is None:
        values.setdefault("epoch", trainer.current_epoch)
        step = trainer.fit_loop.epoch_loop._batches_that_stepped
    return values, int(step)


def is_final_batch(trainer: L.Trainer) -> bool:
    """Whether training ends with the batch that has just ended, by `max_steps` or at the end of the last epoch."""
    if 0 < trainer.max_steps <= trainer.global_step:
        return True
    last_epoch = trainer.max_epochs is not None and 0 < trainer.max_epochs <= trainer.current_epoch + 1
    return last_epoch and trainer.fit_loop.epoch_loop.batch_progress.is_last_batch


def validation_follows(trainer: L.Trainer) -> bool:
    """Whether Lightning will validate after the batch that has just ended."""
    fetcher = trainer.fit_loop._data_fetcher
    return fetcher is not None and trainer.fit_loop.epoch_loop._should_check_val_fx(fetcher)


def forget_sigterm(trainer: L.Trainer) -> None:
    """Keeps Lightning from ending the run for a SIGTERM that it has received."""
    trainer._signal_connector.received_sigterm = False
