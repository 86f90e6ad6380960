"""What `auto` and null mean on the device at hand: size of the model, learning rate, micro-batch and precision.

`config.yaml` keeps what the user said; from here on every stage reads plain values.
"""

from dataclasses import dataclass, replace

from baoc.config.schema import RunConfig
from baoc.models import ModelSize, choose_size


@dataclass(frozen=True, slots=True, kw_only=True)
class Resolved:
    """`reasons`: one sentence for each value that was chosen, for the start-up summary."""

    config: RunConfig
    size: ModelSize
    size_why: str
    reasons: tuple[str, ...]


def resolve(config: RunConfig, *, device: str) -> Resolved:
    """`config` with every choice made that depends on the device (`cpu` or `cuda`); what the user set stays."""
    choice = choose_size(config.model.name, size=config.model.size, device=device)
    size, reasons = choice.size, []
    optim, trainer, micro_batch = config.optim, config.trainer, config.micro_batch
    if optim.lr is None:
        optim = replace(optim, lr=size.lr)
        reasons.append(f"optim.lr={size.lr:g} suits {config.model.name} {size.name}")
    if trainer.precision == "auto":
        trainer = replace(trainer, precision="bf16-mixed" if device == "cuda" else "32-true")
        reasons.append(f"trainer.precision={trainer.precision} on {device}")
    if micro_batch is None:
        micro_batch = config.batch_size
        accumulates = not optim.release_gradients
        if accumulates and device == "cuda" and size.micro_batch is not None and size.micro_batch < config.batch_size:
            micro_batch = max(n for n in range(1, size.micro_batch + 1) if config.batch_size % n == 0)
            reasons.append(f"micro_batch={micro_batch} is meant for {config.model.name} {size.name} in 8 GiB")
    model = replace(config.model, size=size.name)
    return Resolved(
        config=replace(config, optim=optim, trainer=trainer, micro_batch=micro_batch, model=model),
        size=size,
        size_why=choice.why,
        reasons=tuple(reasons),
    )
