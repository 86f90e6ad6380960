"""Entry points of the `python -m baoc.sweep.NAME` commands: a user's error is one line and exit code 2."""

import sys
from collections.abc import Callable, Sequence
from functools import wraps

from baoc.errors import BaocError

Arguments = Sequence[str] | None  # None: sys.argv[1:]


def command(main: Callable[[Arguments], int | None]) -> Callable[..., int]:
    """Decorates `main(argv)`: its exit code or 0; 2 with a one-line message for a BaocError or OSError."""

    @wraps(main)
    def run(argv: Arguments = None) -> int:
        try:
            return main(argv) or 0
        except (BaocError, OSError) as error:
            print(f"baoc: error: {error}", file=sys.stderr)
            return 2

    return run
