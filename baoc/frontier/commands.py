"""What the commands of `python -m baoc.sweep.NAME` share: an error of the user's is one line, and exit code 2."""

import sys
from collections.abc import Callable, Sequence
from functools import wraps

from baoc.errors import BaocError

Arguments = Sequence[str] | None  # None: those of the process


def command(main: Callable[[Arguments], int | None]) -> Callable[..., int]:
    """`main(argv)` as an entry point: its exit code, 0 where it gives none, 2 where it raises what a user can mend."""

    @wraps(main)
    def run(argv: Arguments = None) -> int:
        try:
            return main(argv) or 0
        except (BaocError, OSError) as error:
            print(f"baoc: error: {error}", file=sys.stderr)
            return 2

    return run
