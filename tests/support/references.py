"""Every update rule again, written from its paper in float64 and plain loops over steps: for tests only.

Each works on a [rows, cols] matrix (a vector is one row) and takes a mask of elements to leave out, True where finite.
"""

from collections.abc import Callable
from dataclasses import dataclass, field

import torch
from torch import Tensor


@dataclass
class Reference:
    """State and settings of one rule on one matrix; `step` returns the update before the learning rate."""

    beta1: float = 0.9
    beta2: float = 0.999
    eps: float = 1e-8
    t: int = 0
    state: dict[str, Tensor] = field(default_factory=dict)

    def step(self, grad: Tensor, keep: Tensor) -> Tensor:
        """One step on gradients that are 0 where `keep` is False."""
        raise NotImplementedError

    def average(self, name: str, new: Tensor, beta: float, keep: Tensor | None = None) -> Tensor:
        old = self.state.get(name, torch.zeros_like(new))
        mixed = beta * old + (1 - beta) * new
        self.state[name] = mixed if keep is None else torch.where(keep, mixed, old)
        return self.state[name]


def masked_mean(values: Tensor, keep: Tensor, dim: int) -> Tensor:
    return (values * keep).sum(dim) / keep.sum(dim).clamp(min=1)


class AdamW(Reference):
    def step(self, grad: Tensor, keep: Tensor) -> Tensor:
        self.t += 1
        m = self.average("m", grad, self.beta1, keep) / (1 - self.beta1**self.t)
        v = self.average("v", grad**2, self.beta2, keep) / (1 - self.beta2**self.t)
        return m / (v.sqrt() + self.eps)


class RmsProp(Reference):
    def step(self, grad: Tensor, keep: Tensor) -> Tensor:
        self.t += 1
        v = self.average("v", grad**2, self.beta2, keep) / (1 - self.beta2**self.t)
        return grad / (v.sqrt() + self.eps)


@dataclass
class Shared(Reference):
    dim: int = 1

    def step(self, grad: Tensor, keep: Tensor) -> Tensor:
        self.t += 1
        m = self.average("m", grad, self.beta1, keep) / (1 - self.beta1**self.t)
        square = masked_mean(grad**2, keep, self.dim)
        v = self.average("v", square, self.beta2, keep.any(self.dim)) / (1 - self.beta2**self.t)
        return m / (v.sqrt().unsqueeze(self.dim) + self.eps)


@dataclass
class Adafactor(Reference):
    momentum: bool = False

    def step(self, grad: Tensor, keep: Tensor) -> Tensor:
        self.t += 1
        beta2 = 1 - self.t**-0.8
        row = self.average("row", masked_mean(grad**2 + 1e-30, keep, 1), beta2, keep.any(1))
        col = self.average("col", masked_mean(grad**2 + 1e-30, keep, 0), beta2, keep.any(0))
        numerator = grad
        if self.momentum:
            numerator = self.average("m", grad, self.beta1, keep) / (1 - self.beta1**self.t)
        v = row.unsqueeze(1) * col.unsqueeze(0) / row.mean()
        update = torch.where(keep, numerator / v.sqrt(), 0.0)
        rms = (update.square().sum() / keep.sum()).sqrt()
        return update / rms.clamp(min=1.0)


class Lion(Reference):
    def step(self, grad: Tensor, keep: Tensor) -> Tensor:
        m = self.state.get("m", torch.zeros_like(grad))
        update = (self.beta1 * m + (1 - self.beta1) * grad).sign()
        self.average("m", grad, 0.99, keep)
        return update


class Signum(Reference):
    def step(self, grad: Tensor, keep: Tensor) -> Tensor:
        return self.average("m", grad, self.beta1, keep).sign()


class Sign(Reference):
    def step(self, grad: Tensor, keep: Tensor) -> Tensor:
        return grad.sign()


@dataclass
class ColumnNorm(Reference):
    momentum: bool = False

    def step(self, grad: Tensor, keep: Tensor) -> Tensor:
        if self.momentum:
            grad = self.average("m", grad, self.beta1, keep)
        update = torch.zeros_like(grad)
        for j in range(grad.shape[1]):
            length = grad[keep[:, j], j].square().sum().sqrt()
            if length > 0:
                update[:, j] = grad[:, j] / length
        return update


class Muon(Reference):
    """By singular values: the quintic is a polynomial of each, so no product of matrices is iterated."""

    def step(self, grad: Tensor, keep: Tensor) -> Tensor:
        old = self.state.get("m", torch.zeros_like(grad))
        self.state["m"] = torch.where(keep, self.beta1 * old + (1 - self.beta1) * grad, old)
        mixed = torch.where(keep, (1 - self.beta1) * grad + self.beta1 * self.state["m"], 0.0)
        size = mixed.norm()
        if size == 0:
            return mixed
        left, singular, right = torch.linalg.svd(mixed / size, full_matrices=False)
        for _ in range(5):
            singular = 3.4445 * singular - 4.7750 * singular**3 + 2.0315 * singular**5
        rows, cols = grad.shape
        return (left * singular) @ right * max(1.0, rows / cols) ** 0.5


@dataclass
class Foam(Reference):
    level: int = 1

    def step(self, grad: Tensor, keep: Tensor) -> Tensor:
        self.t += 1
        size = 2**self.level
        count = -(-grad.shape[1] // size)
        folded = torch.zeros(grad.shape[0], count, dtype=grad.dtype)
        some = torch.zeros(grad.shape[0], count, dtype=torch.bool)
        for j in range(count):
            part, kept = grad[:, j * size : (j + 1) * size], keep[:, j * size : (j + 1) * size]
            divisor = kept.sum(1) + (size - part.shape[1])  # zeros of the padding count, excluded elements do not
            folded[:, j] = part.sum(1) / divisor.clamp(min=1)
            some[:, j] = divisor > 0
        m = self.average("m", folded, self.beta1, some)
        v = self.average("v", folded**2, self.beta2, some)

        def unfold(values: Tensor) -> Tensor:
            return values.repeat_interleave(size, dim=1)[:, : grad.shape[1]]

        residual = grad - unfold(folded)
        update = 0.25 * (unfold(m) + residual) / ((unfold(v) + residual**2).sqrt() + self.eps)
        return update * (1 - self.beta2**self.t) ** 0.5 / (1 - self.beta1**self.t)


REFERENCES: dict[str, Callable[[], Reference]] = {
    "adamw": AdamW,
    "rmsprop": RmsProp,
    "adamw_shared_in": lambda: Shared(dim=1),
    "adamw_shared_out": lambda: Shared(dim=0),
    "adafactor": Adafactor,
    "adafactor_momentum": lambda: Adafactor(momentum=True),
    "lion": Lion,
    "signum": Signum,
    "sign": Sign,
    "column_norm": ColumnNorm,
    "column_norm_momentum": lambda: ColumnNorm(momentum=True),
    "muon": Muon,
    **{f"foam_l{n}": (lambda n=n: Foam(level=n)) for n in (1, 2, 3)},
}
