"""How a parameter itself is kept: native, bf16 with a correction, or bf16 alone; and moving it from one to another.

With other weights than native the parameter's data is bf16, whatever it was, and everything else reads that; the step
works on the numbers that `master` tells, and `store_` puts back what becomes of them.
"""

from collections.abc import Mapping
from hashlib import blake2b

import torch
from torch import Tensor

from baoc.kernels.weights import merge_weights, round_at_random_, split_weights_
from baoc.optim.codecs.base import lanes
from baoc.types import ParamInfo

CORRECTION = "correction"  # key of the state
CORRECTIONS = {"split8": torch.int8, "split16": torch.int16}
ROUNDED = (torch.bfloat16, torch.float16)
PIECE = 2**20  # elements that are taken in at a time
LOOK = 2**17  # that are looked at at a time, in 1 MiB
PIECE_BYTES = 24 * PIECE  # what that takes at most beside what stays: fp32 numbers and temporaries of splitting them


def seed_of(name: str) -> int:
    """The parameter's own seed for rounding at random, in 32 bits: the same on every rank and after a resume."""
    return int.from_bytes(blake2b(name.encode(), digest_size=4).digest(), "little", signed=True)


def dtype_of(weights: str, *, info: ParamInfo) -> torch.dtype:
    """The type of the parameter's data; native weights have the type that the parameter came with."""
    return getattr(torch, info.dtype) if weights == "native" else torch.bfloat16


def master(param: Tensor, state: Mapping[str, Tensor]) -> Tensor:
    """The numbers that the parameter stands for, fp32 or wider; the parameter itself where it holds them."""
    if CORRECTION in state:
        return merge_weights(param.detach(), state[CORRECTION])
    return param.detach().to(torch.float32) if param.dtype in ROUNDED else param


@torch.no_grad()
def bits_of(param: Tensor) -> int:
    """Sum of the bits of a bf16 parameter, by which it is told from others wherever and however it lies.

    By parts, as torch sums in a wider type what it has cast to it: in one sum that would take 8 bytes per element.
    """
    data = param.detach().view(torch.int16)
    data = data.view(-1) if data.is_contiguous() else data
    total = torch.zeros((), dtype=torch.int64, device=data.device)
    for part in data.split(max(1, LOOK // max(1, data[:1].numel()))):
        total += part.sum(dtype=torch.int64)
    return int(total)


@torch.no_grad()
def store_(
    param: Tensor,
    state: Mapping[str, Tensor],
    values: Tensor,
    *,
    weights: str,
    name: str,
    phase: int | None = None,
    first: int = 0,
) -> None:
    """Keeps `values`, the new master, as `weights` says. `phase` counts steps from 1; None is outside of any step.

    `first`: index of the first element, where these are a part of a parameter.
    """
    if values is param:
        return
    if CORRECTION in state:
        thresholds = lanes(phase, param.device) if phase is not None else None
        split_weights_(param.detach(), state[CORRECTION], values=values, thresholds=thresholds)
    elif weights == "bf16_sr":  # when it is adopted too: to nearest, weights that are all alike would all be off alike
        round_at_random_(param.detach(), values=values, seed=seed_of(name), phase=phase or 0, first=first)
    else:
        param.copy_(values)


@torch.no_grad()
def adopt_(
    param: Tensor, state: Mapping[str, Tensor], values: Tensor, *, weights: str, name: str, dtype: torch.dtype
) -> None:
    """Makes `param` keep `values` as `weights` says from now on, its data being of type `dtype`.

    Strides stay, and a gradient that is there changes its type with the data.
    """
    if param.dtype is not dtype:
        grad, param.grad = param.grad, None
        values = values.detach()
        param.data = param.detach().to(dtype, memory_format=torch.preserve_format)
        if grad is not None:
            param.grad = grad.to(dtype)
    store_(param, state, values, weights=weights, name=name)


@torch.no_grad()
def make_room_(param: Tensor, *, dtype: torch.dtype, device: torch.device) -> Tensor:
    """Gives `param` data of this type on `device`, with its strides, and returns those that are to fill it.

    Where they are so already, they stay. A gradient that is there goes along.
    """
    whole = param.detach()
    if whole.dtype is not dtype or whole.device != device:
        grad, param.grad = param.grad, None
        param.data = torch.empty_like(whole, dtype=dtype, device=device)
        if grad is not None:
            param.grad = grad.to(device=device, dtype=dtype)
    return whole


@torch.no_grad()
def take_in_(param: Tensor, state: Mapping[str, Tensor], whole: Tensor, *, weights: str, name: str) -> None:
    """Makes `param`, whose data have the type that `weights` asks for, keep `whole`, which may be on another device.

    The numbers are those of `store_`, bit for bit, and come PIECE at a time, so that they are never there in full; of a
    parameter that is not contiguous a row at least.
    """
    flat = param.is_contiguous() and whole.is_contiguous()
    near, values = (param.detach().view(-1), whole.view(-1)) if flat else (param.detach(), whole)
    kept = {key: value.view(near.shape) for key, value in state.items() if key == CORRECTION}
    width = max(1, values[:1].numel())
    for row in range(0, len(values), max(1, PIECE // width)):
        part = slice(row, row + max(1, PIECE // width))
        piece = master(values[part].to(param.device), {})
        parts = {key: value[part] for key, value in kept.items()}
        store_(near[part], parts, piece, weights=weights, name=name, first=row * width)
