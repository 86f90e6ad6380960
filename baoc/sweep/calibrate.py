"""Says where `python -m baoc.sweep.calibrate` went."""

import sys

if __name__ == "__main__":
    print(
        "baoc: error: baoc.sweep.calibrate moved out of the package: python -m experiments.analysis.calibrate "
        "FOLDER... in a checkout takes the same arguments",
        file=sys.stderr,
    )
    sys.exit(2)
