"""Lightning's Trainer arguments in conf/trainer: those passed through, and those that BAOC sets itself."""

import re
from collections.abc import Mapping
from dataclasses import dataclass, fields
from typing import Any, Literal

from baoc.config.strict import require

TRAINER_OWNED: Mapping[str, str] = {
    "accelerator": "set device=auto|cpu|cuda",
    "accumulate_grad_batches": "set micro_batch: accumulation is batch_size / micro_batch",
    "barebones": "it would switch off what a budget needs",
    "callbacks": "use BaocStrategy in a Trainer of your own",
    "default_root_dir": "set hydra.run.dir",
    "enable_autolog_hparams": "config.yaml in the run folder holds every value",
    "enable_checkpointing": "set checkpoint.every_n_steps and checkpoint.keep",
    "fast_dev_run": "use debug=fast_dev",
    "limit_predict_batches": "a run trains and validates only",
    "limit_test_batches": "a run trains and validates only",
    "logger": "use logger=jsonl|csv|wandb",
    "model_registry": "use BaocStrategy in a Trainer of your own",
    "num_nodes": "start torchrun or srun on each machine",
    "plugins": "use BaocStrategy in a Trainer of your own",
    "strategy": "BAOC is the strategy; use BaocStrategy in a Trainer of your own for another wrapping",
    "sync_batchnorm": "no network here has batch norms",
    "use_distributed_sampler": "loaders give each rank its share",
}

PRECISIONS = ("auto", "32-true", "32", "bf16-mixed", "bf16-true", "bf16", "16-mixed", "16-true", "16", "64-true", "64")

# Each a whole number of batches, or a share from 0.0 to 1.0.
_SHARES = ("val_check_interval", "limit_train_batches", "limit_val_batches", "overfit_batches")


@dataclass(frozen=True, slots=True, kw_only=True)
class TrainerConfig:
    """Lightning's Trainer arguments with their own names and defaults. TRAINER_OWNED lists the arguments that BAOC
    sets, each with the setting to use instead. `precision=auto` is resolved for the device (`baoc.config.resolve`).
    `devices`: processes of the run, each with a device of its own, on this machine or as torchrun or srun started them.
    """

    devices: int = 1
    precision: int | str | None = None
    max_epochs: int | None = None
    min_epochs: int | None = None
    max_steps: int = -1
    min_steps: int | None = None
    max_time: str | None = None
    limit_train_batches: int | float | None = None
    limit_val_batches: int | float | None = None
    overfit_batches: int | float = 0.0
    val_check_interval: int | float | None = None
    check_val_every_n_epoch: int | None = 1
    num_sanity_val_steps: int | None = None
    log_every_n_steps: int | None = None
    enable_progress_bar: bool | None = None
    enable_model_summary: bool | None = None
    gradient_clip_val: int | float | None = None
    gradient_clip_algorithm: Literal["norm", "value"] | None = None
    deterministic: bool | Literal["warn"] | None = None
    benchmark: bool | None = None
    inference_mode: bool = True
    profiler: str | None = None
    detect_anomaly: bool = False
    reload_dataloaders_every_n_epochs: int = 0

    def __post_init__(self) -> None:
        allowed = (None, 32, 16, 64, *PRECISIONS)
        require(self.precision in allowed, "trainer.precision", self.precision, f"one of {', '.join(PRECISIONS)}")
        require(self.devices >= 1, "trainer.devices", self.devices, "1 or more")
        require(self.max_steps == -1 or self.max_steps >= 1, "trainer.max_steps", self.max_steps, "1 or more, or -1")
        if self.gradient_clip_val is not None:
            clip = self.gradient_clip_val
            require(clip >= 0, "trainer.gradient_clip_val", clip, "zero or more, or null for no clipping")
        for key in ("max_epochs", *_SHARES[:3], "check_val_every_n_epoch"):
            value = getattr(self, key)
            is_positive = value is None or value > 0 or (key, value) == ("max_epochs", -1)
            require(is_positive, f"trainer.{key}", value, "more than 0, since 0 trains or validates nothing")
        for key in _SHARES:
            value = getattr(self, key)
            is_valid = not isinstance(value, float) or 0 <= value <= 1
            require(is_valid, f"trainer.{key}", value, "a whole number of batches, or a share from 0.0 to 1.0")
        if self.max_time is not None:
            is_duration = re.fullmatch(r"\d+:\d\d:\d\d:\d\d", self.max_time) is not None
            require(is_duration, "trainer.max_time", self.max_time, "days:hours:minutes:seconds, as in '00:12:00:00'")

    def arguments(self) -> dict[str, Any]:
        """Keyword arguments for `lightning.Trainer`, but for its devices."""
        return {item.name: getattr(self, item.name) for item in fields(self) if item.name != "devices"}
