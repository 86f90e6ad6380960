"""The buffer that the host refills in every step: what goes up, what comes back, when a slot may be filled again."""

from typing import Any
from unittest.mock import Mock

import torch

from baoc.kernels.triton.staging import Upload, memory_of

NBYTES = 48


def make(value: int = 0) -> Upload:
    buffer = Upload(NBYTES, num_back=4, device=torch.device("cpu"))
    buffer.slots[buffer.slot()].fill_(value)
    return buffer


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


def test_slots_are_filled_in_turn_once_they_were_read() -> None:
    """A slot's event is waited for before the slot is given out to be filled, and recorded behind its copy."""
    buffer, order = make(), []
    events: list[Any] = [Mock() for _ in range(3)]
    for slot, event in enumerate(events):
        event.synchronize.side_effect = lambda slot=slot: order.append(("waited", slot))
        event.record.side_effect = lambda slot=slot: order.append(("recorded", slot, int(buffer.device[0])))
    buffer.on_cuda, buffer.slots, buffer.events = True, [buffer.slots[0].clone() for _ in events], events
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
