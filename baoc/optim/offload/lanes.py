"""Lanes, in which copies and steps of streamed blocks run beside the caller.

On a GPU a lane is a CUDA stream (`Streams`); elsewhere work is done at once, in the caller's order (`Lanes`). Within a
lane work is done in order. Between lanes it is ordered by marks alone: a mark, a CUDA event, is taken when a lane has
come so far, and another lane waits for it. `MAIN` is the caller's own lane, in which forward and backward run.
"""

from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import Tensor

MAIN, IN, STEP, OUT = "main", "in", "step", "out"
_OWN = (IN, STEP, OUT)


class Lanes:
    """Those of the CPU, where nothing runs beside anything: work is done at once, in the caller's order."""

    def run(self, lane: str, work: Callable[[], object]) -> None:
        """Does `work` in the lane, now or when the lane comes to it."""
        work()

    def mark(self, lane: str) -> Any:
        """How far the lane has been given work by now."""

    def wait(self, lane: str, mark: Any) -> None:
        """What the lane is given from now on waits for the mark."""

    def wait_here(self, mark: Any) -> None:
        """The calling thread waits for the mark."""

    def keep(self, tensors: Iterable[Tensor], *, lane: str) -> None:
        """The memory of tensors that the caller lets go of is not used again before the lane has come so far."""

    def finish(self) -> None:
        """The calling thread waits for all lanes but its own."""


class Streams(Lanes):
    """Lanes that are CUDA streams; marks are events, so no lane keeps the calling thread."""

    def __init__(self, device: torch.device):
        self.device = device
        # Steps are short and copies wait for them: they go before what backward has launched already.
        self._streams = {lane: torch.cuda.Stream(device, priority=-1 if lane == STEP else 0) for lane in _OWN}

    def _stream(self, lane: str) -> torch.cuda.Stream:
        return torch.cuda.current_stream(self.device) if lane == MAIN else self._streams[lane]

    def run(self, lane: str, work: Callable[[], object]) -> None:
        with torch.cuda.stream(self._stream(lane)):
            work()

    def mark(self, lane: str) -> torch.cuda.Event:
        event = torch.cuda.Event()
        event.record(self._stream(lane))
        return event

    def wait(self, lane: str, mark: torch.cuda.Event | None) -> None:
        if mark is not None:
            self._stream(lane).wait_event(mark)

    def wait_here(self, mark: torch.cuda.Event | None) -> None:
        if mark is not None:
            mark.synchronize()

    def keep(self, tensors: Iterable[Tensor], *, lane: str) -> None:
        stream = self._stream(lane)
        for tensor in tensors:
            tensor.record_stream(stream)

    def finish(self) -> None:
        for stream in self._streams.values():
            stream.synchronize()


def lanes_for(device: torch.device) -> Lanes:
    return Streams(device) if device.type == "cuda" else Lanes()
