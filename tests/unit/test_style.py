"""The shape of the code: a docstring in each file, no machine's paths. Complexity is ruff's to limit."""

import ast
import re

from tests.conftest import ROOT

SOURCES = {
    str(file.relative_to(ROOT)): file.read_text()
    for file in (ROOT / "run.py", *(file for folder in ("baoc", "tests") for file in (ROOT / folder).rglob("*.py")))
}


def test_each_file_says_what_it_is_for():
    assert [name for name, text in SOURCES.items() if not ast.get_docstring(ast.parse(text))] == []


def test_no_file_names_a_path_of_one_machine():
    kept = [*ROOT.glob("*.md"), *ROOT.glob("*.toml"), *(ROOT / "conf").rglob("*.yaml"), *ROOT.glob("experiments/*")]
    texts = {
        **SOURCES,
        **{str(file.relative_to(ROOT)): file.read_text() for file in kept if file.is_file() and file.name[0] != "."},
    }
    pattern = re.compile(r"/(?:home|Users|root|work)/\w")
    assert [name for name, text in texts.items() if pattern.search(text)] == []
