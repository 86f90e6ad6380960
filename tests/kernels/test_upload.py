"""The buffer that the host refills in every step: what goes up, what comes back, when a slot may be filled again."""

import gc
from typing import Any
from unittest.mock import Mock

import pytest
import torch

from baoc.kernels.triton.staging import Upload, memory_of
from tests.support.interpreting import interpreted

NBYTES = 48


def make(value: int = 0) -> Upload:
    buffer = Upload(NBYTES, num_back=4, device=torch.device("cpu"))
    buffer.slots[buffer.slot()].fill_(value)
    return buffer


@interpreted
def test_a_slot_goes_up_and_what_the_device_says_comes_back() -> None:
    buffer = make(7)
    buffer.back.copy_(torch.tensor([3, 0, -1, 2**40]))
    buffer.send()
    assert buffer.received.cast("q").tolist() == [0] * 4
    buffer.receive()
    assert buffer.device.tolist() == [7] * NBYTES
    assert buffer.received.cast("q").tolist() == [3, 0, -1, 2**40]
    buffer.slots[buffer.slot()].fill_(9)
    assert buffer.device.tolist() == [7] * NBYTES  # not before it is sent
    buffer.send(16)
    assert buffer.device.tolist() == [9] * 16 + [7] * (NBYTES - 16)
    assert memory_of(torch.zeros(0)).nbytes == 0


def test_an_upload_is_of_whole_words() -> None:
    with pytest.raises(ValueError, match="44 bytes are no whole number of 8-byte words"):
        Upload(44, num_back=4, device=torch.device("cpu"))


def test_pinned_memory_goes_when_the_device_has_read_it() -> None:
    buffer = make()
    events: list[Any] = [Mock(), Mock()]
    events[1].synchronize.side_effect = RuntimeError("CUDA error: the device failed before")  # it reads no more
    buffer.events += events
    del buffer
    gc.collect()
    assert [event.synchronize.call_count for event in events] == [1, 1]


@interpreted
def test_slots_are_filled_in_turn_once_they_were_read() -> None:
    """A slot's event is waited for before the slot is given out to be filled, and recorded behind its copy. The device
    counts the slots itself."""
    buffer, order = make(), []
    events: list[Any] = [Mock() for _ in range(3)]
    for slot, event in enumerate(events):
        event.synchronize.side_effect = lambda slot=slot: order.append(("waited", slot))
        event.record.side_effect = lambda slot=slot: order.append(("recorded", slot, int(buffer.device[0])))
    buffer.on_cuda, buffer.events = True, events
    for step in range(1, 5):
        slot = buffer.slot()
        order.append(("filled", slot))
        buffer.slots[slot].fill_(step)
        buffer.send()
    assert order == [
        entry
        for step, slot in enumerate((0, 1, 2, 0), start=1)
        for entry in (("waited", slot), ("filled", slot), ("recorded", slot, step))  # the device has what was filled
    ]
