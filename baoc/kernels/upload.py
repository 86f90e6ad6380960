"""A small device buffer that the host refills every step, without waiting for the device and without racing it."""

import ctypes

import torch
from torch import Tensor

_SLOTS = 4  # steps that the host may be ahead of the device before it waits


class Upload:
    """`slot()` says which of `slots` to fill (bytes on the CPU), `send()` copies it to `device`, which never moves."""

    def __init__(self, nbytes: int, *, device: torch.device):
        self.device = torch.zeros(nbytes, dtype=torch.uint8, device=device)
        self._on_cuda = device.type == "cuda"
        count = _SLOTS if self._on_cuda else 1
        self.slots = [
            torch.zeros(nbytes, dtype=torch.uint8, pin_memory=self._on_cuda, device="cpu") for _ in range(count)
        ]
        self._sent = [torch.cuda.Event() for _ in range(count)] if self._on_cuda else []
        self._next = 0

    def slot(self) -> int:
        """It holds what was sent some steps ago, so write all that matters."""
        if self._on_cuda:
            self._sent[self._next].synchronize()
        return self._next

    def send(self) -> None:
        """One asynchronous copy on the current stream."""
        self.device.copy_(self.slots[self._next], non_blocking=True)
        if self._on_cuda:
            self._sent[self._next].record()
            self._next = (self._next + 1) % len(self.slots)


def memory_of(tensor: Tensor) -> memoryview:
    """The bytes of a contiguous tensor on the CPU, to read and write; keep the tensor alive meanwhile."""
    assert tensor.device.type == "cpu" and tensor.is_contiguous()
    if not tensor.numel():
        return memoryview(bytearray())
    return memoryview((ctypes.c_char * tensor.nbytes).from_address(tensor.data_ptr())).cast("B")
