"""Arguments of Lightning's Trainer in conf/trainer: those passed through, and those that BAOC sets itself."""

from collections.abc import Mapping
from dataclasses import dataclass, fields
from typing import Annotated, Any, Literal

from baoc.config.validate import Allowed, at_least

SET_BY_BAOC: Mapping[str, str] = {  # argument that BAOC sets -> what to use instead, or why there is none
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
    "sync_batchnorm": "each rank keeps BatchNorm statistics of its own",
    "use_distributed_sampler": "loaders give each rank its share",
}

_Precision = Literal[
    "auto", "32-true", "32", "bf16-mixed", "bf16-true", "bf16", "16-mixed", "16-true", "16", "64-true", "64", 32, 16, 64
]
_CLIP_RANGE = "zero or more, or null for no clipping"
_BATCHES = "more than 0, since 0 trains or validates nothing: a whole number of batches, or a share from 0.0 to 1.0"
_Batches = Annotated[Annotated[int, Allowed(ge=1)] | Annotated[float, Allowed(gt=0, le=1)] | None, Allowed(_BATCHES)]
_Overfit = Annotated[
    Annotated[int, Allowed(ge=0)] | Annotated[float, Allowed(ge=0, le=1)],
    Allowed("a whole number of batches, or a share from 0.0 to 1.0"),
]
_Duration = Annotated[str, Allowed("days:hours:minutes:seconds, as in '00:12:00:00'", pattern=r"^\d+:\d\d:\d\d:\d\d$")]
_Norm = Annotated[int, Allowed(_CLIP_RANGE, ge=0)] | Annotated[float, Allowed(_CLIP_RANGE, ge=0)]
_Epochs = Annotated[int, Allowed("more than 0, since 0 trains or validates nothing", ge=1)]
_Steps = Annotated[int, at_least(1, ", or -1")]


@dataclass(frozen=True, slots=True, kw_only=True)
class TrainerConfig:
    """Arguments of `lightning.Trainer` under Lightning's names, and how processes share the network.

    Attributes:
        devices: Number of processes, started on this machine or by torchrun or srun. Each has one device.
        strategy: `ddp` (also `auto`): each process holds the network. `fsdp`: it holds a shard of all weights.
        reshard_after_forward: Whether fsdp frees gathered layers between forward and backward. `auto` keeps them if the
            memory budget then still allows a plan of equal risk.
        precision: `auto` is resolved for the device (`baoc.config.resolve`).
    """

    devices: Annotated[int, at_least(1)] = 1
    strategy: Literal["auto", "ddp", "fsdp"] = "auto"
    reshard_after_forward: bool | Literal["auto"] = "auto"
    precision: _Precision | None = None
    max_epochs: Literal[-1] | _Epochs | None = None
    min_epochs: Annotated[int, at_least(0)] | None = None
    max_steps: Literal[-1] | _Steps = -1
    min_steps: Annotated[int, at_least(0)] | None = None
    max_time: _Duration | None = None
    limit_train_batches: _Batches = None
    limit_val_batches: _Batches = None
    overfit_batches: _Overfit = 0.0
    val_check_interval: _Batches = None
    check_val_every_n_epoch: _Epochs | None = 1
    num_sanity_val_steps: Annotated[int, at_least(-1)] | None = None
    log_every_n_steps: Annotated[int, at_least(0)] | None = None
    enable_progress_bar: bool | None = None
    enable_model_summary: bool | None = None
    gradient_clip_val: _Norm | None = None
    gradient_clip_algorithm: Literal["norm", "value"] | None = None
    deterministic: bool | Literal["warn"] | None = None
    benchmark: bool | None = None
    inference_mode: bool = True
    profiler: Literal["simple", "advanced", "pytorch", "xla"] | None = None
    detect_anomaly: bool = False
    reload_dataloaders_every_n_epochs: Annotated[int, at_least(0)] = 0

    def arguments(self) -> dict[str, Any]:
        """Keyword arguments for `lightning.Trainer`, except devices and strategy, which depend on the launcher."""
        excluded = ("devices", "strategy", "reshard_after_forward")
        return {item.name: getattr(self, item.name) for item in fields(self) if item.name not in excluded}
