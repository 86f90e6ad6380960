"""Train within a budget: `python run.py model=vit budget=8gb`; `python run.py --help` says the rest."""

import sys

from baoc.__main__ import main

if __name__ == "__main__":
    sys.exit(main())
