"""CUDA graphs of what a step launches: one replay instead of a launch per kernel, captured when it has run before."""

import ctypes
import gc
import logging
from collections.abc import Callable, Hashable, Iterator
from contextlib import contextmanager

import torch

log = logging.getLogger(__name__)
MOST_GRAPHS = 24  # variants kept: gradients that wander between layouts are launched plainly
_TRIES = 3  # captures that may fail before steps are launched plainly for good


def capturing() -> bool:
    """True while someone captures the current stream."""
    return torch.cuda.is_initialized() and torch.cuda.is_current_stream_capturing()


class Graphs:
    """`run(key, launch, slot=)` launches plainly the first time for a key, then captures for each slot, and replays.

    What is launched must take all it needs from buffers that never move, and be the same whenever `key` and `slot` are;
    slots differ in addresses alone. A capture that fails is tried again at the next step; after some, `on` is False.
    """

    def __init__(self, device: torch.device, *, on: bool):
        self.device = device
        self.on = on and device.type == "cuda"
        self._failed = 0
        self._warm: set[Hashable] = set()
        self._graphs: dict[Hashable, torch.cuda.CUDAGraph] = {}

    def run(self, key: Hashable, launch: Callable[[], None], *, slot: int) -> None:
        graph = self._graphs.get((slot, key))
        if graph is None and key in self._warm and len(self._graphs) < MOST_GRAPHS:
            graph = self.capture(launch)
            if graph is not None:
                self._graphs[slot, key] = graph
        if graph is None:
            self._warm.add(key)
            launch()
        else:
            graph.replay()

    def capture(self, launch: Callable[[], None]) -> torch.cuda.CUDAGraph | None:
        """On a stream of its own, as capturing needs; other threads may go on using the device."""
        graph = torch.cuda.CUDAGraph()
        stream = torch.cuda.Stream(self.device)
        stream.wait_stream(torch.cuda.current_stream(self.device))
        begun = False
        try:
            with nothing_collected(), torch.cuda.stream(stream):
                _room_for_generator(self.device)
                graph.capture_begin(capture_error_mode="thread_local")
                begun = True
                try:
                    launch()
                finally:
                    graph.capture_end()
        except RuntimeError as error:
            if not begun:  # torch ends the process where a graph is destroyed whose capture could not begin: it stays
                ctypes.pythonapi.Py_IncRef(ctypes.py_object(graph))
            self.give_up(error)
            return None
        torch.cuda.current_stream(self.device).wait_stream(stream)
        return graph

    def give_up(self, error: RuntimeError) -> None:
        """For this step, and for good when it was tried often enough."""
        self._failed += 1
        self.on = self._failed < _TRIES
        what = "is tried again" if self.on else "is launched plainly from now on"
        log.warning("the optimizer step could not be captured in a CUDA graph and %s: %s", what, error)


def _room_for_generator(device: torch.device) -> None:
    """Makes torch's allocator hold, for the current stream, what beginning a capture takes; raises OutOfMemoryError.

    The first capture gives the device's random generator a seed and an offset in device memory, of 8 bytes each. Where
    those find no memory a graph is left half registered, and to free it ends the process ("should be registered").
    """
    seed, offset = (torch.empty(1, dtype=torch.int64, device=device) for _ in range(2))
    del seed, offset


@contextmanager
def nothing_collected() -> Iterator[None]:
    """Python's collector rests: what it frees may be a CUDA graph, of an optimizer that is gone, and to free one is not
    permitted while another is captured, which ends the capture."""
    was_on = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_on:
            gc.enable()
