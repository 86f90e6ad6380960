"""What a study pays once and a trial does not pay again: imports of its networks, and composing twice."""

import sys
from importlib.util import find_spec

import pytest
from hydra._internal.config_loader_impl import ConfigLoaderImpl
from hydra._internal.hydra import Hydra
from hydra.core.plugins import Plugins

from baoc.cli import jobs
from baoc.cli.main import main
from baoc.config.compose import compose
from baoc.config.from_hydra import from_hydra
from baoc.models import MODELS
from baoc.sweep import forkserver, study
from baoc.sweep.race import run_race
from baoc.sweep.study_config import read_study
from baoc.sweep.trial_process import COMMAND


@pytest.fixture
def imported(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """What the fork server is to import. No process starts."""
    told: list[str] = []
    monkeypatch.setattr(forkserver, "preload", lambda *modules: told.extend(modules))
    monkeypatch.setattr(forkserver, "start", lambda *_, **__: sys.exit("a process starts"))
    return told


NEEDED = ["baoc.sweep.trial_process", forkserver.PRELOAD]


@pytest.mark.parametrize(
    ("given", "names"),
    [
        ({}, ()),
        ({"fixed": ["model=dit", "optim.lr=1e-3"]}, ("dit",)),
        ({"space": {"model": {"choices": ["vit", "llama"]}}, "repeats": [["model=vit"], ["seed=1"]]}, ("vit", "llama")),
        ({"baselines": [["model=unheard_of"]]}, ()),  # a trial of it says what is wrong
    ],
)
def test_only_networks_that_overrides_name_are_imported_beforehand(tmp_path, imported, given, names):
    known = {"name": "s", "objectives": {"quality": "minimize"}, "space": {"seed": {"choices": [0, 1]}}}
    with pytest.raises(SystemExit, match="a process starts"):
        study.run_study(read_study(known | given), folder=tmp_path)
    assert imported == [*NEEDED, *(module for name in names for module in (MODELS[name].module, *MODELS[name].imports))]


def test_the_plan_of_a_race_starts_a_server_that_imports_for_its_runs_too(tmp_path, imported):
    words = ["model=dit", "mode=race"]
    with pytest.raises(SystemExit, match="a process starts"):
        run_race(from_hydra(compose(words)), overrides=words, folder=tmp_path, command="c")
    assert imported == [*NEEDED, MODELS["dit"].module, *MODELS["dit"].imports]


@pytest.mark.parametrize("name", MODELS)
def test_what_a_network_imports_is_there(name):
    for module in MODELS[name].imports:
        assert find_spec(module) is not None


@pytest.mark.parametrize(("single", "times"), [(True, 1), (False, 2)])
def test_a_trial_is_composed_once(monkeypatch, tmp_path, single, times):
    """Hydra composes a second time to read hydra.mode; a trial is one run, whatever that says."""
    composed, get_mode = [], Hydra.get_mode
    load = ConfigLoaderImpl.load_configuration

    def counted(self, *args, **options):
        composed.append(1)
        return load(self, *args, **options)

    monkeypatch.setattr(ConfigLoaderImpl, "load_configuration", counted)
    seen = []
    monkeypatch.setattr(jobs, "run_job", lambda config: seen.append(config.budget.name))
    assert main(["budget=7.5gb", f"hydra.run.dir={tmp_path}"], single=single) == 0
    assert seen == ["7.5gb"] and len(composed) == times
    assert Hydra.get_mode is get_mode
    assert "single=True" in COMMAND


@pytest.mark.slow
def test_a_long_tmpdir_is_no_fault_of_a_study(tmp_path, run_python):
    """A socket's path has at most 107 bytes."""
    long = tmp_path / ("x" * 90)
    long.mkdir()
    code = (
        "import sys\nfrom tests.support.studies import STUB, config\nfrom baoc.sweep.study import run_study\n"
        "print(len(run_study(config(n_trials=1), folder=sys.argv[1], code=STUB).best_trials))"
    )
    script = tmp_path / "script.py"
    script.write_text(code)
    done = run_python(str(script), str(tmp_path / "study"), TMPDIR=str(long))
    assert done.returncode == 0 and done.stdout.endswith("1\n"), done.stderr


@pytest.mark.parametrize("launcher", ["basic", "joblib"])
@pytest.mark.parametrize("word", ["recipe=one.yaml", "model=net.py:build"])
def test_trials_of_a_study_are_given_files_as_the_command_had_them(word, launcher, tmp_path, monkeypatch):
    """Their processes do not know the options' names that this process has made for Hydra."""
    (tmp_path / "one.yaml").write_text("hidden: muon_int8")
    (tmp_path / "net.py").write_text("def build(): pass")
    monkeypatch.chdir(tmp_path)
    told = []
    monkeypatch.setattr(study, "run_study", lambda *_, extra, **__: told.extend(extra))
    monkeypatch.setattr(study, "raise_if_all_failed", lambda _: None)
    monkeypatch.setattr("baoc.sweep.space_check.check_space", lambda *_, **__: None)

    def launched(*_, task_function, **__):
        told.extend(task_function.keywords["extra"])
        sys.exit("a job starts")

    monkeypatch.setattr(Plugins, "instantiate_launcher", launched)
    main(["-m", "sweeps=frontier_vision", word, f"hydra/launcher={launcher}", "hydra.sweep.dir=study"])
    assert word in told
