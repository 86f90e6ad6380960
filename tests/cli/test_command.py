"""The command line as a process: help and lists without torch, and exit codes of what is refused before a run."""

import json
from collections.abc import Sequence
from pathlib import Path

import pytest

from baoc.cli.listing import LISTS, list_lines
from baoc.core.budgets import PRESETS
from baoc.core.catalogue import NATIVE
from baoc.errors import BadInputError
from tests.support.paths import ROOT

pytestmark = pytest.mark.slow

HEAVY = "{'torch', 'lightning', 'transformers', 'numpy', 'scipy', 'wandb', 'optuna', 'rich'}"


CODE = f"""
import contextlib, io, json, os, sys
from baoc.cli.main import main
for argv in json.loads(sys.argv.pop()):
    os.environ.pop("COMP_LINE", None)
    if isinstance(argv, str):  # a line that is to be completed
        os.environ["COMP_LINE"], argv = argv, ["-sc", "query=bash"]
    with contextlib.redirect_stdout(io.StringIO()) as out, contextlib.redirect_stderr(io.StringIO()) as err:
        code = main(argv)
    print(json.dumps([code, out.getvalue(), err.getvalue(), sorted({HEAVY} & set(sys.modules))]))
"""


def ran(commands: Sequence[list[str] | str], run_python, cwd: Path = ROOT) -> list[tuple[int, str, str]]:
    """Exit code, stdout and stderr of each command line, all in one process, which imports nothing heavy for any."""
    done = run_python(CODE, json.dumps(commands), cwd=cwd)
    told = [json.loads(line) for line in done.stdout.splitlines()]
    assert len(told) == len(commands) and not any(heavy for *_, heavy in told), done.stderr + done.stdout
    return [(code, out, err) for code, out, err, _ in told]


def test_help_shows_groups_and_values(run_python):
    ((code, out, _),) = ran([["--help", "budget=7.5gb"]], run_python)
    assert code == 0
    for text in (
        *("python run.py model=vit budget=8gb", "budget: auto, unlimited, 2gb", "allocator: exact", "max_steps: 400"),
        *("name: 7.5gb", "Exit codes: 0 done, 2 bad input", "BAOC_CACHE"),
    ):
        assert text in out


COMPLETIONS = {
    "python run.py mod": ["mode=", "model=", "model."],
    "python run.py reallocation=": ["reallocation=once", "reallocation=off"],
    "python run.py experiments=": ["experiments=digits_state_25"],
    "python run.py budget=7.5gb trainer.max_st": ["trainer.max_steps="],
    "python run.py budget=": ["budget=8gb", "budget=state_25"],
}


def test_shell_completion_completes(run_python):
    for (code, out, err), expected in zip(ran(list(COMPLETIONS), run_python), COMPLETIONS.values(), strict=True):
        assert code == 0 and set(expected) <= set(out.split()), out + err


REFUSALS = [
    (["budget=8gbb"], "baoc: error: cannot read budget=8gbb: it takes a preset (2gb, 4gb"),
    (["budget=0gb"], "baoc: error: a memory size of '0gb' holds nothing"),
    (["-m", "budget=8gb,lots"], "baoc: error: cannot read budget=lots"),
    (["-m", "model=vit,vitt"], "baoc: error: model=vitt: there is no such model; did you mean vit?"),
    (["--list", "specz"], "error: --list specz: there is no such list; did you mean specs?\nallowed: specs"),
    (["--list"], "baoc: error: --list of what? allowed: specs, models"),
    (["-m", "--cfg", "hydra"], "error: of -m, -r, --cfg, --info and --shell-completion one can be given"),
    (["-cjob", "--multi"], "what a sweep is made of is shown without -m: python run.py sweeps=NAME --cfg hydra"),
    (["--frobnicate"], "unrecognized arguments: --frobnicate"),
]


def test_a_refusal_is_one_message_and_leaves_no_folder(run_python, tmp_path: Path):
    told = ran([argv for argv, _ in REFUSALS], run_python, cwd=tmp_path)
    for (argv, message), (code, _, err) in zip(REFUSALS, told, strict=True):
        assert code == 2 and message in err and "Traceback" not in err, (argv, err)
    assert not list(tmp_path.glob("outputs/*/*/*/*"))


def test_too_little_address_space_is_said_before_imports_fail_or_wait(run_python):
    code = (
        "import resource, sys\nfrom baoc.cli.main import main\n"
        "resource.setrlimit(resource.RLIMIT_AS, (900 * 2**20, resource.RLIM_INFINITY))\nsys.exit(main(['mode=plan']))"
    )
    done = run_python(code)
    assert done.returncode == 2 and "address space is limited to 900 MiB (ulimit -v)" in done.stderr, done.stderr


def test_run_py_is_the_same_command(run_python):
    done = run_python("run.py", "--version")
    assert (done.returncode, done.stdout) == (0, "baoc 0.1.0\n")


@pytest.mark.parametrize("name", LISTS)
def test_each_list_has_a_line_with_a_text_for_each_entry(name: str):
    shown = list_lines(name)
    if shown != ["(none yet)"] and name != "lists":
        assert shown and all(len(line.split(maxsplit=1)) == 2 for line in shown)


def test_lists_hold_what_there_is():
    assert {line.split()[0] for line in list_lines("specs")} == {
        *NATIVE, "+split8", "+bf16_sr", "+bf16", "@streamed",
    }  # fmt: skip
    assert any(line.split()[:2] == ["adamw", "8.00"] for line in list_lines("specs"))
    assert {line.split()[0] for line in list_lines("budgets")} == {*PRESETS, "SIZE", "state_N"}
    assert any(line.startswith("digits_state_25 ") for line in list_lines("experiments"))
    assert "  model.size=tiny" in "\n".join(list_lines("models"))
    offered = {file.stem for file in (ROOT / "conf" / "risk").glob("*.yaml")}
    assert offered <= {line.split()[0] for line in list_lines("risks")}, "what --help offers is told by --list"
    with pytest.raises(BadInputError, match=r"--list sweps: there is no such list; did you mean sweeps"):
        list_lines("sweps")
