"""How far a step moved parameters."""

from torch import Tensor

from baoc.optim import BlockwiseOptimizer
from baoc.optim.migrate import last_update_rms

LR = 1e-2


def moved_rms(params: dict[str, Tensor], before: dict[str, Tensor]) -> float:
    """RMS over all parameters of what a step did, before the learning rate."""
    total = sum(float((p.detach() - before[n]).double().square().sum()) for n, p in params.items())
    return (total / sum(p.numel() for p in params.values())) ** 0.5 / LR


def last_rms_of(optimizer: BlockwiseOptimizer, block: str) -> float | None:
    """What a move of the block reads from its states."""
    registry = optimizer.registry
    return last_update_rms(registry.live[block], state=registry.state, param_groups=optimizer.param_groups)


def copies(params: dict[str, Tensor]) -> dict[str, Tensor]:
    return {name: p.detach().clone() for name, p in params.items()}
