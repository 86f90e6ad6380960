"""A run that begins with given choices in place of those that priors make: what a change of one block is worth.

`python experiments/benchmarks/first_plan.py RUN head=adafactor_momentum -- model=llama budget=state_15
reallocation=off` takes the choices of the run folder RUN (its allocation.json), but for those named, and hands what
comes after `--` to run.py. The budget has to allow them. Results are the run's own.
"""

import argparse
import json
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT))

from baoc.cli.main import main as run  # noqa: E402
from baoc.planning.planner import Planner  # noqa: E402
from baoc.types import Plan, Profile  # noqa: E402


def begin_with(choices: dict[str, str]) -> None:
    """Every plan by priors is of `choices` from here on; later ones, by gradients, are as ever."""
    propose = Planner.propose

    def given(self: Planner, *, risk: str | None = None, profile: Profile | None = None) -> Plan:
        if profile is not None:
            return propose(self, risk=risk, profile=profile)
        plan = self.adopt(choices, risk="prior", profile=None)
        found = dict(plan.allocation.choices)
        if found != choices:
            unlike = sorted({block for block in {*found, *choices} if found.get(block) != choices.get(block)})
            raise SystemExit(f"budget {self.budget.name} or the model does not take these choices: {', '.join(unlike)}")
        return plan

    adopt = Planner.adopt

    def adopted(self: Planner, *args, **options) -> Plan:
        Planner.propose = propose  # which `adopt` falls back to
        try:
            return adopt(self, *args, **options)
        finally:
            Planner.propose = given

    Planner.propose, Planner.adopt = given, adopted


def main(argv: list[str]) -> int:
    cut = argv.index("--") if "--" in argv else len(argv)
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("run", type=Path, help="folder of a run of the same model")
    parser.add_argument("change", nargs="*", metavar="BLOCK=SPEC")
    given = parser.parse_args(argv[:cut])
    choices = json.loads((given.run / "allocation.json").read_text(encoding="utf-8"))["choices"]
    begin_with(choices | dict(change.split("=", 1) for change in given.change))
    return run(argv[cut + 1 :])


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
