"""What fake tensors of a CPU take over from a card: autocast's types, and the pages of the caching allocator."""

import random

import pytest
import torch
import torch.nn.functional as F

from baoc.models.switches import set_recomputed
from baoc.profiling.cuda_emulation import LARGE_PAGE, ROUNDING_BYTES, SMALL_PAGE, CachingAllocator, CudaAutocast
from baoc.profiling.timeline import Timeline
from baoc.profiling.tracker import MemoryTracker, PeakMeter
from baoc.units import KIB, MIB


@pytest.mark.parametrize(
    "run",
    [
        lambda y: F.layer_norm(y, (8,)),
        lambda y: torch.nn.GroupNorm(2, 8)(y),
        lambda y: F.softmax(y, -1),
        lambda y: y.pow(2),
        lambda y: y.sum(-1),
        lambda y: F.mse_loss(y, y),
    ],
)
def test_what_cuda_does_in_float32_is_done_so(run):
    weight = torch.randn(8, 8, requires_grad=True)
    with torch.autocast("cpu", dtype=torch.bfloat16), CudaAutocast():
        y = F.linear(torch.randn(4, 8), weight)
        assert y.dtype == torch.bfloat16 and run(y).dtype == torch.float32
        assert F.gelu(y).dtype == torch.bfloat16, "and nothing else"
    with CudaAutocast():
        assert run(y).dtype in (torch.bfloat16, run(y.detach()).dtype), "outside of autocast types are the tensors' own"


def test_recomputed_activations_take_the_types_of_those_that_were_dropped():
    """A backward pass leaves the mode behind; torch refuses a recomputation whose types are other ones."""
    net = torch.nn.Sequential(torch.nn.Conv1d(4, 8, 1), torch.nn.GroupNorm(2, 8))
    unit = torch.nn.Sequential(net)
    model = torch.nn.Sequential(unit)
    model.checkpoint_units = [unit]  # pyright: ignore[reportAttributeAccessIssue, reportArgumentType]
    set_recomputed(model, name="small")
    with CudaAutocast():
        with torch.autocast("cpu", dtype=torch.bfloat16):
            loss = model(torch.ones(2, 4, 4, requires_grad=True)).square().sum()
        loss.backward()
    assert all(param.grad is not None for param in model.parameters())


def test_pages_and_gaps_are_those_of_the_caching_allocator():
    held = CachingAllocator()
    held.allocate(1, 30 * MIB)
    assert (held.allocated_bytes, held.reserved_bytes) == (30 * MIB, 2 * LARGE_PAGE)
    held.allocate(2, 10 * MIB)  # the rest of the second page
    held.allocate(3, 1)
    assert held.reserved_bytes == 2 * LARGE_PAGE + SMALL_PAGE and held.allocated_bytes == 40 * MIB + ROUNDING_BYTES
    held.free(1)
    held.allocate(4, 31 * MIB)  # does not fit the gap
    assert held.reserved_bytes == 4 * LARGE_PAGE + SMALL_PAGE
    held.allocate(5, 30 * MIB)  # does
    assert held.reserved_bytes == 4 * LARGE_PAGE + SMALL_PAGE


def test_free_neighbours_are_one_again():
    held, live, draw = CachingAllocator(), {}, random.Random(0)
    for key in range(2000):
        if live and draw.random() < 0.5:
            gone = draw.choice(list(live))
            held.free(gone)
            del live[gone]
        held.allocate(key, live.setdefault(key, draw.randrange(1, 8 * MIB)))
    assert held.allocated_bytes == sum(-(-size // ROUNDING_BYTES) * ROUNDING_BYTES for size in live.values())
    for key in live:
        held.free(key)
    before = held.reserved_bytes
    assert held.allocated_bytes == 0
    for key, pool in enumerate(held.pools):
        held.allocate(key, min(pool.mapped, MIB) if pool.page == SMALL_PAGE else pool.mapped)
    assert held.reserved_bytes == before, "all that was mapped is one block"


def test_a_tracker_counts_as_the_allocator_does():
    tracker = MemoryTracker(device="cpu", allocator=CachingAllocator())
    with tracker:
        kept = torch.zeros(3)
        assert tracker.current_bytes == ROUNDING_BYTES and tracker.reserved_bytes == SMALL_PAGE
        kept = torch.zeros(2 * MIB // 4)
        assert tracker.current_bytes == 2 * MIB and tracker.reserved_bytes == SMALL_PAGE + LARGE_PAGE
    del kept


def test_copies_that_go_end_the_stretch_that_contained_them():
    """As where activations are recomputed: autocast's copies of all layers go at the end of the forward pass."""
    weights = {name: torch.zeros(64, 64, requires_grad=True) for name in "ab"}
    meter = PeakMeter(torch.device("cpu"), list(weights.values()))
    with meter, Timeline(meter, named=weights, gradients_alive=True) as line:
        copies = [weight.detach().to(torch.bfloat16) for weight in weights.values()]
        torch.zeros(256)
        copies.clear()
        torch.zeros(512)
    largest = max(line.intervals, key=lambda interval: interval.num_bytes)
    assert set(largest.copies) == {"a", "b"} and largest.num_bytes == 2 * 16 * KIB + 2 * 8 * KIB + KIB
    last = line.intervals[-1]
    assert not last.copies and last.num_bytes == 2 * 16 * KIB + 2 * KIB, "without what went before it"
