"""Ctrl-C and SIGTERM of a study: its trials are to be ended with it, whatever it is doing when one comes."""

import signal
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager

POLL_S = 0.2
INTERRUPTS = (signal.SIGINT, signal.SIGTERM)


class Interrupts:
    """Ctrl-C, and SIGTERM, with which a cluster ends a job: KeyboardInterrupt in either case, for trials to be ended.

    A callback that may not raise swallows one, so whoever loops asks for what came with `check`.
    """

    def __init__(self) -> None:
        self._came: list[int] = []
        self._waiting = False

    @contextmanager
    def taken(self) -> Iterator[None]:
        """Takes the signals, in the main thread. An ignored Ctrl-C (a job in the background of a script) stays so."""
        main = threading.current_thread() is threading.main_thread()
        wanted = [which for which in INTERRUPTS if main and signal.getsignal(which) is not signal.SIG_IGN]
        before = {which: signal.signal(which, self._take) for which in wanted}
        try:
            yield
        finally:
            for which, handler in before.items():
                signal.signal(which, handler)

    @contextmanager
    def waiting(self) -> Iterator[None]:
        """They wait until what is inside is over: a process that nobody knows would not be asked to end."""
        self._waiting = True
        try:
            yield
        except (EOFError, OSError):
            # sent to a whole job (timeout, scancel), it ended the server of forks, perhaps before it came here
            time.sleep(POLL_S)
            self.check()
            raise
        finally:
            self._waiting = False
        self.check()

    @property
    def came(self) -> bool:
        return bool(self._came)

    def check(self) -> None:
        """Raises KeyboardInterrupt if a signal came."""
        if self._came:
            raise KeyboardInterrupt(f"interrupted ({signal.Signals(self._came[0]).name})")

    def _take(self, number: int, _: object) -> None:
        self._came.append(number)
        if not self._waiting:
            self.check()
