"""How far a step moved parameters."""

from torch import Tensor

LR = 1e-2


def moved_rms(params: dict[str, Tensor], before: dict[str, Tensor]) -> float:
    """RMS over all parameters of what a step did, before the learning rate."""
    total = sum(float((p.detach() - before[n]).double().square().sum()) for n, p in params.items())
    return (total / sum(p.numel() for p in params.values())) ** 0.5 / LR


def copies(params: dict[str, Tensor]) -> dict[str, Tensor]:
    return {name: p.detach().clone() for name, p in params.items()}
