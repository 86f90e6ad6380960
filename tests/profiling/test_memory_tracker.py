"""Tracked bytes against peaks worked out by hand: views, frees, resizes, saved tensors, inference mode, meta."""

import gc
from contextlib import nullcontext

import pytest
import torch
from torch import nn
from torch.nn.functional import scaled_dot_product_attention

from baoc.optim.state import with_own_storage
from baoc.profiling import MemoryTracker

F32 = 4


def test_peak_and_current_of_a_chain_of_operators():
    x = torch.zeros(1000)
    with MemoryTracker().count_existing(x) as tracker:
        y = x + 1  # x, y
        z = y * 2  # x, y, z
        del y
        w = z.exp()  # x, z, w
    assert tracker.peak_bytes == 3 * 1000 * F32
    assert tracker.current_bytes == 3 * 1000 * F32
    del z, w
    assert tracker.current_bytes == 1000 * F32, "a death outside the with is seen as well"


def test_views_and_aliases_count_once():
    with MemoryTracker() as tracker:
        x = torch.zeros(10, 100)
        kept = [x[0], x.view(-1), x.t(), x.detach(), x[:, ::2]]
        x.add_(1)
    assert tracker.peak_bytes == 1000 * F32
    assert len(kept) == 5


def test_nothing_is_kept_alive():
    with MemoryTracker() as tracker:
        for _ in range(5):
            torch.zeros(1000).sum()
    assert tracker.current_bytes == 0
    assert tracker.peak_bytes == 1000 * F32 + F32


def test_unprimed_inputs_join_at_first_use_and_only_once():
    x = torch.zeros(100)
    with MemoryTracker() as tracker:
        assert tracker.current_bytes == 0
        x.add_(1)
        torch.cat([x[:50], x[50:]])
    assert tracker.current_bytes == 100 * F32
    assert tracker.peak_bytes == 200 * F32


@pytest.mark.parametrize("size", [0, 50, 1000])
def test_resizing_a_storage_is_followed(size: int):
    x = torch.zeros(100)
    with MemoryTracker().count_existing(x) as tracker:
        x.untyped_storage().resize_(size * F32)
    assert tracker.current_bytes == size * F32
    assert tracker.peak_bytes == max(size, 100) * F32
    with MemoryTracker().count_existing(x) as tracker:
        x.resize_(2000)
    assert tracker.peak_bytes == 2000 * F32


def test_storage_resize_is_torch_s_own_again_afterwards():
    original = torch.UntypedStorage.resize_
    with pytest.raises(RuntimeError, match="stop"), MemoryTracker():
        raise RuntimeError("stop")
    assert torch.UntypedStorage.resize_ is original


def test_forward_and_backward_of_a_small_mlp():
    """Bytes by hand: batch 8, widths 16 -> 32 -> 4, biases off, ReLU, sum."""
    net = nn.Sequential(nn.Linear(16, 32, bias=False), nn.ReLU(), nn.Linear(32, 4, bias=False))
    x = torch.randn(8, 16)
    weights, batch = (16 * 32 + 32 * 4) * F32, 8 * 16 * F32
    hidden, out, scalar = 8 * 32 * F32, 8 * 4 * F32, F32
    tracker = MemoryTracker().count_existing(net, x)
    assert tracker.current_bytes == weights + batch
    with tracker:
        loss = net(x).sum()
        forward = weights + batch + hidden + out + scalar  # ReLU saves its result; its input is freed afterwards
        assert tracker.current_bytes == forward - out  # sum saves nothing, so the output is gone
        assert tracker.peak_bytes == max(weights + batch + 2 * hidden, forward)
        tracker.reset_peak()
        loss.backward()
        assert tracker.current_bytes == weights + batch + scalar + weights  # gradients as large as weights
    # at the largest: d hidden before and after ReLU beside the saved hidden, and the last layer's gradient
    assert tracker.peak_bytes == max(
        forward - out + scalar + 32 * 4 * F32 + 2 * hidden, weights + batch + scalar + weights + hidden
    )


def test_a_step_of_adamw_holds_two_temporaries_of_the_largest_tensor():
    """foreach=False: sqrt and division make one each, and the sum in place none: v's root, then the denominator."""
    params = [nn.Parameter(torch.ones(1000)), nn.Parameter(torch.ones(10))]
    for param in params:
        param.grad = torch.ones_like(param)
    optimizer = torch.optim.AdamW(params, foreach=False, fused=False)
    tracker = MemoryTracker()
    with tracker.count_existing(params, optimizer.state):
        optimizer.step()
        state = sum(t.nbytes for s in optimizer.state.values() for t in s.values())
        live = 2 * 1010 * F32 + state
        assert tracker.current_bytes == live
        tracker.reset_peak()
        optimizer.step()
    assert tracker.current_bytes == live
    assert tracker.peak_bytes == live + 2 * 1000 * F32


def test_tensors_that_autograd_saves_count_while_the_graph_lives():
    x = torch.zeros(100, requires_grad=True)
    with MemoryTracker().count_existing(x) as tracker:
        loss = x.exp().sum()  # exp saves its result
        assert tracker.current_bytes == 200 * F32 + F32
        loss.backward()
        gc.collect()
        assert tracker.current_bytes == 200 * F32 + F32  # the gradient in its place
    del loss
    assert tracker.current_bytes == 200 * F32


@pytest.mark.parametrize("mode", [nullcontext, torch.no_grad, torch.inference_mode])
def test_composite_operators_are_seen_in_parts_in_every_mode(mode):
    query = torch.randn(2, 4, 32, 16)
    mask = torch.zeros(32, 32)
    tracker = MemoryTracker().count_existing(query, mask)
    with tracker, mode():
        out = scaled_dot_product_attention(query, query, query, attn_mask=mask)
    scores = 2 * 4 * 32 * 32 * F32
    assert tracker.peak_bytes >= query.nbytes + mask.nbytes + out.nbytes
    with tracker, mode():
        torch.nn.functional.linear(torch.softmax(query @ query.mT, -1).flatten(0, 2), mask)
    assert tracker.peak_bytes >= query.nbytes + mask.nbytes + 2 * scores


def test_inference_mode_peaks_as_no_grad_does():
    net = nn.TransformerEncoderLayer(16, 2, 32, batch_first=True, dropout=0.0).eval()
    peaks = []
    for mode in (torch.no_grad, torch.inference_mode):
        x = torch.randn(4, 10, 16)
        tracker = MemoryTracker().count_existing(net, x)
        with tracker, mode():
            net(x)
        peaks.append(tracker.peak_bytes)
    assert peaks[0] == peaks[1]


def test_meta_tensors_count_as_the_real_ones_would():
    peaks = {}
    for device in ("cpu", "meta"):
        with torch.device(device):
            net = nn.Sequential(nn.Linear(16, 32), nn.GELU(), nn.Linear(32, 4))
            x = torch.empty(8, 16).zero_()
        tracker = MemoryTracker(device=device).count_existing(net, x)
        with tracker:
            net(x).square().mean().backward()
        peaks[device] = (tracker.peak_bytes, tracker.current_bytes)
    assert peaks["cpu"] == peaks["meta"]


def test_only_the_named_device_counts():
    with MemoryTracker(device="meta") as tracker:
        x = torch.zeros(100)
        y = torch.zeros(10, device="meta")
    assert tracker.current_bytes == y.nbytes
    assert x.device.type == "cpu"


def test_prime_takes_modules_gradients_and_nested_containers_and_is_idempotent():
    net = nn.BatchNorm1d(10)
    net(torch.randn(4, 10)).sum().backward()
    state = {"a": {"m": torch.zeros(5)}, "steps": [torch.zeros(3), 7, "text"]}
    tracker = MemoryTracker().count_existing(net, state).count_existing(net)
    assert tracker.current_bytes == (2 * 10 + 2 * 10 + 2 * 10) * F32 + 8 * F32 + 8  # num_batches_tracked is int64
    assert tracker.peak_bytes == tracker.current_bytes


def test_sparse_gradients_count_their_indices_and_values():
    table = nn.Embedding(100, 8, sparse=True)
    with MemoryTracker().count_existing(table) as tracker:
        table(torch.tensor([1, 2, 3])).sum().backward()
    assert table.weight.grad is not None
    assert tracker.current_bytes >= table.weight.nbytes + 3 * 8 * F32 + 3 * 8


def test_results_do_not_change_under_the_tracker():
    torch.manual_seed(0)
    net, x = nn.Sequential(nn.Linear(8, 8), nn.Dropout(0.5), nn.Linear(8, 2)), torch.randn(4, 8)
    state = torch.get_rng_state()
    plain = net(x)
    torch.set_rng_state(state)
    with MemoryTracker():
        tracked = net(x)
    assert torch.equal(plain, tracked)


@pytest.mark.parametrize("act", [nn.SiLU, nn.GELU, nn.Softplus, nn.LogSigmoid])
def test_gradients_are_bit_for_bit_those_of_an_untracked_step(act):
    """A resumed run tracks other steps than the whole run does, those after its start: they must come out equal."""
    torch.manual_seed(0)
    module = nn.Sequential(nn.Linear(64, 64), act(), nn.Linear(64, 64))
    x = torch.randn(512, 64)
    grads = []
    for watching in (nullcontext(), MemoryTracker(device="cpu")):
        module.zero_grad()
        with watching:
            module(x).square().mean().backward()
        grads.append([parameter.grad for parameter in module.parameters()])
    assert all(torch.equal(untracked, tracked) for untracked, tracked in zip(*grads, strict=True))


def test_what_is_left_out_does_not_count_and_its_address_counts_again_once_it_is_free():
    mapped, mine = torch.zeros(1000), torch.zeros(1000)
    tracker = MemoryTracker().ignore(mapped)
    with tracker:
        mine.copy_(mapped)
        mapped.view(10, 100).add_(1)
    assert tracker.peak_bytes == 1000 * F32
    del mapped
    gc.collect()
    with tracker:
        torch.zeros(1000)
    assert tracker.peak_bytes == 2000 * F32


def test_a_slice_with_a_storage_of_its_own_is_the_memory_of_its_slab_and_lasts_as_long():
    slab = torch.zeros(1000)
    with MemoryTracker().count_existing(slab) as tracker:
        part = with_own_storage(slab[:500])
        gc.collect()
        part.view(5, 100).add_(1)
        assert tracker.peak_bytes == 1000 * F32
        del slab
        gc.collect()
        part.add_(1)
        assert tracker.current_bytes == 1000 * F32
        del part
        gc.collect()
    assert tracker.current_bytes == 0
