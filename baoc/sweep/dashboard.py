"""Says what took the place of `python -m baoc.sweep.dashboard`."""

import sys

if __name__ == "__main__":
    print(
        "baoc: error: baoc.sweep.dashboard was removed: with logger=wandb a study adds its frontier as a run, whose "
        "table and page W&B shows, and `python -m baoc.frontier.report FOLDER... --picture` makes the page again",
        file=sys.stderr,
    )
    sys.exit(2)
