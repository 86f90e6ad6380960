"""`python -m baoc.sweep.report FOLDER...`: rebuilds frontier.csv and frontier.html from any set of run folders.

Several folders (studies, multiruns, single runs) become one page, so that their frontiers are compared.
"""

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path

from baoc.errors import BaocError
from baoc.sweep.frontier import report


def main(argv: Sequence[str] | None = None) -> int:
    """Exit code 0, or 2 where a folder holds no run or cannot be read or written."""
    parser = argparse.ArgumentParser(prog="python -m baoc.sweep.report", description=__doc__)
    parser.add_argument("folders", nargs="+", type=Path, metavar="FOLDER", help="folders of runs, at any depth")
    parser.add_argument("--out", type=Path, help="where to write; the first folder by default")
    given = parser.parse_args(argv)
    try:
        report(given.folders, out=given.out or given.folders[0])
    except (BaocError, OSError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    return 0


if __name__ == "__main__":
    sys.exit(main())
