"""The configuration of a run as frozen dataclasses: one per group of conf/, and `RunConfig` with all of them.

Free of Hydra and torch. `validate.build_settings` checks types, ranges and choices by the annotations; `__post_init__`
has the checks that join several fields. Defaults repeat those of conf/, so that a test can make a RunConfig without
composing.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field, fields, replace
from typing import Annotated, Any, Literal

from baoc.config.dynamics import DynamicsConfig
from baoc.config.race import RaceConfig
from baoc.config.trainer_arguments import TrainerConfig
from baoc.config.validate import FROM_0, OFF, SHARE, Allowed, at_least
from baoc.core.catalogue import MAX_LR, MIN_EPS
from baoc.core.recipes import Recipe
from baoc.errors import BadInputError
from baoc.planning.cards import CARDS
from baoc.types import Budget

_NAME_CHARACTERS = "letters, digits and . , = + - _ only, as it names the run folder"
_NUM_LAYERS = at_least(0, " layers, true, false, auto or null")
_Beta = Annotated[float, Allowed(ge=0, lt=1)]


@dataclass(frozen=True, slots=True, kw_only=True)
class TaskConfig:
    """The task, which decides loss and metric. `options` are those of its entry in `baoc.tasks.TASKS`.

    Each file of conf/model selects a task.
    """

    name: str = "vision"
    options: Mapping[str, Any] = field(default_factory=dict)


@dataclass(frozen=True, slots=True, kw_only=True)
class LoraConfig:
    """Low-rank adapters (peft); all other parameters are frozen.

    `rank` null is no adapters, `alpha` null twice the rank. `targets` are suffixes of module names; empty means every
    linear layer except the head.
    """

    rank: Annotated[int, at_least(1, ", or null for no adapters")] | None = None
    alpha: Annotated[float, Allowed("above 0, or null for twice the rank", gt=0)] | None = None
    targets: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        if self.rank is None and (self.alpha is not None or self.targets):
            raise BadInputError("model.lora.alpha and model.lora.targets need a model.lora.rank, such as 8")


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelConfig:
    """The network and its preparation. `options` are those of its entry in `baoc.models.MODELS`.

    Attributes:
        pretrained: Folder or safetensors file to start from; null starts at random.
        new_head: Skip the file's head, for other classes.
        freeze: Patterns of parameter names that are not trained.
        activations: bf16 keeps norms and the residual stream in bf16 too; bf16-mixed alone computes them in float32.
        checkpointing: Layers whose activations are recomputed in backward: all, none, or the first N. auto decides it
            with the micro-batch; null is auto where a micro-batch is decided, else false.
        compile: Run the layers by torch.compile in training. auto leaves it to the same decision, on a GPU.
    """

    name: str = "vit"
    size: str = "auto"
    pretrained: str | None = None
    new_head: bool = False
    freeze: tuple[str, ...] = ()
    lora: LoraConfig = field(default_factory=LoraConfig)
    activations: Literal["bf16"] | None = None
    checkpointing: bool | Annotated[int, _NUM_LAYERS] | Literal["auto"] | None = None
    compile: bool | Literal["auto"] = False
    options: Mapping[str, Any] = field(default_factory=dict)

    def __post_init__(self) -> None:
        if self.new_head and self.pretrained is None:
            raise BadInputError("model.new_head=true is about pretrained weights: give model.pretrained=PATH as well")


@dataclass(frozen=True, slots=True, kw_only=True)
class DatasetConfig:
    """The data set. `path` null uses the embedded or installed data. `options` are those of its entry in DATASETS."""

    name: str = "digits"
    path: str | None = None
    options: Mapping[str, Any] = field(default_factory=dict)


@dataclass(frozen=True, slots=True, kw_only=True)
class BlocksConfig:
    """How parameters are grouped into blocks: by the model's own declaration, then by `patterns`, then by `by`.

    `patterns` are (block name, regular expression or glob) pairs; the first match wins.
    """

    by: Literal["auto", "layer_role", "layer_part", "layer", "role", "tensor", "model"] = "auto"
    patterns: tuple[tuple[str, str], ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class CatalogueConfig:
    """The specs that the allocator may choose (names or globs), and the roles that stay on fp32 AdamW."""

    specs: Annotated[tuple[str, ...], Allowed("at least one name or pattern", min_length=1)] = ("*",)
    keep_fp32_roles: tuple[str, ...] = ("embedding", "head", "norm")


@dataclass(frozen=True, slots=True, kw_only=True)
class RiskConfig:
    """The risk model, and the weight of each of its terms. A term that is absent has weight 1."""

    name: str = "measured"
    weights: Mapping[str, Annotated[float, FROM_0]] = field(default_factory=dict)


@dataclass(frozen=True, slots=True, kw_only=True)
class AllocatorConfig:
    name: str = "exact"


@dataclass(frozen=True, slots=True, kw_only=True)
class ReallocationConfig:
    """`once` chooses the allocation again after `warmup_steps` optimizer steps, by the gradients of these steps."""

    mode: Annotated[Literal["off", "once"], OFF] = "off"
    warmup_steps: Annotated[int, at_least(2, " (step 0 is skipped)")] = 40


@dataclass(frozen=True, slots=True, kw_only=True)
class OptimConfig:
    """Settings that all update rules share.

    Attributes:
        lr: Peak learning rate; null depends on the model's size.
        warmup_fraction: Share of the steps in which the learning rate rises linearly to `lr`; then `schedule` follows.
        final_lr_fraction: Cosine ends at this share of `lr`.
        matching: Scales updates of rules without momentum to the RMS of AdamW's update, without its momentum
            (`displacement`) or with it (`rms`).
        nonfinite: A NaN or infinity in a gradient skips its element, skips the step, or stops the run.
        release_gradients: Gradient release: step each block in backward and free its gradients, which needs one
            micro-batch per batch. null leaves it to the micro-batch search, and is false without a search.
    """

    lr: (
        Annotated[float, Allowed("above 0, or null for what suits the model, and at most 1e30", gt=0, le=MAX_LR)] | None
    ) = None
    betas: Annotated[tuple[_Beta, _Beta], Allowed("two numbers in [0, 1)")] = (0.9, 0.999)
    eps: Annotated[float, Allowed("at least 1.18e-38, as fp32 rounds less", ge=MIN_EPS)] = 1e-8
    weight_decay: Annotated[float, FROM_0] = 1e-2
    warmup_fraction: Annotated[float, SHARE] = 0.1
    schedule: Literal["cosine", "constant"] = "cosine"
    final_lr_fraction: Annotated[float, SHARE] = 0.1
    backend: Literal["auto", "eager", "fused", "native"] = "auto"
    matching: Literal["rms", "displacement"] = "displacement"
    nonfinite: Literal["skip_element", "skip_step", "raise"] = "skip_element"
    release_gradients: bool | None = None

    def __post_init__(self) -> None:
        if self.release_gradients and self.nonfinite == "skip_step":
            raise BadInputError(
                "optim.nonfinite=skip_step cannot be had with optim.release_gradients=true, where blocks are stepped "
                "before the last gradient is known: use skip_element or raise"
            )


@dataclass(frozen=True, slots=True, kw_only=True)
class WandbConfig:
    """`mode=auto` is online if there is a key and a network, else offline; the run never waits for a network."""

    project: str = "baoc"
    entity: str | None = None
    mode: Literal["auto", "online", "offline", "disabled"] = "auto"


@dataclass(frozen=True, slots=True, kw_only=True)
class LoggerConfig:
    """Loggers beside `metrics.jsonl`, which is always written."""

    names: tuple[Literal["jsonl", "csv", "wandb"], ...] = ("jsonl",)
    wandb: WandbConfig = field(default_factory=WandbConfig)


@dataclass(frozen=True, slots=True, kw_only=True)
class CheckpointConfig:
    """A checkpoint is written every `every_n_steps` or `every_minutes`, whichever comes first (null: never), and at the
    end. The newest `keep` checkpoints stay. `export` writes the final weights as safetensors for the model's library.
    """

    every_n_steps: Annotated[int, at_least(1, ", or null")] | None = None
    # A long run that is killed loses minutes at most; a short one spends no time on checkpoints.
    every_minutes: Annotated[float, Allowed("more than 0, or null", gt=0)] | None = 10.0
    keep: Annotated[int, at_least(1)] = 1
    export: bool = True


@dataclass(frozen=True, slots=True, kw_only=True)
class FaultsConfig:
    """`patience`: number of steps in a row with a NaN or infinite loss that ends the run; fewer are skipped."""

    patience: Annotated[int, at_least(1, " steps")] = 20


@dataclass(frozen=True, slots=True, kw_only=True)
class RunConfig:
    """One run: the argument of `baoc.training.run.run` and the content of `config.yaml` in the run folder."""

    name: Annotated[str, Allowed(_NAME_CHARACTERS, pattern=r"^[\w.,=+-]+$")] = "run"
    seed: Annotated[int, Allowed("a whole number from 0 to 4294967295", ge=0, lt=2**32)] = 0
    mode: Literal["train", "eval", "plan", "race"] = "train"
    device: Literal["auto", "cpu", "cuda", "h100", "h200", "a100", "rtx4090"] = "auto"
    resume: str | None = None  # null | auto | path of a run folder or checkpoint
    objective: Literal["quality", "throughput", "balanced"] = "quality"
    batch_size: Annotated[int, at_least(1, " samples")] = 64  # global: samples per optimizer step
    # Samples per forward pass on each device; null searches for it on CUDA only (docs/budgets.md).
    micro_batch: Annotated[int, at_least(1, " samples, auto or null")] | Literal["auto"] | None = None
    task: TaskConfig = field(default_factory=TaskConfig)
    model: ModelConfig = field(default_factory=ModelConfig)
    dataset: DatasetConfig = field(default_factory=DatasetConfig)
    budget: Budget = field(default_factory=lambda: Budget(name="unlimited"))
    dynamics: DynamicsConfig = field(default_factory=DynamicsConfig)  # written under `budget`
    blocks: BlocksConfig = field(default_factory=BlocksConfig)
    catalogue: CatalogueConfig = field(default_factory=CatalogueConfig)
    risk: RiskConfig = field(default_factory=RiskConfig)
    allocator: AllocatorConfig = field(default_factory=AllocatorConfig)
    recipe: Recipe | None = None  # replaces the allocator
    race: RaceConfig = field(default_factory=RaceConfig)
    reallocation: ReallocationConfig = field(default_factory=ReallocationConfig)
    trainer: TrainerConfig = field(default_factory=lambda: TrainerConfig(max_steps=400, gradient_clip_val=1.0))
    optim: OptimConfig = field(default_factory=OptimConfig)
    logger: LoggerConfig = field(default_factory=LoggerConfig)
    checkpoint: CheckpointConfig = field(default_factory=CheckpointConfig)
    faults: FaultsConfig = field(default_factory=FaultsConfig)

    def __post_init__(self) -> None:
        if isinstance(self.micro_batch, int) and self.batch_size % (self.micro_batch * self.trainer.devices):
            on_each = f" on each of trainer.devices={self.trainer.devices}" if self.trainer.devices > 1 else ""
            raise BadInputError(
                f"micro_batch={self.micro_batch}{on_each} does not divide batch_size={self.batch_size}, so "
                "their quotient is no number of accumulation steps: choose a micro_batch that divides, or null for "
                "no accumulation"
            )
        if self.micro_batch is None and self.batch_size % self.trainer.devices:
            raise BadInputError(
                f"batch_size={self.batch_size} is of all devices together, and trainer.devices={self.trainer.devices} "
                "does not divide it: choose one that it divides"
            )
        if self.optim.release_gradients and isinstance(self.micro_batch, int) and self.accumulation != 1:
            raise BadInputError(
                f"optim.release_gradients=true steps in every backward, but micro_batch={self.micro_batch} of "
                f"batch_size={self.batch_size} accumulates {self.accumulation}: set micro_batch=null or "
                f"{self.batch_size}, or optim.release_gradients=false"
            )
        self._check_devices()
        if self.device in CARDS and self.mode != "plan":
            raise BadInputError(
                f"device={self.device} is a card to plan for, not one to run on: add mode=plan, or use device=cuda"
            )
        if self.race.first != "off" and self.mode == "eval":
            raise BadInputError("a race chooses what a run trains with, and mode=eval trains nothing: leave race out")
        if self.mode == "race" and self.resume is not None:
            raise BadInputError(
                f"resume={self.resume} holds no race that mode=race could go on with: give the folder of one, or leave "
                "resume out"
            )
        races = self.mode == "race" or (self.race.first != "off" and self.mode == "train")
        idle = changed_keys(replace(self.race, library=RaceConfig().library), path="race")  # recipe=raced reads it
        if idle and self.race.first == "off" and not races:
            raise BadInputError(
                f"{idle}: of a race, and none is asked for: add race=auto, race=SECONDS or mode=race, or leave it out"
            )
        if races and self.recipe is not None:
            raise BadInputError(
                f"recipe={self.recipe.name} says what every block runs, and a race chooses it: leave one out, or name "
                "it in race.recipes"
            )
        if self.mode == "eval" and self.resume is None:
            raise BadInputError("mode=eval evaluates a checkpoint: name it with resume=PATH, or resume=auto")

    def _check_devices(self) -> None:
        if self.trainer.devices > 1 and self.optim.release_gradients:
            raise BadInputError(
                f"optim.release_gradients=true steps before gradients are averaged over trainer.devices="
                f"{self.trainer.devices}: set it to false, or trainer.devices=1"
            )
        if self.trainer.strategy == "fsdp" and self.device in CARDS:
            raise BadInputError(
                f"device={self.device} is planned for as one device that has all of the network: leave "
                "trainer.strategy=fsdp out, or plan on devices that are there"
            )
        if self.trainer.strategy != "fsdp" and self.trainer.reshard_after_forward != "auto":
            raise BadInputError(
                f"trainer.reshard_after_forward={self.trainer.reshard_after_forward} is of trainer.strategy=fsdp: set "
                "that, or leave it out"
            )

    @property
    def micro_batch_size(self) -> int:
        """Samples per forward and backward pass of a device."""
        return self.micro_batch if isinstance(self.micro_batch, int) else self.batch_size // self.trainer.devices

    @property
    def accumulation(self) -> int:
        """Micro-batches per optimizer step on each device."""
        return self.batch_size // (self.micro_batch_size * self.trainer.devices)


def changed_keys(settings: CatalogueConfig | RaceConfig, *, path: str) -> str:
    """The keys whose values are not the defaults: `race.cap_s, race.seeds`."""
    return ", ".join(f"{path}.{key.name}" for key in fields(settings) if getattr(settings, key.name) != key.default)
