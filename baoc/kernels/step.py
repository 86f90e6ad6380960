"""The entry point: one fused step of all tensors in a table.

`prepare` is the host's part (addresses, settings, one small copy each), `launch` the device's, which takes all it needs
from buffers that never move: it can be captured in a CUDA graph and replayed after each `prepare`.
"""

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from baoc.kernels.kinds import Options
from baoc.kernels.table import FusedTable

_SUM_BLOCK = 1024


def fused_step(
    table: FusedTable,
    *,
    options: Sequence[Options],
    thresholds: Tensor | None = None,
    factors: Tensor | None = None,
    masks: Mapping[int, Tensor] | None = None,
    track: bool = False,
    measure: bool = False,
    count: bool = True,
) -> Tensor | None:
    """Steps every tensor of the table that has a gradient.

    `options`: settings by parameter group, of which lr, betas, eps and weight_decay are read. `thresholds`: the codecs'
    lanes of this step's phase, fp32 [32] on the CPU. `factors`: fp32 [tensors] on the device, multiply each tensor's
    update. `masks`: tensor index -> bool mask, True where finite, of gradients whose non-finite elements were zeroed
    before; what is still non-finite is left out in any case. `count`: add the number of both to `table.num_bad`.
    `track`: return the sum of squares of each tensor's own update, before factor and lr, over its finite elements
    (fp32 [tensors], deterministic). `measure`: that alone, changing nothing, for the first step after a switch.
    """
    prepare(table, options=options, thresholds=thresholds, advance=not measure)
    return launch(table, factors=factors, masks=masks, track=track or measure, store=not measure, count=count)


def prepare(
    table: FusedTable, *, options: Sequence[Options], thresholds: Tensor | None = None, advance: bool = True
) -> None:
    """Brings addresses and settings up to date and, unless told otherwise, counts the step."""
    table.refresh()
    table.stage(options, thresholds=thresholds, advance=advance)


def launch(
    table: FusedTable,
    *,
    factors: Tensor | None = None,
    masks: Mapping[int, Tensor] | None = None,
    track: bool = False,
    store: bool = True,
    count: bool = True,
) -> Tensor | None:
    """Only kernels. The arguments are those of `fused_step`; without `store` nothing but sums is written."""
    from baoc.kernels.elementwise import step_kernel, sum_kernel  # Triton is optional

    if table.num_chunks:
        flags = {"TRACK": track, "STORE": store, "COUNT": count and store, "MATCHED": factors is not None}
        step_kernel[(table.num_chunks,)](  # pyright: ignore[reportIndexIssue]
            table.chunk_tensor,
            table.first_chunk,
            table.numels,
            table.ptrs,
            table.grad_ptrs,
            _mask_ptrs(table, masks=masks),
            table.settings,
            table.thresholds,
            table.ones if factors is None else factors,
            table.partial,
            table.num_bad,
            **_constants(table),
            **flags,
            MASKED=bool(masks),
            num_warps=table.cut.warps,  # pyright: ignore[reportCallIssue] (Triton's own)
        )
    if not track:
        return None
    sums = torch.zeros(len(table.params), dtype=torch.float32, device=table.device)
    sum_kernel[(len(table.params),)](table.partial, table.first_chunk, sums, BLOCK=_SUM_BLOCK)
    return sums


def _constants(table: FusedTable) -> dict[str, Any]:
    import triton.language as tl

    dtypes = {torch.float32: tl.float32, torch.bfloat16: tl.bfloat16}
    kind, traits = table.kind, table.kind.traits
    return {
        "RULE": kind.rule,
        "M": kind.m if traits.has_m else "none",
        "V": kind.v if traits.has_v else "none",
        "WEIGHTS": kind.weights,
        "PARAM": dtypes[table.dtype],
        "GRAD": dtypes[table.grad_dtype],
        "CHUNK": table.cut.chunk,
        "VEC": table.cut.vector if table.aligned and table.grads_aligned else 1,
    }


def _mask_ptrs(table: FusedTable, *, masks: Mapping[int, Tensor] | None) -> Tensor:
    """Addresses of the masks on the device. Rare, so it may wait for the copy."""
    if not masks:
        return table.no_masks
    addresses = [0] * len(table.params)
    for index, mask in masks.items():
        assert mask.is_contiguous() and mask.dtype is torch.bool
        addresses[index] = mask.data_ptr()
    return torch.tensor(addresses, dtype=torch.int64, device="cpu").to(table.device)
