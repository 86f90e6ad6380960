"""CUDA graphs of what a step launches: one replay instead of a launch per kernel, captured when it has run before."""

import logging
from collections.abc import Callable, Hashable

import torch

log = logging.getLogger(__name__)
_MOST = 8  # variants kept: gradients that wander between layouts are launched plainly


def capturing() -> bool:
    """True while someone captures the current stream."""
    return torch.cuda.is_initialized() and torch.cuda.is_current_stream_capturing()


class Graphs:
    """`run(key, launch)` launches plainly the first time, captures the second, then replays.

    What is launched must take all it needs from buffers that never move, and be the same whenever `key` is. After a
    capture failed, `on` is False.
    """

    def __init__(self, device: torch.device, *, on: bool):
        self.device = device
        self.on = on and device.type == "cuda"
        self._graphs: dict[Hashable, torch.cuda.CUDAGraph | None] = {}

    def run(self, key: Hashable, launch: Callable[[], None]) -> None:
        graph = self._graphs.get(key)
        if graph is not None:
            graph.replay()
        elif key not in self._graphs:
            if len(self._graphs) < _MOST:
                self._graphs[key] = None
            launch()
        else:
            graph = self._graphs[key] = self._capture(launch)
            if graph is None:
                launch()
            else:
                graph.replay()

    def _capture(self, launch: Callable[[], None]) -> torch.cuda.CUDAGraph | None:
        """On a stream of its own, as capturing needs; other threads may go on using the device."""
        graph = torch.cuda.CUDAGraph()
        stream = torch.cuda.Stream(self.device)
        stream.wait_stream(torch.cuda.current_stream(self.device))
        try:
            with torch.cuda.stream(stream):
                graph.capture_begin(capture_error_mode="thread_local")
                try:
                    launch()
                finally:
                    graph.capture_end()
        except RuntimeError as error:
            log.warning("the optimizer step cannot be captured in a CUDA graph and is launched plainly: %s", error)
            self.on = False
            return None
        torch.cuda.current_stream(self.device).wait_stream(stream)
        return graph
