"""The Muon step: momentum, orthogonalization on tensor cores, and the update, batch by batch.

The kernels of a batch, in order: `scan_kernel` and `norm_kernel` (norms of the momentum), `gather_kernel` (new m, and
the normalized matrices stacked in the workspace), `orthogonalize`, for matched updates `square_kernel`, `total_kernel`
and `factor_kernel`, at last `apply_kernel` (weights). A matched factor is known before weights change, because the
complete update is, so nothing has to be repaired. The eager counterpart is `optim.rules.muon`.

Where matrices are sharded by lines (`FusedTable.shards`), each rank orthogonalizes a share of the batch's matrices:
norms are all-reduced, and an all-to-all before and after exchanges the matrices between the stacks of the workspace.
"""

from typing import TYPE_CHECKING, Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from baoc.kernels.polar import workspace_spans
from baoc.kernels.triton import muon_plan
from baoc.kernels.triton.device import tile_of
from baoc.kernels.triton.elementwise import (
    CORRECTION_AT,
    DECAY,
    DTYPES,
    M_AT,
    M_SCALE_AT,
    MATCH_AT,
    PARAM_AT,
    SIZE,
    W1,
    WIDTH,
    average,
    count_skipped,
    lerp,
    load_grad,
    matched_factor,
)
from baoc.kernels.triton.kinds import Call
from baoc.kernels.triton.orthogonal import orthogonalize
from baoc.kernels.triton.storage import lanes_like, load_param, load_scaled_m, store_m, store_param
from baoc.kernels.triton.table import start

if TYPE_CHECKING:
    from baoc.kernels.triton.table import FusedTable

_TINY = tl.constexpr(1e-30)  # as baoc.optim.rules.base
_NORM_BLOCK_SIZE = 1024


@triton.jit
def _program(owner, first, first_program, numels, CHUNK: tl.constexpr):
    """This program's (tensor, index among the table's programs, first element, number of elements)."""
    pid = tl.program_id(0)
    tensor = tl.load(owner + pid)
    index = pid - tl.load(first + tensor)
    start = index.to(tl.int64) * CHUNK
    left = tl.minimum(tl.load(numels + tensor) - start, CHUNK).to(tl.int32)
    return tensor, tl.load(first_program + tensor) + index, start, left


@triton.jit
def _stack_index(tensor, start, tile, slots, lines, length, own_length, PADDED: tl.constexpr, WIDE: tl.constexpr):
    """Positions of the elements in the stack of the batch, whose matrices may be PADDED."""
    at = start + tile
    if PADDED:
        if not WIDE:  # division is slow in 64 bits
            at = at.to(tl.int32)
        line = at // own_length
        at = line.to(tl.int64) * length + (at - line * own_length)
    return tl.load(slots + tensor).to(tl.int64) * lines * length + at


@triton.jit
def _momentum(tensor, grad_addr, start, left, ptrs, settings, M: tl.constexpr, GRAD: tl.constexpr,
              MARKED: tl.constexpr, CHUNK: tl.constexpr, VEC: tl.constexpr):  # fmt: skip
    """(Nesterov's momentum, new m, finite, stepped). Elements that are not stepped have momentum 0 and keep m."""
    tile, groups = tile_of(CHUNK)
    inside, addrs = tile < left, ptrs + tensor * WIDTH
    w1 = tl.load(settings + tensor * WIDTH + W1)
    g, finite, stepped = load_grad(grad_addr, start, tile, inside, GRAD, MARKED, VEC, False)
    m_addr, m_scale_addr = tl.load(addrs + M_AT), tl.load(addrs + M_SCALE_AT)
    m_old, scale = load_scaled_m(m_addr, m_scale_addr, start, tile, inside, groups, left, M, VEC, False)
    m = average(m_old, scale, g, w1, M)
    nesterov = tl.where(stepped & inside, lerp(g, m, 1.0 - w1), 0.0)
    return nesterov, tl.where(stepped, m, m_old * scale), finite, stepped


@triton.jit
def scan_kernel(
    owner,  # int32[programs]: tensor of each
    first,  # int32[tensors]: first program of each tensor in this launch
    first_program,  # int32[tensors + 1]: and among the table's programs
    numels,  # int64[tensors]
    ptrs,  # int64[tensors, 8]
    grad_ptrs,  # int64[tensors]
    settings,  # fp32[tensors, 8]
    tops,  # fp32[table's programs]: takes the largest |momentum|
    sums,  # fp32[table's programs]: takes the sum of (momentum / largest)^2
    M: tl.constexpr, GRAD: tl.constexpr, MARKED: tl.constexpr, CHUNK: tl.constexpr, VEC: tl.constexpr,
):  # fmt: skip
    """Partial sums of squares of the momentum, from which `norm_kernel` computes norms."""
    tensor, program, start, left = _program(owner, first, first_program, numels, CHUNK)
    grad_addr = tl.load(grad_ptrs + tensor)
    if grad_addr != 0:
        nesterov, _, _, _ = _momentum(tensor, grad_addr, start, left, ptrs, settings, M, GRAD, MARKED, CHUNK, VEC)
        top = tl.max(tl.abs(nesterov))
        x = nesterov * (1.0 / tl.maximum(top, _TINY))
        tl.store(tops + program, top)
        tl.store(sums + program, tl.sum(x * x))


@triton.jit
def norm_kernel(members, first_program, tops, sums, scales, BLOCK_SIZE: tl.constexpr):
    """scales[tensor] = (1 / largest, 1 / norm of momentum / largest). Without the first, small squares underflow."""
    tensor = tl.load(members + tl.program_id(0))
    begin, end = tl.load(first_program + tensor), tl.load(first_program + tensor + 1)
    lanes = tl.arange(0, BLOCK_SIZE)
    top = tl.zeros([BLOCK_SIZE], dtype=tl.float32)
    for at in range(begin, end, BLOCK_SIZE):
        top = tl.maximum(top, tl.load(tops + at + lanes, mask=at + lanes < end, other=0.0))
    inverse = 1.0 / tl.maximum(tl.max(top), _TINY)
    total = tl.zeros([BLOCK_SIZE], dtype=tl.float32)
    for at in range(begin, end, BLOCK_SIZE):
        part = tl.maximum(tl.load(tops + at + lanes, mask=at + lanes < end, other=0.0), _TINY) * inverse
        total += tl.load(sums + at + lanes, mask=at + lanes < end, other=0.0) * part * part
    tl.store(scales + 2 * tensor, inverse)
    tl.store(scales + 2 * tensor + 1, 1.0 / tl.maximum(tl.sqrt(tl.sum(total)), _TINY))


@triton.jit
def gather_kernel(
    owner, first, first_program, numels, ptrs, grad_ptrs, settings, thresholds,
    slots,  # int32[tensors]: place in the stack
    scales,  # fp32[tensors, 2]
    stack,  # fp16 [num, lines, length]: takes the momentum over its norm
    skipped, nonfinite, lines, length, own_length,
    M: tl.constexpr, GRAD: tl.constexpr, MODE: tl.constexpr, TRACK: tl.constexpr, COUNT: tl.constexpr,
    MARKED: tl.constexpr, CHUNK: tl.constexpr, VEC: tl.constexpr, PADDED: tl.constexpr, WIDE: tl.constexpr,
):  # fmt: skip
    """Stores the new m, and the normalized momentum in the stack; zeros for a matrix without gradient."""
    tensor, _, start, left = _program(owner, first, first_program, numels, CHUNK)
    grad_addr, addrs = tl.load(grad_ptrs + tensor), ptrs + tensor * WIDTH
    tile, groups = tile_of(CHUNK)
    inside = tile < left
    target = stack + _stack_index(tensor, start, tile, slots, lines, length, own_length, PADDED, WIDE)
    if grad_addr != 0:
        nesterov, m, finite, stepped = _momentum(
            tensor, grad_addr, start, left, ptrs, settings, M, GRAD, MARKED, CHUNK, VEC
        )
        x = nesterov * tl.load(scales + 2 * tensor) * tl.load(scales + 2 * tensor + 1)
        tl.store(target, x.to(tl.float16), mask=inside)
        if MODE == "step":
            m_addr, m_scale_addr = tl.load(addrs + M_AT), tl.load(addrs + M_SCALE_AT)
            store_m(m_addr, m_scale_addr, m, thresholds, start, tile, inside, groups, left, M, VEC, False)
        count_skipped(finite, stepped, tensor, skipped, nonfinite, TRACK, COUNT)
    else:
        tl.store(target, tl.zeros([CHUNK // 32, 32], dtype=tl.float16), mask=inside)


@triton.jit
def _update(tensor, start, tile, inside, slots, sizes, stack, lines, length, own_length, PADDED: tl.constexpr,
            WIDE: tl.constexpr):  # fmt: skip
    """Elements of the orthogonalized momentum, scaled as the update."""
    spot = _stack_index(tensor, start, tile, slots, lines, length, own_length, PADDED, WIDE)
    return tl.load(stack + spot, mask=inside, other=0.0).to(tl.float32) * tl.load(sizes + tensor)


@triton.jit
def _stepped_mask(tensor, grad_addr, start, tile, inside, skipped, TRACK: tl.constexpr, GRAD: tl.constexpr,
          MARKED: tl.constexpr, VEC: tl.constexpr):  # fmt: skip
    """Mask of the elements that are stepped. With TRACK, loads gradients again only if the tensor skipped any."""
    stepped = inside
    if TRACK:
        if tl.load(skipped + tensor) != 0:
            _g, _finite, stepped = load_grad(grad_addr, start, tile, inside, GRAD, MARKED, VEC, False)
    else:
        _g, _finite, stepped = load_grad(grad_addr, start, tile, inside, GRAD, MARKED, VEC, False)
    return stepped


@triton.jit
def square_kernel(
    owner, first, first_program, numels, grad_ptrs, slots,
    sizes,  # fp32[tensors]: what the polar factor is multiplied by
    stack,  # fp16: the polar factors
    partial,  # fp32[table's programs]
    skipped, lines, length, own_length,
    GRAD: tl.constexpr, MARKED: tl.constexpr, CHUNK: tl.constexpr, VEC: tl.constexpr, PADDED: tl.constexpr,
    WIDE: tl.constexpr,
):  # fmt: skip
    """Sums of squares of the update."""
    tensor, program, start, left = _program(owner, first, first_program, numels, CHUNK)
    grad_addr = tl.load(grad_ptrs + tensor)
    square = 0.0
    if grad_addr != 0:
        tile, _groups = tile_of(CHUNK)
        inside = tile < left
        stepped = _stepped_mask(tensor, grad_addr, start, tile, inside, skipped, True, GRAD, MARKED, VEC)
        update = _update(tensor, start, tile, inside, slots, sizes, stack, lines, length, own_length, PADDED, WIDE)
        square = tl.sum(tl.where(stepped & inside, update * update, 0.0))
    tl.store(partial + program, square)


@triton.jit
def total_kernel(members, first_program, numels, partial, skipped, totals, BLOCK_SIZE: tl.constexpr):
    """totals[place in the batch] = sum of squares of the update, and elements that are stepped."""
    place = tl.program_id(0)
    tensor = tl.load(members + place)
    begin, end = tl.load(first_program + tensor), tl.load(first_program + tensor + 1)
    lanes = tl.arange(0, BLOCK_SIZE)
    total = tl.zeros([BLOCK_SIZE], dtype=tl.float32)
    for at in range(begin, end, BLOCK_SIZE):
        total += tl.load(partial + at + lanes, mask=at + lanes < end, other=0.0)
    tl.store(totals + 2 * place, tl.sum(total))
    tl.store(totals + 2 * place + 1, (tl.load(numels + tensor) - tl.load(skipped + tensor)).to(tl.float32))


@triton.jit
def factor_kernel(members, ptrs, totals, factors):
    """factors[tensor] as `optim.backends.eager.matching_factor` defines it, from the sums of this step."""
    place = tl.program_id(0)
    tensor = tl.load(members + place)
    total, num = tl.load(totals + 2 * place), tl.load(totals + 2 * place + 1)
    rms = tl.maximum(tl.sqrt(total / tl.maximum(num, 1.0)), _TINY)
    match_addr = tl.load(ptrs + tensor * WIDTH + MATCH_AT)
    match = match_addr.to(tl.pointer_type(tl.float32))
    target, own, used = tl.load(match), tl.load(match + 1), matched_factor(match_addr)
    factor = tl.where(own > _TINY, tl.minimum(used, tl.maximum(target, 1.0) / rms), target / rms)
    tl.store(factors + tensor, tl.where(rms > _TINY, factor, used))


@triton.jit
def apply_kernel(
    owner, first, first_program, numels, ptrs, grad_ptrs, settings, thresholds, slots, sizes, stack,
    factors,  # fp32[tensors]
    skipped, lines, length, own_length,
    WEIGHTS: tl.constexpr, PARAM: tl.constexpr, GRAD: tl.constexpr, MATCHED: tl.constexpr, TRACK: tl.constexpr,
    MARKED: tl.constexpr, CHUNK: tl.constexpr, VEC: tl.constexpr, PADDED: tl.constexpr, WIDE: tl.constexpr,
):  # fmt: skip
    """Steps the weights by the orthogonalized momentum."""
    tensor, _, start, left = _program(owner, first, first_program, numels, CHUNK)
    grad_addr = tl.load(grad_ptrs + tensor)
    if grad_addr != 0:
        tile, _groups = tile_of(CHUNK)
        inside, row, addrs = tile < left, settings + tensor * WIDTH, ptrs + tensor * WIDTH
        size = tl.load(row + SIZE)
        if MATCHED:
            size *= tl.load(factors + tensor)
        stepped = _stepped_mask(tensor, grad_addr, start, tile, inside, skipped, TRACK, GRAD, MARKED, VEC)
        p_addr, correction_addr = tl.load(addrs + PARAM_AT), tl.load(addrs + CORRECTION_AT)
        p, stored = load_param(p_addr, correction_addr, start, tile, inside, WEIGHTS, PARAM, VEC, False)
        update = _update(tensor, start, tile, inside, slots, sizes, stack, lines, length, own_length, PADDED, WIDE)
        new = p * tl.load(row + DECAY) - size * update
        new = tl.where(stepped, new, p)
        store_param(
            p_addr, correction_addr, new, p, stored, thresholds, lanes_like(tile), start, tile, inside, WEIGHTS, PARAM,
            VEC, False, False,
        )  # fmt: skip


def launch(table: "FusedTable", call: Call) -> None:
    """Launches the Muon step, see `kinds.Call`. Outside of an engine's step it allocates its own workspace."""
    if call.mode == "repair":  # the step used the right factor
        return
    plan, workspace = muon_plan.plan_of(table), table.workspace
    if workspace is None:
        return _launch(table, plan, torch.empty(plan.workspace_bytes, dtype=torch.uint8, device=table.device), call)
    if table.shards is not None or any([_is_padded(batch) for batch in plan.batches]):
        return _launch(table, plan, workspace, call)  # which does more than launch kernels
    place = (workspace.data_ptr(), workspace.numel(), table.max_workspace_bytes)
    key = (call, table.grad_dtype, table.vector, place)
    table.launches.run(key, lambda: _launch(table, plan, workspace, call), of=table.ptrs)


def _is_padded(batch: muon_plan.Batch) -> bool:
    return (batch.lines, batch.length) != (batch.own_lines, batch.own_length)


def _launch(table: "FusedTable", plan: muon_plan.Plan, workspace: Tensor, call: Call) -> None:
    read: dict[str, Any] = {
        "GRAD": DTYPES[table.grad_dtype], "MARKED": call.marked, "CHUNK": table.config.chunk, "VEC": table.vector,
        "num_warps": table.config.warps,
    }  # fmt: skip
    for batch in plan.batches:
        where = (batch.owner, plan.first, table.first_program, table.numels)
        start(
            scan_kernel, (len(batch.owner),), *where, table.ptrs, table.grad_ptrs, table.settings, plan.tops, plan.sums,
            M=table.kind.m, **read,
        )  # fmt: skip
        start(
            norm_kernel, (batch.num,), batch.members, table.first_program, plan.tops, plan.sums, plan.scales,
            BLOCK_SIZE=_NORM_BLOCK_SIZE,
        )  # fmt: skip
    if table.shards is not None:
        squares = plan.scales.to(torch.float64).prod(1).pow(-2)
        plan.scales[:, 0] = table.shards.all_reduce_(squares).sqrt().clamp(min=_TINY.value).reciprocal()
        plan.scales[:, 1] = 1.0
    for batch in plan.batches:
        _step(table, plan, batch, workspace, call, read)


def _step(
    table: "FusedTable",
    plan: muon_plan.Plan,
    batch: muon_plan.Batch,
    workspace: Tensor,
    call: Call,
    read: dict[str, Any],
) -> None:
    where = (batch.owner, plan.first, table.first_program, table.numels)
    layout: dict[str, Any] = {
        "lines": batch.lines, "length": batch.length, "own_length": batch.own_length,
        "PADDED": _is_padded(batch),
        "WIDE": batch.own_lines * batch.own_length >= 2**31,
    }  # fmt: skip
    programs, shards = (len(batch.owner),), table.shards
    share = batch.num if shards is None else -(-batch.num // shards.size)
    num = batch.num if shards is None else share * shards.size
    stack = workspace.view(torch.float16)[: num * batch.lines * batch.length]
    if layout["PADDED"] or num > batch.num:
        stack.zero_()
    start(
        gather_kernel, programs, *where, table.ptrs, table.grad_ptrs, table.settings, table.thresholds, plan.slots,
        plan.scales, stack, table.num_skipped, table.num_nonfinite, M=table.kind.m, MODE=call.mode, TRACK=call.track,
        COUNT=call.count and call.mode == "step", **read, **layout,
    )  # fmt: skip
    if shards is None:
        update = orthogonalize(workspace, num=share, lines=batch.lines, length=batch.length)
    else:
        update = _orthogonalize_sharded(workspace, batch=batch, share=share, shards=shards)
    if call.track or call.matched:
        start(
            square_kernel, programs, *where, table.grad_ptrs, plan.slots, plan.sizes, update, table.partial,
            table.num_skipped, **read, **layout,
        )  # fmt: skip
    if call.mode == "measure":
        return
    if call.matched:
        totals = plan.totals[: batch.num]
        start(
            total_kernel, (batch.num,), batch.members, table.first_program, table.numels, table.partial,
            table.num_skipped, totals, BLOCK_SIZE=_NORM_BLOCK_SIZE,
        )  # fmt: skip
        if shards is not None:
            shards.all_reduce_(totals)
        start(factor_kernel, (batch.num,), batch.members, table.ptrs, totals, plan.factors)
    start(
        apply_kernel, programs, *where, table.ptrs, table.grad_ptrs, table.settings, table.thresholds, plan.slots,
        plan.sizes, update, plan.factors, table.num_skipped, WEIGHTS=table.kind.weights, PARAM=DTYPES[table.dtype],
        MATCHED=call.matched, TRACK=call.track, **read, **layout,
    )  # fmt: skip


def _orthogonalize_sharded(workspace: Tensor, *, batch: muon_plan.Batch, share: int, shards: Any) -> Tensor:
    """Orthogonalizes a sharded batch: all-to-all by matrix, orthogonalize this rank's share of the matrices, all-to-all
    back by rows. The workspace begins with this rank's rows of every matrix; the result lies in it in the same order.
    """
    size, lines = shards.size, shards.size * batch.lines
    spans = workspace_spans(share, batch.unsharded_lines, batch.length)[:2]
    x, other = (workspace[begin:end].view(torch.float16) for begin, end in spans)

    def by_rank(part: Tensor) -> Tensor:
        return part[: share * lines * batch.length].view(size, share, batch.lines, batch.length)

    def by_matrix(part: Tensor) -> Tensor:
        unpadded = part.view(share, batch.unsharded_lines, batch.length)[:, :lines]
        return unpadded.view(share, size, batch.lines, batch.length).transpose(0, 1)

    received = shards.all_to_all(by_rank(x), into=by_rank(other))
    x.view(share, batch.unsharded_lines, batch.length)[:, lines:].zero_()
    by_matrix(x).copy_(received)
    result = orthogonalize(workspace, num=share, lines=batch.unsharded_lines, length=batch.length).view(-1)
    free = other if result.data_ptr() == x.data_ptr() else x
    by_rank(free).copy_(by_matrix(result))
    return shards.all_to_all(by_rank(free), into=by_rank(result))
