"""Every figure that the README claims stands in experiments/CLAIMS.md, and its table is that of the results."""

import csv
import re

from tests.support.paths import ROOT

README = (ROOT / "README.md").read_text()
CLAIMS = (ROOT / "experiments" / "CLAIMS.md").read_text()
# Signed or plain decimals, and numbers with a unit of time, size, speed or share.
FIGURE = re.compile(r"[-+]?\b\d+\.\d+\b%?|\b\d+(?:\.\d+)?(?:%| (?:ms|MiB|GiB|samples/s|times|seconds)\b)")


def measured_part(text: str) -> str:
    return text[text.index("## What was measured") : text.index("## What is not there yet")]


def figures(text: str) -> set[str]:
    return {match.group().lstrip("-+") for match in FIGURE.finditer(text)}


def test_each_measured_figure_of_the_readme_is_a_claim():
    found = figures(measured_part(README))
    assert len(found) > 20, "the pattern finds too little to check anything"
    assert found - figures(CLAIMS) == set()


def test_no_figure_hides_elsewhere_in_the_readme():
    rest = README.replace(measured_part(README), "")
    definitions = {"8 GiB", "2.13.0", "3.11", "3.12", "0.01", "7.5", "1.2", "4.0", "2605.04711", "2.13", "2.0"}
    assert figures(rest) - figures(CLAIMS) - definitions == set()


def test_the_table_is_that_of_the_results():
    with (ROOT / "experiments" / "results" / "state_budgets_vision.csv").open() as file:
        for row in csv.DictReader(file):
            line = (
                f"| {row['configuration']} | {float(row['state_fraction']):.1%} | {float(row['loss']):.3f} "
                f"({float(row['loss_sd']):.3f}) | {float(row['accuracy']):.1%} |"
            )
            assert line in CLAIMS
