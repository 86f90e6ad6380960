"""The link's seconds: rates by size, what a stream adds to a step, and what backward hides of it."""

import itertools

import pytest
import torch

from baoc.planning.transfer import (
    STORED_RATES,
    copy_seconds,
    drain_seconds,
    hidden_seconds,
    pinned_bytes,
    pinned_room,
    slower_link,
)
from baoc.profiling import measure_link
from baoc.profiling.step_time import with_link_rates
from baoc.types import LatencyTable, LinkRates

MIB = 2**20
LINK = LinkRates(
    sizes=(10**6, 10**7),
    in_rates=(1e9, 2e9),
    out_rates=(1e9, 2e9),
    both_rates=(1e9, 4e9),
    source="measured",
)


def test_the_stored_link_is_the_one_that_was_measured():
    """Packed states of 3.13 bytes per parameter in 6.8 ms per 100M parameters, fp32 of 12 bytes in 29."""
    assert copy_seconds(int(3.13e8), link=STORED_RATES) == pytest.approx(6.8e-3, rel=0.02)
    assert 22e-3 < copy_seconds(int(12e8), link=STORED_RATES) < 29e-3
    assert STORED_RATES.source == "stored"


def test_blocks_are_charged_in_proportion_and_pieces_by_their_size():
    assert copy_seconds(2 * 10**8, link=LINK) == pytest.approx(0.1), "both ways at 4 GB/s"
    assert copy_seconds(10**6, link=LINK) == pytest.approx(copy_seconds(2 * 10**8, link=LINK) / 200)
    assert copy_seconds(0, link=LINK) == 0
    assert drain_seconds(10**7, link=LINK) == pytest.approx(5e-3)
    assert drain_seconds(55 * 10**5, link=LINK) == pytest.approx(3e-3), "on the line between 1 and 5 ms"
    assert drain_seconds(1, link=LINK) == pytest.approx(1e-3) and drain_seconds(0, link=LINK) == 0
    assert drain_seconds(10**8, link=LINK) == pytest.approx(0.05)
    assert copy_seconds(10**9, link=slower_link(LINK, factor=2)) == pytest.approx(2 * copy_seconds(10**9, link=LINK))


def test_the_last_backward_hides_a_stream_unless_gradients_change_after_it():
    """Two thirds of the last of three micro-batches; a CPU has no link to be measured."""
    assert hidden_seconds(0.9, accumulation=3) == pytest.approx(0.2)
    table = LatencyTable(device="cpu", fixed_s={}, per_element_s={}, base_step_s=0.9)
    cpu = torch.device("cpu")
    hidden = with_link_rates(table, device=cpu, accumulation=3, hides=True)
    assert (hidden.hidden_s, hidden.link) == (pytest.approx(0.2), None)
    assert with_link_rates(table, device=cpu, accumulation=3, hides=False).hidden_s == 0


def test_pinned_memory_comes_in_pages():
    assert (pinned_bytes(0), pinned_bytes(1), pinned_bytes(4096), pinned_bytes(4097)) == (0, 4096, 4096, 8192)
    for limit in (4095, 4096, 9000):
        room = pinned_room(limit)
        assert pinned_bytes(room) <= limit < pinned_bytes(room + 1)


def test_rates_are_bytes_over_the_median_of_a_way():
    """A clock that ticks once per look: each copy takes one tick, so that both ways carry twice as much."""
    ticks = itertools.count()
    link = measure_link("cpu", sizes=(MIB, 2 * MIB), max_s=40.0, clock=lambda: float(next(ticks)))
    assert link.in_rates == link.out_rates == (MIB, 2 * MIB)
    assert link.both_rates == (2 * MIB, 4 * MIB)
    assert (link.sizes, link.source) == ((MIB, 2 * MIB), "measured")


@pytest.mark.skipif(
    not torch.cuda.is_available(), reason="needs a link to a GPU, which CI has none of; until 2027-06-30"
)
def test_both_ways_at_once_carry_more_than_one():
    link = measure_link("cuda")
    assert link.both_rates[-1] > 1.2 * max(link.in_rates[-1], link.out_rates[-1])
    assert all(rate > 1e9 for rate in link.in_rates + link.out_rates)
