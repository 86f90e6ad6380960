"""Replaces `auto` and null by values for the device: model size, learning rate, micro-batch and precision.

`config.yaml` keeps what the user set; all later stages read the resolved values.
"""

from dataclasses import dataclass, replace

from baoc.config.schema import RunConfig
from baoc.errors import BadInputError
from baoc.models import OWN_SIZE, ModelSize, choose_size


@dataclass(frozen=True, slots=True, kw_only=True)
class Resolved:
    """A resolved configuration. `reasons` has one sentence per chosen value, for the start-up summary. `open`: the
    micro-batch search still decides micro-batch and recomputed layers (`training.measure.microbatch_search`), and
    `micro_batch` is a placeholder."""

    config: RunConfig
    size: ModelSize
    size_reason: str
    reasons: tuple[str, ...]
    needs_microbatch_search: bool = False


PLACEHOLDER_MICRO_BATCH = 8  # samples of the example batch while the micro-batch is undecided


def needs_microbatch_search(config: RunConfig, *, device: str) -> bool:
    """Whether the micro-batch search decides micro-batch, recomputed layers and allocation together. It does on request
    (micro_batch or model.checkpointing=auto, or an objective other than quality), and by default on CUDA with limited
    memory and no given micro-batch, but not under fsdp. Released gradients need the whole batch as one micro-batch."""
    if config.mode == "eval":
        return False
    requested = "auto" in (config.micro_batch, config.model.checkpointing) or config.objective != "quality"
    if (config.optim.release_gradients or config.trainer.strategy == "fsdp") and not requested:
        return False
    limited = config.budget.memory_bytes is not None or config.budget.name == "auto"
    supported = config.trainer.precision in (None, "auto", "32-true", "bf16-mixed")
    return requested or (device == "cuda" and config.micro_batch is None and limited and supported)


def choose_device(name: str) -> str:
    """`auto` -> cuda where there is one, else cpu. Raises BadInputError for cuda where there is none."""
    import torch  # which a command that only reads its configuration does without

    if name == "cuda" and not torch.cuda.is_available():
        raise BadInputError("device=cuda, but torch sees no CUDA device: use device=cpu, or a CUDA build of torch")
    return ("cuda" if torch.cuda.is_available() else "cpu") if name == "auto" else name


def largest_divisor(number: int, *, at_most: int) -> int:
    """The largest divisor of `number` that is at most `at_most`."""
    return max(n for n in range(1, min(number, at_most) + 1) if number % n == 0)


def resolve(config: RunConfig, *, device: str) -> Resolved:
    """`config` with every device-dependent value chosen (`cpu` or `cuda`); values that the user set stay."""
    choice = choose_size(config.model.name, size=config.model.size, device=device)
    size, reasons = choice.size, []
    optim, trainer, micro_batch = config.optim, config.trainer, config.micro_batch
    if optim.lr is None:
        optim = replace(optim, lr=size.lr)
        known = f"suits {config.model.name} {size.name}"
        unknown = "is torch's default, as nothing is known of a network of your own"
        reasons.append(f"optim.lr={size.lr:g} {unknown if size.name == OWN_SIZE else known}")
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
    undecided = needs_microbatch_search(config, device=device)
    if undecided and not isinstance(micro_batch, int):
        return Resolved(
            config=replace(config, optim=optim, trainer=trainer, model=replace(config.model, size=size.name)),
            size=size,
            size_reason=choice.why,
            reasons=tuple(reasons),
            needs_microbatch_search=True,
        )
    if not isinstance(micro_batch, int):
        micro_batch = of_device = config.batch_size // config.trainer.devices
        accumulates = device == "cuda" and not optim.release_gradients
        if accumulates and size.micro_batch is not None and size.micro_batch < of_device:
            micro_batch = largest_divisor(of_device, at_most=size.micro_batch)
            reasons.append(f"micro_batch={micro_batch} is meant for {config.model.name} {size.name} in 8 GiB")
    model = replace(config.model, size=size.name)
    return Resolved(
        config=replace(config, optim=optim, trainer=trainer, micro_batch=micro_batch, model=model),
        size=size,
        size_reason=choice.why,
        reasons=tuple(reasons),
        needs_microbatch_search=undecided,
    )
