"""`python -m baoc`, and the console script `baoc`: the command of run.py, where what it needs is installed."""

import sys

from baoc.errors import BadInputError


def main() -> int:
    """The exit code of the command. Without the packages of run.py it is 2, with a sentence."""
    try:
        from baoc.cli.main import main as command
    except ModuleNotFoundError as error:
        missing = (error.name or "").partition(".")[0]
        if missing in ("", "baoc"):
            raise
        print(
            f"the command needs {missing}, which is not installed: pip install 'baoc[all]'. BaocOptimizer and "
            "BaocStrategy work without it",
            file=sys.stderr,
        )
        return BadInputError.exit_code
    return command()


if __name__ == "__main__":
    sys.exit(main())
