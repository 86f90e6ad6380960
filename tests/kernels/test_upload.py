"""The buffer that the host refills in every step: what goes up, what comes back, when a slot may be filled again."""

import gc
import threading
import weakref
from collections.abc import Callable
from types import SimpleNamespace

import pytest
import torch

from baoc.kernels.triton import staging
from baoc.kernels.triton.staging import SLOTS, Upload, memory_of
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


@interpreted
def test_slots_are_filled_in_turn() -> None:
    buffer = make()
    for step in range(1, 6):
        assert buffer.slot() == (step - 1) % SLOTS
        buffer.slots[buffer.slot()].fill_(step)
        buffer.copy_up()  # the device counts the slots itself
        assert buffer.device.tolist() == [step] * NBYTES and buffer.num_copied_host[0] == step
        buffer.sent()


def test_a_slot_that_the_device_has_not_read_is_waited_for(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(staging, "PATIENCE_S", 60.0)
    buffer = make()
    buffer.num_sent = SLOTS  # the copies are still on their way
    arrive = threading.Timer(0.02, lambda: buffer.num_copied_host.__setitem__(0, 1))
    arrive.start()
    assert buffer.slot() == 0 and buffer.num_copied_host[0] == 1
    arrive.join()


def waited_for(query: Callable[[], bool], *, monkeypatch: pytest.MonkeyPatch) -> int:
    """The slot that is given after uploads of which the device has told nothing."""
    buffer = make()
    buffer.num_sent = SLOTS
    monkeypatch.setattr(staging, "PATIENCE_S", 0.0)
    monkeypatch.setattr(torch.cuda, "current_stream", lambda device: SimpleNamespace(query=query))
    return buffer.slot()


def test_a_device_that_failed_ends_the_wait_with_its_error(monkeypatch: pytest.MonkeyPatch) -> None:
    def query() -> bool:
        raise RuntimeError("CUDA error: an illegal memory access was encountered")

    with pytest.raises(RuntimeError, match="illegal memory access"):
        waited_for(query, monkeypatch=monkeypatch)


def test_an_idle_device_that_has_told_nothing_is_counted_again(monkeypatch: pytest.MonkeyPatch) -> None:
    asked = iter((False, True))
    assert waited_for(lambda: next(asked), monkeypatch=monkeypatch) == 0


@interpreted
@pytest.mark.parametrize("copied", [False, True])
def test_an_exception_before_or_behind_the_copy_parts_no_counts(copied: bool) -> None:
    buffer = make(1)
    buffer.send()
    buffer.slots[buffer.slot()].fill_(2)
    buffer.sending = True
    if copied:
        buffer.copy_up()
    # `sent` is never called
    buffer.slots[buffer.slot()].fill_(3)
    buffer.send()
    assert buffer.device.tolist() == [3] * NBYTES and buffer.num_sent == buffer.num_copied_host[0] == 2 + copied


def test_collecting_an_upload_asks_nothing_of_the_device_and_keeps_its_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    """A synchronization would spoil the graph that another thread may be capturing; the next upload frees it."""
    capturing, waited = [True], []
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: capturing[0])
    monkeypatch.setattr(torch.cuda, "synchronize", waited.append)
    make()  # frees what other tests left
    buffer = make(7)
    address = buffer.slots[0].data_ptr()
    del buffer
    gc.collect()
    (_, memory) = staging.RETIRED.pop()
    assert memory[0].data_ptr() == address
    slots = weakref.ref(memory[0])
    on_gpu = torch.device("cuda", 0)
    staging.RETIRED.clear()
    staging.RETIRED.append((on_gpu, memory))
    del memory
    made = [make()]
    assert slots() is not None and not waited, "this thread captures itself"
    capturing[0] = False
    made.append(make())
    assert slots() is None and waited == [on_gpu]
