"""`python -m baoc.sweep.report FOLDER...`, the earlier name of `python -m baoc.frontier.report`."""

import sys

from baoc.frontier.report import main

if __name__ == "__main__":
    sys.exit(main())
