"""Published figures are rows of experiments/claims.csv, which follow from raw rows; the pages show those rows."""

import ast
import re

import pytest

from baoc.profiling import footprint
from experiments.analysis import claims, frontier_picture, peak_predictions
from tests.support.paths import ROOT

CLAIMS = claims.read_claims()
MADE_AGAIN = [claim for claim in CLAIMS if claim["column"]]
# Signed or plain decimals, and numbers with a unit of time, size, speed or share.
FIGURE = re.compile(r"[-+]?\b\d+\.\d+\b|\b\d+(?:\.\d+)?(?= ?(?:%|(?:ms|MiB|GiB|samples/s|times|seconds)\b))")
FENCED = re.compile(r"^```.*?^```", re.MULTILINE | re.DOTALL)
CODE = re.compile(r"`[^`\n]*`")
# Figures of prose that define or name something: versions, budgets, settings, shares of the state.
DEFINITIONS = {
    "README.md": {"2.13", "2.0", "3.11", "3.12", "8", "3", "10", "2605.04711"},
    "docs/index.md": set(),
    "docs/results.md": {"2.11", "2.12", "0.003", "0.28", "3.13", "8", "6", "3", "10", "16", "95"},
}


def figures(text: str) -> set[str]:
    """Of the prose: code names things, and the tables between marks are compared with the claims as a whole."""
    prose = CODE.sub("", FENCED.sub("", claims.TABLE.sub("", text)))
    return {match.group().lstrip("-+") for match in FIGURE.finditer(prose)}


def test_claims_are_figures_with_all_that_is_needed_to_check_them():
    assert len(CLAIMS) > 250
    needed = ("section", "figure", "value", "n", "device", "versions", "commit", "command")
    assert [claim["figure"] for claim in CLAIMS if not all(claim[key] for key in needed)] == []
    names = [(claim["section"], claim["figure"], claim["commit"], claim["interval"]) for claim in CLAIMS]
    assert len(set(names)) == len(names)


def test_raw_rows_of_a_claim_exist():
    named = {claim["rows"] for claim in CLAIMS if claim["rows"]}
    assert [name for name in named if not (claims.RESULTS / name).is_file()] == []
    assert all(claim["rows"] and claim["where"] and claim["statistic"] for claim in MADE_AGAIN)


@pytest.mark.slow
@pytest.mark.parametrize("section", sorted({claim["section"] for claim in MADE_AGAIN}))
def test_figures_follow_from_their_raw_rows(section: str):
    own = [claim for claim in MADE_AGAIN if claim["section"] == section]
    assert [found for claim in own if (found := claims.complaint(claim))] == []


def test_a_wrong_figure_is_found():
    claim = next(claim for claim in MADE_AGAIN if claim["statistic"] == "paired")
    assert "is claimed" in str(claims.complaint({**claim, "value": "+9.999"}))
    assert "an interval of" in str(claims.complaint({**claim, "interval": "sd 9.999"}))
    assert "n 99 is claimed" in str(claims.complaint({**claim, "n": "99"}))


def test_figures_without_raw_rows_grow_no_more():
    pinned = [claim["figure"] for claim in CLAIMS if not claim["column"]]
    assert len(pinned) <= 15, "a new figure needs raw rows, a column and a statistic"


@pytest.mark.parametrize("page", [claims.README, claims.PAGE], ids=lambda page: page.name)
def test_tables_of_the_pages_are_those_of_the_claims(page):
    text = page.read_text()
    assert claims.rendered(text, CLAIMS) == text, "run python -m experiments.analysis.claims --write"


def test_each_section_of_the_claims_is_on_the_results_page():
    shown = {match["section"] for match in claims.TABLE.finditer(claims.PAGE.read_text())}
    assert shown == {claim["section"] for claim in CLAIMS}


@pytest.mark.parametrize("page", DEFINITIONS)
def test_no_figure_of_a_page_hides_from_the_claims(page: str):
    told = {number for claim in CLAIMS for key in ("value", "interval", "figure") for number in numbers(claim[key])}
    assert figures((ROOT / page).read_text()) - told - DEFINITIONS[page] == set()


def numbers(text: str) -> set[str]:
    return set(re.findall(r"\d+(?:\.\d+)?", text))


def test_commands_of_the_claims_name_programs_that_exist():
    for command in {claim["command"] for claim in CLAIMS}:
        words = command.split()
        module = words[words.index("-m") + 1].replace(".", "/") + ".py" if words[:2] == ["python", "-m"] else None
        file = module or next(word for word in words if word.endswith(".py"))
        assert (ROOT / file).is_file(), command
        assert file == "run.py" or ast.parse((ROOT / file).read_text())


def test_tables_made_from_other_tables_are_up_to_date():
    assert claims.stale() == []


@pytest.mark.parametrize(
    ("cause", "runs", "before"), [(peak_predictions.MOVED, 6, 22), (peak_predictions.NARROWED, 1, 24)]
)
def test_a_run_that_rose_by_a_page_is_within_the_margin_of_today(cause: str, runs: int, before: int):
    """Margins are added to a prediction, so a recorded one rises by as much as they did, from `before` MiB."""
    widened = footprint.PAGES_BYTES - before * 2**20
    risen = [row for row in peak_predictions.above() if row["cause"] == cause]
    assert len(risen) == runs and all(0 < row["excess_bytes"] <= widened for row in risen)


def test_the_picture_is_that_of_its_rows():
    assert frontier_picture.picture(frontier_picture.read_points()) == frontier_picture.PICTURE.read_text()
    assert frontier_picture.PICTURE.stat().st_size < 150_000
