"""The shape of the code: short files, short functions, a docstring in each file, no machine's paths."""

import ast
import re

from tests.support.paths import ROOT

MAX_FILE_LINES, MAX_FUNCTION_LINES = 450, 60
SOURCES = {
    str(file.relative_to(ROOT)): file.read_text()
    for file in (ROOT / "run.py", *(file for folder in ("baoc", "tests") for file in (ROOT / folder).rglob("*.py")))
}


def test_files_are_short():
    lengths = {name: len(text.splitlines()) for name, text in SOURCES.items()}
    assert {name: length for name, length in lengths.items() if length > MAX_FILE_LINES} == {}


def test_each_file_says_what_it_is_for():
    assert [name for name, text in SOURCES.items() if not ast.get_docstring(ast.parse(text))] == []


def test_functions_are_short():
    lengths = {
        f"{name}:{node.name}": (node.end_lineno or 0) - node.lineno + 1
        for name, text in SOURCES.items()
        for node in ast.walk(ast.parse(text))
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)
    }
    assert {name: length for name, length in lengths.items() if length > MAX_FUNCTION_LINES} == {}


def test_no_file_names_a_path_of_one_machine():
    kept = [*ROOT.glob("*.md"), *ROOT.glob("*.toml"), *(ROOT / "conf").rglob("*.yaml"), *ROOT.glob("experiments/*")]
    texts = {
        **SOURCES,
        **{str(file.relative_to(ROOT)): file.read_text() for file in kept if file.is_file() and file.name[0] != "."},
    }
    pattern = re.compile(r"/(?:home|Users|root|work)/\w")
    assert [name for name, text in texts.items() if pattern.search(text)] == []


def test_no_test_module_imports_another():
    """What several test modules need is in tests/support; scripts in strings, which other processes run, count too."""
    pattern = re.compile(r"(?:from|import) (?:tests\.(?!support\.)|tests import|\.+\w* import|test_\w)")
    assert [name for name, text in SOURCES.items() if name.startswith("tests/") and pattern.search(text)] == []
