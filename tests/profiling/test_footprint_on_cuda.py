"""The footprint that follows from what torch's allocator on CUDA tells: bytes go in, bytes come out."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from baoc.profiling import FirstStepMemory, probe_footprint
from baoc.profiling import footprint as module_of_footprints
from baoc.profiling.memory import LATE_MODULES_BYTES
from baoc.units import MIB

CONTEXT = 77


class Card:
    """The statistics of a card's allocator: what a test says is allocated and reserved, and the peaks of both."""

    allocator = None

    def __init__(self):
        self.device = torch.device("cuda", 0)
        self.has(0, reserved=0)
        self.reset_peak()

    def has(self, allocated: int, *, reserved: int) -> None:
        self.current_bytes, self._reserved = allocated, reserved
        self.peak_allocated_bytes = max(getattr(self, "peak_allocated_bytes", 0), allocated)
        self.peak_bytes = max(getattr(self, "peak_bytes", 0), reserved)

    def reset_peak(self) -> None:
        self.peak_allocated_bytes, self.peak_bytes = self.current_bytes, self._reserved

    def empty_cache(self) -> None:
        self._reserved = self.current_bytes

    def __enter__(self) -> "Card":
        return self

    def __exit__(self, *exc: object) -> None:
        pass


@pytest.fixture
def card(monkeypatch: pytest.MonkeyPatch) -> Card:
    """The card whose bytes are measured; the few weights of these tests lie on the CPU."""
    card = Card()
    monkeypatch.setattr(module_of_footprints, "PeakMeter", lambda *_, **__: card)
    monkeypatch.setattr(
        module_of_footprints.memory, "fix_context_bytes", lambda device: CONTEXT * (device.type == "cuda")
    )
    return card


def loss_of(*params: Tensor) -> Tensor:
    return torch.stack([param.sum() for param in params]).sum()


@pytest.mark.parametrize(
    ("reserved", "peak"),
    [
        ((300, 900, 300, 350), 350),  # the second step without gradients does not fit into the gaps of the first
        ((300, 900, 350, 300), 350),
        ((400, 900, 300, 350), 400),  # the very first needed most
    ],
)
def test_a_loop_that_drops_gradients_itself_is_measured_over_two_steps_without_any(
    card: Card, reserved: tuple[int, ...], peak: int
):
    net, needs, beside, emptied = nn.Linear(2, 1), list(reserved), [], []

    def empty_cache() -> None:
        emptied.append(net.weight.grad)
        Card.empty_cache(card)

    def run() -> None:
        beside.append(net.weight.grad is not None)
        card.has(100, reserved=needs.pop(0))
        net(torch.ones(1, 2)).sum().backward()

    card.empty_cache = empty_cache
    found = probe_footprint(net, run_micro_batch=run)
    assert found.forward_backward_bytes == peak and not found.intervals
    assert beside == [False, True, False, False] and emptied == [None]
    assert (found.resident_bytes, found.gradients_bytes, found.settled_bytes) == (100, 12, 0)


@pytest.mark.parametrize(("first", "stretches"), [(300, [300]), (299, [300]), (301, [300, 301])])
def test_only_a_first_micro_batch_that_reserves_more_is_a_stretch_of_its_own(
    card: Card, first: int, stretches: list[int]
):
    net, needs = nn.Linear(2, 1), [first, 300]

    def run() -> Tensor:
        card.has(200, reserved=needs.pop(0))
        return net(torch.ones(1, 2)).sum()

    found = probe_footprint(net, run_micro_batch=run)
    assert sorted({interval.num_bytes for interval in found.intervals}) == stretches
    assert [interval.name for interval in found.intervals].count("first") == len(stretches) - 1
    assert found.forward_backward_bytes == max(stretches) and found.resident_bytes == 200


def test_released_gradients_are_neither_absent_nor_left_when_the_last_block_was_stepped(card: Card):
    net = nn.Linear(2, 1)

    def run() -> None:
        card.has(500, reserved=600)
        net(torch.ones(1, 2)).sum().backward()
        card.has(120, reserved=600)

    validate: Callable[[], Any] = lambda: card.has(250, reserved=260)  # noqa: E731
    found = probe_footprint(
        net, run_micro_batch=run, run_validation_batch=validate, released_blocks=[[net.weight], [net.bias]]
    )
    assert (found.gradients_bytes, found.resident_bytes, found.settled_bytes) == (8, 500, 120)
    assert (found.forward_backward_bytes, found.validation_bytes, found.released) == (600, 260, True)


def test_a_first_step_on_a_card_counts_gradients_that_none_got_and_reserves_a_share_of_all_it_saw(card: Card):
    trained, idle = nn.Parameter(torch.ones(3)), nn.Parameter(torch.ones(500))
    memory = FirstStepMemory([trained, idle, torch.ones(2)], context_bytes=5)
    card.has(10_000, reserved=20_000)
    loss_of(trained).backward()
    found = memory.finish(state_bytes=3000)
    assert (found.weights_bytes, found.gradients_bytes, found.resident_bytes) == (2020, 2012, 4032)
    assert (found.forward_backward_bytes, found.settled_bytes, found.released) == (20_000 + 2000 - 3000, 0, False)
    assert found.reserve_bytes == LATE_MODULES_BYTES + 44 * MIB + 440  # 2 % of 22,000
    assert (found.device, found.context_bytes) == ("cuda:0", CONTEXT)


def test_a_gradient_that_came_and_went_in_the_first_step_is_not_absent(card: Card):
    trained, early = nn.Parameter(torch.ones(3)), nn.Parameter(torch.ones(500))
    memory = FirstStepMemory([trained, early])
    card.has(10_000, reserved=20_000)
    loss_of(trained, early).backward()
    early.grad = None
    found = memory.finish(state_bytes=0)
    assert (found.forward_backward_bytes, found.gradients_bytes) == (20_000, 12)


def test_forward_of_a_first_step_is_counted_beside_the_gradients_of_a_later_one(card: Card):
    """At zeroing, the peak of 200 holds 12 bytes of old gradients; forward of the next step will be beside 20."""
    old, other = nn.Parameter(torch.ones(3)), nn.Parameter(torch.ones(2))
    memory = FirstStepMemory([old, other])
    old.grad = torch.ones(3)
    card.has(100, reserved=200)
    memory.record_zeroing()
    old.grad = None
    loss_of(old, other).backward()
    assert memory.finish(state_bytes=0).forward_backward_bytes == 200 - 12 + 20


def test_a_first_step_that_releases_gradients_counts_none_beside_its_peak(card: Card):
    released, idle, kept = (nn.Parameter(torch.ones(n)) for n in (3, 5, 2))
    memory = FirstStepMemory([released, idle, kept])
    card.has(100, reserved=200)
    memory.record_zeroing()
    loss_of(released, kept).backward()
    card.has(150, reserved=200)
    memory.record_block_step()
    released.grad = None
    card.has(90, reserved=200)
    found = memory.finish(state_bytes=30)
    assert (found.gradients_bytes, found.resident_bytes, found.settled_bytes) == (20, 120, 60)
    assert (found.forward_backward_bytes, found.released) == (200 - 30, True)
