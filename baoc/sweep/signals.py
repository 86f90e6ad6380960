"""SIGINT and SIGTERM of a study, so that its trials end with it whatever the study is doing at that moment."""

import signal
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager

POLL_S = 0.2
HANDLED = (signal.SIGINT, signal.SIGTERM)


class SignalHandler:
    """Raises KeyboardInterrupt for SIGINT (Ctrl-C) and SIGTERM (a cluster ends the job). A callback that must not raise
    may swallow the exception, so loops call `check`, which raises it again."""

    def __init__(self) -> None:
        self._received: list[int] = []
        self._deferred = False

    @contextmanager
    def installed(self) -> Iterator[None]:
        """Installs the handlers, in the main thread. An ignored SIGINT (a shell's background job) stays ignored."""
        main = threading.current_thread() is threading.main_thread()
        wanted = [which for which in HANDLED if main and signal.getsignal(which) is not signal.SIG_IGN]
        before = {which: signal.signal(which, self._handle) for which in wanted}
        try:
            yield
        finally:
            for which, handler in before.items():
                signal.signal(which, handler)

    @contextmanager
    def deferred(self) -> Iterator[None]:
        """Raises only at the end of the block: a process that is not yet registered could not be ended."""
        self._deferred = True
        try:
            yield
        except (EOFError, OSError):
            # a signal to the whole job (timeout, scancel) ends the fork server, perhaps before it arrives here
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
