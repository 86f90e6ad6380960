"""What each spec takes: `python -m baoc.optim.table [PATTERN ...]` prints bytes per parameter, as a Markdown table.

Patterns are those of `catalogue.select`; without any, every row with native weights is shown. Gradients take as much as
the weights. Figures are of a large fp32 matrix: small tensors add a few bytes each for steps, scales and alignment.
"""

import sys
from collections.abc import Sequence

from baoc.core.catalogue import select
from baoc.core.commands import Arguments, command
from baoc.core.rule_tags import RULE_INFOS
from baoc.planning.cost import bytes_per_parameter


def table(patterns: Sequence[str] = ("*",)) -> str:
    """Rows of spec, state, weights and their sum, in bytes per parameter. Raises BadInputError as `select` does."""
    lines = ["| spec | state | weights | both | |", "|---|---|---|---|---|"]
    for name, spec in select(patterns).items():
        state, weights = bytes_per_parameter(spec, rule=RULE_INFOS[spec.rule])
        lines.append(f"| {name} | {state:.2f} | {weights:.2f} | {state + weights:.2f} | {spec.description} |")
    return "\n".join(lines)


@command
def main(argv: Arguments = None) -> None:
    print(table((sys.argv[1:] if argv is None else argv) or ("*",)))


if __name__ == "__main__":
    sys.exit(main())
