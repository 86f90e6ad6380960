"""The streams on which copies and steps of host-placed blocks run beside the caller.

On a GPU they are CUDA streams (`CudaStreams`); elsewhere work is done at once, in the caller's order (`Streams`).
Within a stream work is done in order. Between streams it is ordered by marks alone: a mark, a CUDA event, is taken when
a stream has come so far, and another stream waits for it. `MAIN` is the caller's own stream, in which forward and
backward run.
"""

from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import Tensor

MAIN, IN, STEP, OUT = "main", "in", "step", "out"  # names of streams
_OWN = (IN, STEP, OUT)


class Streams:
    """The streams of a CPU, where nothing runs beside anything: work is done at once, in the caller's order."""

    def run(self, name: str, work: Callable[[], object]) -> None:
        """Does `work` in the stream, now or when the stream comes to it."""
        work()

    def mark(self, name: str) -> Any:
        """How far the stream has been given work by now."""

    def wait(self, name: str, mark: Any) -> None:
        """Work that the stream is given from now on waits for the mark."""

    def wait_on_host(self, mark: Any) -> None:
        """The calling thread waits for the mark."""

    def record_use(self, tensors: Iterable[Tensor], *, name: str) -> None:
        """Keeps the memory of tensors that the caller drops from being reused before the stream is done with them."""

    def finish(self) -> None:
        """The calling thread waits for all streams but its own."""


class CudaStreams(Streams):
    """CUDA streams; marks are events, so no stream keeps the calling thread."""

    def __init__(self, device: torch.device):
        self.device = device
        # Steps are short and copies wait for them: they go before what backward has launched already.
        self._own = {name: torch.cuda.Stream(device, priority=-1 if name == STEP else 0) for name in _OWN}

    def _named(self, name: str) -> torch.cuda.Stream:
        return torch.cuda.current_stream(self.device) if name == MAIN else self._own[name]

    def run(self, name: str, work: Callable[[], object]) -> None:
        with torch.cuda.stream(self._named(name)):
            work()

    def mark(self, name: str) -> torch.cuda.Event:
        event = torch.cuda.Event()
        event.record(self._named(name))
        return event

    def wait(self, name: str, mark: torch.cuda.Event | None) -> None:
        if mark is not None:
            self._named(name).wait_event(mark)

    def wait_on_host(self, mark: torch.cuda.Event | None) -> None:
        if mark is not None:
            mark.synchronize()

    def record_use(self, tensors: Iterable[Tensor], *, name: str) -> None:
        for tensor in tensors:
            tensor.record_stream(self._named(name))

    def finish(self) -> None:
        for stream in self._own.values():
            stream.synchronize()
