"""The table of docs/benchmarks.md: what each script here answers, by which command, in which time, and its rows.

All of it is in the scripts' docstrings: the question is the first paragraph, and a command is an indented line with a
comment `# TIME -> ROWS`, on its line or the next. `python -m experiments.analysis.claims --write` renders the page.
"""

import argparse
import ast
import re
import runpy
import shlex
import sys
from collections.abc import Iterable
from pathlib import Path
from typing import Any
from unittest.mock import patch

ROOT = Path(__file__).resolve().parents[2]
PAGE = ROOT / "docs" / "benchmarks.md"
TABLE = re.compile(r"(<!-- scripts -->\n).*?(<!-- end of scripts -->)", re.DOTALL)
COMMAND = re.compile(r"^ {4}((?:\w+=\S+ )?(?:python|torchrun) .*?)\s+# (.*?)(?: -> (.*))?$", re.MULTILINE)

PLACEHOLDERS = {"LAYERS": "22", "GIB": "8"}  # of numbers; OUT, FOLDER and ROWS.csv are paths


def rendered(page: str) -> str:
    """`page` with its table made anew."""
    lines = ["| script | question | command | time | rows |", "|---|---|---|---|---|"]
    shared = []
    for file in sorted(ROOT.glob("experiments/*/*.py")):
        name, text = f"{file.parent.name}/{file.name}", file.read_text(encoding="utf-8")
        question = " ".join((ast.get_docstring(ast.parse(text)) or "").partition("\n\n")[0].split())
        if file not in scripts():
            shared.append(f"| `{name}` | {question} |")
        for index, (command, time, rows) in enumerate(commands(file)):
            first = (f"`{name}`", question) if not index else ("", "")
            lines.append(f"| {' | '.join(first)} | `{command}` | {time} | {rows or '-'} |")
    lines += [
        "",
        "What scripts share and has no command of its own:",
        "",
        "| file | what it is |",
        "|---|---|",
        *shared,
    ]
    return TABLE.sub(lambda found: found[1] + "\n".join(lines) + "\n" + found[2], page)


def scripts() -> list[Path]:
    """Files that are run, in order."""
    return [
        file for file in sorted(ROOT.glob("experiments/*/*.py")) if '\nif __name__ == "__main__":' in file.read_text()
    ]


def commands(file: Path) -> list[tuple[str, str, str]]:
    """Commands of a script's docstring, their times, and the files of their rows."""
    return COMMAND.findall(ast.get_docstring(ast.parse(file.read_text(encoding="utf-8")), clean=False) or "")


class Parsed(BaseException):
    """The script has understood its command line."""


def refused(lines: Iterable[str]) -> list[str]:
    """Those of the command lines whose script does not take them. Scripts are imported here and end when they have
    parsed, so a process of its own should ask."""
    found, parse = [], argparse.ArgumentParser.parse_args

    def parsed(*args: Any, **given: Any) -> None:
        parse(*args, **given)
        raise Parsed

    for line in lines:
        words = [PLACEHOLDERS.get(word, word) for word in shlex.split(line)]
        at = next(i for i, word in enumerate(words) if word.endswith(".py") or word.startswith("experiments."))
        name = words[at].removesuffix(".py").replace("/", ".")
        with patch.object(sys, "argv", words[at:]), patch.object(argparse.ArgumentParser, "parse_args", parsed):
            try:
                runpy.run_module(name, run_name="__main__")
                found.append(f"{line}: its arguments are not parsed")
            except Parsed:
                pass
            except SystemExit:
                found.append(line)
    return found
