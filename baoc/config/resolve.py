"""Replaces `auto` and null by values for the device: model size, learning rate, micro-batch and precision.

`config.yaml` keeps what the user set; all later stages read the resolved values.
"""

from dataclasses import dataclass, replace

from baoc.config.schema import RunConfig
from baoc.errors import BadInputError
from baoc.models import OWN_SIZE, ModelSize, choose_size

SEARCHED_PRECISIONS = ("32-true", "bf16-mixed")  # others convert the weights, or have a GradScaler
PLACEHOLDER_MICRO_BATCH = 8  # samples of the example batch while the micro-batch is undecided


@dataclass(frozen=True, slots=True, kw_only=True)
class Resolved:
    """A resolved configuration.

    Attributes:
        size_reason: why this size was chosen, for the start-up summary.
        reasons: one sentence for each other chosen value, for the start-up summary.
        needs_microbatch_search: `training.measure.microbatch_search` has still to decide micro-batch and recomputed
            layers.
    """

    config: RunConfig
    size: ModelSize
    size_reason: str
    reasons: tuple[str, ...]
    needs_microbatch_search: bool = False


def needs_microbatch_search(config: RunConfig, *, device: str) -> bool:
    """Whether the micro-batch search decides micro-batch, recomputed layers and allocation together.

    It does if it is requested: by micro_batch=auto, model.checkpointing=auto, or an objective other than quality. By
    default it also does on CUDA with limited memory and micro_batch=null, except under fsdp and with gradient release,
    which needs the batch as one micro-batch.
    """
    if config.mode == "eval":
        return False
    requested = "auto" in (config.micro_batch, config.model.checkpointing) or config.objective != "quality"
    if (config.optim.release_gradients or config.trainer.strategy == "fsdp") and not requested:
        return False
    limited = config.budget.memory_bytes is not None or config.budget.name == "auto"
    supported = config.trainer.precision in (None, "auto", *SEARCHED_PRECISIONS)
    return requested or (device == "cuda" and config.micro_batch is None and limited and supported)


def choose_device(name: str) -> str:
    """Returns `cpu` or `cuda`; `auto` is cuda if torch sees one. Raises BadInputError for cuda if it sees none."""
    import torch  # here, because a command that only reads its configuration does not need it

    if name == "cuda" and not torch.cuda.is_available():
        raise BadInputError("device=cuda, but torch sees no CUDA device: use device=cpu, or a CUDA build of torch")
    return ("cuda" if torch.cuda.is_available() else "cpu") if name == "auto" else name


def largest_divisor(number: int, *, at_most: int) -> int:
    return max(n for n in range(1, min(number, at_most) + 1) if number % n == 0)


def resolve(config: RunConfig, *, device: str) -> Resolved:
    """`config` with every device-dependent value chosen (`cpu` or `cuda`); values that the user set stay."""
    choice = choose_size(config.model.name, size=config.model.size, device=device)
    size, reasons = choice.size, []
    optim, trainer, micro_batch = config.optim, config.trainer, config.micro_batch
    if optim.lr is None:
        optim = replace(optim, lr=size.lr)
        reason = f"suits {config.model.name} {size.name}"
        if size.name == OWN_SIZE:
            reason = "is torch's default, as nothing is known of a network of your own"
        reasons.append(f"optim.lr={size.lr:g} {reason}")
    is_bf16 = config.model.activations == "bf16"
    if trainer.precision == "auto":
        trainer = replace(trainer, precision="bf16-mixed" if device == "cuda" or is_bf16 else "32-true")
        reasons.append(
            f"trainer.precision={trainer.precision} " + ("for model.activations=bf16" if is_bf16 else f"on {device}")
        )
    if is_bf16 and trainer.precision not in ("bf16-mixed", "bf16-true", "bf16"):
        raise BadInputError(
            f"model.activations=bf16 needs layers that take bf16, but trainer.precision={trainer.precision} runs them "
            "in their weights' own type: set trainer.precision=bf16-mixed, or model.activations=null"
        )
    needs_search = needs_microbatch_search(config, device=device)
    if needs_search and trainer.precision not in (None, *SEARCHED_PRECISIONS):
        raise BadInputError(
            f"micro_batch=auto tries micro-batches at trainer.precision={' or '.join(SEARCHED_PRECISIONS)}, not "
            f"{trainer.precision}: give a micro_batch, or one of these"
        )
    if not isinstance(micro_batch, int) and not needs_search:
        micro_batch = device_batch = config.batch_size // config.trainer.devices
        may_accumulate = device == "cuda" and not optim.release_gradients
        if may_accumulate and size.micro_batch is not None and size.micro_batch < device_batch:
            micro_batch = largest_divisor(device_batch, at_most=size.micro_batch)
            reasons.append(f"micro_batch={micro_batch} is meant for {config.model.name} {size.name} in 8 GiB")
    model = replace(config.model, size=size.name)
    return Resolved(
        config=replace(config, optim=optim, trainer=trainer, micro_batch=micro_batch, model=model),
        size=size,
        size_reason=choice.why,
        reasons=tuple(reasons),
        needs_microbatch_search=needs_search,
    )
