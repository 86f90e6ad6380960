"""The streams on which copies and steps of host-placed blocks run beside the caller.

On a GPU they are CUDA streams (`CudaStreams`); elsewhere work is done at once, in the caller's order (`Streams`).
Work within a stream runs in order. Between streams only marks order it: a mark, a CUDA event, is reached when the
stream has done all work that it was given before, and another stream can wait for that. `MAIN` is the caller's current
stream, in which forward and backward run.
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
        """A mark after all work that the stream has been given by now."""

    def wait(self, name: str, mark: Any) -> None:
        """Makes work that the stream is given from now on wait for the mark."""

    def wait_on_host(self, mark: Any) -> None:
        """Blocks the calling thread until the mark is reached."""

    def record_use(self, tensors: Iterable[Tensor], *, name: str) -> None:
        """Notes that the stream uses `tensors`: if the caller drops them, their memory is reused only afterwards."""

    def finish(self) -> None:
        """Blocks the calling thread until all streams but MAIN are done."""


class CudaStreams(Streams):
    """CUDA streams. Marks are events, so that the calling thread does not wait."""

    def __init__(self, device: torch.device):
        self.device = device
        # Steps are short and copies wait for them: they run before what backward has launched already.
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
