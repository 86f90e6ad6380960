"""The command line as a process: help and lists without torch, and exit codes of what is refused before a run."""

import pytest

from baoc.cli.listing import LISTS, lines
from baoc.core.budgets import PRESETS
from baoc.core.catalogue import NATIVE
from baoc.errors import BadInputError
from tests.support.paths import ROOT

pytestmark = pytest.mark.slow

HEAVY = "{'torch', 'lightning', 'transformers', 'numpy', 'scipy', 'wandb', 'optuna', 'rich'}"


def heavy_modules_after(argv: list[str]) -> str:
    """Code that runs a command line and prints its exit code and the heavy modules it has imported."""
    return (
        "import sys\nfrom baoc.cli.main import main\n"
        f"code = main({argv!r})\nprint('\\nEXIT', code, sorted({HEAVY} & set(sys.modules)))"
    )


def test_help_shows_groups_and_values_and_imports_nothing_heavy(run_python):
    done = run_python(heavy_modules_after(["--help", "budget=7.5gb"]))
    assert done.stdout.endswith("EXIT 0 []\n"), done.stderr
    for text in (
        "python run.py model=vit budget=8gb",
        "budget: auto, unlimited, 2gb",
        "allocator: exact",
        "max_steps: 400",
        "name: 7.5gb",
    ):
        assert text in done.stdout
    assert "Exit codes: 0 done, 2 bad input" in done.stdout and "BAOC_CACHE" in done.stdout


@pytest.mark.parametrize(
    ("line", "expected"),
    [
        ("python run.py mod", ["mode=", "model=", "model."]),
        ("python run.py reallocation=", ["reallocation=drift", "reallocation=off"]),
        ("python run.py experiments=", ["experiments=digits_state_25"]),
        ("python run.py budget=7.5gb trainer.max_st", ["trainer.max_steps="]),
        ("python run.py budget=", ["budget=8gb", "budget=state_25"]),
    ],
)
def test_shell_completion_completes_and_imports_nothing_heavy(line: str, expected: list[str], run_python):
    done = run_python(heavy_modules_after(["-sc", "query=bash"]), COMP_LINE=line)
    words, _, end = done.stdout.partition("\nEXIT ")
    assert end == "0 []\n", done.stderr
    assert set(expected) <= set(words.split())


@pytest.mark.parametrize(
    ("argv", "exit_code", "message"),
    [
        (["budget=8gbb"], 2, "baoc: error: cannot read budget=8gbb: it takes a preset (2gb, 4gb"),
        (["budget=0gb"], 2, "baoc: error: a memory size of '0gb' holds nothing"),
        (["budget=-1gb"], 2, "baoc: error: cannot read budget=-1gb"),
        (["-m", "budget=8gb,lots"], 2, "baoc: error: cannot read budget=lots"),
        (["-m", "model=vit,vitt"], 2, "baoc: error: model=vitt: there is no such model; did you mean vit?"),
        (
            ["model=vitt"],
            2,
            "baoc: error: model=vitt: there is no such model; did you mean vit?\nallowed: dit, hf, llama, unet, vit",
        ),
        (["trainer.max_stps=1"], 2, "baoc: error: unknown key trainer.max_stps; did you mean trainer.max_steps"),
        (
            ["--list", "specz"],
            2,
            "baoc: error: --list specz: there is no such list; did you mean specs?\nallowed: specs",
        ),
        (["--list"], 2, "baoc: error: --list of what? allowed: specs, models"),
        (
            ["-m", "--cfg", "hydra"],
            2,
            "baoc: error: -m and --cfg exclude each other: leave one out; what a sweep is made",
        ),
        (["-cjob", "--multi"], 2, "baoc: error: --multi and -cjob exclude each other"),
        (["--frobnicate"], 2, "unrecognized arguments: --frobnicate"),
    ],
)
def test_a_refusal_is_one_message_and_costs_no_heavy_import(
    argv: list[str], exit_code: int, message: str, run_python, tmp_path
):
    done = run_python(heavy_modules_after(argv), cwd=tmp_path)
    assert done.stdout.endswith(f"EXIT {exit_code} []\n")
    assert message in done.stderr
    assert "Traceback" not in done.stderr
    assert not list(tmp_path.glob("outputs/*/*/*/*")), "no run folder is left by a refused command"


def test_run_py_is_the_same_command(run_python):
    done = run_python("run.py", "--version")
    assert (done.returncode, done.stdout) == (0, "baoc 0.1.0\n")
    assert run_python("run.py", "budget=lots").returncode == 2


def test_a_reader_that_goes_away_is_no_bug(run_python):
    code = (
        "import os, sys\nfrom baoc.cli.main import main\n"
        "reading, writing = os.pipe()\nos.close(reading)\nos.dup2(writing, 1)\nsys.exit(main(['--list', 'specs']))"
    )
    done = run_python(code)
    assert (done.returncode, done.stderr) == (130, "")


@pytest.mark.parametrize("name", LISTS)
def test_each_list_has_a_line_with_a_text_for_each_entry(name: str):
    shown = lines(name)
    if shown != ["(none yet)"] and name != "lists":
        assert shown and all(len(line.split(maxsplit=1)) == 2 for line in shown)


def test_lists_hold_what_there_is():
    assert {line.split()[0] for line in lines("specs")} == {
        *NATIVE, "+split8", "+bf16_sr", "+bf16", "@streamed",
    }  # fmt: skip
    assert any(line.split()[:2] == ["adamw", "8.00"] for line in lines("specs"))
    assert {line.split()[0] for line in lines("budgets")} == {*PRESETS, "SIZE", "state_N"}
    assert any(line.startswith("digits_state_25 ") for line in lines("experiments"))
    assert "  model.size=tiny" in "\n".join(lines("models"))
    offered = {file.stem for file in (ROOT / "conf" / "risk").glob("*.yaml")}
    assert offered <= {line.split()[0] for line in lines("risks")}, "what --help offers is told by --list"
    with pytest.raises(BadInputError, match=r"--list sweps: there is no such list; did you mean sweeps"):
        lines("sweps")
