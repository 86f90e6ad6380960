"""The scripts of examples/ run as they are on tiny data, are short, and say what they did."""

import re
from pathlib import Path

import pytest

from tests.support.commands import start_script
from tests.support.paths import ROOT

SCRIPTS = sorted((ROOT / "examples").glob("*.py"))
MOST_LINES = 80


def test_they_are_short_two_lines_are_ours_and_the_page_names_them():
    assert len(SCRIPTS) == 6
    page = (ROOT / "docs" / "examples.md").read_text(encoding="utf-8")
    for script in SCRIPTS:
        text = script.read_text(encoding="utf-8")
        assert len(text.splitlines()) < MOST_LINES, script.name
        assert text.count("# line ") == 2, script.name
        assert "del sys.path[0]" in text, f"{script.name} would import the lightning.py beside it"
        assert f"## {script.name}" in page, script.name


@pytest.mark.slow
@pytest.mark.parametrize("script", SCRIPTS, ids=lambda script: script.stem)
def test_an_example_trains_inside_its_budget(script: Path, tmp_path: Path):
    code, told = start_script(script, "state_25", folder=tmp_path / "command", cwd=tmp_path).done()
    assert code == 0, told
    assert "plan for budget state_25" in told
    assert re.search(r"steps, no reallocation; .* of optimizer state: met, .* to spare", told)
    losses = [float(found) for found in re.findall(r"loss (\d+\.\d+)", told)]
    # nanogpt guesses among 64 letters (4.2 by chance, AdamW ends at 2.4), the others among few classes.
    assert losses and losses[-1] < (2.5 if script.stem == "nanogpt" else 1.5)
