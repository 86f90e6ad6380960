"""Finding the non-finite elements of gradients, and making them zero: what is not `usable` counts as one."""

from collections.abc import Iterable, Mapping

import torch
from torch import Tensor

from baoc.errors import BadInputError
from baoc.kernels import cpp as native
from baoc.kernels.usable import LIMIT, usable


def all_finite(params: Iterable[Tensor], *, names: Mapping[Tensor, str]) -> bool:
    """False if some gradient element may not be finite. One read and one synchronisation per device."""
    by_device: dict[torch.device, list[Tensor]] = {}
    for param in params:
        grad = param.grad
        assert grad is not None
        if grad.is_sparse:
            raise BadInputError(f"{names[param]} has a sparse gradient: build its layer with sparse=False")
        if grad.numel() and grad.device.type != "meta":
            by_device.setdefault(grad.device, []).append(grad)
    on_cpu = by_device.get(torch.device("cpu"), [])
    if on_cpu and native.is_loaded() and all(native.scannable(grad) for grad in on_cpu):
        del by_device[torch.device("cpu")]
        if not native.all_finite(on_cpu):
            return False
    # The Euclidean norm is the reduction that every device has a fast kernel for. It may be large where no element
    # is, so then these are looked at one by one; half the limit, because norms are rounded.
    norms = [torch.nn.utils.get_total_norm(same, norm_type=2.0) for same in by_device.values()]
    return all(bool(norm < LIMIT / 2) for norm in norms)


def mask_(params: Iterable[Tensor]) -> dict[Tensor, Tensor]:
    """Zeroes the non-finite elements; returns their parameters with a bool mask, True where finite."""
    masks = {}
    for param in params:
        grad = param.grad
        if grad is None or not grad.numel():
            continue
        finite = usable(grad)
        if not bool(finite.all()):
            grad.masked_fill_(~finite, 0.0)
            masks[param] = finite
    return masks
