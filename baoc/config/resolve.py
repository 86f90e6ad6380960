"""What `auto` and null mean on the device at hand: size of the model, learning rate, micro-batch and precision.

`config.yaml` keeps what the user said; from here on every stage reads plain values.
"""

from dataclasses import dataclass, replace

from baoc.config.schema import RunConfig
from baoc.errors import BadInputError
from baoc.models import ModelSize, choose_size


@dataclass(frozen=True, slots=True, kw_only=True)
class Resolved:
    """`reasons`: one sentence for each value that was chosen, for the start-up summary.

    `open`: micro-batch and checkpointing are still to be decided (`training.measure.microbatch_search`);
    `micro_batch` is a stand-in then.
    """

    config: RunConfig
    size: ModelSize
    size_why: str
    reasons: tuple[str, ...]
    open: bool = False


STAND_IN = 8  # samples of the batch that trials are made of


def is_open(config: RunConfig, *, device: str) -> bool:
    """Whether micro-batch, checkpointing and allocation are to be decided together.

    They are where the user says so (micro_batch=auto, or an objective other than quality), and by themselves on CUDA
    where memory is limited and no micro-batch is given; released gradients make one of the whole batch.
    """
    if config.mode == "eval":
        return False
    asked = config.micro_batch == "auto" or config.objective != "quality"
    if config.optim.release_gradients and not asked:
        return False
    limited = config.budget.memory_bytes is not None or config.budget.name == "auto"
    taken = config.trainer.precision in (None, "auto", "32-true", "bf16-mixed")
    return asked or (device == "cuda" and config.micro_batch is None and limited and taken)


def divisor(number: int, *, most: int) -> int:
    """The largest whole part of `number` that is at most `most`."""
    return max(n for n in range(1, min(number, most) + 1) if number % n == 0)


def resolve(config: RunConfig, *, device: str) -> Resolved:
    """`config` with every choice made that depends on the device (`cpu` or `cuda`); what the user set stays."""
    choice = choose_size(config.model.name, size=config.model.size, device=device)
    size, reasons = choice.size, []
    optim, trainer, micro_batch = config.optim, config.trainer, config.micro_batch
    if optim.lr is None:
        optim = replace(optim, lr=size.lr)
        reasons.append(f"optim.lr={size.lr:g} suits {config.model.name} {size.name}")
    small = config.model.activations == "bf16"
    if trainer.precision == "auto":
        trainer = replace(trainer, precision="bf16-mixed" if device == "cuda" or small else "32-true")
        reasons.append(
            f"trainer.precision={trainer.precision} " + ("for model.activations=bf16" if small else f"on {device}")
        )
    if small and trainer.precision not in ("bf16-mixed", "bf16-true", "bf16"):
        raise BadInputError(
            f"model.activations=bf16 needs layers that take bf16, but trainer.precision={trainer.precision} runs them "
            "in their weights' own type: set trainer.precision=bf16-mixed, or model.activations=null"
        )
    undecided = is_open(config, device=device)
    if undecided and not isinstance(micro_batch, int):
        return Resolved(
            config=replace(config, optim=optim, trainer=trainer, model=replace(config.model, size=size.name)),
            size=size,
            size_why=choice.why,
            reasons=tuple(reasons),
            open=True,
        )
    if not isinstance(micro_batch, int):
        micro_batch = config.batch_size
        accumulates = device == "cuda" and not optim.release_gradients
        if accumulates and size.micro_batch is not None and size.micro_batch < config.batch_size:
            micro_batch = divisor(config.batch_size, most=size.micro_batch)
            reasons.append(f"micro_batch={micro_batch} is meant for {config.model.name} {size.name} in 8 GiB")
    model = replace(config.model, size=size.name)
    return Resolved(
        config=replace(config, optim=optim, trainer=trainer, micro_batch=micro_batch, model=model),
        size=size,
        size_why=choice.why,
        reasons=tuple(reasons),
        open=undecided,
    )
