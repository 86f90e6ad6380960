"""What a command leaves in its folders and what it exits with, with a stand-in for the training itself."""

import json
import os
import shlex
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from types import ModuleType

import pytest
import yaml

from baoc.cli import jobs
from baoc.cli.main import main
from baoc.cli.run_lock import lock_folder
from baoc.config.schema import RunConfig
from baoc.errors import InfeasibleBudgetError, OutputError, TrainingFailedError
from baoc.training import resume
from baoc.units import MIB
from tests.support.paths import ROOT, read_config

pytestmark = [pytest.mark.slow, pytest.mark.usefixtures("own_logging")]

Train = Callable[[RunConfig, Path, str], None]


@pytest.fixture
def training(monkeypatch, tmp_path: Path) -> Callable[[Train], list[str]]:
    """`training(body)`: `run.run` calls `body` instead; returns the commands it was given. Runs in tmp_path."""
    commands: list[str] = []

    def install(body: Train) -> list[str]:
        def run(config: RunConfig, *, run_dir: Path, command: str) -> None:
            commands.append(command)
            body(config, run_dir, command)
            (run_dir / "result.json").write_text("{}")

        module = ModuleType("baoc.training.run")
        module.__dict__["run"] = run
        monkeypatch.setitem(sys.modules, "baoc.training.run", module)
        return commands

    monkeypatch.chdir(tmp_path)
    return install


@pytest.fixture
def frontiers(monkeypatch) -> list[Path]:
    """Folders that a frontier was asked of."""
    asked: list[Path] = []
    monkeypatch.setattr("baoc.frontier.build.write_frontier", asked.append)
    return asked


def do_nothing(config: RunConfig, run_dir: Path, command: str) -> None:
    """A training that succeeds at once."""


def only(folder: Path, pattern: str) -> Path:
    (found,) = folder.glob(pattern)
    return found


def test_a_run_leaves_its_configuration_and_environment(training, tmp_path: Path, monkeypatch):
    """The environment names neither the machine nor its user; the process is left as it was."""
    commands = training(do_nothing)
    monkeypatch.delenv("HYDRA_FULL_ERROR", raising=False)
    before = sys.argv[:]
    assert main(["budget=300mb", "seed=7", "trainer.max_steps=3"]) == 0
    assert sys.argv == before and "HYDRA_FULL_ERROR" not in os.environ
    run_dir = only(tmp_path, "outputs/vision/*/*_vit_300mb_7")
    config = read_config(run_dir / "config.yaml")
    assert (config.budget.memory_bytes, config.seed, config.trainer.max_steps) == (300 * MIB, 7, 3)
    assert "${" not in (run_dir / "config.yaml").read_text(), "every interpolation is resolved"
    text = (run_dir / "env.json").read_text()
    assert str(tmp_path) not in text and str(ROOT) not in text and str(Path.home()) not in text
    env = json.loads(text)
    parts = {"schema", "baoc", "commit", "python", "platform", "versions", "device", "variables", "command", "argv"}
    assert set(env) == parts
    assert env["argv"] == ["budget=300mb", "seed=7", "trainer.max_steps=3"] and env["versions"]["torch"]
    assert env["device"]["cpu_threads"] >= 1
    assert commands == [env["command"]] == ["python run.py budget=300mb seed=7 trainer.max_steps=3"]
    assert yaml.safe_load((run_dir / ".hydra" / "overrides.yaml").read_text()) == env["argv"]
    assert not (run_dir / "error.json").exists()


def test_relative_paths_are_those_of_the_command(training, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """A job may run in its own folder, in which none of them is."""
    places: list[Path] = []
    training(lambda *_: places.append(Path.cwd()))
    (tmp_path / "mine").mkdir()
    given = ["dataset=images", "dataset.path=mine", "model.pretrained=mine", "dataset.image_size=8"]
    assert main(["hydra.job.chdir=true", *given]) == 0
    run_dir = only(tmp_path, "outputs/vision/*/*")
    config = read_config(run_dir / "config.yaml")
    assert places == [run_dir], "the job did run in its own folder"
    assert {config.dataset.path, config.model.pretrained} == {str(tmp_path / "mine")}
    other = tmp_path / "outputs" / "other"  # the second run may begin in the same second
    assert main([*given[:2], f"hydra.run.dir={other}"]) == 0
    assert read_config(other / "config.yaml").dataset.path == "mine", "elsewhere they stay as they were given"


def test_an_interrupt_says_how_to_go_on(training, capsys):
    def stop(config: RunConfig, run_dir: Path, command: str) -> None:
        (run_dir / "last.ckpt").write_text("")
        raise KeyboardInterrupt

    training(stop)
    assert main(["hydra.run.dir=mine"]) == 130
    shown = capsys.readouterr().err
    assert shown.startswith("baoc: interrupted; resume=") and shown.endswith(
        "mine goes on from the newest checkpoint\n"
    )


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["optim.lr=abc"], "baoc: error: optim.lr=abc is not allowed: it must be a number"),
        (["-m", "model=vit,vitt"], "model=vitt: there is no such model"),
    ],
)
def test_what_is_refused_as_a_whole_leaves_no_folder(training, frontiers, tmp_path: Path, capsys, words, said):
    training(do_nothing)
    assert main(words) == 2
    shown = capsys.readouterr().err
    assert said in shown and "frontier" not in shown
    assert not list(tmp_path.glob("outputs/vision/*/*"))


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (
            ["recipe=muon8_lean", "catalogue.specs=[adamw*]"],
            "catalogue.specs: without effect, as recipe=muon8_lean says",
        ),
        (["catalogue.specs=[adamw*]"], None),
        (["risk=statistics"], None),
        (["recipe=muon8_lean"], None),
        (
            ["recipe=muon8_lean", "risk=statistics"],
            "risk=statistics: prices the plan and chooses no spec, as recipe=muon8_lean says what every block runs",
        ),
        (
            ["recipe=muon8_lean", "objective=throughput"],
            "objective=throughput: chooses how a batch is run and no spec, as recipe=muon8_lean says",
        ),
        (
            ["allocator=uniform_adamw", "objective=balanced", "risk=prior"],
            "objective=balanced: chooses how a batch is run and no spec, as allocator=uniform_adamw says",
        ),
        (["allocator=uniform_adamw", "risk=prior"], "risk=prior: prices the plan and chooses no spec, as allocator="),
        (["objective=balanced"], None),
    ],
)
def test_specs_and_risk_beside_a_recipe_are_told_to_choose_nothing(
    training, capsys, words: list[str], said: str | None
):
    training(do_nothing)
    assert main(words) == 0
    out = capsys.readouterr().out
    assert "says what every block runs" not in out if said is None else said in out


def test_a_run_is_never_written_over_another(training, tmp_path: Path, capsys):
    training(do_nothing)
    assert main(["hydra.run.dir=mine"]) == 0
    assert main(["hydra.run.dir=mine"]) == 2
    assert "mine holds a run already, which is never overwritten: choose another folder" in capsys.readouterr().err
    assert not (tmp_path / "mine" / "error.json").exists() or (tmp_path / "mine" / "result.json").exists()
    assert main(["hydra.run.dir=mine", "resume=mine"]) == 0


@pytest.mark.parametrize("race", ["auto", "600"])
def test_a_race_before_a_run_that_trained_without_one_is_refused(training, tmp_path: Path, capsys, race: str):
    training(do_nothing)
    assert main(["hydra.run.dir=mine"]) == 0
    assert main(["hydra.run.dir=on", "resume=mine", f"race={race}"]) == 2
    told = capsys.readouterr().err
    assert f"race={race} chooses what a run trains with before it begins, and resume=mine is not the folder of" in told
    assert "mode=race" not in told


@pytest.mark.parametrize("name", ["mine", "beside"])
@pytest.mark.parametrize("raced", [False, True])
def test_what_resume_auto_finds_goes_on_with_its_race_or_without(
    training, monkeypatch, tmp_path: Path, capsys, name: str, raced: bool
):
    """A race before a run that goes on would choose what it no longer can train with."""
    folders: list[Path] = []
    races = ModuleType("races")
    monkeypatch.setattr(races, "race_before_run", lambda c, *, folder, **_: folders.append(folder) or c, raising=False)
    monkeypatch.setitem(sys.modules, jobs.RACES, races)
    monkeypatch.setattr(resume, "locate_checkpoint", lambda *_, **__: tmp_path / name / "checkpoints" / "last.ckpt")
    training(do_nothing)
    if raced:
        (tmp_path / name / "race").mkdir(parents=True)
        (tmp_path / name / "race" / "race_setup.json").write_text("{}")
        (tmp_path / name / "metrics.jsonl").touch()
    assert main(["hydra.run.dir=mine", "resume=auto", "race=auto"]) == 0
    assert folders == ([tmp_path / name / "race"] if raced else [])
    said = f"the run of {tmp_path / name} trained without a race: it goes on without"
    assert (said in " ".join(capsys.readouterr().out.split())) is not raced


HOLD = """
import sys
from pathlib import Path
from baoc.cli.run_lock import lock_folder
with lock_folder(Path(sys.argv[1])):
    print("held", flush=True)
    sys.stdin.read()
"""


@pytest.mark.parametrize("resume", [[], ["resume=mine"]], ids=["anew", "resumed"])
def test_two_processes_are_never_in_one_folder(training, tmp_path: Path, capsys, resume: list[str]):
    commands = training(do_nothing)
    mine = tmp_path / "mine"
    (mine / "checkpoints").mkdir(parents=True)
    command = [sys.executable, "-c", HOLD, str(mine)]
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    with subprocess.Popen(command, env=environment, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as other:
        assert other.stdout is not None and other.stdout.readline() == "held\n"
        (mine / "config.yaml").write_text("of the other run")
        assert main(["hydra.run.dir=mine", *resume]) == 2
        said = capsys.readouterr().err
        assert f"process {other.pid} on " in said and f"is at work in {mine}: wait for it or end it" in said
        assert not commands and (mine / "config.yaml").read_text() == "of the other run"
        assert not (mine / "error.json").exists(), "nothing of the other run's is touched"
        other.kill()
    assert (mine / "run.lock").exists(), "as kill -9 leaves it"
    assert main(["hydra.run.dir=mine", *resume]) == 0
    assert commands and not (mine / "run.lock").exists()


def test_a_lock_that_another_process_made_anew_stays(tmp_path: Path):
    with lock_folder(tmp_path):
        (tmp_path / "run.lock").unlink()
        (tmp_path / "run.lock").write_text("another process")
    assert (tmp_path / "run.lock").read_text() == "another process"


@pytest.mark.parametrize("words", [["hydra.run.dir={}"], ["-m", "hydra.sweep.dir={}", "budget=state_50,state_25"]])
@pytest.mark.parametrize("folder", ["file/run", "/proc/none", "long" * 80])
def test_a_folder_that_cannot_be_made_is_named(training, folder: str, words: list[str], tmp_path: Path, capsys):
    training(do_nothing)
    (tmp_path / "file").write_text("")
    assert main([word.format(folder) for word in words]) == 2
    shown = capsys.readouterr()
    assert "cannot make the folder" in shown.err or "cannot open or write" in shown.err
    assert folder in shown.err and "Traceback" not in shown.out + shown.err


def test_jobs_of_a_multirun_do_not_disturb_each_other(training, frontiers, tmp_path: Path, capsys):
    def second_fails(config: RunConfig, run_dir: Path, command: str) -> None:
        if config.budget.name == "300mb":
            raise InfeasibleBudgetError("300mb is too little", budget_bytes=1, least_feasible_bytes=2)
        if config.budget.name == "301mb":
            raise TrainingFailedError("loss is nan")

    commands = training(second_fails)
    assert main(["-m", "budget=4gb,300mb,301mb,state_25", "seed=3"]) == 3, "that of the first failed job"
    sweep_dir = only(tmp_path, "outputs/vision/*/*_multirun")
    folders = {path.name for path in sweep_dir.iterdir() if path.is_dir()}
    assert folders == {f"{n}_budget={b},seed=3" for n, b in enumerate(["4gb", "300mb", "301mb", "state_25"])}
    assert [path.parent.name[0] for path in sorted(sweep_dir.glob("*/result.json"))] == ["0", "3"]
    assert [failure.exit_code for failure in jobs.read_failures(sweep_dir)] == [3, 5]
    shown = capsys.readouterr()
    assert "baoc: error: run 1: 300mb is too little" in shown.err and "baoc: error: run 2: loss is nan" in shown.err
    assert "--- run 3: budget=state_25 seed=3" in shown.out
    assert commands[3] == "python run.py budget=state_25 seed=3"
    assert [path.resolve() for path in frontiers] == [sweep_dir.resolve()]


def test_failures_are_not_forgotten_where_the_folder_of_a_multirun_is_gone(training, tmp_path: Path):
    def fails(config: RunConfig, run_dir: Path, command: str) -> None:
        if config.seed == 2:
            raise TrainingFailedError("loss is nan")
        shutil.rmtree(run_dir.parent)

    training(fails)
    assert main(["-m", "seed=2,1"]) == 5


@pytest.mark.parametrize(
    "word",
    ["recipe=one.yaml", r"recipe='it\'s two.yaml'", "recipe='a,b.yaml'", "recipe=muon8_lean", "budget='300000000'"],
)
def test_the_command_of_a_run_names_files_as_they_were_typed(word: str, training, tmp_path: Path):
    """Hydra has options of other names for them, which another process does not know."""
    for name in ("one.yaml", "it's two.yaml", "a,b.yaml"):
        (tmp_path / name).write_text("hidden: muon_int8")
    commands = training(do_nothing)
    assert main([word, "hydra.run.dir=first"]) == 0
    assert main([*shlex.split(commands[0])[2:], "hydra.run.dir=again"]) == 0
    assert shlex.split(commands[0]) == shlex.split(commands[1]) == ["python", "run.py", word]
    assert (tmp_path / "again" / "config.yaml").read_text() == (tmp_path / "first" / "config.yaml").read_text()


def test_jobs_of_files_of_recipes_name_them(training, frontiers, tmp_path: Path):
    for name in ("one.yaml", "two.yaml"):
        (tmp_path / name).write_text("hidden: muon_int8")
    commands = training(do_nothing)
    assert main(["-m", "recipe=one.yaml,two.yaml"]) == 0
    assert commands == [f"python run.py recipe={name}.yaml" for name in ("one", "two")]


@pytest.mark.parametrize("failing", ["build.write_frontier", "wandb_frontier.log_frontier"])
def test_a_frontier_that_cannot_be_written_fails_the_multirun_and_wandb_does_not(
    training, frontiers, failing: str, monkeypatch, capsys
):
    def fail(*_: object) -> None:
        raise OutputError("no space left")

    training(do_nothing)
    monkeypatch.setattr(f"baoc.frontier.{failing}", fail)
    assert main(["-m", "budget=4gb,8gb"]) == (2 if failing.startswith("build") else 0)
    assert "baoc: error: frontier: no space left" in capsys.readouterr().err


def test_plans_that_cannot_be_compared_end_in_a_sentence(training, monkeypatch, capsys):
    def fail(_: Path) -> None:
        raise OutputError("no space left")

    training(lambda config, run_dir, command: (run_dir / "plan.json").write_text("{}"))
    monkeypatch.setattr("baoc.frontier.planned.write_planned_frontier", fail)
    assert main(["-m", "budget=4gb,8gb"]) == 2
    assert "baoc: error: frontier: no space left" in capsys.readouterr().err


def test_a_multirun_without_a_finished_run_has_no_frontier(training, frontiers, capsys):
    def fail(config: RunConfig, run_dir: Path, command: str) -> None:
        raise TrainingFailedError("loss is nan")

    training(fail)
    assert main(["-m", "budget=4gb,8gb"]) == 5
    assert "no run has finished, so there is no frontier" in capsys.readouterr().err
    assert frontiers == []


def test_a_refused_study_says_why_and_shows_no_frontier_after_it(tmp_path: Path, capsys):
    folder = tmp_path / "study"
    (folder / "0000").mkdir(parents=True)
    for name in ("0000/result.json", "study.lock"):
        (folder / name).write_text("{}")
    assert main(["-m", "sweeps=frontier_vision", "hydra.sweeper.workers=0", f"hydra.sweep.dir={folder}"]) == 2
    shown = capsys.readouterr()
    assert "hydra.sweeper.workers=0 is not allowed: it must be 1" in shown.err
    assert "frontier" not in shown.out + shown.err.replace(str(folder), "")


def test_an_interrupt_ends_a_multirun_and_shows_what_is_done(training, frontiers, tmp_path: Path, capsys):
    def interrupt_second(config: RunConfig, run_dir: Path, command: str) -> None:
        if config.seed == 1:
            raise KeyboardInterrupt

    commands = training(interrupt_second)
    assert main(["-m", "seed=0,1,2"]) == 130
    assert len(commands) == 2, "the third was not started"
    assert "baoc: interrupted" in capsys.readouterr().err
    assert len(frontiers) == 1


def test_a_refused_job_of_a_multirun_stays_visible(training, frontiers, tmp_path: Path):
    training(do_nothing)
    assert main(["-m", "optim.lr=1e-3,abc"]) == 2
    sweep_dir = only(tmp_path, "outputs/vision/*/*_multirun")
    assert [path.parent.name for path in sweep_dir.glob("*/error.json")] == ["1_optim.lr=abc"]
