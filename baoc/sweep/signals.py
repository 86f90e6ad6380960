"""Handlers for SIGINT and SIGTERM, by which a study ends its trials whatever it is doing at that moment."""

import signal
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager

POLL_S = 0.2
HANDLED = (signal.SIGINT, signal.SIGTERM)


class SignalHandler:
    """Raises KeyboardInterrupt on SIGINT (Ctrl-C) and SIGTERM (a cluster ends the job). The code that runs then may
    swallow the exception, so loops call `check`, which raises it again."""

    def __init__(self) -> None:
        self._received: list[int] = []
        self._deferred = False

    @contextmanager
    def installed(self) -> Iterator[None]:
        """Installs the handlers for the block. An ignored SIGINT (a shell's background job) stays ignored."""
        is_main = threading.current_thread() is threading.main_thread()  # the only one that may set handlers
        numbers = [number for number in HANDLED if is_main and signal.getsignal(number) is not signal.SIG_IGN]
        previous = {number: signal.signal(number, self._handle) for number in numbers}
        try:
            yield
        finally:
            for number, handler in previous.items():
                signal.signal(number, handler)

    @contextmanager
    def deferred(self) -> Iterator[None]:
        """Delays the exception to the end of the block, in which a process is started and registered to be ended."""
        self._deferred = True
        try:
            yield
        except (EOFError, OSError):
            # a signal to the whole job (timeout, scancel) may end the fork server before it arrives here
            time.sleep(POLL_S)
            self.check()
            raise
        finally:
            self._deferred = False
        self.check()

    @property
    def received(self) -> bool:
        return bool(self._received)

    def check(self) -> None:
        """Raises KeyboardInterrupt if a signal was received."""
        if self._received:
            raise KeyboardInterrupt(f"interrupted ({signal.Signals(self._received[0]).name})")

    def _handle(self, number: int, _: object) -> None:
        self._received.append(number)
        if not self._deferred:
            self.check()
