"""The table of benchmarks is that of the scripts, and scripts take each command that is told anywhere."""

import json
import re

import pytest

from experiments.analysis import claims, script_table
from tests.support.paths import ROOT

SCRIPTS = script_table.scripts()
OF_A_SCRIPT = re.compile(r"(\w+=\S+ )?(python|torchrun) (\S+ )*?(-m experiments\.|experiments/)")


@pytest.mark.parametrize("file", SCRIPTS, ids=lambda file: file.stem)
def test_each_script_tells_a_command_its_time_and_its_rows(file):
    own = script_table.commands(file)
    assert own and all(file.stem in command and time for command, time, _ in own)


def test_the_page_is_what_the_docstrings_say():
    page = script_table.PAGE.read_text()
    assert script_table.rendered(page) == page, "run python -m experiments.analysis.claims --write"
    assert all(f"`{file.parent.name}/{file.name}`" in page for file in ROOT.glob("experiments/*/*.py"))


def told() -> list[str]:
    """Commands of scripts: of their docstrings, of the claims, and of the list of experiments."""
    lines = [command for file in SCRIPTS for command, _, _ in script_table.commands(file)]
    lines += [part for claim in claims.read_claims() for part in claim["command"].split(" && ")]
    lines += re.findall(r"`([^`\n]+)`", (ROOT / "experiments" / "README.md").read_text())
    return sorted({line for line in lines if OF_A_SCRIPT.match(line)})


@pytest.mark.slow
def test_scripts_take_the_commands_that_are_told(run_python):
    lines = told()
    assert len(lines) > 100
    wrong = ["python experiments/benchmarks/cpu_step.py --numbers 3", "python -m experiments.benchmarks.fronts FOLDER"]
    code = "import json, sys; from experiments.analysis.script_table import refused; "
    done = run_python(code + "print(json.dumps(refused(sys.argv[1:])))", *lines, *wrong)
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout.splitlines()[-1]) == wrong
