"""A small device buffer that the host refills every step, without waiting for the device and without racing it.

Bytes go up from one of a few pinned slots, with a number that counts them. It comes back with what the device has to
say, and tells the host that everything before it was read: that costs a look at memory, where an event costs two calls.
"""

import ctypes
import time

import torch
from torch import Tensor

_LANES = 1024  # words of 8 bytes that are read at once
SLOTS = 3  # uploads that the host may be ahead of the device before it waits
_HEAD = 16  # bytes before what goes up: the number, and padding
_PATIENCE_S, LOOK_S = 1e-4, 0.1  # between looks at the number, and at whether the device still works


class Upload:
    """`slot()` says which slot to fill, `send()` copies it to `device` (uint8 [nbytes]), which never moves.

    `back` (int64 [num_back] on the device) is copied to `received` on the CPU by `receive()`. `copy()` and `receive()`
    may be captured in a graph, one for each slot, and so may `exchange()`, which does both in one launch; after a
    replay `sent()` does the counting that `send` does itself.
    """

    def __init__(self, nbytes: int, *, num_back: int, device: torch.device):
        self.on_cuda = device.type == "cuda"
        assert not nbytes % 8, "whole words go up"
        begin = 8 * num_back
        whole = torch.zeros(begin + _HEAD + nbytes, dtype=torch.uint8, device=device)
        self.back, self.device = whole[:begin].view(torch.int64), whole[begin + _HEAD :]
        self._up, self._down = whole[begin:], whole[: begin + 8]
        count = SLOTS if self.on_cuda else 1
        self._slots = [self._pinned(_HEAD + nbytes) for _ in range(count)]
        self.slots = [slot[_HEAD:] for slot in self._slots]  # what to fill
        self._numbers = [memory_of(slot[:8]).cast("q") for slot in self._slots]
        self._received = self._pinned(begin + 8)
        self.received = memory_of(self._received[:begin])
        self.arrived = memory_of(self._received[begin:]).cast("q")
        self.in_use = [0] * count  # the number under which a slot was last sent
        self._number = 0
        self._next = 0

    def __del__(self) -> None:
        """The device may still have to read a slot or to write what comes back, of which torch, who takes pinned memory
        back and hands it to others, knows nothing."""
        try:
            if self.on_cuda and self.arrived[0] < self._number:
                torch.cuda.synchronize(self.device.device)
        except Exception:  # names of modules are None where the interpreter is on its way out: no `suppress` either
            pass

    @property
    def nbytes(self) -> int:
        return self._up.nbytes + self.back.nbytes

    def _pinned(self, nbytes: int) -> Tensor:
        return torch.zeros(nbytes, dtype=torch.uint8, pin_memory=self.on_cuda, device="cpu")

    def slot(self) -> int:
        """It holds what was sent some steps ago, so write all that matters; it stays the same until it is sent."""
        if self.on_cuda and self.arrived[0] < self.in_use[self._next]:
            self._wait(self.in_use[self._next])
        return self._next

    def _wait(self, number: int) -> None:
        """Until the device has come that far. Looks at the stream too, which raises if the device failed."""
        look_again = time.monotonic() + LOOK_S
        while self.arrived[0] < number:
            time.sleep(_PATIENCE_S)
            if time.monotonic() > look_again:
                if torch.cuda.current_stream().query():  # sent from another stream, then
                    torch.cuda.synchronize()
                    return
                look_again = time.monotonic() + LOOK_S

    def copy(self, nbytes: int | None = None) -> None:
        """The slot's bytes, or the first of them, go up on the current stream."""
        end = None if nbytes is None else _HEAD + nbytes
        self._up[:end].copy_(self._slots[self._next][:end], non_blocking=True)

    def exchange(self) -> None:
        """`copy` and `receive` in one launch; what comes back is as it was before what is launched after it."""
        from baoc.kernels.triton.matching import exchange_kernel

        exchange_kernel[(1,)](
            self._slots[self._next].data_ptr(),
            self._up.data_ptr(),
            self.back.data_ptr(),
            self._received.data_ptr(),
            self._up.nbytes // 8,
            len(self.back),
            LANES=_LANES,
            num_warps=8,
        )

    def receive(self) -> None:
        """What is in `back`, and the number, come back."""
        self._received.copy_(self._down, non_blocking=True)

    def number(self) -> None:
        """Gives the slot its number. To be called before it is copied."""
        self._numbers[self._next][0] = self._number + 1

    def sent(self) -> None:
        """The slot is on its way, and what `receive` gets after it says when it has arrived."""
        self._number += 1
        self.in_use[self._next] = self._number
        self._next = (self._next + 1) % len(self.slots)

    def send(self, nbytes: int | None = None) -> None:
        """Up and back, for those who launch nothing in between."""
        self.number()
        self.copy(nbytes)
        self.receive()
        self.sent()

    def read_back(self) -> None:
        """Brings `received` up to date, waiting for the device."""
        self._received.copy_(self._down)


def memory_of(tensor: Tensor) -> memoryview:
    """The bytes of a contiguous tensor on the CPU, to read and write; keep the tensor alive meanwhile."""
    assert tensor.device.type == "cpu" and tensor.is_contiguous()
    if not tensor.numel():
        return memoryview(bytearray())
    return memoryview((ctypes.c_char * tensor.nbytes).from_address(tensor.data_ptr())).cast("B")
