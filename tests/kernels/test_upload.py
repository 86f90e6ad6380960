"""The buffer that the host refills in every step: what goes up, what comes back, when a slot may be filled again."""

import threading
from types import SimpleNamespace

import pytest
import torch

from baoc.kernels.triton import staging as upload
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
    assert buffer.device.tolist() == [7] * NBYTES
    assert buffer.received.cast("q").tolist() == [3, 0, -1, 2**40]
    buffer.slots[buffer.slot()].fill_(9)
    assert buffer.device.tolist() == [7] * NBYTES  # not before it is sent
    buffer.send(16)
    assert buffer.device.tolist() == [9] * 16 + [7] * (NBYTES - 16)


def test_what_comes_back_is_read_at_once_on_request() -> None:
    buffer = make()
    buffer.back.fill_(5)
    assert buffer.received.cast("q").tolist() == [0] * 4
    buffer.read_back()
    assert buffer.received.cast("q").tolist() == [5] * 4


def test_a_number_that_came_back_says_that_the_slot_was_read() -> None:
    buffer = make()
    for expected in (1, 2, 3):
        buffer.number()
        buffer.copy()
        assert buffer.arrived[0] == expected - 1
        buffer.receive()
        buffer.sent()
        assert buffer.arrived[0] == expected == buffer.in_use[0]


@pytest.mark.parametrize("arrived", [True, False])
def test_pinned_memory_is_given_back_when_the_device_is_done_with_it(
    arrived: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    waited: list[object] = []
    buffer = make()
    monkeypatch.setattr(upload, "torch", SimpleNamespace(cuda=SimpleNamespace(synchronize=waited.append)))
    buffer.on_cuda = True
    buffer.number()
    if arrived:
        buffer.arrived[0] = 1
    buffer.sent()
    del buffer
    assert len(waited) == (not arrived)


def test_a_slot_that_the_device_has_not_read_is_waited_for() -> None:
    buffer = make()
    buffer.on_cuda = True
    buffer.number()
    buffer.sent()  # its copy is still on the way
    arrive = threading.Timer(0.02, lambda: buffer.arrived.__setitem__(0, 1))
    arrive.start()
    assert buffer.slot() == 0 and buffer.arrived[0] == 1
    arrive.join()


def test_a_device_that_failed_ends_the_wait_with_its_error(monkeypatch: pytest.MonkeyPatch) -> None:
    def query() -> bool:
        raise RuntimeError("CUDA error: an illegal memory access was encountered")

    buffer = make()
    buffer.on_cuda, buffer.in_use = True, [1]
    monkeypatch.setattr(upload, "LOOK_S", 0.0)
    monkeypatch.setattr(torch.cuda, "current_stream", lambda: SimpleNamespace(query=query))
    with pytest.raises(RuntimeError, match="illegal memory access"):
        buffer.slot()


def test_a_slot_sent_from_another_stream_is_waited_for_on_the_device(monkeypatch: pytest.MonkeyPatch) -> None:
    waited = []
    buffer = make()
    buffer.on_cuda, buffer.in_use = True, [1]
    monkeypatch.setattr(upload, "LOOK_S", 0.0)
    monkeypatch.setattr(torch.cuda, "current_stream", lambda: SimpleNamespace(query=lambda: True))
    monkeypatch.setattr(torch.cuda, "synchronize", lambda: waited.append(True))
    assert buffer.slot() == 0 and waited == [True]


def test_parts_begin_at_multiples_of_sixteen_bytes() -> None:
    buffer = make()
    assert (buffer.device.data_ptr() - buffer.back.data_ptr()) % 16 == 0
    assert memory_of(torch.zeros(0)).nbytes == 0


def test_nothing_is_said_of_an_upload_that_goes_when_the_interpreter_does(monkeypatch: pytest.MonkeyPatch) -> None:
    """Names of a module are None by then, and what a `__del__` raises is printed at the end of a user's script."""
    held = make()
    held.on_cuda = True
    held.number()
    held.sent()
    with monkeypatch.context() as late:
        for name in [name for name in vars(upload) if not name.startswith("__")]:
            late.setitem(vars(upload), name, None)
        held.__del__()
        held.arrived[0] = 1
