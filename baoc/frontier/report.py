"""`python -m baoc.frontier.report FOLDER...` builds frontier.csv and frontier.html from any set of run folders.

Several folders (studies, multiruns, single runs) become one page, so that their frontiers can be compared.
"""

import argparse
import sys
from pathlib import Path

from baoc.core.commands import Arguments, command
from baoc.frontier.build import build_report
from baoc.frontier.picture import BROWSERS, render_picture
from baoc.tracking.console import say


@command
def main(argv: Arguments = None) -> None:
    """Raises BadInputError where a folder holds no run."""
    parser = argparse.ArgumentParser(prog="python -m baoc.frontier.report", description=__doc__)
    parser.add_argument("folders", nargs="+", type=Path, metavar="FOLDER", help="folders of runs, at any depth")
    parser.add_argument("--out", type=Path, help="where to write; the first folder by default")
    parser.add_argument("--picture", action="store_true", help="frontier.png beside the page, by a Chromium")
    args = parser.parse_args(argv)
    out = args.out or args.folders[0]
    build_report(args.folders, out=out)
    if args.picture:
        png = render_picture(out / "frontier.html")
        say(f"drawn in {png}" if png else f"no picture: none of {', '.join(BROWSERS)} is there and draws it")


if __name__ == "__main__":
    sys.exit(main())
