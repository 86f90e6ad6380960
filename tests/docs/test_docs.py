"""What the pages say can be done: links lead somewhere, examples run or compile, commands and settings compose."""

import re
import shlex
from collections.abc import Iterator
from fnmatch import fnmatch
from importlib.util import find_spec
from pathlib import Path

import pytest
from hydra.core.override_parser.overrides_parser import OverridesParser

from baoc.cli.listing import LISTS
from baoc.config.compose import compose
from baoc.config.from_hydra import from_hydra
from baoc.config.nodes import option_names
from baoc.config.race import parse_seconds
from baoc.core.budgets import parse_budget
from baoc.core.catalogue import select
from baoc.core.rule_tags import RULE_INFOS
from baoc.planning.cost import bytes_per_parameter
from tests.support.paths import ROOT

PAGES = [ROOT / name for name in ("README.md", "CONTRIBUTING.md", "CHANGELOG.md")] + sorted(
    (ROOT / "docs").glob("*.md")
)
IDS = [str(page.relative_to(ROOT)) for page in PAGES]
TEXTS = {page: page.read_text(encoding="utf-8") for page in PAGES}
FENCE = re.compile(r"^```(\w*)\n(.*?)^```", re.MULTILINE | re.DOTALL)
INLINE = re.compile(r"`([^`\n]+)`")
LINK = re.compile(r"\]\(([^)\s]+)\)")
RUNS = "# This example runs as it is.\n"  # the first line of an example that is executed
PLACEHOLDER = re.compile(r"\b[A-Z]{3,}\b|\.\.\.")  # NAME, PATH, FOLDER, ...
OTHER = re.compile(
    r"hydra|n_trials=|step=|find_unused_parameters=|baselines=|automatic_optimization=|checkpointing=|verbose=|release=|nonfinite=|fused=|trainer.devices="
)  # of studies and of Python; what is refused
SETTING = re.compile(r"'?[a-z][a-z_.]*=[^\s=]\S*( [a-z][a-z_.]*=\S+)*'?")


def prose(page: Path) -> str:
    return FENCE.sub("", TEXTS[page])


def fenced(page: Path, language: str) -> list[str]:
    return [code for found, code in FENCE.findall(TEXTS[page]) if found == language]


def anchors(page: Path) -> set[str]:
    """As GitHub and MkDocs make them of headings: lower case, words joined by hyphens."""
    headings = re.findall(r"^#+ (.+)$", prose(page), re.MULTILINE)
    return {re.sub(r"[^\w\s-]", "", heading).strip().lower().replace(" ", "-") for heading in headings}


@pytest.mark.parametrize("page", PAGES, ids=IDS)
def test_links_lead_to_files_and_headings(page: Path):
    broken = []
    for link in LINK.findall(prose(page)):
        if link.startswith("http"):
            continue
        name, _, anchor = link.partition("#")
        target = (page.parent / name).resolve() if name else page
        if not target.is_file() or (anchor and anchor not in anchors(target)):
            broken.append(link)
    assert broken == []


@pytest.mark.parametrize(("page", "code"), [(page, code) for page in PAGES for code in fenced(page, "python")])
def test_python_examples_compile_and_the_short_ones_run(page: Path, code: str, tmp_path, monkeypatch):
    program = compile(code, page.name, "exec")
    if code.startswith(RUNS):
        monkeypatch.chdir(tmp_path)
        exec(program, {"__name__": "example"})


def test_there_are_examples_of_each_kind():
    examples = [code for page in PAGES for code in fenced(page, "python")]
    assert sum(code.startswith(RUNS) for code in examples) >= 3
    assert len(examples) >= 8
    assert len(set(commands())) >= 25


def commands() -> Iterator[str]:
    """Every command line of the pages that has no placeholder."""
    for page in PAGES:
        lines = [line for code in fenced(page, "bash") for line in code.splitlines()]
        for line in [*lines, *INLINE.findall(prose(page))]:
            for command in line.split(" && "):
                if command.startswith("python ") and not PLACEHOLDER.search(command):
                    yield command


def points(overrides: list[str]) -> Iterator[list[str]]:
    """The settings of a multirun, each value once; without a study's own settings, which are no run's."""
    parsed = OverridesParser.create().parse_overrides(overrides)
    runs = [override for override in parsed if not str(override.key_or_group).startswith("hydra")]
    plain = [override.input_line for override in runs if not override.is_sweep_override()]
    swept = {run.get_key_element(): list(run.sweep_string_iterator()) for run in runs if run.is_sweep_override()}
    for index in range(max(map(len, swept.values()), default=1)):
        yield [*plain, *(f"{key}={choices[index % len(choices)]}" for key, choices in swept.items())]


@pytest.mark.slow
@pytest.mark.parametrize("command", sorted(set(commands())))
def test_commands_name_what_exists(command: str):
    program, *rest = shlex.split(command)[1:]
    if program == "-m":
        assert find_spec(rest[0]) is not None
    elif program != "run.py":
        assert (ROOT / program).is_file()
    elif rest[:1] == ["--list"]:
        assert rest[1] in LISTS
    elif rest[:1] != ["--help"]:
        for overrides in points([argument for argument in rest if argument != "-m"]):
            from_hydra(compose(overrides))


def settings() -> dict[str, set[str]]:
    """Key -> values of what stands in prose as a setting: `key=value`, several of them, or as in `key=one|two`."""
    found: dict[str, set[str]] = {}
    for page in PAGES:
        for text in INLINE.findall(prose(page)):
            if SETTING.fullmatch(text) and not PLACEHOLDER.search(text) and not OTHER.match(text):
                for setting in shlex.split(text):
                    key, _, values = setting.partition("=")
                    found.setdefault(key, set()).update([values] if values[0] in "[{" else values.split("|"))
    return found


def test_settings_in_prose_exist():
    """Options of groups by their files; single values all together, on the data set that has the most options."""
    keys = settings()
    assert len(keys) > 25
    groups = {key: values for key, values in keys.items() if option_names(key)}
    for group, values in groups.items():
        allowed = option_names(group)
        unknown = {value for value in values if not any(fnmatch(option, value) for option in allowed)}
        unknown -= {value for value in unknown if group == "race" and parse_seconds(value)}
        assert {value for value in unknown if group != "budget" or parse_budget(value) is None} == set(), group
    plain = [f"{key}={min(values)}" for key, values in keys.items() if key not in groups]
    compose(["dataset=images", *plain])


def test_a_wrong_key_would_be_found():
    with pytest.raises(Exception, match="bugdet"):
        compose(["bugdet=8gb"])


def test_readme_is_short_and_the_glossary_small():
    assert len(TEXTS[ROOT / "README.md"].splitlines()) <= 150
    glossary = TEXTS[ROOT / "docs" / "concepts.md"].split("## Glossary")[1].split("## ")[0]
    assert 15 <= glossary.count("\n| ") - 1 <= 25


def test_the_table_of_bytes_is_that_of_the_catalogue():
    table = TEXTS[ROOT / "docs" / "concepts.md"].split("## Specs and their bytes")[1].split("\n## ")[0]
    rows = re.findall(r"^\| `([^`]+)` \| ([\d.]+) \| ([\d.]+) \| ([\d.]+) \|", table, re.MULTILINE)
    assert len(rows) >= 10
    for name, *shown in rows:
        (spec,) = select([name]).values()
        state, weights = bytes_per_parameter(spec, rule=RULE_INFOS[spec.rule])
        assert shown == [f"{state:.2f}", f"{weights:.2f}", f"{state + weights:.2f}"], name


def test_make_has_the_targets_that_the_pages_name():
    targets = set(re.findall(r"^(\w+):", (ROOT / "Makefile").read_text(), re.MULTILINE))
    assert set(re.findall(r"\bmake (\w+)`", "\n".join(TEXTS.values()))) <= targets
    assert targets == {"setup", "test", "quick", "lint", "docs", "bench"}


@pytest.mark.slow
def test_the_site_builds_without_a_warning(run_python, tmp_path):
    done = run_python(
        "-m", "mkdocs", "build", "--strict", "--site-dir", str(tmp_path / "site"), NO_MKDOCS_2_WARNING="1"
    )
    assert done.returncode == 0, done.stderr
    for page in (ROOT / "docs").glob("*.md"):
        place = "index.html" if page.stem == "index" else f"{page.stem}/index.html"
        assert (tmp_path / "site" / place).is_file()
