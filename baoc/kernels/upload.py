"""A small device buffer that the host refills every step, without waiting for the device and without racing it."""

import torch
from torch import Tensor

_SLOTS = 4  # steps that the host may be ahead of the device before it waits


class Upload:
    """`host()` gives the next staging tensor to fill, `send()` copies it to `device`, which never moves."""

    def __init__(self, numel: int, *, dtype: torch.dtype, device: torch.device):
        self.device = torch.zeros(numel, dtype=dtype, device=device)
        self._on_cuda = device.type == "cuda"
        count = _SLOTS if self._on_cuda else 1
        self._slots = [torch.zeros(numel, dtype=dtype, pin_memory=self._on_cuda, device="cpu") for _ in range(count)]
        self._sent = [torch.cuda.Event() for _ in range(count)] if self._on_cuda else []
        self._next = 0

    def host(self) -> Tensor:
        """Holds what was sent some steps ago, so write all of it."""
        if self._on_cuda:
            self._sent[self._next].synchronize()
        return self._slots[self._next]

    def send(self) -> None:
        """One asynchronous copy on the current stream."""
        self.device.copy_(self._slots[self._next], non_blocking=True)
        if self._on_cuda:
            self._sent[self._next].record()
            self._next = (self._next + 1) % _SLOTS
